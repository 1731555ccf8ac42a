#include "flatweights/repeated_calls.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <stdexcept>
#include <thread>
#include <utility>

#include "flatweights/flatten.hpp"
#include "flatweights/parallel.hpp"

namespace flatweights {
namespace {

constexpr double kForever = std::numeric_limits<double>::infinity();

}  // namespace

RepeatedCalls::RepeatedCalls(std::vector<Mailbox*> boxes)
    : boxes_(std::move(boxes)),
      segments_(boxes_.size()),
      seen_(boxes_.size()),
      requests_(boxes_.size()),
      extents_(boxes_.size()),
      models_(boxes_.size()) {}

void RepeatedCalls::prepare(Prepared call) {
  if (call.timeouts.size() != boxes_.size())
    throw std::invalid_argument("expected a timeout for each member");
  if (call.root && *call.root >= boxes_.size())
    throw std::invalid_argument("expected the root to be a member");
  forget(call.call);
  prepared_.push_back(std::move(call));
}

void RepeatedCalls::forget(std::uint64_t call) {
  std::erase_if(prepared_, [call](const Prepared& one) { return one.call == call; });
}

RepeatedCalls::Prepared* RepeatedCalls::find(std::uint64_t call) noexcept {
  const auto found = std::ranges::find(prepared_, call, &Prepared::call);
  return found == prepared_.end() ? nullptr : &*found;
}

// Reads the messages that have come since the last look.
RepeatedCalls::Found RepeatedCalls::look(double now) {
  bool is_all = true;
  for (std::size_t k = 0; k < boxes_.size(); ++k) {
    if (seen_[k] != 0) continue;
    if (!boxes_[k]->is_answered()) {
      is_all = false;
      continue;
    }
    const double before = std::exchange(seen_before_[k], 0.0);
    seen_[k] = before != 0 ? before : now;
    try {
      const Message message(*boxes_[k], Mailbox::Side::kDriver);
      if (message.kind() != kRepeat || message.body().size() != sizeof(Repeat) ||
          message.extents().size() > 1)
        return Found::kOther;
      std::memcpy(&requests_[k], message.body().data(), sizeof(Repeat));
      extents_[k].reset();
      if (!message.extents().empty()) extents_[k] = message.extents().front();
    } catch (const std::exception&) {  // it is malformed
      return Found::kOther;
    }
    if (find(requests_[k].call) == nullptr) return Found::kOther;
  }
  return is_all ? Found::kAll : Found::kMissing;
}

double RepeatedCalls::deadline() noexcept {
  double first = kForever;
  for (std::size_t k = 0; k < boxes_.size(); ++k) {
    if (seen_[k] == 0) continue;
    const Prepared* const call = find(requests_[k].call);
    if (call != nullptr) first = std::min(first, seen_[k] + call->timeouts[k]);
  }
  return first;
}

// The number of members that are worth waking for: the first one, if its time begins then.
std::uint32_t RepeatedCalls::awaited() const noexcept {
  const auto missing = std::ranges::count(seen_, 0.0);
  const auto is_timed = [](const Prepared& call) {
    return std::ranges::any_of(call.timeouts, [](double timeout) { return timeout < kForever; });
  };
  const bool is_first = missing == std::ssize(seen_) && std::ranges::any_of(prepared_, is_timed);
  return is_first ? 1 : static_cast<std::uint32_t>(missing);
}

// Returns nothing once all members have asked for repetitions.
std::optional<RepeatedCalls::Ended> RepeatedCalls::wait(double begin, double end,
                                                        const Sleep& sleep,
                                                        const std::atomic<bool>& queued) {
  double now = begin;
  const double watched = begin + polling_.seconds();
  for (;;) {
    const Found found = look(now);
    if (found == Found::kOther) return Ended::kOther;
    if (queued.load()) return Ended::kQueue;
    if (found == Found::kAll) return std::nullopt;
    if (now >= deadline()) return Ended::kLate;
    if (now >= end) return Ended::kPause;
    if (now < watched) {
      std::this_thread::yield();
    } else if (const auto ended = sleep_until(std::min(end, deadline()), sleep)) {
      return ended;
    }
    now = seconds_now();
  }
}

// Sleeps until the bell rings, or a member has died; or wakes early.
std::optional<RepeatedCalls::Ended> RepeatedCalls::sleep_until(double end, const Sleep& sleep) {
  std::vector<const Mailbox*> missing;
  for (std::size_t k = 0; k < boxes_.size(); ++k)
    if (seen_[k] == 0) missing.push_back(boxes_[k]);
  if (sleep_at(sleep, missing, awaited(), end) == Woken::kSocket) return Ended::kSocket;
  return std::nullopt;
}

// Makes the call that all members have asked for; returns false, with nothing done, if it is not
// the same for all, or is one for a coordinator that knows more.
bool RepeatedCalls::make(std::int64_t number, double waited) {
  Prepared* const call = find(requests_.front().call);
  for (const Repeat& request : requests_)
    if (request.call != call->call) return false;
  for (std::size_t k = 0; k < boxes_.size(); ++k) {
    models_[k] = memory_of(extents_[k], call->layout.nbytes(), segments_[k]);
    const bool is_sent = !call->root || *call->root == k;
    if (is_sent != (models_[k] != nullptr) || is_sent != extents_[k].has_value()) return false;
  }
  const Result& result = call->results[1 - call->last];
  for (const Mailbox* box : boxes_)
    if (box->holds(Mailbox::Side::kWorker, result.extent.segment) != 0) return false;
  const double begin = seconds_now();
  if (call->root) {
    const Copy copy{result.memory, models_[*call->root], call->layout.nbytes(), 1};
    copy_all({&copy, 1});
  } else if (!average(*call, result)) {
    return false;
  }
  const double averaged = seconds_now() - begin;
  for (std::size_t k = 0; k < boxes_.size(); ++k)
    if (extents_[k]) boxes_[k]->drop_hold(Mailbox::Side::kDriver, extents_[k]->segment);
  call->told = {number, waited, averaged};
  call->last = 1 - call->last;
  ++call->count;
  call->waited += waited;
  call->averaged += averaged;
  post(*call, result);
  return true;
}

// Returns false if the mean is not to be given to the members.
bool RepeatedCalls::average(Prepared& call, const Result& result) {
  std::vector<double> weights;
  for (const Repeat& request : requests_) weights.push_back(request.weight);
  return mean_of(call.layout, models_, weights, call.takes_nonfinite, result.memory);
}

void RepeatedCalls::post(const Prepared& call, const Result& result) {
  struct {
    std::uint32_t kind = kRepeated, count = 1;
    Extent extent;
    Repeated body;
  } message;
  message.extent = result.extent;
  message.body = call.told;
  for (Mailbox* const box : boxes_)
    post_with_holds(*box, std::as_bytes(std::span(&message, 1)), 0, {&message.extent.segment, 1});
  Mailbox::wake(boxes_);
}

RepeatedCalls::Ended RepeatedCalls::run(std::int64_t number, double seconds, const Sleep& sleep,
                                        const std::atomic<bool>& queued, std::vector<double> seen) {
  if (seen.size() != boxes_.size()) throw std::invalid_argument("expected a time for each member");
  seen_before_ = std::move(seen);
  const double end = seconds_now() + seconds;
  count_ = 0;
  for (Prepared& call : prepared_) call.count = 0, call.waited = call.averaged = 0;
  std::ranges::fill(seen_, 0.0);
  for (;;) {
    const double begin = seconds_now();
    const auto ended = wait(begin, end, sleep, queued);
    pending_ = seconds_now() - begin;
    if (ended) return *ended;
    polling_.note(pending_);
    if (!make(number + count_ + 1, pending_)) return Ended::kOther;
    ++count_;
    std::ranges::fill(seen_, 0.0);
  }
}

}  // namespace flatweights
