// The averaging kernel's body. nvcc compiles it for GPUs, g++ for the tests that compare it with
// average_kernel.hpp, its oracle: every bit is the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "flatweights/device_average.hpp"
#include "flatweights/device_code.hpp"
#include "flatweights/scalar.hpp"
#include "flatweights/two_sum.hpp"

namespace flatweights {
namespace {

// What one thread loads at once.
struct alignas(16) Vector {
  std::uint32_t words[4];
};

template <class T>
inline constexpr std::uint32_t kInVector = sizeof(Vector) / sizeof(T);

// Element `i`, exactly.
template <class T>
FLATWEIGHTS_DEVICE inline double element(const Vector& vector, std::uint32_t i) noexcept {
  if constexpr (std::is_same_v<T, Float16>) {
    return static_cast<double>(
        widen_float16(static_cast<std::uint16_t>(vector.words[i / 2] >> (i % 2 * 16))));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return static_cast<double>(
        widen_bfloat16(static_cast<std::uint16_t>(vector.words[i / 2] >> (i % 2 * 16))));
  } else if constexpr (std::is_same_v<T, float>) {
    return static_cast<double>(__builtin_bit_cast(float, vector.words[i]));
  } else {
    const std::uint64_t high = vector.words[2 * i + 1];
    return __builtin_bit_cast(double, high << 32 | vector.words[2 * i]);
  }
}

// Rounds `value` to element `i` of a vector of zeros.
template <class T>
FLATWEIGHTS_DEVICE inline void set_element(Vector& vector, std::uint32_t i, double value) noexcept {
  if constexpr (sizeof(T) == 2) {
    const std::uint32_t odd = round_to_odd(value);
    const std::uint32_t bits =
        std::is_same_v<T, Float16> ? narrow_float16(odd) : narrow_bfloat16(odd);
    vector.words[i / 2] |= bits << (i % 2 * 16);
  } else if constexpr (std::is_same_v<T, float>) {
    vector.words[i] = __builtin_bit_cast(std::uint32_t, with_one_nan(static_cast<float>(value)));
  } else {
    const auto bits = __builtin_bit_cast(std::uint64_t, with_one_nan(value));
    vector.words[2 * i] = static_cast<std::uint32_t>(bits);
    vector.words[2 * i + 1] = static_cast<std::uint32_t>(bits >> 32);
  }
}

FLATWEIGHTS_DEVICE inline Vector load_vector(const std::byte* memory) noexcept {
  return *reinterpret_cast<const Vector*>(memory);
}

FLATWEIGHTS_DEVICE inline bool is_finite(double value) noexcept { return value - value == 0.0; }

// Writes the first `nbytes` of a vector, at least one.
FLATWEIGHTS_DEVICE inline void store_vector(std::byte* out, const Vector& vector,
                                            std::uint32_t nbytes) noexcept {
  if (nbytes == sizeof(Vector)) {
    *reinterpret_cast<Vector*>(out) = vector;
    return;
  }
  std::uint64_t half = std::uint64_t{vector.words[1]} << 32 | vector.words[0];
  const std::uint64_t high = std::uint64_t{vector.words[3]} << 32 | vector.words[2];
  FLATWEIGHTS_NO_UNROLL
  for (std::uint32_t i = 0; i < nbytes; ++i) {
    if (i == sizeof(half)) half = high;
    out[i] = static_cast<std::byte>(half & 0xff);
    half >>= 8;
  }
}

// Sets the flags of the sources that hold NaN or infinity in the first `used` elements at `offset`.
template <class T>
FLATWEIGHTS_DEVICE inline void mark_nonfinite(const DeviceAverage& job, std::uint64_t offset,
                                              std::uint32_t used) noexcept {
  FLATWEIGHTS_NO_UNROLL
  for (std::uint32_t k = 0; k < job.num_sources; ++k) {
    const Vector vector = load_vector(job.sources[k] + offset);
    bool finite = true;
    FLATWEIGHTS_UNROLL
    for (std::uint32_t i = 0; i < kInVector<T>; ++i)
      finite = finite && (i >= used || is_finite(element<T>(vector, i)));
    if (!finite) job.nonfinite[k] = 1;
  }
}

// Averages the first `used` elements of the vectors at `offset`.
template <class T>
FLATWEIGHTS_DEVICE inline void average_vector(const DeviceAverage& job, std::uint64_t offset,
                                              std::uint32_t used) noexcept {
  double total[kInVector<T>] = {};
  double lost[kInVector<T>] = {};  // to rounding; used for float64 only
  Vector next = load_vector(job.sources[0] + offset);
  FLATWEIGHTS_NO_UNROLL
  for (std::uint32_t k = 0; k < job.num_sources; ++k) {
    const Vector vector = next;
    // Threads do not run ahead of an addition that waits for its term.
    if (k + 1 < job.num_sources) next = load_vector(job.sources[k + 1] + offset);
    FLATWEIGHTS_UNROLL
    for (std::uint32_t i = 0; i < kInVector<T>; ++i) {
      double term = element<T>(vector, i);
      if (job.weighted != 0) term *= job.weights[k];
      if constexpr (std::is_same_v<T, double>)
        add_exactly(total[i], lost[i], term);
      else
        total[i] += term;
    }
  }
  Vector mean{};
  bool finite = true;
  FLATWEIGHTS_UNROLL
  for (std::uint32_t i = 0; i < kInVector<T>; ++i) {
    finite = finite && (i >= used || is_finite(total[i]));
    double value = total[i];
    // An infinite sum has no meaningful remainder.
    if constexpr (std::is_same_v<T, double>) value += is_finite(lost[i]) ? lost[i] : 0.0;
    value = job.multiply != 0 ? value * job.factor : value / job.factor;
    set_element<T>(mean, i, value);
  }
  store_vector(job.out + offset, mean, used * static_cast<std::uint32_t>(sizeof(T)));
  if (!finite && job.nonfinite != nullptr) mark_nonfinite<T>(job, offset, used);
}

// Calls `body(offset, used)` for this thread's vectors of a piece with `in_vector` elements each.
template <class Body>
FLATWEIGHTS_DEVICE inline void for_each_vector(const AveragePiece& piece, std::uint32_t in_vector,
                                               std::uint32_t thread, std::uint32_t threads,
                                               Body body) noexcept {
  FLATWEIGHTS_NO_UNROLL
  for (std::uint32_t i = thread; i * in_vector < piece.count; i += threads) {
    const std::uint32_t left = piece.count - i * in_vector;
    body(piece.offset + std::uint64_t{i} * sizeof(Vector), left < in_vector ? left : in_vector);
  }
}

template <class T>
FLATWEIGHTS_DEVICE inline void average_piece_of(const DeviceAverage& job, const AveragePiece& piece,
                                                std::uint32_t thread,
                                                std::uint32_t threads) noexcept {
  for_each_vector(
      piece, kInVector<T>, thread, threads,
      [&job](std::uint64_t offset, std::uint32_t used) { average_vector<T>(job, offset, used); });
}

// What thread number `thread` of a block's `threads` does for one piece.
FLATWEIGHTS_DEVICE inline void average_piece(const DeviceAverage& job, const AveragePiece& piece,
                                             std::uint32_t thread, std::uint32_t threads) noexcept {
  switch (piece.real) {
    case 0:
      return average_piece_of<Float16>(job, piece, thread, threads);
    case 1:
      return average_piece_of<BFloat16>(job, piece, thread, threads);
    case 2:
      return average_piece_of<float>(job, piece, thread, threads);
    case 3:
      return average_piece_of<double>(job, piece, thread, threads);
    default:
      for_each_vector(piece, sizeof(Vector), thread, threads,
                      [&job](std::uint64_t offset, std::uint32_t used) {
                        store_vector(job.out + offset, load_vector(job.sources[0] + offset), used);
                      });
  }
}

}  // namespace
}  // namespace flatweights
