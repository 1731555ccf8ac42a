// Makes 16-bit differences between a model and a reference, and adds them.
#pragma once

#include <cstddef>
#include <span>

#include "flatweights/dtype.hpp"

namespace flatweights {

// Part of a model and of its difference: numbers of two averaged real types, of which the
// difference has the narrower one; or equal bytes, which are copied.
struct DifferencePart {
  DType dtype;         // of the model
  DType narrow_dtype;  // of the difference
  std::size_t size;    // elements
  std::size_t nbytes;  // of the model
  bool is_copied;
  std::byte* model;
  std::byte* difference;
  // For encode_difference, in the dtype of the model. Null inputs count as zeros; a null output
  // is not written.
  const std::byte* reference = nullptr;
  const std::byte* residual = nullptr;
  std::byte* next_residual = nullptr;
};

// Adds the difference, widened, to the model; each sum is rounded once.
void add_difference(std::span<const DifferencePart> parts);

// Writes `model - reference + residual`, rounded to 16 bits, to the difference, and the error of
// that rounding to `next_residual`, if there is a residual. Each operation is rounded to the type
// of the model, float32 or float64. Nothing overlaps. Returns the index of the first part
// whose difference holds NaN or infinity, or `parts.size()`. Without a residual, the difference
// will be added to the reference, and a part counts as well if that sum holds infinity.
[[nodiscard]] std::size_t encode_difference(std::span<const DifferencePart> parts);

}  // namespace flatweights
