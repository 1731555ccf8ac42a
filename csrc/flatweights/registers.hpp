// Registers that hold several numbers, in the vector types of GCC and clang: one source for
// AVX-512, AVX2 and NEON. Only what these types cannot express is written per instruction set.
//
// Included by code that is compiled once per instruction set. Defines FLATWEIGHTS_REGISTERS if
// the loops use registers, and FLATWEIGHTS_STREAMS if stores can bypass the caches.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(FLATWEIGHTS_PORTABLE)
#if defined(__AVX512F__)
#define FLATWEIGHTS_REGISTERS 64
#elif defined(__AVX2__) && defined(__F16C__)
#define FLATWEIGHTS_REGISTERS 32
#elif defined(__aarch64__)
#define FLATWEIGHTS_REGISTERS 16
#endif
#if defined(__SSE2__)
#define FLATWEIGHTS_STREAMS 1
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#endif

// Before a loop that may be vectorised without looking whether its memory overlaps.
#if defined(__clang__)
#define FLATWEIGHTS_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define FLATWEIGHTS_IVDEP _Pragma("GCC ivdep")
#endif

namespace flatweights {
namespace {

// Bytes of the widest register, which may begin anywhere in memory.
#if defined(FLATWEIGHTS_REGISTERS)
inline constexpr std::size_t kRegister = FLATWEIGHTS_REGISTERS;
#else
inline constexpr std::size_t kRegister = 16;
#endif

using Bytes = std::uint8_t __attribute__((vector_size(kRegister)));

template <class V>
[[gnu::always_inline]] inline V load_register(const void* from) noexcept {
  using Anywhere [[gnu::aligned(1), gnu::may_alias]] = V;
  return *static_cast<const Anywhere*>(from);
}

// Writes `value`; with Stream past the caches, to memory that is aligned to its size.
template <bool Stream = false, class V>
[[gnu::always_inline]] inline void store_register(void* to, V value) noexcept {
#if defined(FLATWEIGHTS_STREAMS)
  if constexpr (Stream) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64)
      return _mm512_stream_si512(static_cast<__m512i*>(to), __builtin_bit_cast(__m512i, value));
#endif
#if defined(__AVX2__)
    if constexpr (sizeof(V) == 32)
      return _mm256_stream_si256(static_cast<__m256i*>(to), __builtin_bit_cast(__m256i, value));
#endif
    if constexpr (sizeof(V) == 16)
      return _mm_stream_si128(static_cast<__m128i*>(to), __builtin_bit_cast(__m128i, value));
  }
#endif
  using Anywhere [[gnu::aligned(1), gnu::may_alias]] = V;
  *static_cast<Anywhere*>(to) = value;
}

// How far ahead of a loop memory is prefetched: beyond the border of a page, where processors'
// own prefetching stops.
inline constexpr std::size_t kAhead = 4096;

// Prefetches for a loop that reads `size` bytes at `from`, kAhead bytes later.
template <std::size_t size>
[[gnu::always_inline]] inline void read_ahead(const void* from) noexcept {
  for (std::size_t line = 0; line < size; line += 64)
    __builtin_prefetch(static_cast<const std::byte*>(from) + kAhead + line);
}

// Orders streamed stores before all that follow.
inline void end_streaming() noexcept {
#if defined(FLATWEIGHTS_STREAMS)
  _mm_sfence();
#endif
}

// The smaller and the larger of two numbers, or of two registers of numbers side by side. Of a
// zero of each sign either may be the smaller; NaN gives any number.
template <class T>
[[gnu::always_inline]] inline T lesser_of(T a, T b) noexcept {
  return a < b ? a : b;
}
template <class T>
[[gnu::always_inline]] inline T greater_of(T a, T b) noexcept {
  return b < a ? a : b;
}

// Numbers of full registers, for any instruction set.
template <class K>
struct RegisterOf {
  typedef K Type __attribute__((vector_size(kRegister)));
};
template <class K>
using Register = typename RegisterOf<K>::Type;

// The same with the instructions by name: the compiler finds them by itself, but takes long. With
// a mask of ones, since GCC 12 warns of its own header's uninitialized registers without one.
#if defined(FLATWEIGHTS_REGISTERS) && defined(__AVX512F__)
template <>
[[gnu::always_inline]] inline Register<float> lesser_of(Register<float> a,
                                                        Register<float> b) noexcept {
  return _mm512_maskz_min_ps(0xffff, a, b);
}
template <>
[[gnu::always_inline]] inline Register<float> greater_of(Register<float> a,
                                                         Register<float> b) noexcept {
  return _mm512_maskz_max_ps(0xffff, a, b);
}
template <>
[[gnu::always_inline]] inline Register<double> lesser_of(Register<double> a,
                                                         Register<double> b) noexcept {
  return _mm512_maskz_min_pd(0xff, a, b);
}
template <>
[[gnu::always_inline]] inline Register<double> greater_of(Register<double> a,
                                                          Register<double> b) noexcept {
  return _mm512_maskz_max_pd(0xff, a, b);
}
#elif defined(FLATWEIGHTS_REGISTERS) && defined(__AVX2__)
template <>
[[gnu::always_inline]] inline Register<float> lesser_of(Register<float> a,
                                                        Register<float> b) noexcept {
  return _mm256_min_ps(a, b);
}
template <>
[[gnu::always_inline]] inline Register<float> greater_of(Register<float> a,
                                                         Register<float> b) noexcept {
  return _mm256_max_ps(a, b);
}
template <>
[[gnu::always_inline]] inline Register<double> lesser_of(Register<double> a,
                                                         Register<double> b) noexcept {
  return _mm256_min_pd(a, b);
}
template <>
[[gnu::always_inline]] inline Register<double> greater_of(Register<double> a,
                                                          Register<double> b) noexcept {
  return _mm256_max_pd(a, b);
}
#endif

// Makes the compiler hold a value in a register before it goes on.
template <class V>
[[gnu::always_inline]] inline void settle([[maybe_unused]] V& value) noexcept {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(value));
#elif defined(__SSE2__)
  asm volatile("" : "+x"(value));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(value));
#endif
}

// `sum` + `a` * `b`, rounded once: with the processor's instruction if there is one, else slowly.
#if defined(FLATWEIGHTS_REGISTERS)
[[gnu::always_inline]] inline Register<float> multiply_add(Register<float> a, Register<float> b,
                                                           Register<float> sum) noexcept {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, sum);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, sum);
#else
  return __builtin_bit_cast(Register<float>, vfmaq_f32(__builtin_bit_cast(float32x4_t, sum),
                                                       __builtin_bit_cast(float32x4_t, a),
                                                       __builtin_bit_cast(float32x4_t, b)));
#endif
}
[[gnu::always_inline]] inline Register<double> multiply_add(Register<double> a, Register<double> b,
                                                            Register<double> sum) noexcept {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, sum);
#elif defined(__AVX2__)
  return _mm256_fmadd_pd(a, b, sum);
#else
  return __builtin_bit_cast(Register<double>, vfmaq_f64(__builtin_bit_cast(float64x2_t, sum),
                                                        __builtin_bit_cast(float64x2_t, a),
                                                        __builtin_bit_cast(float64x2_t, b)));
#endif
}
#else
inline Register<float> multiply_add(Register<float> a, Register<float> b,
                                    Register<float> sum) noexcept {
  for (std::size_t i = 0; i < kRegister / sizeof(float); ++i)
    sum[i] = __builtin_fmaf(a[i], b[i], sum[i]);
  return sum;
}
inline Register<double> multiply_add(Register<double> a, Register<double> b,
                                     Register<double> sum) noexcept {
  for (std::size_t i = 0; i < kRegister / sizeof(double); ++i)
    sum[i] = __builtin_fma(a[i], b[i], sum[i]);
  return sum;
}
#endif

#if defined(FLATWEIGHTS_REGISTERS)

inline constexpr std::size_t kLanes = kRegister / sizeof(double);

using Doubles = double __attribute__((vector_size(kRegister)));
using Longs = std::int64_t __attribute__((vector_size(kRegister)));  // masks of Doubles: 0 or -1
using Floats = float __attribute__((vector_size(kRegister / 2)));
using Words = std::uint32_t __attribute__((vector_size(kRegister / 2)));

[[gnu::always_inline]] inline Doubles broadcast(double value) noexcept {
  return value - Doubles{};  // a sum would turn -0.0 into 0.0
}

[[gnu::always_inline]] inline Words to_words(Floats value) noexcept {
  return __builtin_bit_cast(Words, value);
}
[[gnu::always_inline]] inline Floats to_floats(Words value) noexcept {
  return __builtin_bit_cast(Floats, value);
}

// `value` where it is finite, else 0.
[[gnu::always_inline]] inline Doubles finite_or_zero(Doubles value) noexcept {
  return value - value == 0 ? value : Doubles{};
}

// The rest is written per instruction set, because GCC 12 emits several instructions instead of
// one (`__builtin_convertvector`), or has no vector type for it (float16):
//
// widen and narrow convert between float32 and float64. round_to_odd is that of real.hpp.
// widen_halves reads kLanes numbers of float16, narrow_to_halves makes them of two registers,
// load_half_words reads kLanes words of 16 bits. widen_eight reads eight numbers of float16.

#if defined(__AVX512F__)

[[gnu::always_inline]] inline bool any_nonzero_or_nan(Doubles value) noexcept {
  return _mm512_cmp_pd_mask(value, Doubles{}, _CMP_NEQ_UQ) != 0;
}
// With masks that select everything: without masks, GCC 12 warns of uninitialised memory.
[[gnu::always_inline]] inline Doubles widen(Floats value) noexcept {
  return _mm512_maskz_cvtps_pd(0xff, value);
}
[[gnu::always_inline]] inline Floats narrow(Doubles value) noexcept {
  return _mm512_maskz_cvtpd_ps(0xff, value);
}
// Truncates, and sets the last bit if anything was lost.
[[gnu::always_inline]] inline Words round_to_odd(Doubles value) noexcept {
  const Floats cut =
      _mm512_maskz_cvt_roundpd_ps(0xff, value, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  const __mmask8 lost = _mm512_cmp_pd_mask(widen(cut), value, _CMP_NEQ_UQ);
  const __m256i bits = _mm256_castps_si256(cut);
  return __builtin_bit_cast(Words, _mm256_mask_or_epi32(bits, lost, bits, _mm256_set1_epi32(1)));
}
[[gnu::always_inline]] inline Floats widen_halves(const void* from) noexcept {
  return _mm256_cvtph_ps(load_register<__m128i>(from));
}
[[gnu::always_inline]] inline Words narrow_to_halves(Floats a, Floats b) noexcept {
  return __builtin_bit_cast(Words, _mm256_set_m128i(_mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT),
                                                    _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)));
}
[[gnu::always_inline]] inline Words load_half_words(const void* from) noexcept {
  return __builtin_bit_cast(Words, _mm256_cvtepu16_epi32(load_register<__m128i>(from)));
}

#elif defined(__AVX2__)

[[gnu::always_inline]] inline bool any_nonzero_or_nan(Doubles value) noexcept {
  return _mm256_movemask_pd(_mm256_cmp_pd(value, Doubles{}, _CMP_NEQ_UQ)) != 0;
}
[[gnu::always_inline]] inline Doubles widen(Floats value) noexcept {
  return _mm256_cvtps_pd(value);
}
[[gnu::always_inline]] inline Floats narrow(Doubles value) noexcept {
  return _mm256_cvtpd_ps(value);
}
// The lower halves of masks.
[[gnu::always_inline]] inline Words narrow_masks(Longs masks) noexcept {
  const auto both = __builtin_bit_cast(__m256, masks);
  return __builtin_bit_cast(
      Words, _mm_shuffle_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1),
                            _MM_SHUFFLE(2, 0, 2, 0)));
}
[[gnu::always_inline]] inline Doubles magnitude_of(Doubles value) noexcept {
  return __builtin_bit_cast(Doubles, __builtin_bit_cast(Longs, value) & INT64_MAX);
}
[[gnu::always_inline]] inline Words round_to_odd(Doubles value) noexcept {
  const Floats nearest = narrow(value);
  const Doubles back = widen(nearest);
  const Words away = narrow_masks(magnitude_of(back) > magnitude_of(value));
  const Words lost = narrow_masks(back != value);
  return (to_words(nearest) + away) | (lost & 1);  // a mask is -1
}
[[gnu::always_inline]] inline Floats widen_halves(const void* from) noexcept {
  return _mm_cvtph_ps(_mm_loadu_si64(from));
}
[[gnu::always_inline]] inline Words narrow_to_halves(Floats a, Floats b) noexcept {
  return __builtin_bit_cast(Words, _mm_unpacklo_epi64(_mm_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT),
                                                      _mm_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT)));
}
[[gnu::always_inline]] inline Words load_half_words(const void* from) noexcept {
  return __builtin_bit_cast(Words, _mm_cvtepu16_epi32(_mm_loadu_si64(from)));
}

#else

[[gnu::always_inline]] inline bool any_nonzero_or_nan(Doubles value) noexcept {
  return !(value[0] == 0 && value[1] == 0);
}
[[gnu::always_inline]] inline Doubles widen(Floats value) noexcept {
  return __builtin_bit_cast(Doubles, vcvt_f64_f32(__builtin_bit_cast(float32x2_t, value)));
}
[[gnu::always_inline]] inline Floats narrow(Doubles value) noexcept {
  return __builtin_bit_cast(Floats, vcvt_f32_f64(__builtin_bit_cast(float64x2_t, value)));
}
[[gnu::always_inline]] inline Words round_to_odd(Doubles value) noexcept {
  return __builtin_bit_cast(Words, vcvtx_f32_f64(__builtin_bit_cast(float64x2_t, value)));
}
// Two numbers of 16 bits, twice.
[[gnu::always_inline]] inline uint32x2_t load_two(const void* from) noexcept {
  std::uint32_t bits;
  __builtin_memcpy(&bits, from, sizeof(bits));
  return vdup_n_u32(bits);
}
[[gnu::always_inline]] inline Floats widen_halves(const void* from) noexcept {
  const auto wide = vcvt_f32_f16(vreinterpret_f16_u32(load_two(from)));
  return __builtin_bit_cast(Floats, vget_low_f32(wide));
}
[[gnu::always_inline]] inline Words narrow_to_halves(Floats a, Floats b) noexcept {
  const auto both =
      vcombine_f32(__builtin_bit_cast(float32x2_t, a), __builtin_bit_cast(float32x2_t, b));
  return __builtin_bit_cast(Words, vcvt_f16_f32(both));
}
[[gnu::always_inline]] inline Words load_half_words(const void* from) noexcept {
  const auto wide = vmovl_u16(vreinterpret_u16_u32(load_two(from)));
  return __builtin_bit_cast(Words, vget_low_u32(wide));
}
inline void widen_eight(float* to, const void* from) noexcept {
  const auto halves = load_register<float16x8_t>(from);
  store_register(to, vcvt_f32_f16(vget_low_f16(halves)));
  store_register(to + 4, vcvt_high_f32_f16(halves));
}

#endif

#if !defined(__aarch64__)
inline void widen_eight(float* to, const void* from) noexcept {
  store_register(to, _mm256_cvtph_ps(load_register<__m128i>(from)));
}
#endif
#endif

}  // namespace
}  // namespace flatweights
