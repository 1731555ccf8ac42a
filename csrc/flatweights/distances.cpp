#include "flatweights/distances.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "flatweights/float_environment.hpp"
#include "flatweights/kernels.hpp"
#include "flatweights/rooms.hpp"

namespace flatweights {
namespace {

constexpr std::size_t kRoomLine = 64;
// parallel_for's borders are multiples of it.
constexpr std::size_t kRangeBorder = 4096;

// Ranges of numbers with sums of their own, which are added in order: enough of them to share
// among threads, and few if there are many pairs.
std::size_t most_ranges(std::size_t pairs) {
  constexpr std::size_t kSums = std::size_t{1} << 20, kLeast = 8, kMost = 64;
  return std::clamp(kSums / pairs, kLeast, kMost);
}

// Adds up the columns of a pair by halves.
double fold(double* columns) {
  for (std::size_t half = kDistanceColumns / 2; half > 0; half /= 2)
    for (std::size_t c = 0; c < half; ++c) columns[c] += columns[c + half];
  return columns[0];
}

class Distances {
 public:
  Distances(std::span<const ReadPart> parts, std::span<const std::byte* const> sources,
            std::size_t count)
      : parts_(parts),
        sources_(sources),
        count_(count),
        pairs_(count * (count - 1) / 2),
        starts_(starts_of(parts)) {}

  // The sums of all pairs; with `wide`, all in float64.
  [[nodiscard]] std::vector<double> sums(bool wide) const {
    const Kernels& loops = kernels();
    const std::size_t reals = starts_.back();
    const std::size_t even = reals / most_ranges(pairs_) + 1;
    const std::size_t range = (even + kRangeBorder - 1) / kRangeBorder * kRangeBorder;
    const std::size_t ranges = (reals + range - 1) / range;
    const std::size_t traffic = real_bytes(parts_, starts_) * count_;
    const std::size_t columns = pairs_ * kDistanceColumns;
    std::vector<double> sums(ranges * pairs_);
    // Columns of sums, and a block of each source.
    const std::size_t room = columns * sizeof(double) + kRoomLine +
                             count_ * (sizeof(void*) + kDistanceBlock * sizeof(double));
    Rooms rooms(room, std::min<std::size_t>(num_threads(), ranges));
    // For parallel_for, each range is as long as the distance between two borders.
    const std::size_t size = ranges * kRangeBorder;
    parallel_for(size, std::max(grain_of(size, traffic), kRangeBorder),
                 [&](std::size_t from, std::size_t to) {
                   std::byte* const memory = rooms.enter();
                   auto* const columns_of = reinterpret_cast<double*>(memory);
                   for (std::size_t r = from / kRangeBorder; r < to / kRangeBorder; ++r) {
                     std::fill_n(columns_of, columns, 0.0);
                     const std::size_t end = std::min(reals, (r + 1) * range);
                     for_each_part(starts_, r * range, end,
                                   [&](std::size_t i, std::size_t a, std::size_t b) {
                                     loops.distances[real_of(parts_[i].dtype)][wide ? 1 : 0](
                                         columns_of, sources_.data() + i * count_, count_, a, b,
                                         memory + columns * sizeof(double));
                                   });
                     for (std::size_t p = 0; p < pairs_; ++p)
                       sums[r * pairs_ + p] = fold(columns_of + p * kDistanceColumns);
                   }
                   rooms.leave(memory);
                 });
    std::vector<double> total(pairs_);
    for (std::size_t r = 0; r < ranges; ++r)
      for (std::size_t p = 0; p < pairs_; ++p) total[p] += sums[r * pairs_ + p];
    return total;
  }

  // Whether squares of float32 may have been too large, or too small, for `sums`.
  [[nodiscard]] bool needs_wide(std::span<const double> sums) const {
    const bool narrow = std::any_of(parts_.begin(), parts_.end(), [](const ReadPart& part) {
      return is_averaged(part.dtype) && !is_compensated(part.dtype);
    });
    // Underflow takes less than 2^-149 from a square: less than 2^-23 of this sum.
    const double least = static_cast<double>(starts_.back()) * 0x1p-126;
    // The first source with the same bytes: equal ones are compared once each.
    std::vector<std::size_t> twin(count_);
    std::size_t pair = 0;
    for (std::size_t i = 0; i < count_; ++i) twin[i] = i;
    for (std::size_t i = 0; narrow && i < count_; ++i) {
      for (std::size_t j = i + 1; j < count_; ++j, ++pair) {
        if (!std::isfinite(sums[pair])) return true;
        if (sums[pair] >= least || twin[i] == twin[j]) continue;
        if (!are_equal(i, j)) return true;
        twin[j] = twin[i];
      }
    }
    return false;
  }

  [[nodiscard]] std::size_t pairs() const noexcept { return pairs_; }

 private:
  // Whether two models have the same bytes.
  [[nodiscard]] bool are_equal(std::size_t i, std::size_t j) const {
    for (std::size_t s = 0; s < parts_.size(); ++s) {
      const std::size_t nbytes = (starts_[s + 1] - starts_[s]) * real_size(parts_[s].dtype);
      const auto* const row = sources_.data() + s * count_;
      if (nbytes > 0 && row[i] != row[j] && std::memcmp(row[i], row[j], nbytes) != 0) return false;
    }
    return true;
  }

  std::span<const ReadPart> parts_;
  std::span<const std::byte* const> sources_;
  std::size_t count_;
  std::size_t pairs_;
  std::vector<std::size_t> starts_;
};

}  // namespace

void squared_distances(double* out, std::span<const ReadPart> parts,
                       std::span<const std::byte* const> sources, std::size_t count) {
  const DefaultFloatEnvironment standard;
  std::fill_n(out, count * count, 0.0);
  const Distances distances(parts, sources, count);
  if (distances.pairs() == 0) return;
  std::vector<double> sums = distances.sums(false);
  if (distances.needs_wide(sums)) sums = distances.sums(true);
  auto sum = sums.begin();
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t j = i + 1; j < count; ++j, ++sum) {
      const double found = std::isnan(*sum) ? std::numeric_limits<double>::quiet_NaN() : *sum;
      out[i * count + j] = out[j * count + i] = found;
    }
  }
}

}  // namespace flatweights
