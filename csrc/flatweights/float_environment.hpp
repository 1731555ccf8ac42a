// Floating-point arithmetic as the standard has it, whatever the calling thread does.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace flatweights {

// While it lives, this thread rounds to nearest and keeps subnormal numbers. Numerical
// libraries set threads to flush those to zero, and results must not depend on it.
class DefaultFloatEnvironment {
#if defined(__x86_64__)
 public:
  DefaultFloatEnvironment() noexcept : before_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~DefaultFloatEnvironment() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kDefault = 0x1f80;  // all exceptions masked
  unsigned before_;
#else
 public:
  // Not trivial, so that an object of it counts as used.
  DefaultFloatEnvironment() noexcept {}
#endif

 public:
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;
};

}  // namespace flatweights
