// The element types that the kernels tell apart.
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

// The real types that are averaged, as indices of tables.
inline constexpr std::size_t kReals = 4;

[[nodiscard]] constexpr bool is_averaged(DType dtype) noexcept {
  return dtype != DType::kInteger && dtype != DType::kOther;
}

// Index of the real type that an averaged dtype consists of: float16, bfloat16,
// float32, float64.
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
  constexpr std::size_t kSizes[kReals] = {2, 2, 4, 8};
  return kSizes[real_of(dtype)];
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
