// How single real numbers of 16 to 64 bits are widened and rounded, on processors and on GPUs.
#pragma once

#include <cstdint>
#include <type_traits>

#include "flatweights/device_code.hpp"

namespace flatweights {
namespace {

FLATWEIGHTS_DEVICE inline float widen_bfloat16(std::uint16_t bits) noexcept {
  return __builtin_bit_cast(float, std::uint32_t{bits} << 16);
}

FLATWEIGHTS_DEVICE inline float widen_float16(std::uint16_t bits) noexcept {
  constexpr std::uint32_t kExponent = 0x7c00u << 13;
  constexpr std::uint32_t kRebias = (127u - 15u) << 23;
  constexpr std::uint32_t kLeast = 113u << 23;  // 2^-14
  const std::uint32_t magnitude = (bits & 0x7fffu) << 13;
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  const std::uint32_t exponent = magnitude & kExponent;
  // Infinity and NaN get the largest exponent.
  const std::uint32_t normal =
      magnitude + kRebias + (exponent == kExponent ? (128u - 16u) << 23 : 0u);
  // A subnormal has no hidden bit: build it with one, then subtract that.
  const float subnormal =
      __builtin_bit_cast(float, magnitude + kLeast) - __builtin_bit_cast(float, kLeast);
  const std::uint32_t chosen =
      exponent == 0 ? __builtin_bit_cast(std::uint32_t, subnormal) : normal;
  return __builtin_bit_cast(float, chosen | sign);
}

FLATWEIGHTS_DEVICE inline bool is_nan(double value) noexcept { return value != value; }

// Rounds to float so that a second rounding, to 16 bits, gives the same result
// as one rounding of `value`: the last bit is set if anything was lost
// ("round to odd": Boldo and Melquiond, "Emulation of FMA and correctly
// rounded sums", IEEE Transactions on Computers 57(4), 2008).
FLATWEIGHTS_DEVICE inline std::uint32_t round_to_odd(double value) noexcept {
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, nearest);
  const std::uint32_t towards_zero =
      bits - (__builtin_fabs(back) > __builtin_fabs(value) ? 1u : 0u);
  return back == value || is_nan(value) ? bits : (towards_zero | 1u);
}

// The compiler decides which of two NaN an addition keeps, but results must have the same bits
// everywhere. So every NaN becomes this one.
inline constexpr std::uint16_t kNanBFloat16 = 0x7fc0;
inline constexpr std::uint16_t kNanFloat16 = 0x7e00;

template <class T>
FLATWEIGHTS_DEVICE inline T with_one_nan(T value) noexcept {
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  constexpr Bits kNan = sizeof(T) == 4 ? Bits{0x7fc00000} : static_cast<Bits>(0x7ff8ULL << 48);
  // Masks instead of a conditional, which would keep some loops from being vectorised.
  const Bits nan = static_cast<Bits>(Bits{0} - Bits{value != value});
  const Bits bits = __builtin_bit_cast(Bits, value);
  return __builtin_bit_cast(T, static_cast<Bits>((bits & ~nan) | (kNan & nan)));
}

FLATWEIGHTS_DEVICE inline std::uint16_t narrow_bfloat16(std::uint32_t odd) noexcept {
  const std::uint32_t rounded = (odd + 0x7fffu + ((odd >> 16) & 1u)) >> 16;
  const bool nan = (odd & 0x7fffffffu) > 0x7f800000u;
  return static_cast<std::uint16_t>(nan ? kNanBFloat16 : rounded);
}

FLATWEIGHTS_DEVICE inline std::uint16_t narrow_float16(std::uint32_t odd) noexcept {
  const std::uint32_t sign = odd & 0x80000000u;
  const std::uint32_t bits = odd ^ sign;
  // Below the smallest normal number, adding 0.5 lines the mantissas up and
  // rounds to nearest even.
  const std::uint32_t subnormal =
      __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, bits) + 0.5f) -
      __builtin_bit_cast(std::uint32_t, 0.5f);
  const std::uint32_t normal = (bits - ((127u - 15u) << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const std::uint32_t finite = bits < 0x38800000u ? subnormal : normal;
  const std::uint32_t signed_ = (bits >= 0x47800000u ? 0x7c00u : finite) | (sign >> 16);
  return static_cast<std::uint16_t>(bits > 0x7f800000u ? kNanFloat16 : signed_);
}

// Division by the sum of the weights. The inverse of a power of two is exact, and
// multiplying by it gives the same as dividing.
struct Divisor {
  double factor;
  bool multiply;

  explicit Divisor(double total) noexcept {
    multiply = (__builtin_bit_cast(std::uint64_t, total) << 12) == 0 && 1.0 / total * total == 1.0;
    factor = multiply ? 1.0 / total : total;
  }
};

}  // namespace
}  // namespace flatweights
