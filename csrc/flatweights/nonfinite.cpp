#include "flatweights/nonfinite.hpp"

#include <atomic>
#include <vector>

#include "flatweights/kernels.hpp"
#include "flatweights/parallel.hpp"

namespace flatweights {
namespace {

constexpr std::size_t kGrain = std::size_t{1} << 17;  // reals

}  // namespace

std::size_t first_nonfinite(std::span<const ScreenedPart> parts) {
  std::vector<std::size_t> starts;
  starts.reserve(parts.size() + 1);
  std::size_t reals = 0;
  for (const ScreenedPart& part : parts) {
    starts.push_back(reals);
    reals += part.size * reals_per_element(part.dtype);
  }
  starts.push_back(reals);

  const Kernels& loops = kernels();
  std::atomic<std::size_t> first{parts.size()};
  parallel_for(reals, kGrain, [&](std::size_t begin, std::size_t end) {
    for_each_piece(starts, begin, end, [&](std::size_t i, std::size_t from, std::size_t to) {
      if (i >= first.load(std::memory_order_relaxed)) return;
      if (!loops.has_nonfinite[real_of(parts[i].dtype)](parts[i].data, from, to)) return;
      std::size_t least = first.load(std::memory_order_relaxed);
      while (i < least && !first.compare_exchange_weak(least, i)) {
      }
    });
  });
  return first.load();
}

}  // namespace flatweights
