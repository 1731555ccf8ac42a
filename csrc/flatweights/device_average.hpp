// What one launch of the averaging kernel is given; shared by the host and nvcc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flatweights/dtype.hpp"

namespace flatweights {

// With more sources than this, the arguments of a launch would be larger than old drivers take.
inline constexpr std::size_t kMostAveraged = 128;

// As AveragePiece::real: the first source's bytes are kept.
inline constexpr std::uint32_t kKept = kReals;

// Part of one slot of packed models, for one block of threads.
struct AveragePiece {
  std::uint64_t offset;  // bytes in the packed form; a multiple of 16
  std::uint32_t count;   // real numbers, or bytes of kKept
  std::uint32_t real;    // index of the real type; or kKept
};

// The mean of packed models of one layout. All addresses are multiples of 16, and nothing overlaps
// `out`. Bytes between the end of a slot and the next multiple of 16 may be read.
struct DeviceAverage {
  const AveragePiece* pieces;
  std::byte* out;
  // For each source a flag, or null. Set to 1 if the source holds NaN or infinity in a piece that
  // is averaged; else left alone.
  std::uint32_t* nonfinite;
  double factor;           // of Divisor: the sum of the weights, or its inverse
  std::uint32_t multiply;  // of Divisor: whether `factor` is the inverse
  std::uint32_t weighted;  // if 0, all weights are 1
  std::uint32_t num_pieces;
  std::uint32_t num_sources;
  const std::byte* sources[kMostAveraged];
  double weights[kMostAveraged];
};

}  // namespace flatweights
