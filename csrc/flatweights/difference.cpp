#include "flatweights/difference.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "flatweights/kernels.hpp"
#include "flatweights/parts.hpp"

namespace flatweights {
namespace {

constexpr std::size_t kBlock = 1024;  // numbers that are widened in L1

void add_range(const DifferencePart& part, std::size_t begin, std::size_t end) noexcept {
  const std::size_t to = real_of(part.dtype), from = real_of(part.narrow_dtype);
  const std::size_t size = real_size(part.dtype), narrow = real_size(part.narrow_dtype);
  const auto widen = kernels().convert[from][to];
  const auto axpy = kernels().axpy[to];
  alignas(64) std::byte wide[kBlock * sizeof(double)];
  for (; begin < end; begin += kBlock) {
    const std::size_t count = std::min(kBlock, end - begin);
    widen(wide, part.difference + begin * narrow, 0, count);
    axpy(part.model + begin * size, 1.0, wide, 0, count);
  }
}

}  // namespace

void add_difference(std::span<const DifferencePart> parts) {
  const std::vector<std::size_t> starts =
      starts_of(parts, [](const DifferencePart& part) { return part.is_copied ? 0 : part.size; });
  for (const DifferencePart& part : parts)  // counters, mostly
    if (part.is_copied && part.nbytes > 0) std::memcpy(part.model, part.difference, part.nbytes);
  // A float32 number and its difference: 10 bytes are read and written.
  parallel_for_parts(
      starts, 10 * starts.back(),
      [&](std::size_t i, std::size_t from, std::size_t to) { add_range(parts[i], from, to); });
}

}  // namespace flatweights
