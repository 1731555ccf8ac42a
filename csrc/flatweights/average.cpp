#include "flatweights/average.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "flatweights/buffer_pool.hpp"
#include "flatweights/kernels.hpp"
#include "flatweights/parts.hpp"
#include "flatweights/streaming.hpp"

namespace flatweights {
namespace {

// Scratch memory for the loops, from the pool; null if memory is short. They are slower then.
class Room {
 public:
  explicit Room(bool wanted) noexcept {
    if (!wanted) return;
    try {
      buffer_ = take_buffer(kRoom);
    } catch (const std::bad_alloc&) {
    }
  }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  ~Room() {
    if (buffer_.memory != nullptr) give_buffer(buffer_);
  }

  [[nodiscard]] std::byte* memory() const noexcept { return buffer_.memory; }

 private:
  Buffer buffer_{nullptr, 0};
};

auto loop_for(const AveragePart& part) {
  const Kernels& loops = kernels();
  if (part.dtype == part.out_dtype) return loops.average[real_of(part.dtype)];
  return loops.average_widened[real_of(part.dtype)][part.out_dtype == DType::kFloat64 ? 1 : 0];
}

}  // namespace

bool average_into(std::span<const AveragePart> parts, std::span<const std::byte* const> sources,
                  std::span<const double> weights, double total) {
  const std::size_t num_sources = weights.size();
  const std::vector<std::size_t> starts = starts_of(parts);
  const std::size_t reals = starts.back();
  std::size_t nbytes = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const AveragePart& part = parts[i];
    nbytes += part.nbytes;
    const std::byte* first = sources[i * num_sources];
    if (!is_averaged(part.dtype) && part.out != first && part.nbytes > 0)
      std::memcpy(part.out, first, part.nbytes);
  }
  if (reals == 0) return true;

  const std::size_t traffic = nbytes * (num_sources + 1);
  const bool weighted =
      std::any_of(weights.begin(), weights.end(), [](double w) { return w != 1; });
  const bool large = pays_to_stream(traffic);
  std::atomic<bool> finite{true};
  parallel_for(reals, grain_of(reals, traffic), [&](std::size_t begin, std::size_t end) {
    const Room room(large && num_sources > kMostStreams);
    for_each_part(starts, begin, end, [&](std::size_t i, std::size_t from, std::size_t to) {
      const AveragePart& part = parts[i];
      const auto row = sources.subspan(i * num_sources, num_sources);
      const bool stream = large && std::find(row.begin(), row.end(), part.out) == row.end();
      const auto average = loop_for(part);
      const bool fine = average(part.out, row.data(), weighted ? weights.data() : nullptr,
                                num_sources, total, from, to, stream, room.memory());
      if (!fine) finite.store(false, std::memory_order_relaxed);
    });
  });
  return finite.load();
}

}  // namespace flatweights
