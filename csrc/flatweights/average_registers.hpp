// The mean of ranges with sums in registers; see registers.hpp. It gives the same bits as
// average_range, its oracle. Included only by kernels.cpp.
#pragma once

#include "flatweights/average_kernel.hpp"
#include "flatweights/kernels.hpp"
#include "flatweights/register_pairs.hpp"

#if defined(FLATWEIGHTS_REGISTERS)

namespace flatweights {
namespace {

inline constexpr std::size_t kPairs = 2;  // several sums hide the latency of an addition
inline constexpr std::size_t kStep = kPairs * kPair;

// Not std::min: see real.hpp.
inline std::size_t lesser(std::size_t a, std::size_t b) noexcept { return a < b ? a : b; }

// Sums of kStep elements, in the order of Pair. Sums that are rounded to float64 also carry
// their rounding errors.
template <class Out>
struct Sums {
  Pair total[kPairs];
};
template <>
struct Sums<double> {
  Pair total[kPairs];
  Pair lost[kPairs];
};

// Like add_terms, for one term.
template <class Out>
[[gnu::always_inline]] inline void add_term(Sums<Out>& sums, std::size_t j, Pair term) noexcept {
  if constexpr (std::is_same_v<Out, double>) {
    add_exactly(sums.total[j].a, sums.lost[j].a, term.a);
    add_exactly(sums.total[j].b, sums.lost[j].b, term.b);
  } else {
    sums.total[j].a += term.a;
    sums.total[j].b += term.b;
  }
}

template <class Out>
[[gnu::always_inline]] inline void settle(Sums<Out>& sums, std::size_t j) noexcept {
  settle(sums.total[j]);
  if constexpr (std::is_same_v<Out, double>) settle(sums.lost[j]);
}

// Like divide of a Sum; `spoiled` becomes NaN if a sum is not finite.
template <class Out>
[[gnu::always_inline]] inline Pair divide(const Sums<Out>& sums, std::size_t j, bool multiply,
                                          Doubles factor, Doubles& spoiled) noexcept {
  Pair total = sums.total[j];
  spoiled += (total.a - total.a) + (total.b - total.b);
  if constexpr (std::is_same_v<Out, double>) {
    total.a += finite_or_zero(sums.lost[j].a);
    total.b += finite_or_zero(sums.lost[j].b);
  }
  if (multiply) return {total.a * factor, total.b * factor};
  return {total.a / factor, total.b / factor};
}

// Count sources that are read side by side, with addresses and weights in registers as far as
// these suffice.
template <bool Weighted, std::size_t Count>
struct Row {
  static constexpr std::size_t count = Count;
  const std::byte* source[Count];
  Doubles weight[Weighted ? Count : 1];

  Row(const std::byte* const* sources, [[maybe_unused]] const double* weights,
      std::size_t) noexcept {
#pragma GCC unroll 16
    for (std::size_t k = 0; k < Count; ++k) {
      source[k] = sources[k];
      if constexpr (Weighted) weight[k] = broadcast(weights[k]);
    }
  }
};

// Any number of sources, which are looked up at each step.
template <bool Weighted>
struct Row<Weighted, 0> {
  const std::byte* const* source;
  const double* weight;
  std::size_t count;

  Row(const std::byte* const* sources, const double* weights, std::size_t number) noexcept
      : source(sources), weight(weights), count(number) {}
};

// Adds elements [i, i + kStep) of all sources, in the order of Pair for Out.
template <class T, class Out, bool Weighted, std::size_t Count>
[[gnu::always_inline]] inline void add_row(Sums<Out>& sums, const Row<Weighted, Count>& row,
                                           std::size_t i) noexcept {
  // One load instruction per source: processors recognise a stream by the address of the
  // instruction that reads it. In a loop, many sources take twice as long.
#pragma GCC unroll 16
  for (std::size_t k = 0; k < row.count; ++k) {
    const std::byte* const source = row.source[k];
    Pair terms[kPairs];
    for (std::size_t j = 0; j < kPairs; ++j) {
      constexpr bool kInterleaved = is_interleaved<T> && is_interleaved<Out>;
      terms[j] = load_pair<T, kInterleaved>(source, i + j * kPair);
    }
    if constexpr (Weighted) {
      for (Pair& term : terms) {
        term.a *= row.weight[k];
        term.b *= row.weight[k];
      }
    }
    for (std::size_t j = 0; j < kPairs; ++j) {
      add_term(sums, j, terms[j]);
      // Without this the compiler loads terms early and spills them: one more stream of memory.
      if constexpr (Count != 0) settle(sums, j);
    }
  }
}

// How many sources larger than the caches are read side by side; more of them take turns.
// Processors prefetch some 16 streams. Everything else that a step reads counts, too, even a
// table of sources or a spilled number: 17 streams take a third longer than 16.
inline constexpr std::size_t kTurn = 8;

// The sums of a block, between one turn of its sources and the next.
template <class Out>
struct Waiting {
  static constexpr std::size_t kSteps = kRoom / sizeof(Sums<Out>);
  Sums<Out> sums[kSteps];
};
static_assert(sizeof(Waiting<double>) <= kRoom && sizeof(Waiting<float>) <= kRoom);

// What the loops below test at each step, `first`, `multiply` and so on, is the same at all steps:
// such a branch costs nothing, while a loop for each case would double the time to compile them.

// Adds kTurn sources to `waiting`, which counts as 0 if `first`.
template <class T, class Out, bool Weighted>
inline void add_turn(Waiting<Out>& waiting, bool first, const std::byte* const* sources,
                     const double* weights, std::size_t begin, std::size_t size) noexcept {
  const Row<Weighted, kTurn> row(sources, weights, kTurn);
  for (std::size_t i = 0; i < size; i += kStep) {
    Sums<Out> sums = {};
    if (!first) sums = waiting.sums[i / kStep];
    add_row<T>(sums, row, begin + i);
    waiting.sums[i / kStep] = sums;
  }
}

// Writes the means of [begin, begin + size), past the caches if `stream`. Adds a row of Count
// sources (any number if 0) to `waiting`, which counts as 0 if null. Returns false if a sum is
// not finite.
template <class T, class Out, bool Weighted, std::size_t Count>
bool write_means(std::byte* out, const Waiting<Out>* waiting, const std::byte* const* sources,
                 const double* weights, std::size_t count, Divisor divisor, std::size_t begin,
                 std::size_t size, bool stream) noexcept {
  const Row<Weighted, Count> row(sources, weights, count);
  const Doubles factor = broadcast(divisor.factor);
  Doubles spoiled = broadcast(0);
  for (std::size_t i = 0; i < size; i += kStep) {
    Sums<Out> sums = {};
    if (waiting != nullptr) sums = waiting->sums[i / kStep];
    add_row<T>(sums, row, begin + i);
    Pair means[kPairs];
    for (std::size_t j = 0; j < kPairs; ++j)
      means[j] = divide(sums, j, divisor.multiply, factor, spoiled);
    for (std::size_t j = 0; j < kPairs; ++j) {
      if (stream)
        store_pair<Out, true>(out, begin + i + j * kPair, means[j]);
      else
        store_pair<Out, false>(out, begin + i + j * kPair, means[j]);
    }
  }
  return !any_nonzero_or_nan(spoiled);
}

// Like average_steps, streamed, for more sources than kMostStreams.
template <class T, class Out, bool Weighted>
bool stream_in_turns(std::byte* out, Waiting<Out>& waiting, const std::byte* const* sources,
                     const double* weights, std::size_t count, Divisor divisor, std::size_t begin,
                     std::size_t size) noexcept {
  const auto weights_of = [weights](std::size_t k) { return Weighted ? weights + k : nullptr; };
  bool finite = true;
  for (const std::size_t end = begin + size; begin < end; begin += waiting.kSteps * kStep) {
    const std::size_t block = lesser(waiting.kSteps * kStep, end - begin);
    std::size_t k = 0;
    for (; k + kTurn < count; k += kTurn)
      add_turn<T, Out, Weighted>(waiting, k == 0, sources + k, weights_of(k), begin, block);
    finite &= write_means<T, Out, Weighted, 0>(out, &waiting, sources + k, weights_of(k), count - k,
                                               divisor, begin, block, true);
  }
  return finite;
}

// Writes the means of [begin, begin + size), whole steps. `out` may be a source unless `stream`:
// each element is read before it is written.
template <class T, class Out, bool Weighted>
bool average_steps(std::byte* out, const std::byte* const* sources, const double* weights,
                   std::size_t count, Divisor divisor, std::size_t begin, std::size_t size,
                   bool stream, [[maybe_unused]] std::byte* room) noexcept {
  if (stream && count == kMostStreams)
    return write_means<T, Out, Weighted, kMostStreams>(out, nullptr, sources, weights, count,
                                                       divisor, begin, size, true);
  // For few numbers, turns do not pay.
  if (stream && room != nullptr && count > kMostStreams && size >= kBlock)
    return stream_in_turns<T, Out, Weighted>(out, *reinterpret_cast<Waiting<Out>*>(room), sources,
                                             weights, count, divisor, begin, size);
  return write_means<T, Out, Weighted, 0>(out, nullptr, sources, weights, count, divisor, begin,
                                          size, stream);
}

// Like average_steps, for part of a line or of a step: too few numbers for the loops of
// average_block, with whose code the compiler would spend half of its time.
template <class T, class Out>
bool average_few(std::byte* out, const std::byte* const* sources, const double* weights,
                 std::size_t count, Divisor divisor, std::size_t begin, std::size_t size) noexcept {
  constexpr std::size_t kFew = kStep * sizeof(Out) > kLine ? kStep : kLine / sizeof(Out);
  if (size > kFew) __builtin_unreachable();
  alignas(kLine) double total[kFew] = {};
  alignas(kLine) double lost[kFew] = {};
  for (std::size_t k = 0; k < count; ++k) {
    const double weight = weights == nullptr ? 1.0 : weights[k];
    for (std::size_t i = 0; i < size; ++i) {
      const double term = widened<T>(sources[k], begin + i) * weight;
      if constexpr (std::is_same_v<Out, double>)
        add_exactly(total[i], lost[i], term);
      else
        total[i] += term;
    }
  }
  alignas(kLine) std::byte few[kFew * sizeof(Out)];
  const bool finite = round_block<Out>(few, 0, size, [&](std::size_t i, std::uint64_t& nonfinite) {
                        const Sum sum = {total[i], lost[i]};
                        return divisor.multiply
                                   ? divide<Out, true>(sum, divisor.factor, nonfinite)
                                   : divide<Out, false>(sum, divisor.factor, nonfinite);
                      }) == 0;
  std::memcpy(out + begin * sizeof(Out), few, size * sizeof(Out));
  return finite;
}

// Implements `average` of Kernels, and `average_widened` if Out is not T.
template <class T, class Out = T>
bool average_in_registers(std::byte* out, const std::byte* const* sources, const double* weights,
                          std::size_t count, double total, std::size_t begin, std::size_t end,
                          bool stream, std::byte* room) noexcept {
  const Divisor divisor(total);
  const std::size_t first = begin;
  bool finite = true;
  const auto singly = [&](std::size_t size) {
    finite &= average_few<T, Out>(out, sources, weights, count, divisor, begin, size);
    begin += size;
  };
  // Streaming needs lines that begin with an element, and starts at the beginning of a line.
  const std::size_t head = bytes_to_line(out + begin * sizeof(Out));
  if (head % sizeof(Out) != 0) stream = false;
  if (stream && head > 0) singly(lesser(end - begin, head / sizeof(Out)));
  const auto steps =
      weights == nullptr ? average_steps<T, Out, false> : average_steps<T, Out, true>;
  const std::size_t whole = (end - begin) / kStep * kStep;
  finite &= steps(out, sources, weights, count, divisor, begin, whole, stream, room);
  begin += whole;
  if (begin < end) singly(end - begin);
  if (stream) end_streaming();
  if (!finite) unify_nan<Out>(out, first, end);
  return finite;
}

}  // namespace
}  // namespace flatweights

#endif
