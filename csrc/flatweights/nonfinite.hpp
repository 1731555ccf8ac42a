// Finds NaN and infinity.
#pragma once

#include <cstddef>
#include <span>

#include "flatweights/parts.hpp"

namespace flatweights {

// Index of the first part that holds a NaN or an infinity, or `parts.size()`.
// Parts of integers and of types that are only moved count as finite.
[[nodiscard]] std::size_t first_nonfinite(std::span<const ReadPart> parts);

}  // namespace flatweights
