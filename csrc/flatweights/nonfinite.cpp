#include "flatweights/nonfinite.hpp"

#include <atomic>
#include <vector>

#include "flatweights/kernels.hpp"

namespace flatweights {
std::size_t first_nonfinite(std::span<const ReadPart> parts) {
  const std::vector<std::size_t> starts = starts_of(parts);
  const Kernels& loops = kernels();
  std::atomic<std::size_t> first{parts.size()};
  const auto screen = [&](std::size_t i, std::size_t from, std::size_t to) {
    if (i >= first.load(std::memory_order_relaxed)) return;
    if (!loops.has_nonfinite[real_of(parts[i].dtype)](parts[i].data, from, to)) return;
    std::size_t least = first.load(std::memory_order_relaxed);
    while (i < least && !first.compare_exchange_weak(least, i)) {
    }
  };
  parallel_for_parts(starts, real_bytes(parts, starts), screen);
  return first.load();
}

}  // namespace flatweights
