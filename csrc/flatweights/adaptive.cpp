#include "flatweights/adaptive.hpp"

#include <algorithm>

#include "flatweights/kernels.hpp"
#include "flatweights/parallel.hpp"

namespace flatweights {
namespace {

// Numbers from which on a second thread pays: as for averages, four read and three written.
constexpr std::size_t kGrain = (std::size_t{256} << 10) / (7 * sizeof(float));

}  // namespace

void adapt(const AdaptiveRange& range, SecondMoment kind, const AdaptiveRates& rates) {
  const auto loop = kernels().adapt[range.wide ? 1 : 0];
  parallel_for(range.size, kGrain,
               [&](std::size_t begin, std::size_t end) { loop(range, kind, rates, begin, end); });
}

}  // namespace flatweights
