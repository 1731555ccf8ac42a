#include "flatweights/running_average.hpp"

#include <algorithm>

#include "flatweights/kernels.hpp"
#include "flatweights/parts.hpp"

namespace flatweights {
namespace {

constexpr std::size_t kBlock = 1024;  // reals whose sums stay in L1

}  // namespace

RunningSum::RunningSum(const Layout& layout) {
  std::size_t reals = 0, compensated = 0;
  for (const Slot& slot : layout.slots()) {
    const std::size_t count = slot.size * reals_per_element(slot.dtype);
    dtypes_.push_back(slot.dtype);
    starts_.push_back(reals);
    lost_starts_.push_back(compensated);
    reals += count;
    if (is_compensated(slot.dtype)) compensated += count;
  }
  starts_.push_back(reals);
  lost_starts_.push_back(compensated);
}

void RunningSum::begin() {
  if (!begun_) std::fill_n(memory_, size(), 0.0);
  begun_ = true;
}

void RunningSum::add(std::span<const std::vector<const std::byte*>> sources,
                     std::span<const double> weights) {
  const Kernels& loops = kernels();
  parallel_for_parts(starts_, traffic(sources.size()),
                     [&](std::size_t i, std::size_t from, std::size_t to) {
                       const auto add = loops.add[real_of(dtypes_[i])];
                       for (std::size_t block = from; block < to; block += kBlock) {
                         const std::size_t stop = std::min(to, block + kBlock);
                         double* const sums = sum(i, block);
                         double* const rounded = lost(i, block);
                         if (!begun_) {  // here, where it stays in the cache until it is added to
                           std::fill_n(sums, stop - block, 0.0);
                           if (rounded != nullptr) std::fill_n(rounded, stop - block, 0.0);
                         }
                         for (std::size_t k = 0; k < sources.size(); ++k)
                           add(sums, rounded, sources[k][i], weights[k], block, stop);
                       }
                     });
  begun_ = true;
}

void RunningSum::merge(const RunningSum& other, double scale) {
  if (!other.begun_) return;
  begin();
  const auto add = kernels().add[real_of(DType::kFloat64)];
  parallel_for_parts(starts_, traffic(1), [&](std::size_t i, std::size_t from, std::size_t to) {
    const std::size_t count = to - from;
    double* const sums = sum(i, from);
    const double* const theirs = other.sum(i, from);
    double* const rounded = lost(i, from);
    if (rounded == nullptr) {
      for (std::size_t r = 0; r < count; ++r) sums[r] += scale * theirs[r];
      return;
    }
    add(sums, rounded, reinterpret_cast<const std::byte*>(theirs), scale, 0, count);
    const double* const theirs_rounded = other.lost(i, from);
    for (std::size_t r = 0; r < count; ++r) rounded[r] += scale * theirs_rounded[r];
  });
}

void RunningSum::divide_into(std::span<std::byte* const> out, double total) const {
  const Kernels& loops = kernels();
  parallel_for_parts(starts_, traffic(1), [&](std::size_t i, std::size_t from, std::size_t to) {
    loops.divide[real_of(dtypes_[i])](out[i], sum(i, from), lost(i, from), total, from, to);
  });
}

}  // namespace flatweights
