#include "flatweights/worker_answers.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <thread>
#include <utility>

namespace flatweights {

WorkerAnswers::WorkerAnswers(std::vector<Mailbox*> boxes, Layout layout, std::string digest)
    : boxes_(std::move(boxes)),
      layout_(std::move(layout)),
      digest_(std::move(digest)),
      segments_(boxes_.size()),
      is_there_(boxes_.size()),
      extents_(boxes_.size()),
      models_(boxes_.size()) {}

// Reads the answer of a worker; returns false if it is another one than `expected`.
bool WorkerAnswers::read(std::size_t worker, const Expected& expected) {
  try {
    const Message message(*boxes_[worker], Mailbox::Side::kDriver);
    const auto body = message.body();
    if (message.kind() != expected.kind || body.size() != expected.body.size() ||
        std::memcmp(body.data(), expected.body.data(), body.size()) != 0 ||
        message.extents().size() != (expected.has_model ? 1 : 0))
      return false;
    if (!expected.has_model) return true;
    extents_[worker] = message.extents().front();
  } catch (const std::exception&) {  // it is malformed
    return false;
  }
  models_[worker] = memory_of(extents_[worker], layout_.nbytes(), segments_[worker]);
  return models_[worker] != nullptr;
}

// Returns kAll once all have answered as expected.
WorkerAnswers::Ended WorkerAnswers::wait(const Expected& expected, const Patience& patience,
                                         const Sleep& sleep) {
  const double begin = seconds_now();
  const double watched = begin + patience.watch, end = begin + patience.seconds;
  std::vector<const Mailbox*> missing;
  std::ranges::fill(is_there_, char{0});
  for (double now = begin;; now = seconds_now()) {
    waited_ = now - begin;
    missing.clear();
    for (std::size_t k = 0; k < boxes_.size(); ++k) {
      if (is_there_[k] != 0) continue;
      if (!boxes_[k]->is_answered()) {
        missing.push_back(boxes_[k]);
        continue;
      }
      if (!read(k, expected)) return Ended::kOther;
      is_there_[k] = 1;
    }
    if (missing.empty()) return Ended::kAll;
    if (now >= end) return Ended::kLate;
    if (now < watched) {
      std::this_thread::yield();
      continue;
    }
    switch (sleep_at(sleep, missing, static_cast<std::uint32_t>(missing.size()), end)) {
      case Woken::kBell:
        break;
      case Woken::kSocket:
        return Ended::kSocket;
      case Woken::kInterrupted:
        return Ended::kInterrupted;
    }
  }
}

std::optional<std::vector<std::size_t>> WorkerAnswers::post(std::span<const Command> commands) {
  if (commands.size() != boxes_.size())
    throw std::invalid_argument("expected a command for each worker");
  for (const Command& command : commands)
    if (command.content.size() > Mailbox::kBytes)
      throw std::invalid_argument("expected a command of at most " +
                                  std::to_string(Mailbox::kBytes) + " bytes");
  if (!std::ranges::all_of(boxes_, &Mailbox::is_answered)) return std::nullopt;
  std::vector<std::size_t> uncalled;
  uncalled.reserve(boxes_.size());
  are_read_ = false;
  ++posts_;
  for (std::size_t k = 0; k < boxes_.size(); ++k) {
    const Command& command = commands[k];
    if (post_with_holds(*boxes_[k], command.content, command.calls, command.held) ==
        Mailbox::Posted::kNeedsCall)
      uncalled.push_back(k);
  }
  Mailbox::wake(boxes_);
  return uncalled;
}

WorkerAnswers::Ended WorkerAnswers::mean(const std::vector<double>& weights, bool takes_nonfinite,
                                         const Patience& patience, const Sleep& sleep,
                                         std::byte* out) {
  if (weights.size() != boxes_.size())
    throw std::invalid_argument("expected a weight for each worker");
  const Ended ended = wait({kWeights, digest_, true}, patience, sleep);
  if (ended != Ended::kAll) return ended;
  const double begin = seconds_now();
  if (!mean_of(layout_, models_, weights, takes_nonfinite, out)) return Ended::kOther;
  averaged_ = seconds_now() - begin;
  for (std::size_t k = 0; k < boxes_.size(); ++k)
    boxes_[k]->drop_hold(Mailbox::Side::kDriver, extents_[k].segment);
  are_read_ = true;
  return Ended::kAll;
}

WorkerAnswers::Ended WorkerAnswers::values(std::string_view value, const Patience& patience,
                                           const Sleep& sleep) {
  const Ended ended = wait({kValue, value, false}, patience, sleep);
  if (ended == Ended::kAll) are_read_ = true;
  return ended;
}

}  // namespace flatweights
