// Squared distances between all pairs of sources. Included only by kernels.cpp.
//
// A block of every source stays in the caches while all pairs of sources are compared. What is
// squared is the difference of two numbers, so nothing cancels, however far the sources are from
// zero, or another source from both.
#pragma once

#include <cstddef>
#include <type_traits>

#include "flatweights/copy_kernel.hpp"
#include "flatweights/distances.hpp"
#include "flatweights/real.hpp"

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

// Where the pair (i, j), i < j, is in the sums.
inline std::size_t pair_index(std::size_t i, std::size_t j, std::size_t count) noexcept {
  return i * (2 * count - i - 1) / 2 + (j - i - 1);
}

// What is fetched into the caches while a tile is computed: parts of the next block of sources.
struct Ahead {
  const std::byte* from[kSquareGroup];
  std::size_t runs;   // of them
  std::size_t ratio;  // bytes of a row to bytes of its source
};

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
              std::size_t j, std::size_t nbytes, const Ahead& ahead) noexcept {
  using V = Register<K>;
  const std::byte* a[Rows];
  const std::byte* b[Columns];
  for (std::size_t r = 0; r < Rows; ++r) a[r] = rows[i + r];
  for (std::size_t c = 0; c < Columns; ++c) b[c] = rows[j + c];
  alignas(kLine) K squares[Rows][Columns][kSquareColumns<K>];
  for (std::size_t column = 0; column < kLine; column += kRegister) {
    V total[Rows][Columns] = {};
    for (std::size_t at = column; at < nbytes; at += kLine) {
      for (std::size_t run = 0; column == 0 && run < ahead.runs; ++run)
        __builtin_prefetch(ahead.from[run] + at / ahead.ratio);
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

// Adds the squared distances of all pairs of rows, and fetches `next`, the blocks that follow them
// in the sources, evenly while it does.
template <class T, class K>
inline void add_pairs(double* sums, const std::byte* const* rows, std::size_t count,
                      std::size_t nbytes, const std::byte* const* sources,
                      std::size_t next) noexcept {
  static_assert(kSquareGroup == 4);
  const std::size_t groups = (count + kSquareGroup - 1) / kSquareGroup;
  std::size_t tiles = groups * (groups - 1) / 2 * (kSquareGroup / kTileRows) + groups;
  std::size_t fetched = 0;
  const auto ahead = [&] {
    Ahead found;
    found.ratio = sizeof(K) / sizeof(T);
    const std::size_t share = (count - fetched + tiles - 1) / tiles;
    found.runs = share < kSquareGroup ? share : kSquareGroup;
    for (std::size_t run = 0; run < found.runs; ++run)
      found.from[run] = sources[fetched++] + next * sizeof(T);
    --tiles;
    return found;
  };
  const auto tile = [&]<std::size_t Columns>(std::size_t i, std::size_t j) {
    for (std::size_t r = 0; r < kSquareGroup; r += kTileRows)
      add_tile<K, kTileRows, Columns, false>(sums, count, rows, i + r, j, nbytes, ahead());
  };
  for (std::size_t j = 0; j < count; j += kSquareGroup) {
    const std::size_t columns = count - j < kSquareGroup ? count - j : kSquareGroup;
    for (std::size_t i = 0; i < j; i += kSquareGroup) {
      if (columns == 1) tile.template operator()<1>(i, j);
      if (columns == 2) tile.template operator()<2>(i, j);
      if (columns == 3) tile.template operator()<3>(i, j);
      if (columns == 4) tile.template operator()<4>(i, j);
    }
    if (columns == 2) add_tile<K, 2, 2, true>(sums, count, rows, j, j, nbytes, ahead());
    if (columns == 3) add_tile<K, 3, 3, true>(sums, count, rows, j, j, nbytes, ahead());
    if (columns == 4) add_tile<K, 4, 4, true>(sums, count, rows, j, j, nbytes, ahead());
  }
}

// Copies `source[begin, begin + size)` to `row`, and zeros up to a whole line.
template <class T, class K>
inline void copy_row(K* __restrict row, const std::byte* source, std::size_t begin,
                     std::size_t size) noexcept {
  std::size_t done = 0;
  if constexpr (std::is_same_v<T, K>) {
    // Not memcpy, which GCC turns into a slow instruction.
    for (; done + kSquareColumns<K> <= size; done += kSquareColumns<K>) {
      const std::byte* const line = source + (begin + done) * sizeof(T);
      for (std::size_t i = 0; i < kLine; i += kRegister)
        store_register(reinterpret_cast<std::byte*>(row + done) + i,
                       load_register<Bytes>(line + i));
    }
  } else if constexpr (is_half<T> && std::is_same_v<K, float>) {
    widen_block<T>(source, begin, size, row);
    done = size;
  }
  for (; done < size; ++done) row[done] = static_cast<K>(widened<T>(source, begin + done));
  for (std::size_t i = size; i % kSquareColumns<K> != 0; ++i) row[i] = K{0};
}

// Implements `distances` of Kernels: differences and squares are of type K.
template <class T, class K>
void distances_range(double* sums, const std::byte* const* sources, std::size_t count,
                     std::size_t begin, std::size_t end, std::byte* room) noexcept {
  const auto** const rows = reinterpret_cast<const std::byte**>(room);
  std::byte* const first = room + (count * sizeof(void*) + kLine - 1) / kLine * kLine;
  for (std::size_t k = 0; k < count; ++k) rows[k] = first + k * kDistanceBlock * sizeof(K);
  for (; begin < end; begin += kDistanceBlock) {
    const std::size_t size = end - begin < kDistanceBlock ? end - begin : kDistanceBlock;
    // Copies, since sources that begin at the same place of a page evict each other from the cache.
    for (std::size_t k = 0; k < count; ++k)
      copy_row<T>(reinterpret_cast<K*>(first + k * kDistanceBlock * sizeof(K)), sources[k], begin,
                  size);
    const std::size_t lines = (size + kSquareColumns<K> - 1) / kSquareColumns<K>;
    add_pairs<T, K>(sums, rows, count, lines * kLine, sources, begin + size);
  }
}

}  // namespace
}  // namespace flatweights
