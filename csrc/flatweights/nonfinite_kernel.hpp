// Finds NaN and infinity by their exponents. Included by kernels.cpp alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flatweights/real.hpp"

namespace flatweights {
namespace {

// The bits of the exponent: all set in NaN and infinity, and in nothing else.
template <class T>
struct Exponent;
template <>
struct Exponent<Float16> {
  using Bits = std::uint16_t;
  static constexpr Bits kMask = 0x7c00;
};
template <>
struct Exponent<BFloat16> {
  using Bits = std::uint16_t;
  static constexpr Bits kMask = 0x7f80;
};
template <>
struct Exponent<float> {
  using Bits = std::uint32_t;
  static constexpr Bits kMask = 0x7f800000;
};
template <>
struct Exponent<double> {
  using Bits = std::uint64_t;
  static constexpr Bits kMask = 0x7ff0000000000000;
};

// As `has_nonfinite` of Kernels.
template <class T>
bool has_nonfinite(const std::byte* data, std::size_t begin, std::size_t end) noexcept {
  using Bits = typename Exponent<T>::Bits;
  constexpr Bits kMask = Exponent<T>::kMask;
  Bits found = 0;  // no early exit: it would keep the loop from being vectorised
  for (std::size_t i = begin; i < end; ++i)
    found = static_cast<Bits>(found | ((load<Bits>(data, i) & kMask) == kMask ? 1 : 0));
  return found != 0;
}

}  // namespace
}  // namespace flatweights
