// Weighted sums of models that arrive one by one.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "flatweights/layout.hpp"

namespace flatweights {

// For every real number of the floating and complex slots of one layout, the sum that
// average_into would hold: the same sources added in the same order give the same bits.
//
// The sums lie in memory of the caller, one float64 for each number, and behind them one
// more for each number of the compensated slots.
class RunningSum {
 public:
  explicit RunningSum(const Layout& layout);

  // Numbers of float64 that the sum needs.
  [[nodiscard]] std::size_t size() const noexcept { return reals() + lost_starts_.back(); }

  // Uses `memory[0, size())` from now on. Unless `begun`, its contents count as zeros.
  void use(double* memory, bool begun) noexcept {
    memory_ = memory;
    begun_ = begun;
  }

  // Adds `weights[k] * sources[k]` over k, one after the other but in one pass over the
  // sum; `sources[k][i]` is where slot i begins.
  void add(std::span<const std::vector<const std::byte*>> sources, std::span<const double> weights);

  // Whether `other` is a sum over parts of the same sizes and dtypes.
  [[nodiscard]] bool fits(const RunningSum& other) const noexcept {
    return dtypes_ == other.dtypes_ && starts_ == other.starts_;
  }

  // Adds `scale * other`, another sum that fits.
  void merge(const RunningSum& other, double scale);

  // Writes `sum / total` to `out`; `out[i]` is where slot i begins. Slots of
  // integers are left alone.
  void divide_into(std::span<std::byte* const> out, double total) const;

 private:
  [[nodiscard]] std::size_t reals() const noexcept { return starts_.back(); }
  // About the bytes that are read and written to add `sources` models, or to write one.
  [[nodiscard]] std::size_t traffic(std::size_t sources) const noexcept {
    return (2 * size() + reals() / 2 * sources) * sizeof(double);
  }
  [[nodiscard]] double* sum(std::size_t slot, std::size_t at) const noexcept {
    return memory_ + starts_[slot] + at;
  }
  // The address of the rounding errors of a compensated slot's sums; null for other slots.
  [[nodiscard]] double* lost(std::size_t slot, std::size_t at) const noexcept {
    return is_compensated(dtypes_[slot]) ? memory_ + reals() + lost_starts_[slot] + at : nullptr;
  }
  void begin();  // zeroes memory that nothing has been added to

  std::vector<DType> dtypes_;
  std::vector<std::size_t> starts_;       // reals before each slot, and after the last
  std::vector<std::size_t> lost_starts_;  // compensated ones of these
  double* memory_ = nullptr;
  bool begun_ = false;
};

}  // namespace flatweights
