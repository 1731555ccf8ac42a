// Squared distances between all pairs of models, in one pass over memory.
#pragma once

#include <cstddef>
#include <span>

#include "flatweights/parts.hpp"

namespace flatweights {

// Squares of a pair are added in this many columns.
inline constexpr std::size_t kDistanceColumns = 8;
// Numbers of each source that are in the caches at a time: their squares are added in one type.
inline constexpr std::size_t kDistanceBlock = 1024;

// Writes the squared distance between models i and j to `out[i * count + j]`, over all real
// numbers of their `parts`. Slot s of model k begins at `sources[s * count + k]`; the data of
// `parts` are not read.
//
// Numbers of up to 32 bits are subtracted and squared in float32, and blocks of squares added in
// float64; again, all in float64, if that overflows, or if underflow could matter. The bits
// depend on the number and shapes of the parts, not on threads or alignment. A distance is NaN
// if a number of either model is NaN, and NaN or infinite if one is infinite.
void squared_distances(double* out, std::span<const ReadPart> parts,
                       std::span<const std::byte* const> sources, std::size_t count);

}  // namespace flatweights
