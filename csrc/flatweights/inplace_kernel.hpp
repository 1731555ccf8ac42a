// Scaling, adding and interpolating in place, and sums of squares. Included by
// kernels.cpp alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "flatweights/average_kernel.hpp"
#include "flatweights/real.hpp"
#include "flatweights/register_pairs.hpp"
#include "flatweights/two_sum.hpp"

namespace flatweights {
namespace {

// Writes `value(y, x)`, rounded once, to each element of `y[begin, end)`; `x[begin, end)`
// may be the same memory.
template <class T, class Value>
inline void change_range(std::byte* y, const std::byte* x, std::size_t begin, std::size_t end,
                         Value value) noexcept {
#if defined(FLATWEIGHTS_REGISTERS)
  const std::size_t first = begin;
  Doubles spoiled = broadcast(0);
  for (; end - begin >= kPair; begin += kPair) {
    const Pair old = load_pair<T>(y, begin);
    const Pair other = load_pair<T>(x, begin);
    const Pair changed = {value(old.a, other.a), value(old.b, other.b)};
    spoiled += (changed.a - changed.a) + (changed.b - changed.b);
    store_pair<T>(y, begin, changed);
  }
  if (any_nonzero_or_nan(spoiled)) unify_nan<T>(y, first, begin);
#endif
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
    // Element i is read before element i is written, and no other element is.
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
  change_range<T>(y, y, begin, end, [=](auto old, auto) { return a * old; });
}

// As `axpy` of Kernels.
template <class T>
void axpy_range(std::byte* y, double a, const std::byte* x, std::size_t begin,
                std::size_t end) noexcept {
  change_range<T>(y, x, begin, end, [=](auto old, auto other) { return old + a * other; });
}

// As `lerp` of Kernels.
template <class T>
void lerp_range(std::byte* y, const std::byte* x, double a, std::size_t begin,
                std::size_t end) noexcept {
  // Computed from the nearer end, where the rounding error is smaller.
  if (a < 0.5) {
    change_range<T>(y, x, begin, end,
                    [=](auto old, auto other) { return old + a * (other - old); });
  } else {
    const double rest = 1.0 - a;
    change_range<T>(y, x, begin, end,
                    [=](auto old, auto other) { return other - rest * (other - old); });
  }
}

// Squares are added up in columns: column c of a block takes elements c, c + kColumns and so
// on, in this order, so that registers of any width give the same bits.
inline constexpr std::size_t kColumns = 32;
static_assert((kColumns & (kColumns - 1)) == 0, "they are added by halves");

// Squares of float64 are summed with compensation. Those of shorter numbers are exact in
// float64 and summed plainly, at most kMostBlock / kColumns in a row.
template <class T, class V>
inline void add_square(V& total, [[maybe_unused]] V& lost, V value) noexcept {
  if constexpr (std::is_same_v<T, double>)
    add_exactly(total, lost, value * value);
  else
    total += value * value;
}

// Adds the squares of `scale * data[begin, begin + count)`, whole rows of columns, to
// `sum` and `rest`, of kColumns each.
template <class T>
inline void add_rows_of_squares(double* sum, double* rest, const std::byte* data, double scale,
                                std::size_t begin, std::size_t count) noexcept {
#if defined(FLATWEIGHTS_REGISTERS)
  constexpr std::size_t kPairsOfColumns = kColumns / kPair;
  Pair sums[kPairsOfColumns];
  Pair rests[kPairsOfColumns];
  for (std::size_t v = 0; v < kPairsOfColumns; ++v)
    sums[v] = rests[v] = {broadcast(0), broadcast(0)};
  for (std::size_t i = 0; i < count; i += kColumns) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < kPairsOfColumns; ++v) {
      const Pair values = load_pair<T>(data, begin + i + v * kPair);
      add_square<T>(sums[v].a, rests[v].a, scale * values.a);
      add_square<T>(sums[v].b, rests[v].b, scale * values.b);
    }
  }
  for (std::size_t v = 0; v < kPairsOfColumns; ++v) {
    spread_pair<T>(sum + v * kPair, sums[v]);
    spread_pair<T>(rest + v * kPair, rests[v]);
  }
#else
  for (std::size_t c = 0; c < kColumns; ++c) sum[c] = rest[c] = 0.0;
  for (std::size_t i = 0; i < count; i += kColumns)
    for (std::size_t c = 0; c < kColumns; ++c)
      add_square<T>(sum[c], rest[c], scale * widened<T>(data, begin + i + c));
#endif
}

// Adds the squares of `scale * data[begin, begin + count)`, count <= kMostBlock.
template <class T>
inline void add_squares(double& total, double& lost, const std::byte* data, double scale,
                        std::size_t begin, std::size_t count) noexcept {
  double sum[kColumns];
  double rest[kColumns];
  const std::size_t whole = count / kColumns * kColumns;
  add_rows_of_squares<T>(sum, rest, data, scale, begin, whole);
  for (std::size_t c = 0; whole + c < count; ++c)
    add_square<T>(sum[c], rest[c], scale * widened<T>(data, begin + whole + c));
  // By halves: one after the other would take as long as a third of a block.
  for (std::size_t half = kColumns / 2; half > 0; half /= 2) {
    for (std::size_t c = 0; c < half; ++c) {
      add_exactly(sum[c], rest[c], sum[c + half]);
      rest[c] += rest[c + half];
    }
  }
  add_exactly(total, lost, sum[0]);
  lost += rest[0];
}

// As `squares` of Kernels.
template <class T>
void squares_range(double* total, double* lost, const std::byte* data, double scale,
                   std::size_t begin, std::size_t end) noexcept {
  for (; begin < end; begin += kMostBlock) {
    const std::size_t count = end - begin < kMostBlock ? end - begin : kMostBlock;
    add_squares<T>(*total, *lost, data, scale, begin, count);
  }
}

}  // namespace
}  // namespace flatweights
