#include "flatweights/flatten.hpp"

#include <vector>

#include "flatweights/kernels.hpp"
#include "flatweights/parallel.hpp"

namespace flatweights {
namespace {

// A second thread pays for its start from about here on.
constexpr std::size_t kGrain = std::size_t{256} << 10;  // bytes

}  // namespace

void copy_all(std::span<const Copy> copies) {
  std::vector<std::size_t> starts;
  starts.reserve(copies.size() + 1);
  std::size_t total = 0;
  for (const Copy& copy : copies) {
    starts.push_back(total);
    total += copy.nbytes;
  }
  starts.push_back(total);
  const Kernels& loops = kernels();
  const bool stream = pays_to_stream(2 * total);
  parallel_for(total, kGrain, [&](std::size_t begin, std::size_t end) {
    for_each_piece(starts, begin, end, [&](std::size_t i, std::size_t from, std::size_t to) {
      loops.copy(copies[i].to + from, copies[i].from + from, to - from, stream);
    });
  });
}

}  // namespace flatweights
