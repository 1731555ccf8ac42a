// Differences of 16 bits, added to what they were taken from.
#pragma once

#include <cstddef>
#include <span>

#include "flatweights/dtype.hpp"

namespace flatweights {

// Part of a model and of a difference: either of one real type that is averaged and another
// one that is narrower, or of the same bytes, which are then copied.
struct DifferencePart {
  DType dtype;         // of the model
  DType narrow_dtype;  // of the difference
  std::size_t size;    // elements
  std::size_t nbytes;  // of the model
  bool is_copied;
  std::byte* model;
  const std::byte* difference;
};

// Adds to each number of the model that of the difference, widened, rounded once.
void add_difference(std::span<const DifferencePart> parts);

}  // namespace flatweights
