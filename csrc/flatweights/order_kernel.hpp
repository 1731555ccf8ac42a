// Means over ranks of the sorted numbers of many sources. Included only by kernels.cpp.
//
// A block of every source is copied to a row in the first-level cache. The rows are sorted by
// exchanging numbers between pairs of rows, so that afterwards one row holds the smallest number
// of each position, one the second smallest, and so on. The mean is that of some of these rows.
//
// 16-bit numbers are sorted by keys: integers in the same order. So is float32 if everything is
// done in registers: processors compare as many integers at a time as floats, or twice as many.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "flatweights/average_kernel.hpp"
#include "flatweights/average_registers.hpp"
#include "flatweights/nonfinite_kernel.hpp"
#include "flatweights/sorting.hpp"

namespace flatweights {
namespace {

// The type of the keys by which numbers of type T are sorted.
template <class T>
using Key = std::conditional_t<is_half<T>, std::int16_t, T>;

// The same in registers; void if they are sorted only in rows. AVX2 cannot compare 64-bit integers.
template <class T>
using RegisterKey =
    std::conditional_t<is_half<T>, std::int16_t,
                       std::conditional_t<std::is_same_v<T, float>, std::int32_t, void>>;

// All bits of a key but the sign.
template <class K>
inline constexpr K kMagnitude = static_cast<K>(~(std::uint64_t{1} << (8 * sizeof(K) - 1)));

// Turns the bits of numbers into keys of type K, and back. V is K, or a register of keys.
template <class K, class V>
[[gnu::always_inline]] inline V flip_key(V bits) noexcept {
  return static_cast<V>(bits ^ ((bits >> (8 * sizeof(K) - 1)) & kMagnitude<K>));
}

// The rows of a block, and the addresses of sorted rows by rank.
template <class T>
class SortedRows {
 public:
  // `room` begins with the addresses; the rows follow.
  SortedRows(const Sorting& sorting, std::byte* room) noexcept
      : sorting_(sorting),
        ranks_(reinterpret_cast<const std::byte**>(room)),
        rows_(room + address_bytes(sorting.count)) {
    for (std::size_t rank = 0; rank < sorting.count; ++rank)
      ranks_[rank] = rows_ + sorting.rows[rank] * sorting.row_bytes;
  }

  [[nodiscard]] Key<T>* row(std::size_t k) const noexcept {
    return reinterpret_cast<Key<T>*>(rows_ + k * sorting_.row_bytes);
  }
  [[nodiscard]] Key<T>* rank(std::size_t k) const noexcept { return row(sorting_.rows[k]); }
  [[nodiscard]] const std::byte* const* ranks() const noexcept { return ranks_; }
  [[nodiscard]] const Sorting& sorting() const noexcept { return sorting_; }

 private:
  const Sorting& sorting_;
  const std::byte** ranks_;
  std::byte* rows_;
};

// Exchanges numbers [from, to) between the two rows of each step. V is a register, or a number.
template <class V, class T>
inline void take_steps(const SortedRows<T>& rows, const Step* steps, std::size_t count,
                       std::size_t from, std::size_t to) noexcept {
  constexpr std::size_t kNumbers = sizeof(V) / sizeof(Key<T>);
  for (const Step* step = steps; step < steps + count; ++step) {
    Key<T>* __restrict const a = rows.row(step->rows.low);
    Key<T>* __restrict const b = rows.row(step->rows.high);
    const auto exchange = [&]<bool Low, bool High>() {
      for (std::size_t i = from; i < to; i += kNumbers) {
        const V x = load_register<V>(a + i), y = load_register<V>(b + i);
        if constexpr (Low) store_register(a + i, lesser_of(x, y));
        if constexpr (High) store_register(b + i, greater_of(x, y));
      }
    };
    if (step->keeps == Keeps::kBoth)
      exchange.template operator()<true, true>();
    else if (step->keeps == Keeps::kLow)
      exchange.template operator()<true, false>();
    else
      exchange.template operator()<false, true>();
  }
}

// Sorts each run of numbers [from, to) of a block that begins at `begin` of the sources. Returns
// whether all numbers are finite.
template <class T>
inline bool sort_runs_singly(const SortedRows<T>& rows, const std::byte* const* sources,
                             std::size_t begin, std::size_t from, std::size_t to) noexcept {
  bool finite = true;
  for (std::size_t k = 0; k < rows.sorting().count; ++k) {
    const std::byte* const source = sources[k] + begin * sizeof(T);
    Key<T>* const row = rows.row(k);
    for (std::size_t i = from; i < to; ++i) {
      if constexpr (is_half<T>)
        row[i] = flip_key<Key<T>>(load<Key<T>>(source, i));
      else
        row[i] = load<T>(source, i);
    }
    finite &= !has_nonfinite<T>(source, from, to);
  }
  take_steps<Key<T>>(rows, rows.sorting().within, rows.sorting().num_within, from, to);
  return finite;
}

// Sets all rows to NaN at the positions where a source is NaN.
template <class T>
[[gnu::noinline]] void spread_nan(const SortedRows<T>& rows, const std::byte* const* sources,
                                  std::size_t begin, std::size_t count) noexcept {
  const Sorting& sorting = rows.sorting();
  for (std::size_t i = 0; i < count; ++i) {
    bool nan = false;
    for (std::size_t k = 0; k < sorting.count; ++k)
      nan |= is_nan(widened<T>(sources[k], begin + i));
    if (!nan) continue;
    for (std::size_t k = 0; k < sorting.count; ++k) {
      if constexpr (std::is_same_v<T, Float16>)
        rows.row(k)[i] = static_cast<Key<T>>(kNanFloat16);
      else if constexpr (std::is_same_v<T, BFloat16>)
        rows.row(k)[i] = static_cast<Key<T>>(kNanBFloat16);
      else
        rows.row(k)[i] = with_one_nan(static_cast<T>(__builtin_nan("")));
    }
  }
}

// The sum of the `nearest` numbers, of `count` sorted ones, that are nearest to their median; of
// two that are equally near, the smaller. `number(rank)` gives one, widened. V is a number, or a
// register of them.
//
// The numbers are a range of ranks, so exactly one rank of each class modulo `nearest` is among
// them. Of the ranks k and k + nearest, the second is nearer if twice the median is more than the
// sum of both numbers: sums are compared with their rounding errors, and so exactly. Beside an
// infinite number they show nothing: if the median is infinity, the largest numbers are nearest.
template <class T, class V, class Number>
[[gnu::always_inline]] inline V sum_nearest(Number number, std::size_t count, std::size_t nearest,
                                            V& lost) noexcept {
  V middle = number((count - 1) / 2), rest = V{};
  const V upper = number(count / 2);
  const auto is_infinite = upper == V{} + std::numeric_limits<double>::infinity();
  add_exactly(middle, rest, upper);
  V total = V{};
  lost = V{};
  for (std::size_t first = 0; first < nearest; ++first) {
    V chosen = number(first);
    for (std::size_t k = first; k + nearest < count; k += nearest) {
      const V next = number(k + nearest);
      V sum = number(k), error = V{};
      add_exactly(sum, error, next);
      const auto nearer = (sum < middle) | ((sum == middle) & (error < rest)) | is_infinite;
      chosen = nearer ? next : chosen;
    }
    if constexpr (std::is_same_v<T, double>)
      add_exactly(total, lost, chosen);
    else
      total += chosen;
  }
  return total;
}

// Writes the means of the numbers nearest to the median to `out[0, count)`, count <= kMostBlock.
template <class T>
inline void write_nearest_singly(std::byte* out, const SortedRows<T>& rows, std::size_t from,
                                 std::size_t to) noexcept {
  const std::size_t nearest = rows.sorting().ranks.nearest;
  const std::byte* const* const ranks = rows.ranks();
  const auto divisor = static_cast<double>(nearest);
  alignas(kLine) std::byte lines[kMostBlock * sizeof(T)];
  for (; from < to; from += kMostBlock) {
    const std::size_t size = to - from < kMostBlock ? to - from : kMostBlock;
    round_block<T>(lines, 0, size, [&](std::size_t i, std::uint64_t& nonfinite) {
      Sum sum;
      sum.total =
          sum_nearest<T, double>([&](std::size_t k) { return widened<T>(ranks[k], from + i); },
                                 rows.sorting().count, nearest, sum.lost);
      return divide<T, false>(sum, divisor, nonfinite);
    });
    std::memcpy(out + from * sizeof(T), lines, size * sizeof(T));
  }
}

#if defined(FLATWEIGHTS_REGISTERS)

template <class V>
[[gnu::always_inline]] inline void exchange(V& a, V& b) noexcept {
  const V low = lesser_of(a, b);
  b = greater_of(a, b);
  a = low;
}

template <std::size_t N, class V, std::size_t... I>
[[gnu::always_inline]] inline void sort_registers([[maybe_unused]] V* values,
                                                  std::index_sequence<I...>) noexcept {
  (exchange(values[comparator_of(N, I).low], values[comparator_of(N, I).high]), ...);
}

// Sorts a run of N sources into rows, which begin `stride` bytes after each other: whole
// registers from `begin` of the sources on. With Middle, writes only the one or two rows in the
// middle, and the compiler drops what these do not depend on. Returns whether all numbers are
// finite, or false by chance if they are large. NaN and infinity of T have at least the bits
// `limit`.
template <class K, std::size_t N, bool Middle>
bool sort_run(std::byte* rows, std::size_t stride, const std::byte* const* sources,
              std::size_t begin, std::size_t size, [[maybe_unused]] K limit) noexcept {
  using V = Register<K>;
  constexpr bool kKeys = std::is_same_v<K, std::int16_t>;
  const std::byte* source[N];
#pragma GCC unroll 16
  for (std::size_t k = 0; k < N; ++k) source[k] = sources[k] + begin * sizeof(K);
  V watch = V{};
  for (std::size_t i = 0; i < size * sizeof(K); i += kRegister) {
    V values[N];
    [[maybe_unused]] V sum = V{};
#pragma GCC unroll 16
    for (std::size_t k = 0; k < N; ++k) {
      values[k] = load_register<V>(source[k] + i);
      if constexpr (kKeys) {
        watch = greater_of<V>(watch, values[k] & static_cast<K>(0x7fff));
        values[k] = flip_key<K>(values[k]);
      } else {
        sum += values[k];
      }
    }
    // A sum of finite numbers is finite, unless it overflows; minus itself it is 0, else NaN.
    if constexpr (!kKeys) watch += sum - sum;
    sort_registers<N>(values, std::make_index_sequence<network_size(N)>{});
#pragma GCC unroll 16
    for (std::size_t k = Middle ? (N - 1) / 2 : 0; k < (Middle ? N / 2 + 1 : N); ++k)
      store_register(rows + k * stride + i, values[k]);
  }
  K marks[kRegister / sizeof(K)];
  store_register(marks, watch);
  bool finite = true;
  for (const K mark : marks) finite &= kKeys ? mark < limit : mark == 0;
  return finite;
}

inline constexpr auto kInputs = std::make_index_sequence<kMostInputs>{};

// Whether only the one or two ranks in the middle are used.
inline bool is_middle(const Sorting& sorting) noexcept {
  const Ranks& ranks = sorting.ranks;
  return ranks.nearest == 0 && ranks.first == (sorting.count - 1) / 2 &&
         ranks.last == sorting.count / 2 + 1;
}

template <class K>
using SortRun = bool (*)(std::byte*, std::size_t, const std::byte* const*, std::size_t, std::size_t,
                         K) noexcept;

template <class K, bool Middle, std::size_t... N>
inline SortRun<K> choose_sort_run(std::size_t inputs, std::index_sequence<N...>) noexcept {
  static constexpr SortRun<K> kRuns[] = {sort_run<K, N + 1, Middle>...};
  return kRuns[inputs - 1];
}

// Like sort_runs_singly, for whole registers.
template <class T>
inline bool sort_runs(const SortedRows<T>& rows, const std::byte* const* sources, std::size_t begin,
                      std::size_t count) noexcept {
  using K = Key<T>;
  const Sorting& sorting = rows.sorting();
  K limit = K{};
  if constexpr (is_half<T>) limit = static_cast<K>(kExponent<T>);
  bool finite = true;
  for (std::size_t run = 0; run < sorting.num_runs; ++run) {
    const std::size_t first = sorting.runs[run], inputs = sorting.runs[run + 1] - first;
    auto sort = choose_sort_run<K, false>(inputs, kInputs);
    if constexpr (std::is_void_v<RegisterKey<T>>)
      if (sorting.num_runs == 1 && is_middle(sorting))
        sort = choose_sort_run<K, true>(inputs, kInputs);
    finite &= sort(reinterpret_cast<std::byte*>(rows.row(first)), sorting.row_bytes,
                   sources + first, begin, count, limit);
  }
  return finite;
}

// The smallest and the largest of the keys that were looked at.
template <class K>
struct Extremes {
  Register<K> lowest = {};
  Register<K> highest = {};

  [[gnu::always_inline]] void look(Register<K> low, Register<K> high) noexcept {
    lowest = lesser_of(lowest, low);
    highest = greater_of(highest, high);
  }

  // Whether all are keys of finite numbers, if `infinity` is that of infinity.
  [[nodiscard]] bool finite(K infinity) const noexcept {
    bool finite = true;
    for (std::size_t i = 0; i < kRegister / sizeof(K); ++i)
      finite &= highest[i] < infinity && lowest[i] > static_cast<K>(~infinity);
    return finite;
  }
};

// Sorts N sources and writes the means over `ranks` of numbers [begin, begin + size), whole
// registers, to `out[0, size)`, without rows. With Middle these are the ranks in the middle.
// Returns whether all numbers are finite; if not, the written numbers are invalid.
template <class T, std::size_t N, bool Middle>
bool mean_run(std::byte* out, const std::byte* const* sources, std::size_t begin, std::size_t size,
              Ranks ranks) noexcept {
  using K = RegisterKey<T>;
  using V = Register<K>;
  constexpr std::size_t kNumbers = kRegister / sizeof(K), kParts = kNumbers / kPair;
  static_assert(kParts <= kPairs);
  const std::byte* source[N];
#pragma GCC unroll 16
  for (std::size_t k = 0; k < N; ++k) source[k] = sources[k] + begin * sizeof(K);
  const Doubles divisor = broadcast(static_cast<double>(ranks.last - ranks.first));
  Extremes<K> extremes;
  Doubles spoiled = {};  // stays so: sums of finite numbers are finite
  for (std::size_t i = 0; i < size; i += kNumbers) {
    V values[N];
#pragma GCC unroll 16
    for (std::size_t k = 0; k < N; ++k) {
      const std::byte* const from = source[k] + i * sizeof(K);
      __builtin_prefetch(from + 512);
      const V bits = load_register<V>(from);
      values[k] = flip_key<K>(bits);
      // The compiler drops the comparators of the ends.
      if constexpr (Middle) extremes.look(V{}, bits & kMagnitude<K>);
    }
    sort_registers<N>(values, std::make_index_sequence<network_size(N)>{});
    if constexpr (!Middle) extremes.look(values[0], values[N - 1]);
    Sums<T> sums = {};
    const auto add = [&](V value) {
      alignas(kLine) std::byte kept[kRegister];
      store_register(kept, flip_key<K>(value));
      for (std::size_t j = 0; j < kParts; ++j) add_term(sums, j, load_pair<T>(kept, j * kPair));
    };
    if constexpr (Middle) {
      add(values[(N - 1) / 2]);
      if constexpr (N % 2 == 0) add(values[N / 2]);
    } else {
      // Which ranks are kept is not known here: in a loop, they are converted in one place.
      alignas(kLine) std::byte sorted[N * kRegister];
#pragma GCC unroll 16
      for (std::size_t k = 0; k < N; ++k) store_register(sorted + k * kRegister, values[k]);
      for (std::size_t k = ranks.first; k < ranks.last; ++k)
        add(load_register<V>(sorted + k * kRegister));
    }
    for (std::size_t j = 0; j < kParts; ++j)
      store_pair<T>(out, i + j * kPair, divide(sums, j, false, divisor, spoiled));
  }
  return extremes.finite(static_cast<K>(kExponent<T>));
}

template <class T, bool Middle, std::size_t... N>
inline auto choose_mean_run(std::size_t inputs, std::index_sequence<N...>) noexcept {
  static constexpr decltype(&mean_run<T, 1, Middle>) kRuns[] = {mean_run<T, N + 1, Middle>...};
  return kRuns[inputs - 1];
}

// Writes the means of whole registers to `out[begin, begin + count)`, in one loop, if there is one
// for it and all numbers are finite; else writes nothing and returns false.
template <class T>
inline bool average_run(std::byte* out, const std::byte* const* sources, const SortedRows<T>& rows,
                        std::size_t begin, std::size_t count, bool stream) noexcept {
  const Sorting& sorting = rows.sorting();
  if constexpr (std::is_void_v<RegisterKey<T>>) {
    return false;
  } else {
    if (sorting.num_runs > 1 || sorting.ranks.nearest > 0) return false;
    const auto mean = is_middle(sorting) ? choose_mean_run<T, true>(sorting.count, kInputs)
                                         : choose_mean_run<T, false>(sorting.count, kInputs);
    // `out` may be a source, which is needed if a number is not finite.
    auto* const means = reinterpret_cast<std::byte*>(rows.row(0));
    if (!mean(means, sources, begin, count, sorting.ranks)) return false;
    std::byte* const to = out + begin * sizeof(T);
    if (stream && bytes_to_line(to) == 0)
      stream_lines(to, means, count * sizeof(T));
    else
      std::memcpy(to, means, count * sizeof(T));
    return true;
  }
}

// Like write_nearest_singly, for whole pairs of registers.
template <class T>
inline void write_nearest(std::byte* out, const SortedRows<T>& rows, std::size_t count) noexcept {
  const std::size_t nearest = rows.sorting().ranks.nearest, sources = rows.sorting().count;
  const std::byte* const* const ranks = rows.ranks();
  const Doubles divisor = broadcast(static_cast<double>(nearest));
  Doubles spoiled = broadcast(0);
  for (std::size_t i = 0; i < count; i += kPair) {
    Sums<T> sums = {};
    Doubles lost;
    sums.total[0].a = sum_nearest<T, Doubles>(
        [&](std::size_t k) { return load_pair<T>(ranks[k], i).a; }, sources, nearest, lost);
    if constexpr (std::is_same_v<T, double>) sums.lost[0].a = lost;
    sums.total[0].b = sum_nearest<T, Doubles>(
        [&](std::size_t k) { return load_pair<T>(ranks[k], i).b; }, sources, nearest, lost);
    if constexpr (std::is_same_v<T, double>) sums.lost[0].b = lost;
    store_pair<T>(out, i, divide(sums, 0, false, divisor, spoiled));
  }
  if (any_nonzero_or_nan(spoiled)) unify_nan<T>(out, 0, count);
}

#endif

// Writes the means of one block to `out[begin, begin + count)`. Returns whether all numbers are
// finite.
template <class T>
inline bool order_block(std::byte* out, const std::byte* const* sources, const SortedRows<T>& rows,
                        std::size_t begin, std::size_t count, bool stream) noexcept {
  const Sorting& sorting = rows.sorting();
  std::byte* const to = out + begin * sizeof(T);
  std::size_t whole = 0;
  bool finite = true;
#if defined(FLATWEIGHTS_REGISTERS)
  constexpr std::size_t kNumbers = kRegister / sizeof(T);
  whole = count / kNumbers * kNumbers;
  if (whole == count && average_run(out, sources, rows, begin, count, stream)) return true;
  finite = sort_runs(rows, sources, begin, whole);
  take_steps<Register<Key<T>>>(rows, sorting.merges, sorting.num_merges, 0, whole);
#endif
  if (whole < count) finite &= sort_runs_singly(rows, sources, begin, whole, count);
  take_steps<Key<T>>(rows, sorting.merges, sorting.num_merges, whole, count);
  if constexpr (is_half<T>) {
    for (std::size_t rank = sorting.ranks.first; rank < sorting.ranks.last; ++rank) {
      Key<T>* const row = rows.rank(rank);
      for (std::size_t i = 0; i < count; ++i) row[i] = flip_key<Key<T>>(row[i]);
    }
  }
  if (!finite) {
    finite = true;
    for (std::size_t k = 0; k < sorting.count; ++k)
      finite &= !has_nonfinite<T>(sources[k], begin, begin + count);
    if (!finite) spread_nan(rows, sources, begin, count);
  }
  if (sorting.ranks.nearest > 0) {
    std::size_t pairs = 0;
#if defined(FLATWEIGHTS_REGISTERS)
    pairs = count / kPair * kPair;
    write_nearest(to, rows, pairs);
#endif
    write_nearest_singly(to, rows, pairs, count);
    return finite;
  }
#if defined(FLATWEIGHTS_REGISTERS)
  constexpr auto average = average_in_registers<T>;
#else
  constexpr auto average = average_range<T>;
#endif
  const std::size_t kept = sorting.ranks.last - sorting.ranks.first;
  average(to, rows.ranks() + sorting.ranks.first, nullptr, kept, static_cast<double>(kept), 0,
          count, stream, nullptr);
  return finite;
}

// Implements `order` of Kernels.
template <class T>
bool order_range(std::byte* out, const std::byte* const* sources, const Sorting& sorting,
                 std::size_t begin, std::size_t end, bool stream, std::byte* room) noexcept {
  const SortedRows<T> rows(sorting, room);
  const std::size_t block = sorting.row_bytes / sizeof(T);
  // The first block ends where a cache line of `out` does.
  const std::size_t head = bytes_to_line(out + begin * sizeof(T)) / sizeof(T);
  bool finite = true;
  for (std::size_t most = head > 0 ? head : block; begin < end; most = block) {
    std::size_t count = end - begin < most ? end - begin : most;
    // The rest, which does not fill a register, is a block of its own.
    constexpr std::size_t kNumbers = kRegister / sizeof(T);
    if (most == block && count > kNumbers) count -= count % kNumbers;
    finite &= order_block(out, sources, rows, begin, count, stream);
    begin += count;
  }
  if (stream) end_streaming();
  return finite;
}

}  // namespace
}  // namespace flatweights
