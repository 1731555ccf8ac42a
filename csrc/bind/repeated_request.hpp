// A member's end of a call that it repeats, for Python and for steps of TensorFlow's.
//
// The protocol is in repeated_calls.hpp. What keeps memory alive is here.
#pragma once

#include <pybind11/pybind11.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "channels.hpp"
#include "checks.hpp"
#include "flatweights/polling.hpp"
#include "flatweights/repeated_request.hpp"
#include "flatweights/segment.hpp"
#include "tensorflow/variables_api.hpp"

namespace flatweights::bind {

// The call of a step whose tensors are on the host: it needs neither the GIL nor Python's objects.
class RepeatedStep {
 public:
  // kDone: the results are there. kAsked: there was no response in time. kTold: one that is to be
  // read in another way has come.
  enum class Ended { kDone, kAsked, kTold };

  struct Parts {
    BoundMailbox mailbox;
    std::shared_ptr<BoundDoorbell> bell;
    RepeatedRequest request;
    std::byte* memory;                 // of its model
    std::shared_ptr<Segment> segment;  // which has that memory
    std::vector<KnownSegment> theirs;  // of the coordinator
    Layout layout;                     // one slot for each tensor
    double weight;
    double seconds;  // to wait for the response
  };

  explicit RepeatedStep(Parts parts);

  // Gathers and asks. Returns false, with nothing done, if it cannot.
  bool ask(const CalledTensor* tensors, std::size_t count) noexcept;
  // Waits for the response, for at most as long as a request, and scatters.
  Ended wait(const CalledTensor* tensors, std::size_t count) noexcept {
    return wait(tensors, count, parts_.seconds);
  }
  Ended wait(const CalledTensor* tensors, std::size_t count, double seconds) noexcept;

 private:
  Parts parts_;
  Polling polling_;
  double asked_ = 0;  // the time at which it asked
  pid_t process_ = getpid();
};

class BoundRepeatedRequest {
 public:
  // Segment, generation, offset and bytes of a model.
  using Position = std::tuple<std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t>;

  // `segments`: as in `read_message`. `size`: bytes of the model. `extent`: where the member's is,
  // in `segment`, which is its own; none, if it sends none.
  BoundRepeatedRequest(BoundMailbox mailbox, std::shared_ptr<BoundDoorbell> bell,
                       pybind11::dict segments, std::uint64_t call, std::size_t size,
                       const std::optional<Position>& extent, std::shared_ptr<Segment> segment);

  // Whether the member may write its model where `exchange` sends it from: the coordinator no
  // longer holds that segment.
  [[nodiscard]] bool may_ask() const { return request_.may_ask(mailbox_.box()); }

  // Asks, and waits for at most `seconds`. Returns number and seconds of the response, and its
  // weights; None, if nothing was sent, since the coordinator still holds the segment; True, if the
  // coordinator has told something else, which is to be read; False, if it has told nothing.
  [[nodiscard]] pybind11::object exchange(double weight, double seconds);

  // The same call as a step; null, if it sends no model of this layout.
  [[nodiscard]] std::shared_ptr<RepeatedStep> step(const BoundLayout& bound, double weight,
                                                   double seconds) const;

 private:
  BoundMailbox mailbox_;
  std::shared_ptr<BoundDoorbell> bell_;
  pybind11::dict segments_;
  RepeatedRequest request_;
  Polling polling_;
  std::shared_ptr<Segment> segment_;
};

}  // namespace flatweights::bind
