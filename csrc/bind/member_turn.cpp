#include "member_turn.hpp"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "without_gil.hpp"

namespace flatweights::bind {

namespace py = pybind11;

namespace {

constexpr std::chrono::milliseconds kSlice{50};  // between two looks for signals
constexpr unsigned long kStep = ~0UL;            // the owner, while no thread goes on with a step

// Seconds for which a step waits in a thread of TensorFlow's. If another thread waited instead, it
// would have to be woken twice, and TensorFlow's would poll for work meanwhile. But that thread may
// be the one in which another member of this process would ask: so it waits for shorter times if
// that is not long enough.
constexpr double kMostMoment = 50e-3;
constexpr double kLeastMoment = 1e-4;

// The turns by the id of an op. Never freed, since ops outlive static objects.
struct MemberTurns {
  std::mutex mutex;
  std::map<std::int64_t, std::weak_ptr<MemberTurn>> by_op;
  const pid_t process = getpid();

  static MemberTurns& instance() {
    static auto* const turns = new MemberTurns;
    return *turns;
  }
};

}  // namespace

bool MemberTurn::try_take() {
  const std::lock_guard lock(mutex_);
  if (owner_ != 0) return false;
  owner_ = PyThread_get_thread_ident();
  return true;
}

void MemberTurn::take() {
  while (!try_take()) {
    {
      const WithoutGil nogil;
      std::unique_lock lock(mutex_);
      given_back_.wait_for(lock, kSlice, [this] { return owner_ == 0; });
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

void MemberTurn::give_back() {
  {
    const std::lock_guard lock(mutex_);
    owner_ = 0;
    asked_.reset();
  }
  given_back_.notify_one();
}

bool MemberTurn::is_taken() const {
  const std::lock_guard lock(mutex_);
  return owner_ != 0;
}

bool MemberTurn::is_own() const {
  const std::lock_guard lock(mutex_);
  return owner_ == PyThread_get_thread_ident();
}

void MemberTurn::allow(std::int64_t op, std::shared_ptr<RepeatedStep> step) {
  MemberTurns& turns = MemberTurns::instance();
  {
    const std::lock_guard lock(turns.mutex);
    turns.by_op[op] = weak_from_this();
  }
  const std::lock_guard lock(mutex_);
  steps_[op] = std::move(step);
}

void MemberTurn::forget_steps() {
  if (process_ != getpid()) return;  // a thread of the parent's may have had the mutex
  const std::lock_guard lock(mutex_);
  steps_.clear();
}

StepStart MemberTurn::start(std::int64_t op, const CalledTensor* tensors,
                            std::size_t count) noexcept {
  if (!try_take()) return StepStart::kNot;
  std::shared_ptr<RepeatedStep> step;
  {
    const std::lock_guard lock(mutex_);
    const auto found = steps_.find(op);
    if (found != steps_.end()) step = found->second;
  }
  if (step == nullptr || !step->ask(tensors, count)) {
    give_back();
    return StepStart::kNot;
  }
  const auto ended = step->wait(tensors, count, moment_);
  const bool was_enough = ended != RepeatedStep::Ended::kAsked;
  moment_ = was_enough ? std::min(2 * moment_, kMostMoment) : std::max(moment_ / 4, kLeastMoment);
  if (ended == RepeatedStep::Ended::kDone) {
    give_back();
    return StepStart::kDone;
  }
  {
    const std::lock_guard lock(mutex_);
    owner_ = kStep;
    begun_ = {op, tensors, std::move(step), ended == RepeatedStep::Ended::kTold};
  }
  MemberTurns& turns = MemberTurns::instance();
  const std::lock_guard lock(turns.mutex);
  turns.by_op[op] = weak_from_this();  // if the op is gone meanwhile, `finish` gives the turn back
  return StepStart::kBegun;
}

bool MemberTurn::finish(std::int64_t op, const CalledTensor* tensors, std::size_t count) noexcept {
  Begun begun;
  {
    const std::lock_guard lock(mutex_);
    if (!begun_ || begun_->op != op || begun_->tensors != tensors) return false;
    begun = std::move(*begun_);
    begun_.reset();
    owner_ = PyThread_get_thread_ident();
  }
  using Ended = RepeatedStep::Ended;
  const Ended ended = begun.has_come ? Ended::kTold : begun.step->wait(tensors, count);
  if (ended == Ended::kDone) {
    give_back();
    return true;
  }
  const std::lock_guard lock(mutex_);
  asked_ = ended == Ended::kTold;
  return false;
}

std::optional<bool> MemberTurn::resume() {
  const std::lock_guard lock(mutex_);
  if (owner_ != PyThread_get_thread_ident()) return {};
  return std::exchange(asked_, std::nullopt);
}

void MemberTurn::end_step() {
  if (!resume()) return;
  {
    const std::lock_guard lock(mutex_);
    is_left_ = true;
    steps_.clear();
  }
  give_back();
}

bool MemberTurn::is_left() const {
  const std::lock_guard lock(mutex_);
  return is_left_;
}

std::shared_ptr<MemberTurn> MemberTurn::of(std::int64_t op) {
  MemberTurns& turns = MemberTurns::instance();
  const std::lock_guard lock(turns.mutex);
  const auto found = turns.by_op.find(op);
  return found == turns.by_op.end() ? nullptr : found->second.lock();
}

void MemberTurn::forget(std::int64_t op) {
  MemberTurns& turns = MemberTurns::instance();
  if (turns.process != getpid()) return;  // as in `forget_steps`
  if (const std::shared_ptr<MemberTurn> turn = of(op)) {
    const std::lock_guard lock(turn->mutex_);
    turn->steps_.erase(op);
    if (turn->begun_ && turn->begun_->op == op) return;  // `finish` needs it
  }
  const std::lock_guard lock(turns.mutex);
  turns.by_op.erase(op);
}

}  // namespace flatweights::bind
