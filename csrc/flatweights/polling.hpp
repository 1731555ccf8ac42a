// Whether a wait polls before it sleeps.
//
// A thread that sleeps is woken by another one, which takes tens of microseconds if its processor
// is idle, and longer in a virtual machine. So a wait polls for a time, if the last one took no
// longer than twice that. It yields in between: other threads of this processor go on.
#pragma once

namespace flatweights {

class Polling {
 public:
  // Polls for at most `most` seconds.
  explicit Polling(double most) noexcept : most_(most) {}

  // Seconds for which the next wait polls.
  [[nodiscard]] double seconds() const noexcept { return last_ <= 2 * most_ ? most_ : 0.0; }
  // Notes how long a wait has taken.
  void note(double seconds) noexcept { last_ = seconds; }

 private:
  double most_;
  double last_ = 0.0;
};

}  // namespace flatweights
