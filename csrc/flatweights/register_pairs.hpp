// Numbers of any real type, widened to float64 in registers and rounded back. Included only by
// kernels.cpp.
#pragma once

#include "flatweights/real.hpp"
#include "flatweights/registers.hpp"

#if defined(FLATWEIGHTS_REGISTERS)

namespace flatweights {
namespace {

// kPair consecutive elements: the first half in `a`, the second in `b`. Or, where Interleaved,
// the even elements in `a` and the odd ones in `b`: two bfloat16 lie in one 32-bit word, from which
// a shift and a mask make two floats.
struct Pair {
  Doubles a;
  Doubles b;
};

inline constexpr std::size_t kPair = 2 * kLanes;

[[gnu::always_inline]] inline void settle(Pair& value) noexcept {
  settle(value.a);
  settle(value.b);
}

template <class T>
inline constexpr bool is_interleaved = std::is_same_v<T, BFloat16>;

// Reads elements [i, i + kPair).
template <class T, bool Interleaved = is_interleaved<T>>
[[gnu::always_inline]] inline Pair load_pair(const std::byte* memory, std::size_t i) noexcept {
  const std::byte* const first = memory + i * sizeof(T);
  const std::byte* const second = first + kLanes * sizeof(T);
  if constexpr (std::is_same_v<T, Float16>) {
    return {widen(widen_halves(first)), widen(widen_halves(second))};
  } else if constexpr (std::is_same_v<T, BFloat16> && Interleaved) {
    const Words words = load_register<Words>(first);
    return {widen(to_floats(words << 16)), widen(to_floats(words & 0xffff0000u))};
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return {widen(to_floats(load_half_words(first) << 16)),
            widen(to_floats(load_half_words(second) << 16))};
  } else if constexpr (std::is_same_v<T, float>) {
    return {widen(load_register<Floats>(first)), widen(load_register<Floats>(second))};
  } else {
    return {load_register<Doubles>(first), load_register<Doubles>(second)};
  }
}

// Writes the numbers of a pair in the order of their elements.
template <class T>
inline void spread_pair(double* to, Pair value) noexcept {
  for (std::size_t l = 0; l < kLanes; ++l) {
    to[is_interleaved<T> ? 2 * l : l] = value.a[l];
    to[is_interleaved<T> ? 2 * l + 1 : kLanes + l] = value.b[l];
  }
}

// Rounds floats made by round_to_odd to bfloat16, in the upper half of each word. Expects NaN with
// a lower half of zeros, as bfloat16 and arithmetic give: rounding up others may overflow.
[[gnu::always_inline]] inline Words narrow_bfloat16(Words odd) noexcept {
  return odd + 0x7fffu + (odd >> 16 & 1);
}

// Writes elements [i, i + kPair), rounded once. A NaN stays a NaN, except as narrow_bfloat16 says,
// but its bits may change. With Stream, writes past the caches, to memory that is aligned to the
// size of a register.
template <class T, bool Stream = false>
[[gnu::always_inline]] inline void store_pair(std::byte* memory, std::size_t i,
                                              Pair value) noexcept {
  std::byte* const to = memory + i * sizeof(T);
  if constexpr (std::is_same_v<T, Float16>) {
    const Floats a = to_floats(round_to_odd(value.a));
    const Floats b = to_floats(round_to_odd(value.b));
    store_register<Stream>(to, narrow_to_halves(a, b));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const Words even = narrow_bfloat16(round_to_odd(value.a)) >> 16;
    const Words odd = narrow_bfloat16(round_to_odd(value.b)) & 0xffff0000u;
    store_register<Stream>(to, even | odd);
  } else if constexpr (std::is_same_v<T, float>) {
    store_register<Stream>(to, narrow(value.a));
    store_register<Stream>(to + kLanes * sizeof(T), narrow(value.b));
  } else {
    store_register<Stream>(to, value.a);
    store_register<Stream>(to + kLanes * sizeof(T), value.b);
  }
}

// Gives every NaN of `out[begin, end)` the same bits.
template <class T>
void unify_nan(std::byte* out, std::size_t begin, std::size_t end) noexcept {
  for (std::size_t i = begin; i < end; ++i) {
    if constexpr (std::is_same_v<T, Float16>) {
      if ((load<std::uint16_t>(out, i) & 0x7fffu) > 0x7c00u) store(out, i, kNanFloat16);
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      if ((load<std::uint16_t>(out, i) & 0x7fffu) > 0x7f80u) store(out, i, kNanBFloat16);
    } else {
      store(out, i, with_one_nan(load<T>(out, i)));
    }
  }
}

}  // namespace
}  // namespace flatweights

#endif
