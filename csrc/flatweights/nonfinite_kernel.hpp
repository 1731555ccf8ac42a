// Finds NaN and infinity by their exponents. Included only by kernels.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flatweights/real.hpp"

namespace flatweights {
namespace {

// The bits of a real type, and those of its exponent.
template <class T>
using Bits = std::conditional_t<sizeof(T) == 2, std::uint16_t,
                                std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;
template <class T>
inline constexpr Bits<T> kExponent = static_cast<Bits<T>>(kFormat<T>.exponent());

// Implements `has_nonfinite` of Kernels.
template <class T>
bool has_nonfinite(const std::byte* data, std::size_t begin, std::size_t end) noexcept {
  constexpr std::size_t kAtOnce = 512 / sizeof(T);
  Bits<T> spoiled = 0;  // no early exit: it would keep the loop from being vectorised
  const auto look = [&](std::size_t first, std::size_t count) {
    for (std::size_t i = first; i < first + count; ++i)
      spoiled = static_cast<Bits<T>>(
          spoiled | ((load<Bits<T>>(data, i) & kExponent<T>) == kExponent<T> ? 1 : 0));
  };
  for (; end - begin >= kAtOnce; begin += kAtOnce) {
    read_ahead<kAtOnce * sizeof(T)>(data + begin * sizeof(T));
    look(begin, kAtOnce);
  }
  look(begin, end - begin);
  return spoiled != 0;
}

}  // namespace
}  // namespace flatweights
