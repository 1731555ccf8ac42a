// Weighted sums of models that arrive one after the other.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "flatweights/buffer_pool.hpp"
#include "flatweights/layout.hpp"

namespace flatweights {

// Holds, for every real number of the floating and complex slots of one layout,
// the sum that average_into would hold, so that the same sources added in the
// same order give the same bits.
class RunningSum {
 public:
  explicit RunningSum(const Layout& layout);

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
  struct GiveBack {
    std::size_t capacity;
    void operator()(double* memory) const noexcept {
      give_buffer({reinterpret_cast<std::byte*>(memory), capacity});
    }
  };
  // From the pool: a driver makes a sum every round.
  using Doubles = std::unique_ptr<double[], GiveBack>;

  [[nodiscard]] static Doubles take_doubles(std::size_t count);
  [[nodiscard]] std::size_t reals() const noexcept { return starts_.back(); }
  [[nodiscard]] double* lost(std::size_t at) const noexcept {
    return compensation_ == nullptr ? nullptr : compensation_.get() + at;
  }
  void begin();  // zeroes what nothing has been added to

  std::vector<DType> dtypes_;
  std::vector<std::size_t> starts_;  // reals before each slot, and after the last
  Doubles sum_;
  Doubles compensation_;  // null where no slot is compensated
  bool begun_ = false;    // before, the memory is undefined
};

}  // namespace flatweights
