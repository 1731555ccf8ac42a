// Splits one range of work across threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

namespace flatweights {

// The largest number of threads that kernels use. Decided at the first call:
// set_num_threads, else FLATWEIGHTS_NUM_THREADS, else OMP_NUM_THREADS, else the
// processors that affinity and the cgroup's quota allow. (Ray sets
// OMP_NUM_THREADS after a worker has started, so an import is too early.)
// Throws std::invalid_argument if FLATWEIGHTS_NUM_THREADS is not a positive number.
[[nodiscard]] unsigned num_threads();

// `count` is at least 1.
void set_num_threads(unsigned count) noexcept;

namespace detail {
using Body = void (*)(void* context, std::size_t begin, std::size_t end);
void run(std::size_t size, std::size_t grain, Body body, void* context);
}  // namespace detail

// Calls `body(begin, end)` for consecutive ranges that cover `[0, size)`,
// concurrently on several threads if each gets at least `grain`. Inner borders are
// multiples of 4096, so that kernels work on whole blocks. `body` must not throw.
template <class F>
void parallel_for(std::size_t size, std::size_t grain, F&& body) {
  detail::run(
      size, grain,
      [](void* context, std::size_t begin, std::size_t end) {
        (*static_cast<std::remove_reference_t<F>*>(context))(begin, end);
      },
      &body);
}

// The grain for work on `size` items that reads and writes `traffic` bytes in all: for fewer
// bytes a second thread does not pay. Measured with bench/bench_average.py on two cores.
[[nodiscard]] constexpr std::size_t grain_of(std::size_t size, std::size_t traffic) {
  constexpr std::size_t kGrainBytes = std::size_t{256} << 10;
  if (traffic < kGrainBytes) return size;  // small jobs are spared a division
  return std::max<std::size_t>(1, size / (traffic / kGrainBytes + 1));
}

}  // namespace flatweights
