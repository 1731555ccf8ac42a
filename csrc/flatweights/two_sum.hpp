// Addition that keeps its rounding error.
#pragma once

#include "flatweights/device_code.hpp"

namespace flatweights {
namespace {

// Adds `term` to `total`, and the exact rounding error to `lost` (Knuth's TwoSum). So
// `total + lost` is the compensated sum of Neumaier (ZAMM 54, 1974). For numbers, or registers
// of numbers.
template <class V>
FLATWEIGHTS_DEVICE [[gnu::always_inline]] inline void add_exactly(V& total, V& lost,
                                                                  V term) noexcept {
  const V next = total + term;
  const V added = next - total;
  lost += (total - (next - added)) + (term - added);
  total = next;
}

}  // namespace
}  // namespace flatweights
