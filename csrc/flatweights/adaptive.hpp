// Steps of Adagrad, Adam and Yogi towards an average, in one pass over memory.
#pragma once

#include <cstddef>

namespace flatweights {

// How the square of a difference d changes the second moment v.
enum class SecondMoment {
  kSum,   // Adagrad: v + d^2
  kMean,  // Adam: beta2 * v + (1 - beta2) * d^2
  kSign,  // Yogi: v - (1 - beta2) * d^2 * sign(v - d^2)
};

// Vectors of one length, of float32 or float64, aligned for that type. `average` and `before`
// may be `weights` or each other; otherwise none overlap. Without `before`, `average` is a
// gradient.
struct AdaptiveRange {
  bool wide;  // float64
  std::size_t size;
  void* weights;
  void* first;  // null: the difference itself is the first moment
  void* second;
  const void* average;
  const void* before;  // the weights that the workers started from; null: see above
};

struct AdaptiveRates {
  double learning_rate;
  double beta1;
  double beta2;
  double tau;
};

// With d = average - before, or -average without `before`: first = beta1 * first + (1 - beta1) * d;
// the second moment changes by `kind`; weights += first / (sqrt(second) + tau) * learning_rate.
// Means are computed from the nearer end, as by `lerp`. Each operation is rounded to the vectors'
// type, without contraction, so the bits depend only on the inputs.
void adapt(const AdaptiveRange& range, SecondMoment kind, const AdaptiveRates& rates);

}  // namespace flatweights
