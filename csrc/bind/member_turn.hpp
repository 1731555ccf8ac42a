// The turn of the thread that makes a call of a member, in Python or in C++.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "repeated_request.hpp"
#include "tensorflow/variables_api.hpp"

namespace flatweights::bind {

// A lock, and the steps of TensorFlow's that may take it without Python: those whose last call was
// a repetition, as long as nothing changes that the next one depends on.
class MemberTurn : public std::enable_shared_from_this<MemberTurn> {
 public:
  // Waits without the GIL, which it needs; raises what a signal handler raises.
  void take();
  [[nodiscard]] bool try_take();
  void give_back();
  [[nodiscard]] bool is_taken() const;
  // Whether this thread has it.
  [[nodiscard]] bool is_own() const;

  // Makes the op with this id repeat a call from now on. With the turn.
  void allow(std::int64_t op, std::shared_ptr<RepeatedStep> step);
  // Makes the next call of each op go through Python. In a fork of the process, it does nothing.
  void forget_steps();

  // Begins the call of a step, without the GIL, and waits a moment: a thread of TensorFlow's calls
  // this. If it is not over then, `finish` has to be called, in any thread.
  StepStart start(std::int64_t op, const CalledTensor* tensors, std::size_t count) noexcept;
  // Goes on with a call that `start` has begun with this array, without the GIL. Returns false if
  // Python has to make the call, or to go on with it: see `resume`.
  bool finish(std::int64_t op, const CalledTensor* tensors, std::size_t count) noexcept;
  // If `finish` has left a call to this thread's Python: whether the response has come. From then
  // on, the turn is Python's, which gives it back. Otherwise nothing.
  std::optional<bool> resume();
  // Gives the turn back if Python did not go on with such a call: then the member has asked for
  // what nobody takes.
  void end_step();
  // Whether that has happened.
  [[nodiscard]] bool is_left() const;

  // The turn that has allowed the op with this id something; null, if none has or it is gone.
  static std::shared_ptr<MemberTurn> of(std::int64_t op);
  // The op is gone.
  static void forget(std::int64_t op);

 private:
  // A call that a step has begun.
  struct Begun {
    std::int64_t op;
    const CalledTensor* tensors;  // an array that no other execution of the op has
    std::shared_ptr<RepeatedStep> step;
    bool has_come;  // whether there is a response, which Python has to read
  };

  mutable std::mutex mutex_;
  std::condition_variable given_back_;
  unsigned long owner_ = 0;     // as of threading.get_ident; 0, if nobody has it
  std::optional<Begun> begun_;  // and not yet gone on with
  std::optional<bool> asked_;   // what `resume` returns
  bool is_left_ = false;
  double moment_ = 1e-3;  // seconds for which `start` waits
  std::map<std::int64_t, std::shared_ptr<RepeatedStep>> steps_;
  const pid_t process_ = getpid();
};

}  // namespace flatweights::bind
