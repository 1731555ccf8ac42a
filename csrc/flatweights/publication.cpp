#include "flatweights/publication.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <stdexcept>
#include <string>

#include "flatweights/futex.hpp"

namespace flatweights {
namespace {

[[noreturn]] void throw_overwritten(std::uint64_t number, std::uint32_t slot) {
  throw std::runtime_error("publication: a process has overwritten memory that all share: number " +
                           std::to_string(number) + " is not in slot " + std::to_string(slot));
}

}  // namespace

bool Publication::is_held(std::uint32_t slot) const noexcept {
  return std::any_of(std::begin(holds_), std::end(holds_),
                     [slot](const Hold& hold) { return hold.slot.load() == slot + 1; });
}

std::uint32_t Publication::begin() noexcept {
  const std::uint64_t word = word_.load();
  // The loop ends: there are fewer holds than slots, and a reader takes hold of an old slot only if
  // something was published between two of its steps.
  for (;;) {
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
      if (number_of(word) > 0 && slot == slot_of(word)) continue;
      if (is_held(slot)) continue;
      const std::uint64_t stamp = slots_[slot].stamp.load();
      slots_[slot].stamp.store(0);
      if (!is_held(slot)) return slot;
      slots_[slot].stamp.store(stamp);
    }
  }
}

void Publication::commit(std::uint32_t slot, std::uint64_t number, std::int64_t time) noexcept {
  slots_[slot].time.store(time, std::memory_order_relaxed);
  slots_[slot].stamp.store(number);
  word_.store(number << 8 | slot);
  for (const std::atomic<std::uint64_t>& bits : asleep_)
    if (bits.load() != 0) {
      turns_.fetch_add(1);
      wake_on(turns_);
      break;
    }
}

Publication::News Publication::hold(std::uint32_t reader, std::uint64_t seen) {
  for (;;) {
    const std::uint64_t word = word_.load();
    const std::uint64_t number = number_of(word);
    const std::uint32_t slot = slot_of(word);
    if (number <= seen) return {};
    if (slot >= kSlots) throw_overwritten(number, slot);
    holds_[reader].slot.store(slot + 1);
    if (slots_[slot].stamp.load() == number)
      return {number, slot, slots_[slot].time.load(std::memory_order_relaxed)};
    release(reader);
    // The slot of the newest publication is never written: there must be a newer one by now.
    if (word_.load() == word) throw_overwritten(number, slot);
  }
}

bool Publication::wait(std::uint32_t reader, std::uint64_t seen,
                       std::int64_t nanoseconds) noexcept {
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(nanoseconds);
  asleep_[reader / 64].fetch_or(std::uint64_t{1} << reader % 64);
  bool is_interrupted = false;
  for (;;) {
    const std::uint32_t turn = turns_.load();
    const std::int64_t left =
        std::chrono::nanoseconds(end - std::chrono::steady_clock::now()).count();
    if (number_of(word_.load()) > seen || left <= 0 || is_interrupted) break;
    is_interrupted = sleep_on(turns_, turn, left);
  }
  return newest() > seen;
}

void Publication::note_awake(std::uint32_t reader) noexcept {
  asleep_[reader / 64].fetch_and(~(std::uint64_t{1} << reader % 64));
}

}  // namespace flatweights
