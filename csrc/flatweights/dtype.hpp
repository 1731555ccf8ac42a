// The element types that kernels distinguish.
#pragma once

#include <cstddef>
#include <cstdint>

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

// Tags for the two real types that C++20 has no name for.
struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

// The bits of a real type in memory: a sign, an exponent and a mantissa, as in IEEE 754.
struct RealFormat {
  std::size_t size;    // bytes
  int mantissa;        // bits
  std::uint64_t bias;  // of the exponent

  // The bits of the exponent: all set in NaN and infinity, and in no other number.
  [[nodiscard]] constexpr std::uint64_t exponent() const { return (2 * bias + 1) << mantissa; }
};

// The real types that are averaged, in the order of all tables.
#define FLATWEIGHTS_EACH_REAL(function) \
  {function<Float16>, function<BFloat16>, function<float>, function<double>}
#define FLATWEIGHTS_FROM_REAL(function, from) \
  {function<from, Float16>, function<from, BFloat16>, function<from, float>, function<from, double>}
#define FLATWEIGHTS_EACH_TWO_REALS(function)                                            \
  {FLATWEIGHTS_FROM_REAL(function, Float16), FLATWEIGHTS_FROM_REAL(function, BFloat16), \
   FLATWEIGHTS_FROM_REAL(function, float), FLATWEIGHTS_FROM_REAL(function, double)}
inline constexpr std::size_t kReals = 4;

template <class T>
inline constexpr RealFormat kFormat{};
template <>
inline constexpr RealFormat kFormat<Float16>{2, 10, 15};
template <>
inline constexpr RealFormat kFormat<BFloat16>{2, 7, 127};
template <>
inline constexpr RealFormat kFormat<float>{4, 23, 127};
template <>
inline constexpr RealFormat kFormat<double>{8, 52, 1023};
inline constexpr RealFormat kFormats[kReals] = FLATWEIGHTS_EACH_REAL(kFormat);

[[nodiscard]] constexpr bool is_averaged(DType dtype) noexcept {
  return dtype != DType::kInteger && dtype != DType::kOther;
}

// Index of the real type that an averaged dtype consists of.
[[nodiscard]] constexpr std::size_t real_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat16:
      return 0;
    case DType::kBFloat16:
      return 1;
    case DType::kFloat64:
    case DType::kComplex128:
      return 3;
    default:
      return 2;
  }
}

// Bytes of that real type.
[[nodiscard]] constexpr std::size_t real_size(DType dtype) noexcept {
  return kFormats[real_of(dtype)].size;
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

}  // namespace flatweights
