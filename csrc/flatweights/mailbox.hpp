// Commands from a driver to one worker, and its answers, in memory that both map.
//
// One atomic word says whose turn it is: a sequence number and a state.
//
//   AWAY n      command n was answered; the worker does not wait: a post may need a Ray call
//   WAITING n   command n was answered; the worker polls the word, or sleeps on it
//   COMMAND n   the driver has posted command n; the worker has not taken it
//   BUSY n      the worker runs command n
//
// Driver:  WAITING n or AWAY n -> COMMAND n+1 (post);  COMMAND n -> AWAY n (withdraw);
//          WAITING n -> AWAY n (dismiss).
// Worker:  AWAY n -> WAITING n (enter);  COMMAND n -> BUSY n (take);  WAITING n -> AWAY n (its
//          time is up);  BUSY n -> WAITING n or AWAY n (answer).
//
// A worker runs commands inside Ray calls, which the driver numbers and queues: the next call may
// be on its way while the worker is still in the last one. Before the worker leaves WAITING or BUSY
// for AWAY, it notes the number of the call that it is about to end. A worker that was dismissed
// does so too, and then reads the word again. A driver that has posted to an AWAY worker reads that
// number afterwards: if it is that of the last call that the driver made, no call would take the
// command, and the driver makes another.
//
// `dismiss` also keeps Ray's order: the calls up to a number take no command any more. So a command
// that is posted after it waits for a call that is made after it, and Ray runs that call after all
// that were submitted to the actor before.
//
// Every arrow is one atomic change: a compare-and-swap, except that an answer is a store, since
// only the worker leaves BUSY. Every read of the word acquires at least. The driver writes the
// command, and reads the answer, only in AWAY and WAITING; the worker reads and writes only in
// BUSY. So neither reads memory that the other is writing. The answer to command n is there once
// the word says AWAY n or WAITING n. A process that dies leaves the word as it is: the other side
// learns of the death by the end of file of their socket.
//
// Beside the word, each side has a count of the views that the other holds of its segments: the
// owner adds before it mentions a segment, the holder subtracts when a view is gone.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

namespace flatweights {

class Mailbox {
 public:
  static constexpr std::size_t kBytes = std::size_t{128} << 10;  // of a command, of an answer
  static constexpr std::size_t kSegments = 64;                   // of each side

  enum class State : std::uint32_t { kAway = 0, kWaiting = 1, kCommand = 2, kBusy = 3 };
  // kExpected: the worker is waiting, or a call that has not ended will take the command.
  enum class Posted { kExpected, kNeedsCall, kRefused };
  enum class Awaited { kTaken, kLeft, kInterrupted };
  enum class Side { kDriver = 0, kWorker = 1 };

  // Zeros, as in a new memory file, are a mailbox: AWAY 0.

  [[nodiscard]] State state() const noexcept { return state_of(word_.load()); }
  // Whether every command that was posted has been answered. Sequentially consistent with the
  // doorbell's count: a driver arms the bell, then calls this.
  [[nodiscard]] bool is_answered() const noexcept {
    const std::uint32_t word = word_.load();
    return state_of(word) == State::kAway || state_of(word) == State::kWaiting;
  }

  // Driver. `post` refuses unless the last command was answered; `command` is at most kBytes long.
  // `calls` is the number of Ray calls made so far; if all of them have ended or were dismissed,
  // the command needs another call. Unless `wakes` is set, a sleeping worker sleeps until `wake`.
  Posted post(std::span<const std::byte> command, std::uint32_t calls, bool wakes = true) noexcept;
  // Wakes the workers of `boxes`, two by each call of the system: the first one to wake may take
  // the processor from the driver, and the others would sleep until it has it back.
  static void wake(std::span<Mailbox* const> boxes) noexcept;
  // Polls until `enough` of `boxes` are answered, for at most `nanoseconds`, and yields in between;
  // returns whether they are. An idle processor takes longer to wake than a small command to run.
  static bool watch(std::span<const Mailbox* const> boxes, std::size_t enough,
                    std::int64_t nanoseconds) noexcept;
  bool withdraw() noexcept;
  // From now on, Ray calls up to number `calls` neither take commands nor wait for them. Allowed
  // only after the last command has been answered.
  void dismiss(std::uint32_t calls) noexcept;
  [[nodiscard]] std::span<const std::byte> answer() const noexcept;

  // Worker, in the Ray call with the number `call`, from 1. `enter` comes before each series of
  // `await`. `await` waits until it has taken a command, the driver has dismissed the worker or
  // the time is up (kLeft), or a signal came. Until `watched`, it polls, and yields in between;
  // then it sleeps.
  void enter(std::uint32_t call) noexcept;
  Awaited await(std::chrono::steady_clock::time_point end, std::uint32_t call,
                std::chrono::steady_clock::time_point watched = {}) noexcept;
  [[nodiscard]] std::span<const std::byte> command() const noexcept;
  // Only while BUSY. An answer is at most kBytes long. answer_and_stay leaves the worker WAITING.
  void answer_and_stay(std::span<const std::byte> answer) noexcept;
  void answer_and_leave(std::span<const std::byte> answer, std::uint32_t call) noexcept;

  // Views that `holder` has of the other side's segment `index`.
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
  alignas(64) std::atomic<std::uint32_t> holds_[2][kSegments];
  alignas(64) std::byte command_[kBytes];
  alignas(64) std::byte answer_[kBytes];
};

}  // namespace flatweights
