#include "flatweights/nonfinite.hpp"

#include <vector>

#include "flatweights/kernels.hpp"

namespace flatweights {
std::size_t first_nonfinite(std::span<const ReadPart> parts) {
  const std::vector<std::size_t> starts = starts_of(parts);
  const Kernels& loops = kernels();
  FirstIndex first(parts.size());
  const auto screen = [&](std::size_t i, std::size_t from, std::size_t to) {
    if (i < first.get() && loops.has_nonfinite[real_of(parts[i].dtype)](parts[i].data, from, to))
      first.lower_to(i);
  };
  parallel_for_parts(starts, real_bytes(parts, starts), screen);
  return first.get();
}

}  // namespace flatweights
