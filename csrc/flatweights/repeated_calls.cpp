#include "flatweights/repeated_calls.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <stdexcept>
#include <thread>
#include <utility>

#ifdef __linux__
#include <sys/epoll.h>
#include <unistd.h>
#endif

#include "flatweights/average.hpp"
#include "flatweights/flatten.hpp"
#include "flatweights/parallel.hpp"
#include "flatweights/relative_weights.hpp"

namespace flatweights {
namespace {

constexpr double kForever = std::numeric_limits<double>::infinity();
constexpr double kWatch = 150e-6;     // seconds of polling before the coordinator sleeps
constexpr double kSoon = 2 * kWatch;  // if the last wait took no longer, polling was enough

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

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
                                                        const Sleep& sleep) {
  double now = begin;
  const double watched = last_wait_ <= kSoon ? begin + kWatch : begin;
  for (;;) {
    const Found found = look(now);
    if (found == Found::kOther) return Ended::kOther;
    if (sleep.queued->load()) return Ended::kQueue;
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
#ifdef __linux__
  sleep.door->arm(awaited());
  // Perhaps before the bell was armed.
  for (std::size_t k = 0; k < boxes_.size(); ++k)
    if (seen_[k] == 0 && boxes_[k]->is_answered()) return std::nullopt;
  const double left = std::clamp(end - seconds_now(), 0.0, 3600.0);
  const int milliseconds = static_cast<int>(std::ceil(left * 1e3));
  std::array<epoll_event, 8> events{};
  const int count = epoll_wait(sleep.poll, events.data(), events.size(), milliseconds);
  bool is_socket = false;
  for (int k = 0; k < count; ++k) {
    if (events[static_cast<std::size_t>(k)].data.fd != sleep.bell) {
      is_socket = true;
      continue;
    }
    std::uint64_t rings = 0;
    if (read(sleep.bell, &rings, sizeof rings) < 0) continue;  // another thread has heard it
  }
  if (is_socket) return Ended::kSocket;
  return std::nullopt;
#else
  (void)end, (void)sleep;
  return Ended::kOther;
#endif
}

// The model of a member; null if its message does not have it.
const std::byte* RepeatedCalls::model_of(std::size_t member, const Prepared& call) const noexcept {
  const std::optional<Extent>& extent = extents_[member];
  const std::size_t nbytes = call.layout.nbytes();
  if (!extent || extent->nbytes != nbytes) return nullptr;
  for (const Segment& segment : segments_[member]) {
    if (segment.index != extent->segment || segment.generation != extent->generation) continue;
    const std::size_t size = segment.file->size();
    if (extent->offset > size || nbytes > size - extent->offset) return nullptr;
    return segment.file->data() + extent->offset;
  }
  return nullptr;
}

// Makes the call that all members have asked for; returns false, with nothing done, if it is not
// the same for all, or is one for a coordinator that knows more.
bool RepeatedCalls::make(std::int64_t number, double waited) {
  Prepared* const call = find(requests_.front().call);
  for (const Repeat& request : requests_)
    if (request.call != call->call) return false;
  for (std::size_t k = 0; k < boxes_.size(); ++k) {
    models_[k] = model_of(k, *call);
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
  bool is_any_positive = false;
  for (const Repeat& request : requests_) {
    if (!(std::isfinite(request.weight) && request.weight >= 0)) return false;
    is_any_positive = is_any_positive || request.weight > 0;
    weights.push_back(request.weight);
  }
  if (!is_any_positive) return false;
  std::vector<AveragePart> parts;
  std::vector<const std::byte*> sources;
  for (const Slot& slot : call.layout.slots()) {
    std::byte* const out = result.memory + slot.offset;
    parts.push_back({slot.dtype, slot.size, slot.nbytes, out, slot.dtype});
    for (const std::byte* const model : models_) sources.push_back(model + slot.offset);
  }
  try {
    RelativeWeights relative;
    const std::vector<double> ratios = relative.add(weights);
    return average_into(parts, sources, ratios, relative.ratios) || call.takes_nonfinite;
  } catch (const std::exception&) {  // weights that are too far apart, or memory is short
    return false;
  }
}

void RepeatedCalls::post(const Prepared& call, const Result& result) {
  struct {
    std::uint32_t kind = kRepeated, count = 1;
    Extent extent;
    Repeated body;
  } message;
  message.extent = result.extent;
  message.body = call.told;
  for (Mailbox* const box : boxes_) {
    box->add_hold(Mailbox::Side::kWorker, result.extent.segment);
    // Refused only by a broken member, which has changed the word.
    if (box->post(std::as_bytes(std::span(&message, 1)), 0, false) == Mailbox::Posted::kRefused)
      box->drop_hold(Mailbox::Side::kWorker, result.extent.segment);
  }
  Mailbox::wake(boxes_);
}

RepeatedCalls::Ended RepeatedCalls::run(std::int64_t number, double seconds, const Sleep& sleep,
                                        std::vector<double> seen) {
  if (seen.size() != boxes_.size()) throw std::invalid_argument("expected a time for each member");
  seen_before_ = std::move(seen);
  const double end = seconds_now() + seconds;
  count_ = 0;
  for (Prepared& call : prepared_) call.count = 0, call.waited = call.averaged = 0;
  std::ranges::fill(seen_, 0.0);
  for (;;) {
    const double begin = seconds_now();
    const auto ended = wait(begin, end, sleep);
    pending_ = seconds_now() - begin;
    if (ended) return *ended;
    last_wait_ = pending_;
    if (!make(number + count_ + 1, pending_)) return Ended::kOther;
    ++count_;
    std::ranges::fill(seen_, 0.0);
  }
}

}  // namespace flatweights
