// The element types that the kernels tell apart, and how each is summed.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace flatweights {

enum class DType : std::uint8_t {
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex64,
  kComplex128,
  kInteger,  // integers and booleans: an average keeps the first source's value
  kOther,    // moved, never averaged
};

// Tags for the two types that C++20 has no name for.
struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

[[nodiscard]] constexpr bool is_averaged(DType dtype) noexcept {
  return dtype != DType::kInteger && dtype != DType::kOther;
}

// Real numbers in one element: a complex one is averaged as two.
[[nodiscard]] constexpr std::size_t reals_per_element(DType dtype) noexcept {
  if (!is_averaged(dtype)) return 0;
  return dtype == DType::kComplex64 || dtype == DType::kComplex128 ? 2 : 1;
}

// Whether sums of this type carry a compensation term.
[[nodiscard]] constexpr bool is_compensated(DType dtype) noexcept {
  return dtype == DType::kFloat64 || dtype == DType::kComplex128;
}

// Calls `body.template operator()<T>()` with the real type of an averaged dtype.
template <class Body>
decltype(auto) visit_real(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat16:
      return body.template operator()<Float16>();
    case DType::kBFloat16:
      return body.template operator()<BFloat16>();
    case DType::kFloat64:
    case DType::kComplex128:
      return body.template operator()<double>();
    default:
      return body.template operator()<float>();
  }
}

// Reads element `i` of memory that may be aligned to nothing.
template <class T>
[[nodiscard]] inline T load(const std::byte* memory, std::size_t i) noexcept {
  T value;
  std::memcpy(&value, memory + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
inline void store(std::byte* memory, std::size_t i, T value) noexcept {
  std::memcpy(memory + i * sizeof(T), &value, sizeof(T));
}

[[nodiscard]] inline double widen(double value) noexcept { return value; }
[[nodiscard]] inline double widen(float value) noexcept { return static_cast<double>(value); }

[[nodiscard]] inline double widen(BFloat16 value) noexcept {
  return static_cast<double>(std::bit_cast<float>(std::uint32_t{value.bits} << 16));
}

[[nodiscard]] inline double widen(Float16 value) noexcept {
  constexpr std::uint32_t kExponent = 0x7c00u << 13;
  constexpr std::uint32_t kRebias = (127u - 15u) << 23;
  const std::uint32_t magnitude = (value.bits & 0x7fffu) << 13;
  const std::uint32_t sign = (value.bits & 0x8000u) << 16;
  const std::uint32_t exponent = magnitude & kExponent;
  // Infinity and NaN take the rest of the way to the largest exponent.
  const std::uint32_t normal =
      magnitude + kRebias + (exponent == kExponent ? (128u - 16u) << 23 : 0u);
  // A subnormal has no hidden bit: build it with one, then subtract that.
  const float subnormal =
      std::bit_cast<float>(magnitude + (113u << 23)) - std::bit_cast<float>(113u << 23);
  const std::uint32_t bits = exponent == 0 ? std::bit_cast<std::uint32_t>(subnormal) : normal;
  return static_cast<double>(std::bit_cast<float>(bits | sign));
}

// Rounds to float so that a second rounding, to 16 bits, gives what one
// rounding of `value` would have given: the last bit is set where anything was
// lost ("round to odd": Boldo and Melquiond, "Emulation of FMA and correctly
// rounded sums", IEEE Transactions on Computers 57(4), 2008).
[[nodiscard]] inline std::uint32_t round_to_odd(double value) noexcept {
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(nearest);
  const std::uint32_t towards_zero = bits - (std::fabs(back) > std::fabs(value) ? 1u : 0u);
  return back == value || value != value ? bits : (towards_zero | 1u);
}

template <class T>
[[nodiscard]] inline T narrow(double value) noexcept {
  return static_cast<T>(value);
}

template <>
[[nodiscard]] inline BFloat16 narrow<BFloat16>(double value) noexcept {
  const std::uint32_t bits = round_to_odd(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return BFloat16{static_cast<std::uint16_t>(value != value ? quiet_nan : rounded)};
}

template <>
[[nodiscard]] inline Float16 narrow<Float16>(double value) noexcept {
  const std::uint32_t all = round_to_odd(value);
  const std::uint32_t sign = all & 0x80000000u;
  const std::uint32_t bits = all ^ sign;
  // Below the smallest normal number, adding 0.5 lines the mantissas up and
  // rounds to nearest even.
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(bits) + 0.5f) -
                                  std::bit_cast<std::uint32_t>(0.5f);
  const std::uint32_t normal = (bits - ((127u - 15u) << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const std::uint32_t special = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const std::uint32_t magnitude =
      bits >= 0x47800000u ? special : (bits < 0x38800000u ? subnormal : normal);
  return Float16{static_cast<std::uint16_t>(magnitude | (sign >> 16))};
}

}  // namespace flatweights
