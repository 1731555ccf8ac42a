// Commands from a driver to one worker, and its answers, in memory that both map.
//
// One atomic word says whose turn it is: a sequence number and a state.
//
//   AWAY n      command n was answered; the worker is in no loop: a post needs a call of Ray's
//   WAITING n   command n was answered; the worker sleeps on the word
//   COMMAND n   the driver has posted command n; the worker has not taken it
//   BUSY n      the worker runs command n
//
// Driver:  WAITING n or AWAY n -> COMMAND n+1 (post);  COMMAND n -> AWAY n (withdraw);
//          WAITING n -> AWAY n (dismiss).
// Worker:  AWAY n -> WAITING n (enter);  COMMAND n -> BUSY n (take);  WAITING n -> AWAY n (its
//          time is up);  BUSY n -> WAITING n or AWAY n (answer).
//
// Every arrow is one compare-and-swap with release order, and every look at the word acquires.
// The driver writes the command, and reads the answer, only in AWAY and WAITING; the worker
// reads and writes only in BUSY. So neither reads what the other writes. The answer to command
// n is there once the word says AWAY n or WAITING n. Whoever dies leaves the word as it is: the
// other learns of it by the end of their socket.
//
// Beside the word, each side counts the views that the other holds of its windows: the owner
// adds before it mentions a window, the holder subtracts when a view is gone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace flatweights {

class Mailbox {
 public:
  static constexpr std::size_t kRoom = std::size_t{128} << 10;  // of a command, of an answer
  static constexpr std::size_t kWindows = 64;                   // of each side

  enum class State : std::uint32_t { kAway = 0, kWaiting = 1, kCommand = 2, kBusy = 3 };
  enum class Posted { kWoken, kNeedsCall, kRefused };
  enum class Awaited { kTaken, kLeft, kInterrupted };
  enum class Side { kDriver = 0, kWorker = 1 };

  // Zeros, as in a new memory file, are a mailbox: AWAY 0.

  [[nodiscard]] State state() const noexcept { return state_of(word_.load()); }
  [[nodiscard]] std::uint32_t sequence() const noexcept { return word_.load() >> 2; }
  // Whether every command that was posted has been answered.
  [[nodiscard]] bool is_settled() const noexcept {
    const std::uint32_t word = word_.load(std::memory_order_acquire);
    return state_of(word) == State::kAway || state_of(word) == State::kWaiting;
  }

  // Driver. `post` refuses unless settled; `command` is at most kRoom long.
  Posted post(std::span<const std::byte> command) noexcept;
  bool withdraw() noexcept;
  void dismiss() noexcept;
  [[nodiscard]] std::span<const std::byte> answer() const noexcept;

  // Worker. `enter` is called before each series of `await`, which sleeps until a command was
  // taken, the driver has dismissed the worker, `nanoseconds` have passed, or a signal came.
  void enter() noexcept;
  Awaited await(std::int64_t nanoseconds) noexcept;
  [[nodiscard]] std::span<const std::byte> command() const noexcept;
  // Only while BUSY. `stay`: go on waiting. An answer is at most kRoom long.
  void answer_with(std::span<const std::byte> answer, bool stay) noexcept;

  // Views that `holder` has of the other side's window `index`.
  [[nodiscard]] std::uint32_t holds(Side holder, std::size_t index) const noexcept {
    return holds_[static_cast<std::size_t>(holder)][index].load(std::memory_order_acquire);
  }
  void add_hold(Side holder, std::size_t index) noexcept {
    holds_[static_cast<std::size_t>(holder)][index].fetch_add(1);
  }
  void drop_hold(Side holder, std::size_t index) noexcept {
    holds_[static_cast<std::size_t>(holder)][index].fetch_sub(1);
  }

 private:
  static State state_of(std::uint32_t word) noexcept { return static_cast<State>(word & 3); }
  static std::uint32_t word_of(std::uint32_t sequence, State state) noexcept {
    return sequence << 2 | static_cast<std::uint32_t>(state);
  }
  bool change(std::uint32_t& from, State to) noexcept {
    return word_.compare_exchange_strong(from, word_of(from >> 2, to));
  }

  alignas(64) std::atomic<std::uint32_t> word_;
  alignas(64) std::uint32_t command_size_;
  alignas(64) std::uint32_t answer_size_;
  alignas(64) std::atomic<std::uint32_t> holds_[2][kWindows];
  alignas(64) std::byte command_[kRoom];
  alignas(64) std::byte answer_[kRoom];
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint32_t>) == 4, "the kernel sleeps on 32 bits");

}  // namespace flatweights
