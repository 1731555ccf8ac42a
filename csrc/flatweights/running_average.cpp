#include "flatweights/running_average.hpp"

#include <algorithm>

#include "flatweights/kernels.hpp"
#include "flatweights/parallel.hpp"

namespace flatweights {
namespace {

constexpr std::size_t kGrain = std::size_t{1} << 16;  // reals
constexpr std::size_t kBlock = 1024;                  // reals whose sums stay in L1

}  // namespace

RunningSum::Doubles RunningSum::take_doubles(std::size_t count) {
  const Buffer buffer = take_buffer(count * sizeof(double));
  return Doubles(reinterpret_cast<double*>(buffer.memory), GiveBack{buffer.capacity});
}

RunningSum::RunningSum(const Layout& layout)
    : sum_(nullptr, GiveBack{0}), compensation_(nullptr, GiveBack{0}) {
  bool compensated = false;
  std::size_t reals = 0;
  for (const Slot& slot : layout.slots()) {
    dtypes_.push_back(slot.dtype);
    starts_.push_back(reals);
    reals += slot.size * reals_per_element(slot.dtype);
    compensated = compensated || is_compensated(slot.dtype);
  }
  starts_.push_back(reals);
  sum_ = take_doubles(reals);
  if (compensated) compensation_ = take_doubles(reals);
}

void RunningSum::begin() {
  if (begun_) return;
  std::fill_n(sum_.get(), reals(), 0.0);
  if (compensation_ != nullptr) std::fill_n(compensation_.get(), reals(), 0.0);
  begun_ = true;
}

void RunningSum::add(std::span<const std::vector<const std::byte*>> sources,
                     std::span<const double> weights) {
  const Kernels& loops = kernels();
  parallel_for(reals(), kGrain, [&](std::size_t begin, std::size_t end) {
    for_each_piece(starts_, begin, end, [&](std::size_t i, std::size_t from, std::size_t to) {
      const auto add = loops.add[real_of(dtypes_[i])];
      for (std::size_t block = from; block < to; block += kBlock) {
        const std::size_t stop = std::min(to, block + kBlock);
        const std::size_t at = starts_[i] + block;
        if (!begun_) {  // here, where it stays in the cache until it is added to
          std::fill_n(sum_.get() + at, stop - block, 0.0);
          if (compensation_ != nullptr) std::fill_n(lost(at), stop - block, 0.0);
        }
        for (std::size_t k = 0; k < sources.size(); ++k)
          add(sum_.get() + at, lost(at), sources[k][i], weights[k], block, stop);
      }
    });
  });
  begun_ = true;
}

void RunningSum::merge(const RunningSum& other, double scale) {
  if (!other.begun_) return;
  begin();
  const auto add = kernels().add[real_of(DType::kFloat64)];
  parallel_for(reals(), kGrain, [&](std::size_t begin, std::size_t end) {
    for_each_piece(starts_, begin, end, [&](std::size_t i, std::size_t from, std::size_t to) {
      const std::size_t at = starts_[i] + from;
      const std::size_t stop = starts_[i] + to;
      if (!is_compensated(dtypes_[i])) {
        for (std::size_t r = at; r < stop; ++r) sum_[r] += scale * other.sum_[r];
        return;
      }
      const auto* theirs = reinterpret_cast<const std::byte*>(other.sum_.get());
      add(sum_.get() + at, lost(at), theirs, scale, at, stop);
      for (std::size_t r = at; r < stop; ++r) compensation_[r] += scale * other.compensation_[r];
    });
  });
}

void RunningSum::divide_into(std::span<std::byte* const> out, double total) const {
  const Kernels& loops = kernels();
  parallel_for(reals(), kGrain, [&](std::size_t begin, std::size_t end) {
    for_each_piece(starts_, begin, end, [&](std::size_t i, std::size_t from, std::size_t to) {
      const std::size_t at = starts_[i] + from;
      loops.divide[real_of(dtypes_[i])](out[i], sum_.get() + at, lost(at), total, from, to);
    });
  });
}

}  // namespace flatweights
