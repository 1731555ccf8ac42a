// Weighted mean of equally shaped parts, in one pass over memory.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <type_traits>

#include "flatweights/dtype.hpp"

namespace flatweights {

// Adds `weight * source[begin, begin + count)` to `sum[0, count)`.
//
// float16, bfloat16 and float32 are summed in float64. Sums of float64 carry in
// `compensation` what each addition rounded away (Neumaier's variant of Kahan
// summation, with Knuth's TwoSum: ZAMM 54, 1974); the narrower types leave it
// untouched.
template <class T>
inline void add_block(double* __restrict sum, double* __restrict compensation,
                      const std::byte* source, std::size_t begin, std::size_t count,
                      double weight) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    const double term = weight * widen(load<T>(source, begin + i));
    if constexpr (std::is_same_v<T, double>) {
      const double total = sum[i] + term;
      const double added = total - sum[i];
      compensation[i] += (sum[i] - (total - added)) + (term - added);
      sum[i] = total;
    } else {
      sum[i] += term;
    }
  }
}

// Writes `sum / total`, rounded to T, to `out[begin, begin + count)`.
template <class T>
inline void divide_block(std::byte* out, std::size_t begin, const double* __restrict sum,
                         const double* __restrict compensation, std::size_t count,
                         double total) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    double value = sum[i];
    if constexpr (std::is_same_v<T, double>) {
      // Infinite sums have no meaningful remainder (infinity - infinity).
      const double corrected = value + compensation[i];
      value = std::isfinite(compensation[i]) ? corrected : value;
    }
    store<T>(out, begin + i, narrow<T>(value / total));
  }
}

struct AveragePart {
  DType dtype;
  std::size_t size;  // elements
  std::size_t nbytes;
  std::byte* out;
};

// Writes to each part the mean, over k, of `sources[part * weights.size() + k]`
// with weights `weights[k]`, divided by `total`, their sum. An integer part gets
// the bytes of its first source. There is at least one source.
//
// A part's `out` may be one of its own sources and overlaps nothing else: each
// block is read before it is written. Sources are added in order, so the result
// does not depend on threads or alignment.
void average_into(std::span<const AveragePart> parts, std::span<const std::byte* const> sources,
                  std::span<const double> weights, double total);

}  // namespace flatweights
