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
// A worker runs commands inside calls of Ray's, which the driver numbers and queues: the next one
// may be on its way while the worker is still in the last. A worker says which call it is about to
// end before it leaves WAITING or BUSY for AWAY. One that was dismissed says so too, then looks at
// the word again. A driver that has posted to an AWAY worker looks afterwards at the last call that
// ended: if that was the last one it made, nobody would take the command, and it makes another.
//
// Every arrow is one compare-and-swap, and every look at the word acquires at least.
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
  // kExpected: the worker is there, or in a call that has not ended.
  enum class Posted { kExpected, kNeedsCall, kRefused };
  enum class Awaited { kTaken, kLeft, kInterrupted };
  enum class Side { kDriver = 0, kWorker = 1 };

  // Zeros, as in a new memory file, are a mailbox: AWAY 0.

  [[nodiscard]] State state() const noexcept { return state_of(word_.load()); }
  // Whether every command that was posted has been answered. In one order with the doorbell's
  // count: a driver arms it, then looks here.
  [[nodiscard]] bool is_settled() const noexcept {
    const std::uint32_t word = word_.load();
    return state_of(word) == State::kAway || state_of(word) == State::kWaiting;
  }

  // Driver. `post` refuses unless settled; `command` is at most kRoom long. `calls`: how many
  // calls of Ray's were made; where all of them have ended, the command needs another.
  Posted post(std::span<const std::byte> command, std::uint32_t calls) noexcept;
  // Looks until `enough` of `boxes` are settled, for at most `nanoseconds`, and lets others run
  // between two looks; returns whether they are. A processor that has gone idle takes longer to
  // come back than a small command takes.
  static bool watch(std::span<const Mailbox* const> boxes, std::size_t enough,
                    std::int64_t nanoseconds) noexcept;
  bool withdraw() noexcept;
  void dismiss(std::uint32_t calls) noexcept;  // and calls up to `calls` do not wait any more
  [[nodiscard]] std::span<const std::byte> answer() const noexcept;

  // Worker, in the call of Ray's number `call`, from 1. `enter` is called before each series of
  // `await`, which sleeps until a command was taken, the driver has dismissed the worker,
  // `nanoseconds` have passed, or a signal came.
  void enter() noexcept;
  Awaited await(std::int64_t nanoseconds, std::uint32_t call) noexcept;
  [[nodiscard]] std::span<const std::byte> command() const noexcept;
  // Only while BUSY. An answer is at most kRoom long. The first goes on waiting.
  void answer_and_stay(std::span<const std::byte> answer) noexcept;
  void answer_and_leave(std::span<const std::byte> answer, std::uint32_t call) noexcept;

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
  void answer_as(State state, std::span<const std::byte> answer) noexcept;
  void note_end(std::uint32_t call) noexcept;
  bool change(std::uint32_t& from, State to) noexcept {
    return word_.compare_exchange_strong(from, word_of(from >> 2, to));
  }

  alignas(64) std::atomic<std::uint32_t> word_;
  alignas(64) std::atomic<std::uint32_t> ended_;
  std::atomic<std::uint32_t> dismissed_;
  alignas(64) std::uint32_t command_size_;
  alignas(64) std::uint32_t answer_size_;
  alignas(64) std::atomic<std::uint32_t> holds_[2][kWindows];
  alignas(64) std::byte command_[kRoom];
  alignas(64) std::byte answer_[kRoom];
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint32_t>) == 4, "the kernel sleeps on 32 bits");

}  // namespace flatweights
