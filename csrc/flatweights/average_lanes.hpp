// The mean of ranges with sums in registers, for AVX2 and AVX-512. The same bits as
// average_range, which is their oracle. Included by kernels.cpp alone.
#pragma once

#include <algorithm>

#include "flatweights/average_kernel.hpp"
#include "flatweights/lanes.hpp"

#if defined(FLATWEIGHTS_LANES)

namespace flatweights {
namespace {

inline constexpr std::size_t kPairs = 2;  // sums at once hide how long one addition takes
inline constexpr std::size_t kStep = kPairs * kPair;

// Sums of kStep elements, in order of Pair. Those that are rounded to float64 carry along
// what they have lost.
template <class Out>
struct Sums {
  Pair total[kPairs];
  Pair lost[std::is_same_v<Out, double> ? kPairs : 1];
};

// As add_terms, for one term.
template <class Out>
[[gnu::always_inline]] inline void add_to(Doubles& total, [[maybe_unused]] Doubles& lost,
                                          Doubles term) noexcept {
  const Doubles next = total + term;
  if constexpr (std::is_same_v<Out, double>) {
    const Doubles added = next - total;
    lost += (total - (next - added)) + (term - added);
  }
  total = next;
}

// Adds element [i, i + kStep) of all sources, in the order of Pair for Out.
template <class T, class Out, bool Weighted>
[[gnu::always_inline]] inline void add_rows(Sums<Out>& sums, const std::byte* const* sources,
                                            [[maybe_unused]] const double* weights,
                                            std::size_t count, std::size_t i) noexcept {
  // A load of its own for each source: processors foresee streams by the address of the
  // instruction that reads them. In a loop, many sources take twice as long.
#pragma GCC unroll 16
  for (std::size_t k = 0; k < count; ++k) {
    const std::byte* const source = sources[k];
    Pair terms[kPairs];
    for (std::size_t j = 0; j < kPairs; ++j) {
      constexpr bool kInterleaved = is_interleaved<T> && is_interleaved<Out>;
      terms[j] = load_pair<T, kInterleaved>(source, i + j * kPair);
    }
    if constexpr (Weighted) {
      const Doubles weight = broadcast(weights[k]);
      for (Pair& term : terms) {
        term.a *= weight;
        term.b *= weight;
      }
    }
    for (std::size_t j = 0; j < kPairs; ++j) {
      Pair& lost = sums.lost[std::is_same_v<Out, double> ? j : 0];
      add_to<Out>(sums.total[j].a, lost.a, terms[j].a);
      add_to<Out>(sums.total[j].b, lost.b, terms[j].b);
    }
  }
}

// As divide of a Sum; `spoiled` becomes NaN where it is not finite.
template <class Out, bool Multiply>
[[gnu::always_inline]] inline Doubles divide(Doubles total, [[maybe_unused]] Doubles lost,
                                             Doubles factor, Doubles& spoiled) noexcept {
  spoiled += total - total;
  if constexpr (std::is_same_v<Out, double>) total += finite_or_zero(lost);
  return Multiply ? total * factor : total / factor;
}

// Where the sums of a block with many sources wait for the next group of these.
template <class Out>
struct Waiting {
  alignas(kLine) Sums<Out> sums[kMostBlock / kStep];
};

template <class Out>
[[gnu::always_inline]] inline Sums<Out> no_sums() noexcept {
  Sums<Out> sums;
  for (Pair& pair : sums.total) pair = {broadcast(0), broadcast(0)};
  for (Pair& pair : sums.lost) pair = {broadcast(0), broadcast(0)};
  return sums;
}

// Adds the sources to `waiting`, which counts as 0 where First.
template <class T, class Out, bool First, bool Weighted>
inline void add_group(Waiting<Out>& waiting, const std::byte* const* sources, const double* weights,
                      std::size_t count, std::size_t begin, std::size_t size) noexcept {
  for (std::size_t i = 0; i < size; i += kStep) {
    Sums<Out> sums = no_sums<Out>();
    if constexpr (!First) sums = waiting.sums[i / kStep];
    add_rows<T, Out, Weighted>(sums, sources, weights, count, begin + i);
    waiting.sums[i / kStep] = sums;
  }
}

// Adds the last sources to `waiting`, and writes the means to `out[to, to + size)`.
template <class T, class Out, bool First, bool Weighted, bool Multiply>
inline Doubles finish_group(std::byte* out, std::size_t to, const Waiting<Out>& waiting,
                            const std::byte* const* sources, const double* weights,
                            std::size_t count, double factor, std::size_t begin,
                            std::size_t size) noexcept {
  const Doubles factors = broadcast(factor);
  Doubles spoiled = broadcast(0);
  for (std::size_t i = 0; i < size; i += kStep) {
    Sums<Out> sums = no_sums<Out>();
    if constexpr (!First) sums = waiting.sums[i / kStep];
    add_rows<T, Out, Weighted>(sums, sources, weights, count, begin + i);
    for (std::size_t j = 0; j < kPairs; ++j) {
      const Pair& lost = sums.lost[std::is_same_v<Out, double> ? j : 0];
      store_pair<Out>(out, to + i + j * kPair,
                      {divide<Out, Multiply>(sums.total[j].a, lost.a, factors, spoiled),
                       divide<Out, Multiply>(sums.total[j].b, lost.b, factors, spoiled)});
    }
  }
  return spoiled;
}

inline constexpr std::size_t kRegisterSources = 16;  // read side by side; more take turns
// What is streamed goes out soon after it was read: measured, the shorter the better, down
// to some lines.
inline constexpr std::size_t kShortBlock = 64;
static_assert(kShortBlock % kStep == 0);

template <class T, class Out, bool Weighted, bool Multiply>
inline bool average_steps(std::byte* out, std::size_t to, const std::byte* const* sources,
                          const double* weights, std::size_t count, double factor,
                          std::size_t begin, std::size_t size) noexcept {
  Waiting<Out> waiting;
  if (count <= kRegisterSources)
    return !any_nonzero_or_nan(finish_group<T, Out, true, Weighted, Multiply>(
        out, to, waiting, sources, weights, count, factor, begin, size));
  const auto from = [weights](std::size_t k) { return Weighted ? weights + k : nullptr; };
  add_group<T, Out, true, Weighted>(waiting, sources, from(0), kRegisterSources, begin, size);
  std::size_t k = kRegisterSources;
  for (; k + kRegisterSources < count; k += kRegisterSources)
    add_group<T, Out, false, Weighted>(waiting, sources + k, from(k), kRegisterSources, begin,
                                       size);
  return !any_nonzero_or_nan(finish_group<T, Out, false, Weighted, Multiply>(
      out, to, waiting, sources + k, from(k), count - k, factor, begin, size));
}

// As `average` of Kernels; as `average_widened` where Out is not T.
template <class T, class Out = T>
bool average_in_lanes(std::byte* out, const std::byte* const* sources, const double* weights,
                      std::size_t count, double total, std::size_t begin, std::size_t end,
                      bool stream) noexcept {
  const Divisor divisor(total);
  const auto steps = weights == nullptr ? (divisor.multiply ? average_steps<T, Out, false, true>
                                                            : average_steps<T, Out, false, false>)
                                        : (divisor.multiply ? average_steps<T, Out, true, true>
                                                            : average_steps<T, Out, true, false>);
  alignas(kLine) std::byte lines[kMostBlock * sizeof(Out)];
  const std::size_t first = begin;
  bool finite = true;
  const auto singly = [&](std::size_t size) {
    finite &= average_block<T, Out>(lines, 0, sources, weights, count, divisor, begin, size);
    std::memcpy(out + begin * sizeof(Out), lines, size * sizeof(Out));
    begin += size;
  };
  // Lines that are streamed begin within no element, and the first where a line does.
  const std::size_t head = bytes_to_line(out + begin * sizeof(Out));
  if (head % sizeof(Out) != 0) stream = false;
  if (stream && head > 0) singly(std::min(end - begin, head / sizeof(Out)));
  const std::size_t block = count > kRegisterSources ? kMostBlock : kShortBlock;
  while (end - begin >= kStep) {
    const std::size_t most = stream ? block : kMostBlock;
    const std::size_t size = std::min(most, (end - begin) / kStep * kStep);
    if (stream && size == block) {
      finite &= steps(lines, 0, sources, weights, count, divisor.factor, begin, size);
      stream_lines(out + begin * sizeof(Out), lines, size * sizeof(Out));
    } else {
      // `out` may be a source: what is read of it is read before it is written.
      finite &= steps(out, begin, sources, weights, count, divisor.factor, begin, size);
    }
    begin += size;
  }
  if (begin < end) singly(end - begin);
  if (stream) end_streaming();
  if (!finite) unify_nan<Out>(out, first, end);
  return finite;
}

}  // namespace
}  // namespace flatweights

#endif
