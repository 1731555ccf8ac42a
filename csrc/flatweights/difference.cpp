#include "flatweights/difference.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "flatweights/kernels.hpp"
#include "flatweights/parts.hpp"

namespace flatweights {
namespace {

constexpr std::size_t kWidenedBlock = 1024;  // numbers that are widened in L1

void add_range(const DifferencePart& part, std::size_t begin, std::size_t end) noexcept {
  const std::size_t to = real_of(part.dtype), from = real_of(part.narrow_dtype);
  const std::size_t size = real_size(part.dtype), narrow = real_size(part.narrow_dtype);
  const auto widen = kernels().convert[from][to];
  const auto axpy = kernels().axpy[to];
  alignas(64) std::byte wide[kWidenedBlock * sizeof(double)];
  for (; begin < end; begin += kWidenedBlock) {
    const std::size_t count = std::min(kWidenedBlock, end - begin);
    widen(wide, part.difference + begin * narrow, 0, count);
    axpy(part.model + begin * size, 1.0, wide, 0, count);
  }
}

// Where the numbers of each part that is not copied begin; see starts_of.
std::vector<std::size_t> rounded_starts(std::span<const DifferencePart> parts) {
  return starts_of(parts,
                   [](const DifferencePart& part) { return part.is_copied ? 0 : part.size; });
}

}  // namespace

void add_difference(std::span<const DifferencePart> parts) {
  for (const DifferencePart& part : parts)  // counters, mostly
    if (part.is_copied && part.nbytes > 0) std::memcpy(part.model, part.difference, part.nbytes);
  const std::vector<std::size_t> starts = rounded_starts(parts);
  // Usually one float32, read and written, and one 16-bit number.
  parallel_for_parts(
      starts, 10 * starts.back(),
      [&](std::size_t i, std::size_t from, std::size_t to) { add_range(parts[i], from, to); });
}

std::size_t encode_difference(std::span<const DifferencePart> parts) {
  FirstIndex first(parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const DifferencePart& part = parts[i];
    if (!part.is_copied || part.nbytes == 0) continue;
    std::memcpy(part.difference, part.model, part.nbytes);
    const std::size_t reals = part.size * reals_per_element(part.dtype);
    if (reals > 0 && kernels().has_nonfinite[real_of(part.dtype)](part.model, 0, reals))
      first.lower_to(i);
  }
  const std::vector<std::size_t> starts = rounded_starts(parts);
  const auto encode = [&](std::size_t i, std::size_t from, std::size_t to) {
    const DifferencePart& part = parts[i];
    const bool is_float64 = part.dtype == DType::kFloat64;
    if (!kernels().encode[is_float64 ? 1 : 0][real_of(part.narrow_dtype)](part, from, to))
      first.lower_to(i);
  };
  // Usually four float32 and one 16-bit number.
  parallel_for_parts(starts, 18 * starts.back(), encode);
  return first.get();
}

}  // namespace flatweights
