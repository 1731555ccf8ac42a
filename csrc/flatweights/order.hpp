// Means over ranks of the sorted numbers of equally shaped parts, in one pass over memory.
#pragma once

#include <cstddef>
#include <span>

#include "flatweights/average.hpp"
#include "flatweights/sorting.hpp"

namespace flatweights {

// Writes to each part, number by number, the mean over `ranks` of the sorted numbers of
// `sources[part * num_sources + k]` over k < num_sources. There are 1 to kMostSources sources, and
// the dtypes of a part and its `out` are the same, and not complex. An integer part gets the bytes
// of its first source.
//
// A part's `out` may be one of its own sources and overlaps nothing else. Numbers are added in the
// order of their ranks, so the result does not depend on the order of the sources, on threads, or
// on alignment. It is NaN where a source is NaN.
//
// Returns whether all numbers of all sources are finite.
bool order_into(std::span<const AveragePart> parts, std::span<const std::byte* const> sources,
                std::size_t num_sources, Ranks ranks);

}  // namespace flatweights
