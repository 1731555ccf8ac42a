#include "flatweights/adaptive.hpp"

#include "flatweights/kernels.hpp"
#include "flatweights/parallel.hpp"

namespace flatweights {
void adapt(const AdaptiveRange& range, SecondMoment kind, const AdaptiveRates& rates) {
  const auto loop = kernels().adapt[range.wide ? 1 : 0];
  const std::size_t traffic = range.size * 7 * (range.wide ? sizeof(double) : sizeof(float));
  parallel_for(range.size, grain_of(range.size, traffic),
               [&](std::size_t begin, std::size_t end) { loop(range, kind, rates, begin, end); });
}

}  // namespace flatweights
