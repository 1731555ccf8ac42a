// Seconds that Python gives, as times of the clock that waits use.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace flatweights::bind {

// Between none, for NaN too, and thirty years: the clock has room for no more than 292 years.
inline std::chrono::nanoseconds nanoseconds_of(double seconds) {
  const double bounded = std::min(std::max(0.0, seconds), 1e9);  // in this order: max drops NaN
  return std::chrono::nanoseconds(static_cast<std::int64_t>(bounded * 1e9));
}

// The time in so many seconds, by which a wait that signals interrupt ends, too.
inline std::chrono::steady_clock::time_point in_seconds(double seconds) {
  return std::chrono::steady_clock::now() + nanoseconds_of(seconds);
}

}  // namespace flatweights::bind
