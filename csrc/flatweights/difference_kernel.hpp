// Rounds differences to 16 bits and keeps the rounding errors. Included only by kernels.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "flatweights/average_kernel.hpp"
#include "flatweights/difference.hpp"
#include "flatweights/nonfinite_kernel.hpp"
#include "flatweights/real.hpp"

namespace flatweights {
namespace {

// The bits of a number after round_to_odd; a float32 needs no rounding.
[[gnu::always_inline]] inline std::uint32_t odd_bits(float value) noexcept {
  return __builtin_bit_cast(std::uint32_t, value);
}
[[gnu::always_inline]] inline std::uint32_t odd_bits(double value) noexcept {
  return round_to_odd(value);
}

// Whether a reference plus the rounded difference of a finite model may be infinite. The rounding
// error of any other pair is less than half a unit in the last place of the largest T.
template <class T, class Narrow>
inline constexpr bool kMayOverflow = std::is_same_v<T, float> && std::is_same_v<Narrow, BFloat16>;

// The exponent bits that all numbers from 2^127 on have, and no smaller ones: only from there on
// can the rounding of a difference, of less than 2^128, make a number infinite.
inline constexpr std::uint32_t kLargest = 0x7f000000;

// Encodes numbers [begin, begin + count), count <= kBlock, in several loops that stay in L1: the
// compiler would vectorise few instances of a single loop.
template <class T, class Narrow, bool HasReference, bool HasResidual>
inline bool encode_block(const DifferencePart& part, std::size_t begin,
                         std::size_t count) noexcept {
  alignas(kLine) T wanted[kBlock];
  alignas(kLine) std::uint32_t odd[kBlock];
  constexpr bool kChecksSum = HasReference && !HasResidual && kMayOverflow<T, Narrow>;
  [[maybe_unused]] std::uint32_t is_large = 0;
  if (count > kBlock) __builtin_unreachable();
  for (std::size_t i = 0; i < count; ++i) {
    T value = load<T>(part.model, begin + i);
    if constexpr (kChecksSum) is_large |= (odd_bits(value) & kLargest) == kLargest ? 1 : 0;
    // In this order: a small residual would be rounded away if it were added to the weight.
    if constexpr (HasReference) value -= load<T>(part.reference, begin + i);
    if constexpr (HasResidual) value += load<T>(part.residual, begin + i);
    wanted[i] = value;
    odd[i] = odd_bits(value);
  }
  narrow_block<Narrow>(odd, count, part.difference, begin);
  if constexpr (HasResidual) {
    alignas(kLine) float sent[kBlock];
    widen_block<Narrow>(part.difference, begin, count, sent);
    std::byte* const next_residual = part.next_residual;
    for (std::size_t i = 0; i < count; ++i)
      store(next_residual, begin + i, wanted[i] - static_cast<T>(sent[i]));
  }
  if (has_nonfinite<Narrow>(part.difference, begin, begin + count)) return false;
  if constexpr (kChecksSum) {
    if (is_large == 0) return true;  // the usual case
    alignas(kLine) float sent[kBlock];
    widen_block<Narrow>(part.difference, begin, count, sent);
    for (std::size_t i = 0; i < count; ++i)
      wanted[i] = load<T>(part.reference, begin + i) + sent[i];
    return !has_nonfinite<T>(reinterpret_cast<const std::byte*>(wanted), 0, count);
  }
  return true;
}

template <class T, class Narrow, bool HasReference, bool HasResidual>
inline bool encode_numbers(const DifferencePart& part, std::size_t begin,
                           std::size_t end) noexcept {
  bool finite = true;
  for_each_block(end - begin, [&](std::size_t done, std::size_t size) {
    finite &= encode_block<T, Narrow, HasReference, HasResidual>(part, begin + done, size);
  });
  return finite;
}

// Implements `encode` of Kernels.
template <class T, class Narrow>
bool encode_range(const DifferencePart& part, std::size_t begin, std::size_t end) noexcept {
  if (part.reference == nullptr)
    return part.residual == nullptr ? encode_numbers<T, Narrow, false, false>(part, begin, end)
                                    : encode_numbers<T, Narrow, false, true>(part, begin, end);
  return part.residual == nullptr ? encode_numbers<T, Narrow, true, false>(part, begin, end)
                                  : encode_numbers<T, Narrow, true, true>(part, begin, end);
}

}  // namespace
}  // namespace flatweights
