// Weighted mean of packed models in the memory of one GPU, by its own kernel.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "flatweights/layout.hpp"

namespace flatweights {

// With more sources than this, nothing is averaged on a GPU.
[[nodiscard]] std::size_t most_averaged_segments() noexcept;

// Writes the mean of packed models, all in the memory of the GPU of `context`, to `out`, which
// overlaps none of them; with the bits of `average_into`. Returns when `out` is complete. Sources
// are complete before the call. Their weights are `weights`, of sum `total`; there is at least one
// source.
//
// Returns, for each source, whether it holds NaN or infinity in a slot that is averaged; if
// all sums are finite, none does. Throws std::bad_alloc or CudaError.
std::vector<bool> average_segments(void* context, const Layout& layout, std::byte* out,
                                   std::span<const std::byte* const> sources,
                                   std::span<const double> weights, double total);

}  // namespace flatweights
