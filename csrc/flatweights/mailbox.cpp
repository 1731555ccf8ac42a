#include "flatweights/mailbox.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

#include "flatweights/futex.hpp"

namespace flatweights {

Mailbox::Posted Mailbox::post(std::span<const std::byte> command, std::uint32_t calls,
                              bool wakes) noexcept {
  if (!is_answered() || command.size() > kBytes) return Posted::kRefused;
  std::copy(command.begin(), command.end(), command_);
  command_size_ = static_cast<std::uint32_t>(command.size());
  std::uint32_t word = word_.load();
  // It fails only if the worker has begun or ceased to wait meanwhile.
  while (!word_.compare_exchange_weak(word, word_of((word >> 2) + 1, State::kCommand))) {
  }
  const bool waits = state_of(word) == State::kWaiting;
  if (waits && wakes) wake_on(word_);
  const bool is_taken = dismissed_.load() < calls && (waits || ended_.load() != calls);
  return is_taken ? Posted::kExpected : Posted::kNeedsCall;
}

void Mailbox::wake(std::span<Mailbox* const> boxes) noexcept {
  std::size_t k = 0;
  for (; k + 1 < boxes.size(); k += 2) wake_on(boxes[k]->word_, boxes[k + 1]->word_);
  if (k < boxes.size()) wake_on(boxes[k]->word_);
}

bool Mailbox::watch(std::span<const Mailbox* const> boxes, std::size_t enough,
                    std::int64_t nanoseconds) noexcept {
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(nanoseconds);
  const auto is_answered = [](const Mailbox* box) { return box->is_answered(); };
  for (;;) {
    const auto answered = std::count_if(boxes.begin(), boxes.end(), is_answered);
    if (static_cast<std::size_t>(answered) >= enough) return true;
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::yield();
  }
}

bool Mailbox::withdraw() noexcept {
  std::uint32_t word = word_.load();
  return state_of(word) == State::kCommand && change(word, State::kAway);
}

void Mailbox::dismiss(std::uint32_t calls) noexcept {
  dismissed_.store(calls);
  std::uint32_t word = word_.load();
  if (state_of(word) == State::kWaiting && change(word, State::kAway)) wake_on(word_);
}

std::span<const std::byte> Mailbox::answer() const noexcept {
  return {answer_, std::min<std::size_t>(answer_size_, kBytes)};
}

void Mailbox::enter(std::uint32_t call) noexcept {
  std::uint32_t word = word_.load();
  if (state_of(word) == State::kAway && call > dismissed_.load()) change(word, State::kWaiting);
}

void Mailbox::note_end(std::uint32_t call) noexcept {
  // The number never falls: Ray may repeat an older call.
  std::uint32_t last = ended_.load();
  while (last < call && !ended_.compare_exchange_weak(last, call)) {
  }
}

Mailbox::Awaited Mailbox::await(std::chrono::steady_clock::time_point end, std::uint32_t call,
                                std::chrono::steady_clock::time_point watched) noexcept {
  for (;;) {
    std::uint32_t word = word_.load(std::memory_order_acquire);
    switch (state_of(word)) {
      case State::kCommand:
        if (call <= dismissed_.load()) {  // it is for a later call
          note_end(call);
          return Awaited::kLeft;
        }
        if (change(word, State::kBusy)) return Awaited::kTaken;
        continue;
      case State::kWaiting: {
        const auto now = std::chrono::steady_clock::now();
        const std::int64_t left = std::chrono::nanoseconds(end - now).count();
        if (left <= 0 || call <= dismissed_.load()) {
          note_end(call);
          if (change(word, State::kAway)) return Awaited::kLeft;
          continue;
        }
        if (now < watched)
          std::this_thread::yield();
        else if (sleep_on(word_, word, left))
          return Awaited::kInterrupted;
        continue;
      }
      default:
        note_end(call);
        if (state_of(word_.load()) == State::kCommand) continue;
        return Awaited::kLeft;
    }
  }
}

std::span<const std::byte> Mailbox::command() const noexcept {
  return {command_, std::min<std::size_t>(command_size_, kBytes)};
}

void Mailbox::answer_as(State state, std::span<const std::byte> answer) noexcept {
  const std::size_t size = std::min(answer.size(), kBytes);
  std::copy_n(answer.begin(), size, answer_);
  answer_size_ = static_cast<std::uint32_t>(size);
  word_.store(word_of(word_.load() >> 2, state));
}

void Mailbox::answer_and_stay(std::span<const std::byte> answer) noexcept {
  answer_as(State::kWaiting, answer);
}

void Mailbox::answer_and_leave(std::span<const std::byte> answer, std::uint32_t call) noexcept {
  note_end(call);
  answer_as(State::kAway, answer);
}

}  // namespace flatweights
