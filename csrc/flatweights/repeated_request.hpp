// A member's end of a call that it repeats; the coordinator's end is in repeated_calls.hpp.
#pragma once

#include <cstdint>
#include <optional>

#include "flatweights/mailbox.hpp"
#include "flatweights/message.hpp"
#include "flatweights/repeated_calls.hpp"

namespace flatweights {

struct RepeatedRequest {
  static constexpr std::uint32_t kStay = 1;  // a member is in one call of the mailbox for ever

  std::uint64_t call;            // the number of the prepared call
  std::optional<Extent> extent;  // where its model is, in a segment of its own, if it sends one

  // Whether it may write its model and ask: nothing was asked, and nobody reads the last model.
  [[nodiscard]] bool may_ask(const Mailbox& box) const noexcept {
    return box.state() == Mailbox::State::kBusy &&
           !(extent && box.holds(Mailbox::Side::kDriver, extent->segment) != 0);
  }
  // Asks. The caller counts down the doorbell afterwards, and then waits as in `kStay`.
  void ask(Mailbox& box, double weight) const noexcept;
};

// What a coordinator has told, and where the model is.
struct ToldAgain {
  Repeated told;
  Extent extent;
};

// Reads a response that has come; nothing, if it is of another kind, or malformed.
std::optional<ToldAgain> told_again(const Mailbox& box);

}  // namespace flatweights
