// Squared distances between all pairs of sources. Included only by kernels.cpp.
//
// A block of every source stays in the second-level cache while all pairs of sources are compared,
// and the next block is read into it meanwhile. Each square is that of the difference of two
// numbers, so nothing cancels, even if two sources are far from zero or from other sources.
#pragma once

#include <cstddef>
#include <cstdint>
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

// The memory to prefetch while a tile is computed: two sources, from the beginning of their next
// block. It goes into the second-level cache, since this block's numbers fill the first.
inline constexpr int kSecondLevel = 2;
struct Ahead {
  const std::byte* first;
  const std::byte* second;
};

// The position of the pair (i, j), i < j, in the sums.
inline std::size_t pair_index(std::size_t i, std::size_t j, std::size_t count) noexcept {
  return i * (2 * count - i - 1) / 2 + (j - i - 1);
}

// Adds a line of squares to the sums of a pair, kDistanceColumns of them. The two squares of one
// column are added first: so sums of lines that begin elsewhere are the same, in other columns.
template <class K>
[[gnu::always_inline]] inline void add_columns(double* __restrict sums, const K* squares) noexcept {
  static_assert(kSquareColumns<double> == kDistanceColumns);
#if defined(FLATWEIGHTS_REGISTERS)
  for (std::size_t c = 0; c < kDistanceColumns; c += kLanes) {
    Doubles sum = load_register<Doubles>(sums + c);
    if constexpr (std::is_same_v<K, float>)
      sum += widen(load_register<Floats>(squares + c) +
                   load_register<Floats>(squares + c + kDistanceColumns));
    else
      sum += load_register<Doubles>(squares + c);
    store_register(sums + c, sum);
  }
#else
  for (std::size_t c = 0; c < kDistanceColumns; ++c) {
    K square = squares[c];
    if constexpr (std::is_same_v<K, float>) square += squares[c + kDistanceColumns];
    sums[c] += static_cast<double>(square);
  }
#endif
}

// A block of every row: `nbytes` bytes, which begin `lead` bytes into the first line and end `lead`
// bytes behind the last. A load that crosses the border of a line takes twice as long, so lines
// begin where those of the caches do.
struct Lines {
  std::size_t nbytes;
  std::size_t lead;
};

// kLine bytes at `kLine - lead` are zeros, then ones from byte `lead` on.
struct Ones {
  alignas(kLine) std::uint8_t bytes[2 * kLine] = {};
  constexpr Ones() noexcept {
    for (std::size_t i = kLine; i < 2 * kLine; ++i) bytes[i] = 0xff;
  }
};
inline constexpr Ones kOnes;

// Adds the squared distances of rows [i, i + Rows) from rows [j, j + Columns). With Triangle, i is
// j, and each pair counts once.
template <class K, std::size_t Rows, std::size_t Columns, bool Triangle>
void add_tile(double* sums, std::size_t count, const std::byte* const* rows, std::size_t i,
              std::size_t j, Lines lines, Ahead ahead) noexcept {
  using V = Register<K>;
  const std::byte* a[Rows];
  const std::byte* b[Columns];
  for (std::size_t r = 0; r < Rows; ++r) a[r] = rows[i + r];
  for (std::size_t c = 0; c < Columns; ++c) b[c] = rows[j + c];
  alignas(kLine) K squares[Rows][Columns][kSquareColumns<K>];
  for (std::size_t column = 0; column < kLine; column += kRegister) {
    V total[Rows][Columns];
#pragma GCC unroll 4
    for (std::size_t r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (std::size_t c = Triangle ? r + 1 : 0; c < Columns; ++c) total[r][c] = V{};
    // Adds a line; `use` selects the differences that count.
    const auto add_line = [&](std::size_t at, auto use) __attribute__((always_inline)) {
      __builtin_prefetch(ahead.first + at, 0, kSecondLevel);
      __builtin_prefetch(ahead.second + at, 0, kSecondLevel);
      V other[Columns];
#pragma GCC unroll 4
      for (std::size_t c = 0; c < Columns; ++c) {
        other[c] = load_register<V>(b[c] + at);
        if constexpr (Triangle) settle(other[c]);  // or each is loaded for every pair
      }
#pragma GCC unroll 4
      for (std::size_t r = 0; r < Rows; ++r) {
        const V one = Triangle ? other[r < Columns ? r : 0] : load_register<V>(a[r] + at);
#pragma GCC unroll 4
        for (std::size_t c = Triangle ? r + 1 : 0; c < Columns; ++c) {
          const V difference = use(one - other[c]);
          total[r][c] = multiply_add(difference, difference, total[r][c]);
        }
      }
    };
    const auto mask = load_register<Bytes>(kOnes.bytes + kLine - lines.lead + column);
    const auto masked = [](V value, Bytes by) {
      return __builtin_bit_cast(V, __builtin_bit_cast(Bytes, value) & by);
    };
    std::size_t at = column;
    if (lines.lead != 0) {
      add_line(at, [&](V difference) { return masked(difference, mask); });
      at += kLine;
    }
    for (; at < lines.nbytes; at += kLine) add_line(at, [](V difference) { return difference; });
    if (lines.lead != 0) add_line(at, [&](V difference) { return masked(difference, ~mask); });
#pragma GCC unroll 4
    for (std::size_t r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (std::size_t c = Triangle ? r + 1 : 0; c < Columns; ++c)
        store_register(reinterpret_cast<std::byte*>(squares[r][c]) + column, total[r][c]);
  }
#pragma GCC unroll 4
  for (std::size_t r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (std::size_t c = Triangle ? r + 1 : 0; c < Columns; ++c)
      add_columns<K>(sums + pair_index(i + r, j + c, count) * kDistanceColumns, squares[r][c]);
}

// Adds the squared distances of all pairs of rows. Meanwhile `next`, with as many sources, is read
// into the caches.
template <class K, class Next>
inline void add_pairs(double* sums, const std::byte* const* rows, std::size_t count, Lines lines,
                      Next next) noexcept {
  static_assert(kSquareGroup == 4);
  std::size_t k = 0;
  const auto tile = [&]<std::size_t Rows, std::size_t Columns, bool Triangle>(std::size_t i,
                                                                              std::size_t j) {
    const Ahead ahead = {next(k), next(k + 1 < count ? k + 1 : k)};
    add_tile<K, Rows, Columns, Triangle>(sums, count, rows, i, j, lines, ahead);
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

// The bytes from the beginning of a line to that of each source; 0 if sources differ in this.
inline std::size_t common_lead(const std::byte* const* sources, std::size_t count) noexcept {
  const std::size_t rest = bytes_to_line(sources[0]);
  for (std::size_t k = 1; k < count; ++k)
    if (bytes_to_line(sources[k]) != rest) return 0;
  return rest == 0 ? 0 : kLine - rest;
}

// Moves the columns of all pairs up by `by`, the last ones to the front.
inline void rotate_columns(double* sums, std::size_t pairs, std::size_t by) noexcept {
  for (std::size_t p = 0; p < pairs; ++p) {
    double* const columns = sums + p * kDistanceColumns;
    double old[kDistanceColumns];
    for (std::size_t c = 0; c < kDistanceColumns; ++c) old[c] = columns[c];
    for (std::size_t c = 0; c < kDistanceColumns; ++c)
      columns[(c + by) % kDistanceColumns] = old[c];
  }
}

// Adds the squares of numbers [begin, end), in blocks, the last of which may be short.
template <class T, class K>
void add_blocks(double* sums, const std::byte* const* sources, std::size_t count, std::size_t begin,
                std::size_t end, std::size_t lead, std::byte* room) noexcept {
  constexpr std::size_t kNumbers = kSquareColumns<K>;
  const auto** const rows = reinterpret_cast<const std::byte**>(room);
  auto* const copies = reinterpret_cast<K*>(room + address_bytes(count));
  for (; begin < end; begin += kDistanceBlock) {
    const std::size_t size = end - begin < kDistanceBlock ? end - begin : kDistanceBlock;
    const std::size_t lines = (size + kNumbers - 1) / kNumbers;
    if (std::is_same_v<T, K> && size % kNumbers == 0) {
      // In place, since copying takes longer.
      for (std::size_t k = 0; k < count; ++k) rows[k] = sources[k] + begin * sizeof(T) - lead;
    } else {
      for (std::size_t k = 0; k < count; ++k)
        rows[k] = reinterpret_cast<const std::byte*>(copies + k * kDistanceBlock);
      // All sources side by side, since processors prefetch streams.
      for (std::size_t at = 0; at < size; at += kNumbers)
        for (std::size_t k = 0; k < count; ++k)
          copy_line<T>(copies + k * kDistanceBlock + at, sources[k] + (begin + at) * sizeof(T),
                       size - at < kNumbers ? size - at : kNumbers);
    }
    add_pairs<K>(sums, rows, count, Lines{lines * kLine, lead},
                 [&](std::size_t k) { return sources[k] + (begin + kDistanceBlock) * sizeof(T); });
  }
}

// Implements `distances` of Kernels: differences and squares are of type K.
template <class T, class K>
void distances_range(double* sums, const std::byte* const* sources, std::size_t count,
                     std::size_t begin, std::size_t end, std::byte* room) noexcept {
  constexpr std::size_t kLeast = 8 * kDistanceBlock;  // below, moving the columns does not pay
  const std::size_t lead = std::is_same_v<T, K> ? common_lead(sources, count) : 0;
  if (lead % sizeof(T) == 0 && lead != 0 && end - begin >= kLeast) {
    // Not for the first block and the end, where such lines would reach outside of the sources.
    const std::size_t first = begin + kDistanceBlock;
    const std::size_t last =
        first + (end - first - kLine / sizeof(T)) / kDistanceBlock * kDistanceBlock;
    const std::size_t pairs = count * (count - 1) / 2;
    const std::size_t moved = lead / sizeof(T) % kDistanceColumns;
    add_blocks<T, K>(sums, sources, count, begin, first, 0, room);
    rotate_columns(sums, pairs, moved);
    add_blocks<T, K>(sums, sources, count, first, last, lead, room);
    rotate_columns(sums, pairs, kDistanceColumns - moved);
    begin = last;
  }
  add_blocks<T, K>(sums, sources, count, begin, end, 0, room);
}

}  // namespace
}  // namespace flatweights
