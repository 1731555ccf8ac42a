// Weighted mean of equally shaped parts, in one pass over memory.
#pragma once

#include <cstddef>
#include <span>

#include "flatweights/dtype.hpp"

namespace flatweights {

struct AveragePart {
  DType dtype;         // of the sources
  std::size_t size;    // elements
  std::size_t nbytes;  // of `out`
  std::byte* out;
  // Of `out`: the same as `dtype`; or float32 or float64 if `dtype` is float16 or bfloat16.
  DType out_dtype;
};

// Writes to each part the mean, over k, of `sources[part * weights.size() + k]`
// with weights `weights[k]`, divided by `total`, their sum. An integer part gets
// the bytes of its first source. There is at least one source.
//
// A part's `out` may be one of its own sources and overlaps nothing else. Sources
// are added in order, so the result does not depend on threads or alignment.
//
// Returns whether all sums are finite. If so, all sources are; if not, a sum may merely
// have overflowed.
bool average_into(std::span<const AveragePart> parts, std::span<const std::byte* const> sources,
                  std::span<const double> weights, double total);

}  // namespace flatweights
