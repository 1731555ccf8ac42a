// Splits one range of work across threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>

namespace flatweights {

// The number of threads that kernels use at most. Decided at the first call:
// set_num_threads, else FLATWEIGHTS_NUM_THREADS, else OMP_NUM_THREADS, else the
// processors that affinity and the cgroup's quota leave. (Ray sets
// OMP_NUM_THREADS after a worker has started, so an import is too early.)
// Throws std::invalid_argument where FLATWEIGHTS_NUM_THREADS is no positive number.
[[nodiscard]] unsigned num_threads();

// `count` is at least 1.
void set_num_threads(unsigned count) noexcept;

namespace detail {
using Body = void (*)(void* context, std::size_t begin, std::size_t end);
void run(std::size_t size, std::size_t grain, Body body, void* context);
}  // namespace detail

// Calls `body(begin, end)` for consecutive ranges that cover `[0, size)`, at
// once on several threads where each gets at least `grain`. Inner borders are
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

// Splits `[begin, end)` of the concatenation of pieces, of which piece `i`
// covers `[starts[i], starts[i + 1])`, at the borders between them: calls
// `body(i, from, to)` with offsets within piece `i`, skipping empty ranges.
template <class F>
void for_each_piece(std::span<const std::size_t> starts, std::size_t begin, std::size_t end,
                    F&& body) {
  auto piece = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
  for (; begin < end; ++piece) {
    const auto i = static_cast<std::size_t>(piece);
    const std::size_t stop = std::min(end, starts[i + 1]);
    if (begin < stop) body(i, begin - starts[i], stop - starts[i]);
    begin = stop;
  }
}

}  // namespace flatweights
