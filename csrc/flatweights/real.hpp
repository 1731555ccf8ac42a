// Real numbers of 16 to 64 bits: how each is widened to float64 and rounded back.
//
// Included only by kernels.cpp, which is compiled once per instruction set. The
// anonymous namespace keeps the linker from replacing one set's code by another's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "flatweights/dtype.hpp"
#include "flatweights/registers.hpp"
#include "flatweights/scalar.hpp"

namespace flatweights {
namespace {

// Reads element `i` of memory with any alignment.
template <class T>
inline T load(const std::byte* memory, std::size_t i) noexcept {
  T value;
  std::memcpy(&value, memory + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
inline void store(std::byte* memory, std::size_t i, T value) noexcept {
  std::memcpy(memory + i * sizeof(T), &value, sizeof(T));
}

template <class T>
inline constexpr bool is_half = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

// Reads element `i`, exactly.
template <class T>
inline double widened(const std::byte* memory, std::size_t i) noexcept {
  if constexpr (std::is_same_v<T, Float16>)
    return static_cast<double>(widen_float16(load<std::uint16_t>(memory, i)));
  else if constexpr (std::is_same_v<T, BFloat16>)
    return static_cast<double>(widen_bfloat16(load<std::uint16_t>(memory, i)));
  else
    return static_cast<double>(load<T>(memory, i));
}

// Writes `source[begin, begin + count)` to `out[0, count)`, exactly.
template <class T>
inline void widen_block(const std::byte* source, std::size_t begin, std::size_t count,
                        float* __restrict out) noexcept {
  std::size_t i = 0;
  if constexpr (std::is_same_v<T, Float16>) {
#if defined(FLATWEIGHTS_REGISTERS)
    for (; i + 8 <= count; i += 8) widen_eight(out + i, source + (begin + i) * sizeof(T));
#endif
    for (; i < count; ++i) out[i] = widen_float16(load<std::uint16_t>(source, begin + i));
  } else {
    for (; i < count; ++i) out[i] = widen_bfloat16(load<std::uint16_t>(source, begin + i));
  }
}

// Writes 16-bit roundings of `odd[0, count)`, made by round_to_odd, to `out` from
// element `begin` on.
template <class T>
inline void narrow_block(const std::uint32_t* __restrict odd, std::size_t count, std::byte* out,
                         std::size_t begin) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<T, Float16>)
      store(out, begin + i, narrow_float16(odd[i]));
    else
      store(out, begin + i, narrow_bfloat16(odd[i]));
  }
}

}  // namespace
}  // namespace flatweights
