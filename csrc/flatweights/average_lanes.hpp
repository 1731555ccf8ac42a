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

// Sums of kStep elements, in order of Pair.
template <class T>
struct Sums {
  Pair total[kPairs];
  Pair lost[std::is_same_v<T, double> ? kPairs : 1];
};

// As add_terms, for one term.
template <class T>
[[gnu::always_inline]] inline void add_to(Doubles& total, [[maybe_unused]] Doubles& lost,
                                          Doubles term) noexcept {
  const Doubles next = total + term;
  if constexpr (std::is_same_v<T, double>) {
    const Doubles added = next - total;
    lost += (total - (next - added)) + (term - added);
  }
  total = next;
}

template <class T, bool Weighted>
[[gnu::always_inline]] inline void add_rows(Sums<T>& sums, const std::byte* const* sources,
                                            [[maybe_unused]] const double* weights,
                                            std::size_t count, std::size_t i) noexcept {
  for (std::size_t k = 0; k < count; ++k) {
    const std::byte* const source = sources[k];
    Pair terms[kPairs];
    for (std::size_t j = 0; j < kPairs; ++j) terms[j] = load_pair<T>(source, i + j * kPair);
    if constexpr (Weighted) {
      const Doubles weight = broadcast(weights[k]);
      for (Pair& term : terms) {
        term.a *= weight;
        term.b *= weight;
      }
    }
    for (std::size_t j = 0; j < kPairs; ++j) {
      Pair& lost = sums.lost[std::is_same_v<T, double> ? j : 0];
      add_to<T>(sums.total[j].a, lost.a, terms[j].a);
      add_to<T>(sums.total[j].b, lost.b, terms[j].b);
    }
  }
}

// As divide of a Sum; `spoiled` becomes NaN where it is not finite.
template <class T, bool Multiply>
[[gnu::always_inline]] inline Doubles divide(Doubles total, [[maybe_unused]] Doubles lost,
                                             Doubles factor, Doubles& spoiled) noexcept {
  spoiled += total - total;
  if constexpr (std::is_same_v<T, double>) total += finite_or_zero(lost);
  return Multiply ? total * factor : total / factor;
}

// Where the sums of a block with many sources wait for the next group of these.
template <class T>
struct Waiting {
  alignas(kLine) Sums<T> sums[kMostBlock / kStep];
};

template <class T>
[[gnu::always_inline]] inline Sums<T> no_sums() noexcept {
  Sums<T> sums;
  for (Pair& pair : sums.total) pair = {broadcast(0), broadcast(0)};
  for (Pair& pair : sums.lost) pair = {broadcast(0), broadcast(0)};
  return sums;
}

// Adds the sources to `waiting`, which counts as 0 where First.
template <class T, bool First, bool Weighted>
inline void add_group(Waiting<T>& waiting, const std::byte* const* sources, const double* weights,
                      std::size_t count, std::size_t begin, std::size_t size) noexcept {
  for (std::size_t i = 0; i < size; i += kStep) {
    Sums<T> sums = no_sums<T>();
    if constexpr (!First) sums = waiting.sums[i / kStep];
    add_rows<T, Weighted>(sums, sources, weights, count, begin + i);
    waiting.sums[i / kStep] = sums;
  }
}

// Adds the last sources to `waiting`, and writes the means to `out[to, to + size)`.
template <class T, bool First, bool Weighted, bool Multiply>
inline Doubles finish_group(std::byte* out, std::size_t to, const Waiting<T>& waiting,
                            const std::byte* const* sources, const double* weights,
                            std::size_t count, double factor, std::size_t begin,
                            std::size_t size) noexcept {
  const Doubles factors = broadcast(factor);
  Doubles spoiled = broadcast(0);
  for (std::size_t i = 0; i < size; i += kStep) {
    Sums<T> sums = no_sums<T>();
    if constexpr (!First) sums = waiting.sums[i / kStep];
    add_rows<T, Weighted>(sums, sources, weights, count, begin + i);
    for (std::size_t j = 0; j < kPairs; ++j) {
      const Pair& lost = sums.lost[std::is_same_v<T, double> ? j : 0];
      store_pair<T>(out, to + i + j * kPair,
                    {divide<T, Multiply>(sums.total[j].a, lost.a, factors, spoiled),
                     divide<T, Multiply>(sums.total[j].b, lost.b, factors, spoiled)});
    }
  }
  return spoiled;
}

inline constexpr std::size_t kRegisterSources = 8;  // read side by side; more take turns

template <class T, bool Weighted, bool Multiply>
inline bool average_steps(std::byte* out, std::size_t to, const std::byte* const* sources,
                          const double* weights, std::size_t count, double factor,
                          std::size_t begin, std::size_t size) noexcept {
  Waiting<T> waiting;
  if (count <= kRegisterSources)
    return !any_nonzero_or_nan(finish_group<T, true, Weighted, Multiply>(
        out, to, waiting, sources, weights, count, factor, begin, size));
  const auto from = [weights](std::size_t k) { return Weighted ? weights + k : nullptr; };
  add_group<T, true, Weighted>(waiting, sources, from(0), kRegisterSources, begin, size);
  std::size_t k = kRegisterSources;
  for (; k + kRegisterSources < count; k += kRegisterSources)
    add_group<T, false, Weighted>(waiting, sources + k, from(k), kRegisterSources, begin, size);
  return !any_nonzero_or_nan(finish_group<T, false, Weighted, Multiply>(
      out, to, waiting, sources + k, from(k), count - k, factor, begin, size));
}

// As `average` of Kernels.
template <class T>
bool average_in_lanes(std::byte* out, const std::byte* const* sources, const double* weights,
                      std::size_t count, double total, std::size_t begin, std::size_t end,
                      bool stream) noexcept {
  const Divisor divisor(total);
  const auto steps =
      weights == nullptr
          ? (divisor.multiply ? average_steps<T, false, true> : average_steps<T, false, false>)
          : (divisor.multiply ? average_steps<T, true, true> : average_steps<T, true, false>);
  alignas(kLine) std::byte lines[kMostBlock * sizeof(T)];
  const std::size_t first = begin;
  bool finite = true;
  const auto singly = [&](std::size_t size) {
    finite &= average_block<T>(lines, 0, sources, weights, count, divisor, begin, size);
    std::memcpy(out + begin * sizeof(T), lines, size * sizeof(T));
    begin += size;
  };
  // Lines that are streamed begin within no element, and the first where a line does.
  const std::size_t head = bytes_to_line(out + begin * sizeof(T));
  if (head % sizeof(T) != 0) stream = false;
  if (stream && head > 0) singly(std::min(end - begin, head / sizeof(T)));
  const std::size_t block = count > kRegisterSources ? kMostBlock : kBlock;
  while (end - begin >= kStep) {
    const std::size_t size = std::min(block, (end - begin) / kStep * kStep);
    if (stream && size == block) {
      finite &= steps(lines, 0, sources, weights, count, divisor.factor, begin, size);
      stream_lines(out + begin * sizeof(T), lines, size * sizeof(T));
    } else {
      // `out` may be a source: what is read of it is read before it is written.
      finite &= steps(out, begin, sources, weights, count, divisor.factor, begin, size);
    }
    begin += size;
  }
  if (begin < end) singly(end - begin);
  if (stream) end_streaming();
  if (!finite) unify_nan<T>(out, first, end);
  return finite;
}

}  // namespace
}  // namespace flatweights

#endif
