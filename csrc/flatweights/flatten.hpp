// Moves many pieces of memory at once: parts into a buffer, or a buffer into parts.
#pragma once

#include <cstddef>
#include <span>

#include "flatweights/dtype.hpp"

namespace flatweights {

// One piece: `size` elements from `from` to `to`. Between two different averaged real types,
// values are converted and rounded once; otherwise bytes are copied, and the dtypes do not
// matter.
struct Copy {
  std::byte* to;
  const std::byte* from;
  std::size_t size;
  std::size_t itemsize;  // bytes of an element of `to`
  DType to_dtype = DType::kOther;
  DType from_dtype = DType::kOther;
};

// Carries out `copies`. Each element is read once and written once. No destination
// overlaps any other range.
void copy_all(std::span<const Copy> copies);

}  // namespace flatweights
