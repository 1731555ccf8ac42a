// Adagrad, Adam and Yogi steps, number by number. Included only by kernels.cpp.
#pragma once

#include <cstddef>

#include "flatweights/adaptive.hpp"
#include "flatweights/registers.hpp"

namespace flatweights {
namespace {

[[gnu::always_inline]] inline float with_sign_of(float sign, float value) noexcept {
  return __builtin_copysignf(value, sign);
}
[[gnu::always_inline]] inline double with_sign_of(double sign, double value) noexcept {
  return __builtin_copysign(value, sign);
}
[[gnu::always_inline]] inline float root(float value) noexcept { return __builtin_sqrtf(value); }
[[gnu::always_inline]] inline double root(double value) noexcept { return __builtin_sqrt(value); }

// Moves a mean by `1 - beta` of the way to a new number. From the farther end, rounding errors of
// the old number would hide a small new one, of which a small `beta` takes nearly all.
template <class T>
struct MovingMean {
  explicit MovingMean(double beta) noexcept
      : from_old(beta > 0.5), factor(static_cast<T>(from_old ? 1.0 - beta : -beta)) {}

  [[gnu::always_inline]] T next(T old, T number) const noexcept {
    return (from_old ? old : number) + (number - old) * factor;
  }

  bool from_old;
  T factor;
};

// Returns the second moment `old`, updated by `square`, the squared difference.
template <class T, SecondMoment Kind>
[[gnu::always_inline]] inline T next_second(T old, T square, MovingMean<T> mean, T share) noexcept {
  if constexpr (Kind == SecondMoment::kSum) return old + square;
  if constexpr (Kind == SecondMoment::kMean) return mean.next(old, square);
  // Yogi: moves `old` towards `square` by at most `share` of `square`; if they are equal, not at
  // all.
  const T change = square * share;
  const T beyond = old - square;
  return old - (beyond == 0 ? T{0} : with_sign_of(beyond, change));
}

template <class T, SecondMoment Kind, bool HasFirst, bool HasBefore>
inline void adapt_numbers(const AdaptiveRange& range, const AdaptiveRates& rates, std::size_t begin,
                          std::size_t end) noexcept {
  T* const weights = static_cast<T*>(range.weights);
  T* const first = static_cast<T*>(range.first);
  T* const second = static_cast<T*>(range.second);
  const T* const average = static_cast<const T*>(range.average);
  const T* const before = static_cast<const T*>(range.before);
  const MovingMean<T> first_mean(rates.beta1);
  const MovingMean<T> second_mean(rates.beta2);
  const T second_share = static_cast<T>(1.0 - rates.beta2);
  const T learning_rate = static_cast<T>(rates.learning_rate);
  const T tau = static_cast<T>(rates.tau);
  // An input may be `weights`, but iteration i reads and then writes only element i.
  FLATWEIGHTS_IVDEP
  for (std::size_t i = begin; i < end; ++i) {
    T delta = -average[i];
    if constexpr (HasBefore) delta = average[i] - before[i];
    T direction = delta;
    if constexpr (HasFirst) {
      direction = first_mean.next(first[i], delta);
      first[i] = direction;
    }
    const T moment = next_second<T, Kind>(second[i], delta * delta, second_mean, second_share);
    second[i] = moment;
    weights[i] += direction / (root(moment) + tau) * learning_rate;
  }
}

template <class T, SecondMoment Kind, bool HasFirst>
inline void adapt_from(const AdaptiveRange& range, const AdaptiveRates& rates, std::size_t begin,
                       std::size_t end) noexcept {
  if (range.before != nullptr)
    adapt_numbers<T, Kind, HasFirst, true>(range, rates, begin, end);
  else
    adapt_numbers<T, Kind, HasFirst, false>(range, rates, begin, end);
}

template <class T, SecondMoment Kind>
inline void adapt_moments(const AdaptiveRange& range, const AdaptiveRates& rates, std::size_t begin,
                          std::size_t end) noexcept {
  if (range.first != nullptr)
    adapt_from<T, Kind, true>(range, rates, begin, end);
  else
    adapt_from<T, Kind, false>(range, rates, begin, end);
}

// Implements `adapt` of Kernels.
template <class T>
void adapt_range(const AdaptiveRange& range, SecondMoment kind, const AdaptiveRates& rates,
                 std::size_t begin, std::size_t end) noexcept {
  switch (kind) {
    case SecondMoment::kSum:
      return adapt_moments<T, SecondMoment::kSum>(range, rates, begin, end);
    case SecondMoment::kMean:
      return adapt_moments<T, SecondMoment::kMean>(range, rates, begin, end);
    case SecondMoment::kSign:
      return adapt_moments<T, SecondMoment::kSign>(range, rates, begin, end);
  }
}

}  // namespace
}  // namespace flatweights
