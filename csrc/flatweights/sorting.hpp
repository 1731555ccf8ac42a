// How the numbers of many sources are sorted: networks within runs of sources, then merges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flatweights/sorting_networks.hpp"

namespace flatweights {

// A mean over ranks of sorted numbers, the smallest of which has rank 0: of the ranks
// [first, last); or, if `nearest` is not 0, of that many numbers nearest to the median.
struct Ranks {
  std::size_t first;
  std::size_t last;
  std::size_t nearest;
};

// Which numbers of a comparator are used later.
enum class Keeps : std::uint8_t { kBoth, kLow, kHigh };

struct Step {
  Comparator rows;
  Keeps keeps;
};

// The steps that sort rows of numbers, one row for each source, as far as `ranks` need it. Plain
// pointers: the loops of all instruction sets read it.
struct Sorting {
  std::size_t count;  // sources
  Ranks ranks;
  std::size_t row_bytes;  // between the beginnings of two rows: whole lines

  // Run r is of rows [runs[r], runs[r + 1]), at most kMostInputs.
  const std::size_t* runs;
  std::size_t num_runs;

  const Step* within;  // sort each run
  std::size_t num_within;
  const Step* merges;  // of sorted runs
  std::size_t num_merges;

  const std::uint16_t* rows;  // by rank, once sorted
};

// Bytes of the addresses of the sorted rows: whole lines.
constexpr std::size_t address_bytes(std::size_t count) noexcept {
  return (count * sizeof(void*) + 63) / 64 * 64;
}

// Bytes that a loop needs for the rows of one block.
constexpr std::size_t room_bytes(const Sorting& sorting) noexcept {
  return address_bytes(sorting.count) + sorting.count * sorting.row_bytes;
}

// Owns the memory that a Sorting points to.
class SortingPlan {
 public:
  // There are at least one and at most kMostSources sources.
  SortingPlan(std::size_t count, Ranks ranks);

  [[nodiscard]] Sorting view() const noexcept;

 private:
  Ranks ranks_;
  std::size_t row_bytes_;
  std::vector<std::size_t> runs_{0};
  std::vector<Step> within_;
  std::vector<Step> merges_;
  std::vector<std::uint16_t> rows_;
};

inline constexpr std::size_t kMostSources = 65535;

}  // namespace flatweights
