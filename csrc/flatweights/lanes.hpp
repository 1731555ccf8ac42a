// Numbers side by side in registers: what the loops for AVX2 and AVX-512 are written with.
//
// Included by kernels.cpp alone. Defines FLATWEIGHTS_LANES where there are such registers.
#pragma once

#if defined(__AVX2__) && defined(__F16C__) && !defined(FLATWEIGHTS_PORTABLE)
#define FLATWEIGHTS_LANES 1

#include <immintrin.h>

#include <cstddef>
#include <type_traits>

#include "flatweights/real.hpp"

namespace flatweights {
namespace {

#if defined(__AVX512F__)

inline constexpr std::size_t kLanes = 8;
using Doubles = __m512d;
using Floats = __m256;
using Words = __m256i;  // of 32 bits, as many as Floats

inline Doubles broadcast(double value) noexcept { return _mm512_set1_pd(value); }
inline Doubles load_doubles(const void* from) noexcept { return _mm512_loadu_pd(from); }
template <bool Stream = false>
inline void store_doubles(void* to, Doubles value) noexcept {
  if constexpr (Stream)
    _mm512_stream_pd(static_cast<double*>(to), value);
  else
    _mm512_storeu_pd(to, value);
}
inline Floats load_floats(const void* from) noexcept {
  return _mm256_loadu_ps(static_cast<const float*>(from));
}
template <bool Stream = false>
inline void store_floats(void* to, Floats value) noexcept {
  const auto floats = static_cast<float*>(to);
  if constexpr (Stream)
    _mm256_stream_ps(floats, value);
  else
    _mm256_storeu_ps(floats, value);
}
// With masks that leave nothing out: GCC 12 warns that those without read what is not set.
inline Doubles widen(Floats value) noexcept { return _mm512_maskz_cvtps_pd(0xff, value); }
inline Floats narrow(Doubles value) noexcept { return _mm512_maskz_cvtpd_ps(0xff, value); }
inline Floats widen_halves(const void* from) noexcept {
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
// Twice as many numbers of half the size: a register whole.
inline Words narrow_to_halves(Floats a, Floats b) noexcept {
  return _mm256_set_m128i(_mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT),
                          _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
inline Words load_half_words(const void* from) noexcept {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
inline Words load_words(const void* from) noexcept {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
template <bool Stream = false>
inline void store_words(void* to, Words value) noexcept {
  const auto words = static_cast<__m256i*>(to);
  if constexpr (Stream)
    _mm256_stream_si256(words, value);
  else
    _mm256_storeu_si256(words, value);
}
inline Words to_words(Floats value) noexcept { return _mm256_castps_si256(value); }
inline Floats to_floats(Words value) noexcept { return _mm256_castsi256_ps(value); }
inline Words broadcast_word(std::uint32_t value) noexcept {
  return _mm256_set1_epi32(static_cast<int>(value));
}
inline Words add_words(Words a, Words b) noexcept { return _mm256_add_epi32(a, b); }
inline Words and_words(Words a, Words b) noexcept { return _mm256_and_si256(a, b); }
inline Words or_words(Words a, Words b) noexcept { return _mm256_or_si256(a, b); }
template <int Count>
inline Words shift_left(Words a) noexcept {
  return _mm256_slli_epi32(a, Count);
}
template <int Count>
inline Words shift_right(Words a) noexcept {
  return _mm256_srli_epi32(a, Count);
}

// As round_to_odd of real.hpp: cut off, and the last bit set where anything was lost.
inline Words round_to_odd(Doubles value) noexcept {
  const Floats cut =
      _mm512_maskz_cvt_roundpd_ps(0xff, value, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  const __mmask8 lost = _mm512_cmp_pd_mask(widen(cut), value, _CMP_NEQ_UQ);
  return _mm256_mask_or_epi32(to_words(cut), lost, to_words(cut), broadcast_word(1));
}

inline bool any_nonzero_or_nan(Doubles value) noexcept {
  return _mm512_cmp_pd_mask(value, _mm512_setzero_pd(), _CMP_NEQ_UQ) != 0;
}

// `value` where it is finite, else 0.
inline Doubles finite_or_zero(Doubles value) noexcept {
  const __mmask8 finite = _mm512_cmp_pd_mask(value - value, _mm512_setzero_pd(), _CMP_EQ_OQ);
  return _mm512_maskz_mov_pd(finite, value);
}

#else

inline constexpr std::size_t kLanes = 4;
using Doubles = __m256d;
using Floats = __m128;
using Words = __m128i;  // of 32 bits, as many as Floats

inline Doubles broadcast(double value) noexcept { return _mm256_set1_pd(value); }
inline Doubles load_doubles(const void* from) noexcept {
  return _mm256_loadu_pd(static_cast<const double*>(from));
}
template <bool Stream = false>
inline void store_doubles(void* to, Doubles value) noexcept {
  const auto doubles = static_cast<double*>(to);
  if constexpr (Stream)
    _mm256_stream_pd(doubles, value);
  else
    _mm256_storeu_pd(doubles, value);
}
inline Floats load_floats(const void* from) noexcept {
  return _mm_loadu_ps(static_cast<const float*>(from));
}
template <bool Stream = false>
inline void store_floats(void* to, Floats value) noexcept {
  const auto floats = static_cast<float*>(to);
  if constexpr (Stream)
    _mm_stream_ps(floats, value);
  else
    _mm_storeu_ps(floats, value);
}
inline Doubles widen(Floats value) noexcept { return _mm256_cvtps_pd(value); }
inline Floats narrow(Doubles value) noexcept { return _mm256_cvtpd_ps(value); }
inline Floats widen_halves(const void* from) noexcept {
  return _mm_cvtph_ps(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
}
inline Words narrow_to_halves(Floats a, Floats b) noexcept {
  return _mm_unpacklo_epi64(_mm_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT),
                            _mm_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT));
}
inline Words load_half_words(const void* from) noexcept {
  return _mm_cvtepu16_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
}
inline Words load_words(const void* from) noexcept {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}
template <bool Stream = false>
inline void store_words(void* to, Words value) noexcept {
  const auto words = static_cast<__m128i*>(to);
  if constexpr (Stream)
    _mm_stream_si128(words, value);
  else
    _mm_storeu_si128(words, value);
}
inline Words to_words(Floats value) noexcept { return _mm_castps_si128(value); }
inline Floats to_floats(Words value) noexcept { return _mm_castsi128_ps(value); }
inline Words broadcast_word(std::uint32_t value) noexcept {
  return _mm_set1_epi32(static_cast<int>(value));
}
inline Words add_words(Words a, Words b) noexcept { return _mm_add_epi32(a, b); }
inline Words and_words(Words a, Words b) noexcept { return _mm_and_si128(a, b); }
inline Words or_words(Words a, Words b) noexcept { return _mm_or_si128(a, b); }
template <int Count>
inline Words shift_left(Words a) noexcept {
  return _mm_slli_epi32(a, Count);
}
template <int Count>
inline Words shift_right(Words a) noexcept {
  return _mm_srli_epi32(a, Count);
}

// The lower halves of four masks of 64 bits.
inline Words pack_masks(Doubles masks) noexcept {
  const Floats low = _mm_castpd_ps(_mm256_castpd256_pd128(masks));
  const Floats high = _mm_castpd_ps(_mm256_extractf128_pd(masks, 1));
  return to_words(_mm_shuffle_ps(low, high, _MM_SHUFFLE(2, 0, 2, 0)));
}

// As round_to_odd of real.hpp.
inline Words round_to_odd(Doubles value) noexcept {
  const Floats nearest = narrow(value);
  const Doubles back = widen(nearest);
  const Doubles sign = broadcast(-0.0);
  const Words lost = pack_masks(_mm256_cmp_pd(back, value, _CMP_NEQ_UQ));
  const Words away = pack_masks(
      _mm256_cmp_pd(_mm256_andnot_pd(sign, back), _mm256_andnot_pd(sign, value), _CMP_GT_OQ));
  // A mask is -1.
  return or_words(add_words(to_words(nearest), away), and_words(lost, broadcast_word(1)));
}

inline bool any_nonzero_or_nan(Doubles value) noexcept {
  return _mm256_movemask_pd(_mm256_cmp_pd(value, _mm256_setzero_pd(), _CMP_NEQ_UQ)) != 0;
}

// `value` where it is finite, else 0.
inline Doubles finite_or_zero(Doubles value) noexcept {
  return _mm256_and_pd(value, _mm256_cmp_pd(value - value, _mm256_setzero_pd(), _CMP_EQ_OQ));
}

#endif

inline Doubles broadcast(Doubles values) noexcept { return values; }

// Two registers' worth of consecutive elements: the first half in `a`, the second in `b`. Or,
// where Interleaved, the even ones in `a` and the odd ones in `b`: bfloat16, in 32-bit words,
// is then one shift or mask apart from what it is as floats.
struct Pair {
  Doubles a;
  Doubles b;
};

inline constexpr std::size_t kPair = 2 * kLanes;

// The compiler has `value` in registers here, whatever it would rather compute first.
[[gnu::always_inline]] inline void settle(Pair& value) noexcept {
  asm volatile("" : "+x"(value.a), "+x"(value.b));
}

template <class T>
inline constexpr bool is_interleaved = std::is_same_v<T, BFloat16>;

// Reads elements [i, i + kPair).
template <class T, bool Interleaved = is_interleaved<T>>
[[gnu::always_inline]] inline Pair load_pair(const std::byte* memory, std::size_t i) noexcept {
  const std::byte* const from = memory + i * sizeof(T);
  if constexpr (std::is_same_v<T, Float16>) {
    return {widen(widen_halves(from)), widen(widen_halves(from + kLanes * sizeof(T)))};
  } else if constexpr (std::is_same_v<T, BFloat16> && !Interleaved) {
    return {widen(to_floats(shift_left<16>(load_half_words(from)))),
            widen(to_floats(shift_left<16>(load_half_words(from + kLanes * sizeof(T)))))};
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const Words words = load_words(from);
    return {widen(to_floats(shift_left<16>(words))),
            widen(to_floats(and_words(words, broadcast_word(0xffff0000u))))};
  } else if constexpr (std::is_same_v<T, float>) {
    return {widen(load_floats(from)), widen(load_floats(from + kLanes * sizeof(T)))};
  } else {
    return {load_doubles(from), load_doubles(from + kLanes * sizeof(T))};
  }
}

// Writes the numbers of a pair in the order of their elements.
template <class T>
inline void spread_pair(double* to, Pair value) noexcept {
  double a[kLanes];
  double b[kLanes];
  store_doubles(a, value.a);
  store_doubles(b, value.b);
  for (std::size_t l = 0; l < kLanes; ++l) {
    to[is_interleaved<T> ? 2 * l : l] = a[l];
    to[is_interleaved<T> ? 2 * l + 1 : kLanes + l] = b[l];
  }
}

// Rounds floats made by round_to_odd to bfloat16, in the upper half of each word.
[[gnu::always_inline]] inline Words narrow_bfloat16(Words odd) noexcept {
  const Words last = and_words(shift_right<16>(odd), broadcast_word(1));
  return add_words(add_words(odd, broadcast_word(0x7fffu)), last);
}

// Writes elements [i, i + kPair), rounded once. NaN stay NaN, any one. Past the caches where
// Stream; each register's place is then aligned to its size.
template <class T, bool Stream = false>
[[gnu::always_inline]] inline void store_pair(std::byte* memory, std::size_t i,
                                              Pair value) noexcept {
  std::byte* const to = memory + i * sizeof(T);
  if constexpr (std::is_same_v<T, Float16>) {
    store_words<Stream>(
        to, narrow_to_halves(to_floats(round_to_odd(value.a)), to_floats(round_to_odd(value.b))));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const Words even = shift_right<16>(narrow_bfloat16(round_to_odd(value.a)));
    const Words odd = narrow_bfloat16(round_to_odd(value.b));
    store_words<Stream>(to, or_words(even, and_words(odd, broadcast_word(0xffff0000u))));
  } else if constexpr (std::is_same_v<T, float>) {
    store_floats<Stream>(to, narrow(value.a));
    store_floats<Stream>(to + kLanes * sizeof(T), narrow(value.b));
  } else {
    store_doubles<Stream>(to, value.a);
    store_doubles<Stream>(to + kLanes * sizeof(T), value.b);
  }
}

// Makes every NaN of `out[begin, end)` the same one.
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
