#include "flatweights/flatten.hpp"

#include <vector>

#include "flatweights/kernels.hpp"
#include "flatweights/parts.hpp"
#include "flatweights/streaming.hpp"

namespace flatweights {
void copy_all(std::span<const Copy> copies) {
  const Kernels& loops = kernels();
  const std::vector<std::size_t> starts =
      starts_of(copies, [](const Copy& copy) { return copy.size * copy.itemsize; });
  const std::size_t traffic = 2 * starts.back();
  const bool stream = pays_to_stream(traffic);
  parallel_for_parts(starts, traffic, [&](std::size_t i, std::size_t from, std::size_t to) {
    const Copy& copy = copies[i];
    if (copy.from_dtype == copy.to_dtype) {
      loops.copy(copy.to + from, copy.from + from, to - from, stream);
      return;
    }
    // An element belongs to the range that its first byte is in.
    const auto element = [&](std::size_t at) { return (at + copy.itemsize - 1) / copy.itemsize; };
    loops.convert[real_of(copy.from_dtype)][real_of(copy.to_dtype)](copy.to, copy.from,
                                                                    element(from), element(to));
  });
}

}  // namespace flatweights
