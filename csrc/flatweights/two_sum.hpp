// Addition that keeps its rounding error.
#pragma once

namespace flatweights {
namespace {

// Adds `term` to `total`, and to `lost` exactly what that rounded away: Knuth's TwoSum, which
// makes of `total + lost` the compensated sum of Neumaier (ZAMM 54, 1974). Of numbers, or of
// registers of them.
template <class V>
[[gnu::always_inline]] inline void add_exactly(V& total, V& lost, V term) noexcept {
  const V next = total + term;
  const V added = next - total;
  lost += (total - (next - added)) + (term - added);
  total = next;
}

}  // namespace
}  // namespace flatweights
