// Standard floating-point arithmetic, whatever mode the calling thread has set.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace flatweights {

// While it lives, this thread rounds to nearest and keeps subnormal numbers. Numerical
// libraries make threads flush those to zero, and results must not depend on that.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() noexcept : before_(read()) { write(kDefault); }
  ~DefaultFloatEnvironment() { write(before_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  using Control = unsigned;
  static constexpr Control kDefault = 0x1f80;  // all exceptions masked
  static Control read() noexcept { return _mm_getcsr(); }
  static void write(Control control) noexcept { _mm_setcsr(control); }
#elif defined(__aarch64__)
  using Control = std::uint64_t;
  static constexpr Control kDefault = 0;
  static Control read() noexcept {
    Control control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  // No access to memory moves across it. Arithmetic in registers might: what is guarded reads and
  // writes memory.
  static void write(Control control) noexcept {
    asm volatile("msr fpcr, %0" : : "r"(control) : "memory");
  }
#else
  using Control = int;
  static constexpr Control kDefault = 0;
  static Control read() noexcept { return kDefault; }
  static void write(Control) noexcept {}
#endif

  Control before_;
};

}  // namespace flatweights
