#include "flatweights/futex.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>

namespace flatweights {

bool sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t value,
              std::int64_t nanoseconds) noexcept {
  const timespec span{static_cast<time_t>(nanoseconds / 1'000'000'000),
                      static_cast<long>(nanoseconds % 1'000'000'000)};
  // Not FUTEX_PRIVATE_FLAG: another process wakes it.
  return syscall(SYS_futex, &word, FUTEX_WAIT, value, &span, nullptr, 0) != 0 && errno == EINTR;
}

void wake_on(std::atomic<std::uint32_t>& word) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void wake_on(std::atomic<std::uint32_t>& one, std::atomic<std::uint32_t>& other) noexcept {
  constexpr std::uint32_t kUnchangedAndNotZero = FUTEX_OP(
      FUTEX_OP_OR, 0, FUTEX_OP_CMP_NE, 0);  // what is done to `other`, and when it is woken
  const long woken = syscall(SYS_futex, &one, FUTEX_WAKE_OP, INT_MAX, static_cast<long>(INT_MAX),
                             &other, kUnchangedAndNotZero);
  if (woken < 0) wake_on(one), wake_on(other);  // a sandbox may not have it
}

}  // namespace flatweights
