// Scaling, adding and interpolating in place, and sums of squares. Included only by
// kernels.cpp.
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
    // `x` may be `y`, but iteration i reads and then writes only element i.
    FLATWEIGHTS_IVDEP
    for (std::size_t i = begin; i < end; ++i) {
      const T rounded = static_cast<T>(
          value(static_cast<double>(load<T>(y, i)), static_cast<double>(load<T>(x, i))));
      store(y, i, rounded == rounded ? rounded : static_cast<T>(__builtin_nan("")));
    }
  }
}

// Implements `scale` of Kernels.
template <class T>
void scale_range(std::byte* y, double a, std::size_t begin, std::size_t end) noexcept {
  change_range<T>(y, y, begin, end, [=](auto old, auto) { return a * old; });
}

// Implements `axpy` of Kernels.
template <class T>
void axpy_range(std::byte* y, double a, const std::byte* x, std::size_t begin,
                std::size_t end) noexcept {
  change_range<T>(y, x, begin, end, [=](auto old, auto other) { return old + a * other; });
}

// Implements `lerp` of Kernels.
template <class T>
void lerp_range(std::byte* y, const std::byte* x, double a, std::size_t begin,
                std::size_t end) noexcept {
  if (a == 0.0 || a == 1.0) {
    // An end is itself, even if the difference of both is not finite.
    change_range<T>(y, a == 0.0 ? y : x, begin, end, [](auto, auto other) { return other; });
    return;
  }
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
static_assert((kColumns & (kColumns - 1)) == 0, "columns are added by halves");

// Rows whose squares are summed plainly before they are added to the sums of their columns.
inline constexpr std::size_t kRows = 4;

// Adds the sums of some rows to the sums of their columns: with compensation for float64, where
// the plain sum of kRows rows rounds no more often than squaring does. Squares of shorter numbers
// are exact in float64, and summed plainly, at most kMostBlock / kColumns in a row.
template <class T, class V>
[[gnu::always_inline]] inline void add_rows(V& total, [[maybe_unused]] V& lost, V rows) noexcept {
  if constexpr (std::is_same_v<T, double>)
    add_exactly(total, lost, rows);
  else
    total += rows;
}

// Sums of squares in columns.
template <class T>
struct Columns {
#if defined(FLATWEIGHTS_REGISTERS)
  static constexpr std::size_t kPairs = kColumns / kPair;
  Pair sums[kPairs] = {};
  Pair rests[kPairs] = {};

  // Adds the squares of this many rows, from element `first` on.
  template <std::size_t Rows>
  [[gnu::always_inline]] void add(const std::byte* data, std::size_t first) noexcept {
    Pair squares[kPairs];
#pragma GCC unroll 4
    for (std::size_t r = 0; r < Rows; ++r) {
      const std::size_t row = first + r * kColumns;
      read_ahead<kColumns * sizeof(T)>(data + row * sizeof(T));
#pragma GCC unroll 8
      for (std::size_t v = 0; v < kPairs; ++v) {
        const Pair values = load_pair<T>(data, row + v * kPair);
        const Pair square = {values.a * values.a, values.b * values.b};
        squares[v] = r == 0 ? square : Pair{squares[v].a + square.a, squares[v].b + square.b};
        // Without this the compiler reads column by column, and so memory out of order.
        settle(squares[v]);
      }
    }
#pragma GCC unroll 8
    for (std::size_t v = 0; v < kPairs; ++v) {
      add_rows<T>(sums[v].a, rests[v].a, squares[v].a);
      add_rows<T>(sums[v].b, rests[v].b, squares[v].b);
    }
  }

  // Writes the sums and their rounding errors, in the order of the columns.
  void spread(double* sum, double* rest) const noexcept {
    for (std::size_t v = 0; v < kPairs; ++v) {
      spread_pair<T>(sum + v * kPair, sums[v]);
      spread_pair<T>(rest + v * kPair, rests[v]);
    }
  }
#else
  double sums[kColumns] = {};
  double rests[kColumns] = {};

  template <std::size_t Rows>
  void add(const std::byte* data, std::size_t first) noexcept {
    double squares[kColumns];
    for (std::size_t r = 0; r < Rows; ++r) {
      for (std::size_t c = 0; c < kColumns; ++c) {
        const double value = widened<T>(data, first + r * kColumns + c);
        squares[c] = r == 0 ? value * value : squares[c] + value * value;
      }
    }
    for (std::size_t c = 0; c < kColumns; ++c) add_rows<T>(sums[c], rests[c], squares[c]);
  }

  void spread(double* sum, double* rest) const noexcept {
    std::memcpy(sum, sums, sizeof(sums));
    std::memcpy(rest, rests, sizeof(rests));
  }
#endif
};

// Adds up columns [0, 2 * half) by halves: adding them one after the other would take a third of
// a block's time.
template <std::size_t half>
[[gnu::always_inline]] inline void fold(double* sum, double* rest) noexcept {
  for (std::size_t c = 0; c < half; ++c) {
    add_exactly(sum[c], rest[c], sum[c + half]);
    rest[c] += rest[c + half];
  }
  if constexpr (half > 1) fold<half / 2>(sum, rest);
}

// Adds the squares of `data[begin, begin + count)`, count <= kMostBlock.
template <class T>
inline void add_squares(double& total, double& lost, const std::byte* data, std::size_t begin,
                        std::size_t count) noexcept {
  alignas(kLine) double sum[kColumns];
  alignas(kLine) double rest[kColumns];
  Columns<T> columns;
  std::size_t i = 0;
  for (; count - i >= kRows * kColumns; i += kRows * kColumns)
    columns.template add<kRows>(data, begin + i);
  for (; count - i >= kColumns; i += kColumns) columns.template add<1>(data, begin + i);
  columns.spread(sum, rest);
  for (std::size_t c = 0; i + c < count; ++c) {
    const double value = widened<T>(data, begin + i + c);
    add_rows<T>(sum[c], rest[c], value * value);
  }
  fold<kColumns / 2>(sum, rest);
  add_exactly(total, lost, sum[0]);
  lost += rest[0];
}

// Implements `squares` of Kernels.
template <class T>
void squares_range(double* total, double* lost, const std::byte* data, double scale,
                   std::size_t begin, std::size_t end) noexcept {
  for (; begin < end; begin += kMostBlock) {
    const std::size_t count = end - begin < kMostBlock ? end - begin : kMostBlock;
    if (scale == 1.0) {
      add_squares<T>(*total, *lost, data, begin, count);
    } else {
      alignas(kLine) double scaled[kMostBlock];
      for (std::size_t i = 0; i < count; ++i) scaled[i] = scale * widened<T>(data, begin + i);
      add_squares<double>(*total, *lost, reinterpret_cast<const std::byte*>(scaled), 0, count);
    }
  }
}

}  // namespace
}  // namespace flatweights
