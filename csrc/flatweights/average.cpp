#include "flatweights/average.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "flatweights/parallel.hpp"

namespace flatweights {
namespace {

constexpr std::size_t kBlock = 1024;          // sums of one block stay in L1
constexpr std::size_t kGrain = 512 * kBlock;  // reals: a second thread pays from here on

template <class T>
void average_range(std::byte* out, std::span<const std::byte* const> sources,
                   std::span<const double> weights, double total, std::size_t begin,
                   std::size_t end) noexcept {
  alignas(64) double sum[kBlock];
  alignas(64) double compensation[std::is_same_v<T, double> ? kBlock : 1];
  for (; begin < end; begin += kBlock) {
    const std::size_t count = std::min(kBlock, end - begin);
    std::fill_n(sum, count, 0.0);
    if constexpr (std::is_same_v<T, double>) std::fill_n(compensation, count, 0.0);
    for (std::size_t k = 0; k < sources.size(); ++k)
      add_block<T>(sum, compensation, sources[k], begin, count, weights[k]);
    divide_block<T>(out, begin, sum, compensation, count, total);
  }
}

}  // namespace

void average_into(std::span<const AveragePart> parts, std::span<const std::byte* const> sources,
                  std::span<const double> weights, double total) {
  const std::size_t num_sources = weights.size();
  std::vector<std::size_t> starts;
  starts.reserve(parts.size() + 1);
  std::size_t reals = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const AveragePart& part = parts[i];
    starts.push_back(reals);
    reals += part.size * reals_per_element(part.dtype);
    const std::byte* first = sources[i * num_sources];
    if (!is_averaged(part.dtype) && part.out != first && part.nbytes > 0)
      std::memcpy(part.out, first, part.nbytes);
  }
  starts.push_back(reals);

  parallel_for(reals, kGrain, [&](std::size_t begin, std::size_t end) {
    for_each_piece(starts, begin, end, [&](std::size_t i, std::size_t from, std::size_t to) {
      visit_real(parts[i].dtype, [&]<class T>() {
        average_range<T>(parts[i].out, sources.subspan(i * num_sources, num_sources), weights,
                         total, from, to);
      });
    });
  });
}

}  // namespace flatweights
