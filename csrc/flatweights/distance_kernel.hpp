// Squared distances between all pairs of sources. Included only by kernels.cpp.
//
// A block of every source stays in the second-level cache while all pairs of sources are compared,
// and the next block is read into it meanwhile. What is squared is the difference of two numbers,
// so nothing cancels, however far the sources are from zero, or another source from both.
#pragma once

#include <cstddef>
#include <type_traits>

#include "flatweights/copy_kernel.hpp"
#include "flatweights/distances.hpp"
#include "flatweights/real.hpp"
#include "flatweights/sorting.hpp"

namespace flatweights {
namespace {

// Squares are summed in columns, a line of numbers wide: as many in all instruction sets.
template <class K>
inline constexpr std::size_t kSquareColumns = kLine / sizeof(K);

// Sources whose differences from as many others are kept in registers.
inline constexpr std::size_t kSquareGroup = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr std::size_t kTileRows = 4;  // 32 registers
#else
inline constexpr std::size_t kTileRows = 2;  // 16 registers
#endif

// What is prefetched while a tile is computed: two sources, from where their next block begins.
// Into the second-level cache, since this block's numbers fill the first.
inline constexpr int kSecondLevel = 2;
struct Ahead {
  const std::byte* first;
  const std::byte* second;
};

// Where the pair (i, j), i < j, is in the sums.
inline std::size_t pair_index(std::size_t i, std::size_t j, std::size_t count) noexcept {
  return i * (2 * count - i - 1) / 2 + (j - i - 1);
}

// Adds a line of squares to the sums of a pair, kDistanceColumns of them.
template <class K>
[[gnu::always_inline]] inline void add_columns(double* __restrict sums, const K* squares) noexcept {
  for (std::size_t first = 0; first < kSquareColumns<K>; first += kDistanceColumns)
    for (std::size_t c = 0; c < kDistanceColumns; ++c)
      sums[c] += static_cast<double>(squares[first + c]);
}

// Adds the squared distances of rows [i, i + Rows) from rows [j, j + Columns), of `nbytes` bytes
// each: whole lines. With Triangle, i is j, and each pair counts once.
template <class K, std::size_t Rows, std::size_t Columns, bool Triangle>
void add_tile(double* sums, std::size_t count, const std::byte* const* rows, std::size_t i,
              std::size_t j, std::size_t nbytes, Ahead ahead) noexcept {
  using V = Register<K>;
  const std::byte* a[Rows];
  const std::byte* b[Columns];
  for (std::size_t r = 0; r < Rows; ++r) a[r] = rows[i + r];
  for (std::size_t c = 0; c < Columns; ++c) b[c] = rows[j + c];
  alignas(kLine) K squares[Rows][Columns][kSquareColumns<K>];
  for (std::size_t column = 0; column < kLine; column += kRegister) {
    V total[Rows][Columns] = {};
    for (std::size_t at = column; at < nbytes; at += kLine) {
      __builtin_prefetch(ahead.first + at, 0, kSecondLevel);
      __builtin_prefetch(ahead.second + at, 0, kSecondLevel);
      V other[Columns];
#pragma GCC unroll 4
      for (std::size_t c = 0; c < Columns; ++c) other[c] = load_register<V>(b[c] + at);
#pragma GCC unroll 4
      for (std::size_t r = 0; r < Rows; ++r) {
        const V one = Triangle ? other[r < Columns ? r : 0] : load_register<V>(a[r] + at);
#pragma GCC unroll 4
        for (std::size_t c = Triangle ? r + 1 : 0; c < Columns; ++c) {
          const V difference = one - other[c];
          total[r][c] = multiply_add(difference, difference, total[r][c]);
        }
      }
    }
    for (std::size_t r = 0; r < Rows; ++r)
      for (std::size_t c = Triangle ? r + 1 : 0; c < Columns; ++c)
        store_register(reinterpret_cast<std::byte*>(squares[r][c]) + column, total[r][c]);
  }
  for (std::size_t r = 0; r < Rows; ++r)
    for (std::size_t c = Triangle ? r + 1 : 0; c < Columns; ++c)
      add_columns<K>(sums + pair_index(i + r, j + c, count) * kDistanceColumns, squares[r][c]);
}

// Adds the squared distances of all pairs of rows. Meanwhile `next`, with as many sources, is read
// into the caches.
template <class K, class Next>
inline void add_pairs(double* sums, const std::byte* const* rows, std::size_t count,
                      std::size_t nbytes, Next next) noexcept {
  static_assert(kSquareGroup == 4);
  std::size_t k = 0;
  const auto tile = [&]<std::size_t Rows, std::size_t Columns, bool Triangle>(std::size_t i,
                                                                              std::size_t j) {
    const Ahead ahead = {next(k), next(k + 1 < count ? k + 1 : k)};
    add_tile<K, Rows, Columns, Triangle>(sums, count, rows, i, j, nbytes, ahead);
    k = k + 2 < count ? k + 2 : count - 1;
  };
  const auto tiles = [&]<std::size_t Columns>(std::size_t i, std::size_t j) {
    for (std::size_t r = 0; r < kSquareGroup; r += kTileRows)
      tile.template operator()<kTileRows, Columns, false>(i + r, j);
  };
  for (std::size_t j = 0; j < count; j += kSquareGroup) {
    const std::size_t columns = count - j < kSquareGroup ? count - j : kSquareGroup;
    for (std::size_t i = 0; i < j; i += kSquareGroup) {
      if (columns == 1) tiles.template operator()<1>(i, j);
      if (columns == 2) tiles.template operator()<2>(i, j);
      if (columns == 3) tiles.template operator()<3>(i, j);
      if (columns == 4) tiles.template operator()<4>(i, j);
    }
    if (columns == 2) tile.template operator()<2, 2, true>(j, j);
    if (columns == 3) tile.template operator()<3, 3, true>(j, j);
    if (columns == 4) tile.template operator()<4, 4, true>(j, j);
  }
}

// Copies `source[0, size)`, at most kSquareColumns numbers, to `row`, and zeros behind them.
template <class T, class K>
[[gnu::always_inline]] inline void copy_line(K* row, const std::byte* source,
                                             std::size_t size) noexcept {
  // Not as far ahead as elsewhere: the sources take turns.
  __builtin_prefetch(source + 1024);
  std::size_t i = 0;
  if constexpr (is_half<T> && std::is_same_v<K, float>) {
    widen_block<T>(source, 0, size, row);
    i = size;
  }
  for (; i < size; ++i) row[i] = static_cast<K>(widened<T>(source, i));
  for (; i < kSquareColumns<K>; ++i) row[i] = K{0};
}

// Implements `distances` of Kernels: differences and squares are of type K.
template <class T, class K>
void distances_range(double* sums, const std::byte* const* sources, std::size_t count,
                     std::size_t begin, std::size_t end, std::byte* room) noexcept {
  constexpr std::size_t kNumbers = kSquareColumns<K>;
  const auto** const rows = reinterpret_cast<const std::byte**>(room);
  auto* const copies = reinterpret_cast<K*>(room + address_bytes(count));
  for (; begin < end; begin += kDistanceBlock) {
    const std::size_t size = end - begin < kDistanceBlock ? end - begin : kDistanceBlock;
    const std::size_t lines = (size + kNumbers - 1) / kNumbers;
    if (std::is_same_v<T, K> && size % kNumbers == 0) {
      // Where they are, even if no line begins with a number: to copy them takes longer.
      for (std::size_t k = 0; k < count; ++k) rows[k] = sources[k] + begin * sizeof(T);
    } else {
      for (std::size_t k = 0; k < count; ++k)
        rows[k] = reinterpret_cast<const std::byte*>(copies + k * kDistanceBlock);
      // Side by side, as processors prefetch streams.
      for (std::size_t at = 0; at < size; at += kNumbers)
        for (std::size_t k = 0; k < count; ++k)
          copy_line<T>(copies + k * kDistanceBlock + at, sources[k] + (begin + at) * sizeof(T),
                       size - at < kNumbers ? size - at : kNumbers);
    }
    add_pairs<K>(sums, rows, count, lines * kLine,
                 [&](std::size_t k) { return sources[k] + (begin + kDistanceBlock) * sizeof(T); });
  }
}

}  // namespace
}  // namespace flatweights
