// Wakes a driver once the number of workers that it waits for have answered.
//
// A count in memory that all of them map; the bell itself (an eventfd) is the caller's.
// Driver: arm with the number of missing answers, look at the mailboxes, sleep only if all are
// still missing. Worker: answer, then count down; the worker that reaches zero rings. So each
// answer that was missing at the second look is counted after the driver armed, and the last one
// rings. An answer that is counted late, after the driver has armed again, rings too early at
// worst. The death of a worker wakes the driver by the end of its socket.
#pragma once

#include <atomic>
#include <cstdint>

namespace flatweights {

class Doorbell {
 public:
  // Zeros, as in a new memory file, are a doorbell that never rings.

  void arm(std::uint32_t missing) noexcept { missing_.store(missing); }
  // Returns whether to ring.
  [[nodiscard]] bool count_down() noexcept { return missing_.fetch_sub(1) == 1; }

 private:
  std::atomic<std::uint32_t> missing_;
};

}  // namespace flatweights
