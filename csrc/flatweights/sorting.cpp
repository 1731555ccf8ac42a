#include "flatweights/sorting.hpp"

#include <algorithm>
#include <iterator>

namespace flatweights {
namespace {

constexpr std::size_t kLine = 64;
// Rows that are sorted together fill the first-level cache of most processors.
constexpr std::size_t kRowsBytes = std::size_t{32} << 10;

using Rows = std::vector<std::uint16_t>;

// Every second of `rows`, from `first` on.
Rows every_second(const Rows& rows, std::size_t first) {
  Rows half;
  for (std::size_t i = first; i < rows.size(); i += 2) half.push_back(rows[i]);
  return half;
}

// Appends the steps that merge two sorted sequences, and returns the sequence that results:
// Batcher's odd-even merge (Knuth, The Art of Computer Programming 3, 5.3.4).
Rows merge(const Rows& a, const Rows& b, std::vector<Step>& steps) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  if (a.size() == 1 && b.size() == 1) {
    steps.push_back({{a[0], b[0]}, Keeps::kBoth});
    return {a[0], b[0]};
  }
  const Rows even = merge(every_second(a, 0), every_second(b, 0), steps);
  const Rows odd = merge(every_second(a, 1), every_second(b, 1), steps);
  Rows merged{even[0]};
  for (std::size_t i = 0; i < std::max(odd.size(), even.size() - 1); ++i) {
    if (i < odd.size()) merged.push_back(odd[i]);
    if (i + 1 < even.size()) merged.push_back(even[i + 1]);
    if (i < odd.size() && i + 1 < even.size())
      steps.push_back({{odd[i], even[i + 1]}, Keeps::kBoth});
  }
  return merged;
}

// Drops steps on which no row in `needed` depends; adds the rows on which these depend.
void prune(std::vector<Step>& steps, std::vector<bool>& needed) {
  std::vector<Step> kept;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const bool low = needed[step->rows.low], high = needed[step->rows.high];
    if (!low && !high) continue;
    step->keeps = !high ? Keeps::kLow : !low ? Keeps::kHigh : Keeps::kBoth;
    needed[step->rows.low] = needed[step->rows.high] = true;
    kept.push_back(*step);
  }
  steps.assign(kept.rbegin(), kept.rend());
}

}  // namespace

SortingPlan::SortingPlan(std::size_t count, Ranks ranks)
    : ranks_(ranks), row_bytes_(std::max(kRowsBytes / count / kLine, std::size_t{1}) * kLine) {
  const std::size_t num_runs = (count + kMostInputs - 1) / kMostInputs;
  std::vector<Rows> sorted;
  for (std::size_t run = 0; run < num_runs; ++run) {
    const std::size_t begin = runs_.back();
    const std::size_t size = (count - begin) / (num_runs - run);
    runs_.push_back(begin + size);
    for (std::size_t i = 0; i < network_size(size); ++i) {
      const Comparator pair = comparator_of(size, i);
      within_.push_back({{static_cast<std::uint16_t>(begin + pair.low),
                          static_cast<std::uint16_t>(begin + pair.high)},
                         Keeps::kBoth});
    }
    Rows rows(size);
    for (std::size_t i = 0; i < size; ++i) rows[i] = static_cast<std::uint16_t>(begin + i);
    sorted.push_back(std::move(rows));
  }
  while (sorted.size() > 1) {
    std::vector<Rows> merged;
    for (std::size_t i = 0; i + 1 < sorted.size(); i += 2)
      merged.push_back(merge(sorted[i], sorted[i + 1], merges_));
    if (sorted.size() % 2 == 1) merged.push_back(std::move(sorted.back()));
    sorted = std::move(merged);
  }
  rows_ = std::move(sorted[0]);
  std::vector<bool> needed(count, ranks.nearest > 0);
  for (std::size_t rank = ranks.first; rank < ranks.last; ++rank) needed[rows_[rank]] = true;
  prune(merges_, needed);
  prune(within_, needed);
}

Sorting SortingPlan::view() const noexcept {
  return {rows_.size(),   ranks_,         row_bytes_,     runs_.data(),   runs_.size() - 1,
          within_.data(), within_.size(), merges_.data(), merges_.size(), rows_.data()};
}

}  // namespace flatweights
