// Scaling, adding and interpolating in place, and sums of squares. Included by
// kernels.cpp alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "flatweights/average_kernel.hpp"
#include "flatweights/real.hpp"

namespace flatweights {
namespace {

// Writes `value(y, x)`, rounded once, to each element of `y[begin, end)`; `x[begin, end)`
// may be the same memory.
template <class T, class Value>
inline void change_range(std::byte* y, const std::byte* x, std::size_t begin, std::size_t end,
                         Value value) noexcept {
  if constexpr (is_half<T>) {
    for (; begin < end; begin += kBlock) {
      const std::size_t count = end - begin < kBlock ? end - begin : kBlock;
      alignas(kLine) float wide_y[kBlock];
      alignas(kLine) float wide_x[kBlock];
      widen_block<T>(y, begin, count, wide_y);
      if (x != y) widen_block<T>(x, begin, count, wide_x);
      const float* const other = x == y ? wide_y : wide_x;
      round_block<T>(y, begin, count, [=, &wide_y](std::size_t i, std::uint64_t&) {
        return value(static_cast<double>(wide_y[i]), static_cast<double>(other[i]));
      });
    }
  } else {
    // Nothing that is written is read at another place.
#pragma GCC ivdep
    for (std::size_t i = begin; i < end; ++i) {
      const T rounded = static_cast<T>(
          value(static_cast<double>(load<T>(y, i)), static_cast<double>(load<T>(x, i))));
      store(y, i, rounded == rounded ? rounded : static_cast<T>(__builtin_nan("")));
    }
  }
}

// As `scale` of Kernels.
template <class T>
void scale_range(std::byte* y, double a, std::size_t begin, std::size_t end) noexcept {
  change_range<T>(y, y, begin, end, [=](double old, double) { return a * old; });
}

// As `axpy` of Kernels.
template <class T>
void axpy_range(std::byte* y, double a, const std::byte* x, std::size_t begin,
                std::size_t end) noexcept {
  change_range<T>(y, x, begin, end, [=](double old, double other) { return old + a * other; });
}

// As `lerp` of Kernels.
template <class T>
void lerp_range(std::byte* y, const std::byte* x, double a, std::size_t begin,
                std::size_t end) noexcept {
  // From the nearer end: what is far from it is rounded against what is near.
  if (a < 0.5) {
    change_range<T>(y, x, begin, end,
                    [=](double old, double other) { return old + a * (other - old); });
  } else {
    const double rest = 1.0 - a;
    change_range<T>(y, x, begin, end,
                    [=](double old, double other) { return other - rest * (other - old); });
  }
}

// Squares are added up in lanes: lane l of a block takes elements l, l + kLanes and so on,
// in this order, so that vectors of any width give the same bits.
inline constexpr std::size_t kLanes = 16;

#if defined(__AVX512F__)
inline constexpr std::size_t kVector = 8;
#elif defined(__AVX__)
inline constexpr std::size_t kVector = 4;
#else
inline constexpr std::size_t kVector = 2;
#endif
// Spelled out: compilers leave loops over lanes with compensation scalar.
using Doubles [[gnu::vector_size(kVector * sizeof(double))]] = double;
using Floats [[gnu::vector_size(kVector * sizeof(float))]] = float;

template <class T>
inline Doubles load_doubles(const std::byte* memory, std::size_t i) noexcept {
  std::conditional_t<std::is_same_v<T, double>, Doubles, Floats> values;
  std::memcpy(&values, memory + i * sizeof(T), sizeof(values));
  return __builtin_convertvector(values, Doubles);
}

// Adds `term` to `total`, and what that rounded away to `lost` (Knuth's TwoSum).
template <class V>
inline void add_exactly(V& total, V& lost, V term) noexcept {
  const V next = total + term;
  const V added = next - total;
  lost += (total - (next - added)) + (term - added);
  total = next;
}

// Squares of float64 are summed with compensation. Those of float32 are exact in float64
// and summed plainly, at most kBlock / kLanes in a row.
template <class T, class V>
inline void add_square(V& total, [[maybe_unused]] V& lost, V value) noexcept {
  if constexpr (std::is_same_v<T, double>)
    add_exactly(total, lost, value * value);
  else
    total += value * value;
}

// Adds the squares of `scale * data[begin, begin + count)`, count <= kBlock, of float32
// or float64.
template <class T>
inline void add_squares(double& total, double& lost, const std::byte* data, double scale,
                        std::size_t begin, std::size_t count) noexcept {
  constexpr std::size_t kVectors = kLanes / kVector;
  Doubles sums[kVectors] = {};
  Doubles rests[kVectors] = {};
  const std::size_t whole = count / kLanes * kLanes;
  for (std::size_t i = 0; i < whole; i += kLanes)
#pragma GCC unroll 8
    for (std::size_t v = 0; v < kVectors; ++v)
      add_square<T>(sums[v], rests[v], scale * load_doubles<T>(data, begin + i + v * kVector));
  double sum[kLanes];
  double rest[kLanes];
  std::memcpy(sum, sums, sizeof(sum));
  std::memcpy(rest, rests, sizeof(rest));
  for (std::size_t l = 0; whole + l < count; ++l)
    add_square<T>(sum[l], rest[l], scale * static_cast<double>(load<T>(data, begin + whole + l)));
  for (std::size_t l = 0; l < kLanes; ++l) {
    add_exactly(total, lost, sum[l]);
    lost += rest[l];
  }
}

// As `squares` of Kernels.
template <class T>
void squares_range(double* total, double* lost, const std::byte* data, double scale,
                   std::size_t begin, std::size_t end) noexcept {
  for (; begin < end; begin += kBlock) {
    const std::size_t count = end - begin < kBlock ? end - begin : kBlock;
    if constexpr (is_half<T>) {
      alignas(kLine) float wide[kBlock];
      widen_block<T>(data, begin, count, wide);
      const auto* const widened = reinterpret_cast<const std::byte*>(wide);
      add_squares<float>(*total, *lost, widened, scale, 0, count);
    } else {
      add_squares<T>(*total, *lost, data, scale, begin, count);
    }
  }
}

}  // namespace
}  // namespace flatweights
