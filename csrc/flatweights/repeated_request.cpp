#include "flatweights/repeated_request.hpp"

#include <array>
#include <cstddef>
#include <cstring>
#include <span>
#include <stdexcept>

namespace flatweights {

void RepeatedRequest::ask(Mailbox& box, double weight) const noexcept {
  struct {
    std::uint32_t kind = kRepeat, count = 0;
    std::array<std::byte, sizeof(Extent) + sizeof(Repeat)> rest;
  } message;
  std::size_t size = 2 * sizeof(std::uint32_t);
  const auto add = [&](const auto& part) {
    std::memcpy(reinterpret_cast<std::byte*>(&message) + size, &part, sizeof part);
    size += sizeof part;
  };
  if (extent) {
    message.count = 1;
    add(*extent);
    box.add_hold(Mailbox::Side::kDriver, extent->segment);
  }
  add(Repeat{call, weight});
  box.answer_and_stay(std::as_bytes(std::span(&message, 1)).first(size));
}

std::optional<ToldAgain> told_again(const Mailbox& box) {
  try {
    const Message message(box, Mailbox::Side::kWorker);
    if (message.kind() != kRepeated || message.extents().size() != 1 ||
        message.body().size() != sizeof(Repeated))
      return {};
    ToldAgain read{{}, message.extents().front()};
    std::memcpy(&read.told, message.body().data(), sizeof read.told);
    return read;
  } catch (const std::invalid_argument&) {  // its reader in Python says how
    return {};
  }
}

}  // namespace flatweights
