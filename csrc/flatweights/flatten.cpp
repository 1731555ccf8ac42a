#include "flatweights/flatten.hpp"

#include <vector>

#include "flatweights/kernels.hpp"
#include "flatweights/parallel.hpp"
#include "flatweights/streaming.hpp"

namespace flatweights {
namespace {

// A second thread pays for its start from about here on.
constexpr std::size_t kGrain = std::size_t{256} << 10;  // bytes

}  // namespace

void copy_all(std::span<const Copy> copies) {
  const Kernels& loops = kernels();
  std::vector<std::size_t> starts;
  starts.reserve(copies.size() + 1);
  std::size_t total = 0;
  for (const Copy& copy : copies) {
    starts.push_back(total);
    total += copy.size * copy.itemsize;
  }
  starts.push_back(total);

  const bool stream = pays_to_stream(2 * total);
  parallel_for(total, kGrain, [&](std::size_t begin, std::size_t end) {
    for_each_piece(starts, begin, end, [&](std::size_t i, std::size_t from, std::size_t to) {
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
  });
}

}  // namespace flatweights
