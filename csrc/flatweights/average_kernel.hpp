// Weighted sums and means of ranges. Included by kernels.cpp alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "flatweights/copy_kernel.hpp"
#include "flatweights/real.hpp"

namespace flatweights {
namespace {

inline constexpr std::size_t kBlock = 1024;  // a block's sums stay in the first cache
inline constexpr std::size_t kGroup = 4;     // sources whose sum is kept in a register

// Adds `weights[k] * sources[k][begin, begin + count)` for k < Count, in order, to
// `sum[0, count)`, which counts as 0 where First.
//
// float16, bfloat16 and float32 are summed in float64. Sums of float64 carry in
// `compensation` what each addition rounded away (Neumaier's variant of Kahan
// summation, with Knuth's TwoSum: ZAMM 54, 1974); the narrower types leave it alone.
template <class T, std::size_t Count, bool First>
inline void add_sources(double* __restrict sum, [[maybe_unused]] double* __restrict compensation,
                        const std::byte* const* sources, const double* weights, std::size_t begin,
                        std::size_t count) noexcept {
  const std::byte* source[Count];
  double weight[Count];
  for (std::size_t k = 0; k < Count; ++k) {
    source[k] = sources[k];
    weight[k] = weights[k];
  }
  for (std::size_t i = 0; i < count; ++i) {
    double total = First ? 0.0 : sum[i];
    if constexpr (std::is_same_v<T, double>) {
      double lost = First ? 0.0 : compensation[i];
      for (std::size_t k = 0; k < Count; ++k) {
        const double term = weight[k] * load<double>(source[k], begin + i);
        const double next = total + term;
        const double added = next - total;
        lost += (total - (next - added)) + (term - added);
        total = next;
      }
      compensation[i] = lost;
    } else {
      for (std::size_t k = 0; k < Count; ++k)
        total += weight[k] * static_cast<double>(load<T>(source[k], begin + i));
    }
    sum[i] = total;
  }
}

template <class T, bool First>
inline void add_group(double* sum, double* compensation, const std::byte* const* sources,
                      const double* weights, std::size_t group, std::size_t begin,
                      std::size_t count) noexcept {
  static_assert(kGroup == 4);
  switch (group) {
    case 1:
      return add_sources<T, 1, First>(sum, compensation, sources, weights, begin, count);
    case 2:
      return add_sources<T, 2, First>(sum, compensation, sources, weights, begin, count);
    case 3:
      return add_sources<T, 3, First>(sum, compensation, sources, weights, begin, count);
    default:
      return add_sources<T, 4, First>(sum, compensation, sources, weights, begin, count);
  }
}

// Adds a group of at most kGroup sources, at most kBlock elements of each.
template <class T, bool First>
inline void add_block(double* sum, double* compensation, const std::byte* const* sources,
                      const double* weights, std::size_t group, std::size_t begin,
                      std::size_t count) noexcept {
  if constexpr (is_half<T>) {
    alignas(kLine) float wide[kGroup][kBlock];
    const std::byte* widened[kGroup];
    for (std::size_t k = 0; k < group; ++k) {
      widen_block<T>(sources[k], begin, count, wide[k]);
      widened[k] = reinterpret_cast<const std::byte*>(wide[k]);
    }
    add_group<float, First>(sum, compensation, widened, weights, group, 0, count);
  } else {
    add_group<T, First>(sum, compensation, sources, weights, group, begin, count);
  }
}

// Writes `value(i)`, rounded to T once, to `out[begin, begin + count)`, count <= kBlock.
template <class T, class Value>
inline void round_block(std::byte* out, std::size_t begin, std::size_t count,
                        Value value) noexcept {
  if constexpr (is_half<T>) {
    alignas(kLine) std::uint32_t odd[kBlock];
    for (std::size_t i = 0; i < count; ++i) odd[i] = round_to_odd(value(i));
    narrow_block<T>(odd, count, out, begin);
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      const double exact = value(i);
      store(out, begin + i,
            is_nan(exact) ? static_cast<T>(__builtin_nan("")) : static_cast<T>(exact));
    }
  }
}

// Writes `sum / total` to `out[begin, begin + count)`, count <= kBlock. Returns whether
// all sums are finite.
template <class T>
inline bool divide_block(std::byte* out, std::size_t begin, double* __restrict sum,
                         [[maybe_unused]] const double* __restrict compensation, std::size_t count,
                         double total) noexcept {
  std::uint64_t nonfinite = 0;
  for (std::size_t i = 0; i < count; ++i) {
    // Infinity minus itself is NaN, which is not equal to 0.
    nonfinite |= sum[i] - sum[i] == 0.0 ? 0u : 1u;
    if constexpr (std::is_same_v<T, double>) {
      // An infinite sum has no meaningful remainder.
      const double corrected = sum[i] + compensation[i];
      sum[i] = compensation[i] - compensation[i] == 0.0 ? corrected : sum[i];
    }
  }
  // The inverse of a power of two is exact: multiplying gives what dividing would.
  const double inverse = 1.0 / total;
  if (inverse * total == 1.0 && (__builtin_bit_cast(std::uint64_t, total) << 12) == 0)
    round_block<T>(out, begin, count, [=](std::size_t i) { return sum[i] * inverse; });
  else
    round_block<T>(out, begin, count, [=](std::size_t i) { return sum[i] / total; });
  return nonfinite == 0;
}

// As `average` of Kernels.
template <class T>
bool average_range(std::byte* out, const std::byte* const* sources, const double* weights,
                   std::size_t count, double total, std::size_t begin, std::size_t end,
                   bool stream) noexcept {
  alignas(kLine) double sum[kBlock];
  alignas(kLine) double compensation[std::is_same_v<T, double> ? kBlock : 1];
  alignas(kLine) std::byte lines[kBlock * sizeof(T)];
  bool finite = true;
  // The first block ends where a line of `out` does, so that whole ones follow.
  const std::size_t head = bytes_to_line(out + begin * sizeof(T));
  std::size_t most = stream && head > 0 ? head / sizeof(T) : kBlock;
  if (head % sizeof(T) != 0) {  // lines begin within elements
    most = kBlock;
    stream = false;
  }
  for (; begin < end; most = kBlock) {
    const std::size_t size = end - begin < most ? end - begin : most;
    for (std::size_t k = 0; k < count; k += kGroup) {
      const std::size_t group = count - k < kGroup ? count - k : kGroup;
      if (k == 0)
        add_block<T, true>(sum, compensation, sources, weights, group, begin, size);
      else
        add_block<T, false>(sum, compensation, sources + k, weights + k, group, begin, size);
    }
    if (stream) {
      finite &= divide_block<T>(lines, 0, sum, compensation, size, total);
      copy_range(out + begin * sizeof(T), lines, size * sizeof(T), size == kBlock);
    } else {
      finite &= divide_block<T>(out, begin, sum, compensation, size, total);
    }
    begin += size;
  }
  return finite;
}

// As `add` of Kernels.
template <class T>
void add_range(double* sum, double* compensation, const std::byte* source, double weight,
               std::size_t begin, std::size_t end) noexcept {
  for (std::size_t done = 0; begin + done < end;) {
    const std::size_t left = end - begin - done;
    const std::size_t size = left < kBlock ? left : kBlock;
    double* lost = compensation == nullptr ? nullptr : compensation + done;
    add_block<T, false>(sum + done, lost, &source, &weight, 1, begin + done, size);
    done += size;
  }
}

// As `divide` of Kernels.
template <class T>
void divide_range(std::byte* out, const double* sum, const double* compensation, double total,
                  std::size_t begin, std::size_t end) noexcept {
  alignas(kLine) double block[kBlock];
  for (std::size_t done = 0; begin + done < end;) {
    const std::size_t left = end - begin - done;
    const std::size_t size = left < kBlock ? left : kBlock;
    for (std::size_t i = 0; i < size; ++i) block[i] = sum[done + i];
    const double* lost = compensation == nullptr ? nullptr : compensation + done;
    divide_block<T>(out, begin + done, block, lost, size, total);
    done += size;
  }
}

}  // namespace
}  // namespace flatweights
