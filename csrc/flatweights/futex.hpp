// Sleep on a word of memory that several processes map, and wake the sleepers.
#pragma once

#include <atomic>
#include <cstdint>

namespace flatweights {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint32_t>) == 4, "the kernel sleeps on 32 bits");

// Sleeps while `word` is `value`, for at most `nanoseconds`; returns whether a signal ended it.
bool sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t value,
              std::int64_t nanoseconds) noexcept;

// Wakes all that sleep on `word`.
void wake_on(std::atomic<std::uint32_t>& word) noexcept;

// Wakes all that sleep on either word, by one call of the system. Nobody sleeps on a value of 0.
void wake_on(std::atomic<std::uint32_t>& one, std::atomic<std::uint32_t>& other) noexcept;

}  // namespace flatweights
