#include "flatweights/order.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "flatweights/kernels.hpp"
#include "flatweights/parts.hpp"
#include "flatweights/rooms.hpp"
#include "flatweights/streaming.hpp"

namespace flatweights {

bool order_into(std::span<const AveragePart> parts, std::span<const std::byte* const> sources,
                std::size_t num_sources, Ranks ranks) {
  const std::vector<std::size_t> starts = starts_of(parts);
  const std::size_t reals = starts.back();
  const SortingPlan plan(num_sources, ranks);
  const Sorting sorting = plan.view();
  const Kernels& loops = kernels();
  const std::size_t traffic = real_bytes(parts, starts) * (num_sources + 1);
  const std::size_t grain = grain_of(reals, traffic);
  const std::size_t shares = reals / std::max<std::size_t>(grain, 1);
  Rooms rooms(room_bytes(sorting), std::clamp<std::size_t>(shares, 1, num_threads()));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const AveragePart& part = parts[i];
    const std::byte* first = sources[i * num_sources];
    if (!is_averaged(part.dtype) && part.out != first && part.nbytes > 0)
      std::memcpy(part.out, first, part.nbytes);
  }
  const bool large = pays_to_stream(traffic);
  std::atomic<bool> finite{true};
  parallel_for(reals, grain, [&](std::size_t begin, std::size_t end) {
    std::byte* const room = rooms.enter();
    for_each_part(starts, begin, end, [&](std::size_t i, std::size_t from, std::size_t to) {
      const AveragePart& part = parts[i];
      const auto row = sources.subspan(i * num_sources, num_sources);
      const bool stream = large && std::find(row.begin(), row.end(), part.out) == row.end();
      if (!loops.order[real_of(part.dtype)](part.out, row.data(), sorting, from, to, stream, room))
        finite.store(false, std::memory_order_relaxed);
    });
    rooms.leave(room);
  });
  return finite.load();
}

}  // namespace flatweights
