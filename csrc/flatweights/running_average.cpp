#include "flatweights/running_average.hpp"

#include "flatweights/average.hpp"
#include "flatweights/parallel.hpp"

namespace flatweights {
namespace {

constexpr std::size_t kGrain = std::size_t{1} << 18;  // reals

}  // namespace

RunningSum::RunningSum(const Layout& layout) {
  bool compensated = false;
  std::size_t reals = 0;
  for (const Slot& slot : layout.slots()) {
    dtypes_.push_back(slot.dtype);
    starts_.push_back(reals);
    reals += slot.size * reals_per_element(slot.dtype);
    compensated = compensated || is_compensated(slot.dtype);
  }
  starts_.push_back(reals);
  sum_.resize(reals);
  if (compensated) compensation_.resize(reals);
}

void RunningSum::add(std::span<const std::byte* const> source, double weight) {
  parallel_for(sum_.size(), kGrain, [&](std::size_t begin, std::size_t end) {
    for_each_piece(starts_, begin, end, [&](std::size_t i, std::size_t from, std::size_t to) {
      const std::size_t at = starts_[i] + from;
      double* compensation = compensation_.empty() ? nullptr : compensation_.data() + at;
      visit_real(dtypes_[i], [&]<class T>() {
        add_block<T>(sum_.data() + at, compensation, source[i], from, to - from, weight);
      });
    });
  });
}

void RunningSum::merge(const RunningSum& other, double scale) {
  parallel_for(sum_.size(), kGrain, [&](std::size_t begin, std::size_t end) {
    for_each_piece(starts_, begin, end, [&](std::size_t i, std::size_t from, std::size_t to) {
      const std::size_t at = starts_[i] + from;
      const auto* theirs = reinterpret_cast<const std::byte*>(other.sum_.data() + at);
      if (!is_compensated(dtypes_[i])) {
        for (std::size_t r = at; r < at + (to - from); ++r) sum_[r] += scale * other.sum_[r];
        return;
      }
      add_block<double>(sum_.data() + at, compensation_.data() + at, theirs, 0, to - from, scale);
      for (std::size_t r = at; r < at + (to - from); ++r)
        compensation_[r] += scale * other.compensation_[r];
    });
  });
}

void RunningSum::divide_into(std::span<std::byte* const> out, double total) const {
  parallel_for(sum_.size(), kGrain, [&](std::size_t begin, std::size_t end) {
    for_each_piece(starts_, begin, end, [&](std::size_t i, std::size_t from, std::size_t to) {
      const std::size_t at = starts_[i] + from;
      const double* compensation = compensation_.empty() ? nullptr : compensation_.data() + at;
      visit_real(dtypes_[i], [&]<class T>() {
        divide_block<T>(out[i], from, sum_.data() + at, compensation, to - from, total);
      });
    });
  });
}

}  // namespace flatweights
