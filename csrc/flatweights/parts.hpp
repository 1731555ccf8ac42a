// Treats the numbers of several parts as one range.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "flatweights/dtype.hpp"
#include "flatweights/parallel.hpp"

namespace flatweights {

// A part that is only read.
struct ReadPart {
  DType dtype;
  std::size_t size;  // elements
  const std::byte* data;
};

// The start of each part if all lie back to back, and the end of the last one. `size_of(part)` is
// the size of a part, in the caller's units.
template <class Part, class SizeOf>
[[nodiscard]] std::vector<std::size_t> starts_of(std::span<const Part> parts, SizeOf&& size_of) {
  std::vector<std::size_t> starts;
  starts.reserve(parts.size() + 1);
  starts.push_back(0);
  for (const Part& part : parts) starts.push_back(starts.back() + size_of(part));
  return starts;
}

// The same in real numbers: parts that are not averaged have none.
template <class Part>
[[nodiscard]] std::vector<std::size_t> starts_of(std::span<const Part> parts) {
  return starts_of(parts,
                   [](const Part& part) { return part.size * reals_per_element(part.dtype); });
}

// Splits `[begin, end)` at the borders between the parts that begin at `starts`: calls
// `body(i, from, to)` with offsets within part `i`, skipping empty ranges.
template <class F>
void for_each_part(std::span<const std::size_t> starts, std::size_t begin, std::size_t end,
                   F&& body) {
  auto part = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
  for (; begin < end; ++part) {
    const auto i = static_cast<std::size_t>(part);
    const std::size_t stop = std::min(end, starts[i + 1]);
    if (begin < stop) body(i, begin - starts[i], stop - starts[i]);
    begin = stop;
  }
}

// Calls `body(i, from, to)` for ranges that cover all parts, on as many threads as pay for
// `traffic`, the bytes that are read and written in all.
template <class F>
void parallel_for_parts(std::span<const std::size_t> starts, std::size_t traffic, F&& body) {
  parallel_for(
      starts.back(), grain_of(starts.back(), traffic),
      [&](std::size_t begin, std::size_t end) { for_each_part(starts, begin, end, body); });
}

// The smallest of the indices that several threads find.
class FirstIndex {
 public:
  explicit FirstIndex(std::size_t none) noexcept : first_(none) {}

  [[nodiscard]] std::size_t get() const noexcept { return first_.load(std::memory_order_relaxed); }

  void lower_to(std::size_t index) noexcept {
    std::size_t first = get();
    while (index < first && !first_.compare_exchange_weak(first, index)) {
    }
  }

 private:
  std::atomic<std::size_t> first_;
};

// The bytes of all real numbers of `parts`, which begin at `starts`.
template <class Part>
[[nodiscard]] std::size_t real_bytes(std::span<const Part> parts,
                                     std::span<const std::size_t> starts) {
  std::size_t nbytes = 0;
  for (std::size_t i = 0; i < parts.size(); ++i)
    nbytes += (starts[i + 1] - starts[i]) * real_size(parts[i].dtype);
  return nbytes;
}

}  // namespace flatweights
