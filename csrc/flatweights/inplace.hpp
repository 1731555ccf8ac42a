// Operations on one model in place, and its norm. Integers are neither changed nor counted.
#pragma once

#include <cstddef>
#include <span>

#include "flatweights/parts.hpp"

namespace flatweights {

// Part of a model `y`, and of a model `x` of the same layout if there is one. A part's `x` may
// be its own `y`; otherwise nothing overlaps.
struct InPlacePart {
  DType dtype;
  std::size_t size;  // elements
  std::byte* y;
  const std::byte* x = nullptr;
};

// Each operation computes in float64, without contraction, and rounds once. The bits do
// not depend on threads, alignment or instruction set.

// y = a * y
void scale(std::span<const InPlacePart> parts, double a);

// y = y + a * x
void axpy(std::span<const InPlacePart> parts, double a);

// y = y + a * (x - y), for a >= 0.5 as x - (1 - a) * (x - y).
void lerp(std::span<const InPlacePart> parts, double a);

// The square root of the sum of all squares of real and imaginary parts. Sums of float64
// are compensated; squares beyond the range of float64 do no harm.
[[nodiscard]] double norm(std::span<const ReadPart> parts);

// Scales by `most / norm` if the norm exceeds `most`, which is not negative. Returns the old
// norm; if that is NaN or infinite, nothing has been changed.
double clip_by_norm(std::span<const InPlacePart> parts, double most);

}  // namespace flatweights
