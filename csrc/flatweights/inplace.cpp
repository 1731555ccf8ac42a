#include "flatweights/inplace.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "flatweights/kernels.hpp"
#include "flatweights/parallel.hpp"

namespace flatweights {
namespace {

// Bytes read and written from which on a second thread pays: as for averages.
constexpr std::size_t kGrain = std::size_t{256} << 10;

// Real numbers whose squares are summed on their own; parallel_for's borders are
// multiples of it.
constexpr std::size_t kBlock = 4096;

// Calls `body(i, from, to)` for ranges of reals that cover all averaged parts, on several
// threads; each real costs `passes` times its size in traffic.
template <class Part, class F>
void for_each_range(std::span<const Part> parts, std::span<const std::size_t> starts,
                    std::size_t passes, F&& body) {
  const std::size_t reals = starts.back();
  if (reals == 0) return;
  std::size_t traffic = 0;
  for (std::size_t i = 0; i < parts.size(); ++i)
    traffic += (starts[i + 1] - starts[i]) * real_size(parts[i].dtype) * passes;
  const std::size_t grain = std::max<std::size_t>(1, reals / (traffic / kGrain + 1));
  parallel_for(reals, grain, [&](std::size_t begin, std::size_t end) {
    for_each_piece(starts, begin, end, body);
  });
}

// Where each part's reals begin, and where the last one's end.
template <class Part>
std::vector<std::size_t> starts_of(std::span<const Part> parts) {
  std::vector<std::size_t> starts{0};
  starts.reserve(parts.size() + 1);
  for (const Part& part : parts)
    starts.push_back(starts.back() + part.size * reals_per_element(part.dtype));
  return starts;
}

// Calls `body(part, from, to)` in the same way.
template <class F>
void change(std::span<const InPlacePart> parts, std::size_t passes, F&& body) {
  for_each_range(
      parts, starts_of(parts), passes,
      [&](std::size_t i, std::size_t from, std::size_t to) { body(parts[i], from, to); });
}

struct Sum {
  double total = 0;
  double lost = 0;  // by rounding

  [[nodiscard]] double value() const {
    // An infinite sum has no meaningful remainder.
    return std::isfinite(lost) ? total + lost : total;
  }
};

// The sum of the squares of `factor` times all reals. Each block is summed on its own, the
// sums are added up in the order of the blocks.
double sum_squares(std::span<const NormPart> parts, double factor) {
  const Kernels& loops = kernels();
  const std::vector<std::size_t> starts = starts_of(parts);
  std::vector<Sum> sums(starts.back() / kBlock + 1);
  for_each_range(parts, starts, 1, [&](std::size_t i, std::size_t from, std::size_t to) {
    const auto squares = loops.squares[real_of(parts[i].dtype)];
    while (from < to) {
      const std::size_t at = starts[i] + from;
      const std::size_t stop = std::min(to, from + kBlock - at % kBlock);
      Sum& sum = sums[at / kBlock];
      squares(&sum.total, &sum.lost, parts[i].data, factor, from, stop);
      from = stop;
    }
  });
  Sum all;
  for (const Sum& sum : sums) {
    const double next = all.total + sum.total;
    const double added = next - all.total;
    all.lost += (all.total - (next - added)) + (sum.total - added) + sum.lost;
    all.total = next;
  }
  return all.value();
}

}  // namespace

void scale(std::span<const InPlacePart> parts, double a) {
  const Kernels& loops = kernels();
  change(parts, 2, [&](const InPlacePart& part, std::size_t from, std::size_t to) {
    loops.scale[real_of(part.dtype)](part.y, a, from, to);
  });
}

void axpy(std::span<const InPlacePart> parts, double a) {
  const Kernels& loops = kernels();
  change(parts, 3, [&](const InPlacePart& part, std::size_t from, std::size_t to) {
    loops.axpy[real_of(part.dtype)](part.y, a, part.x, from, to);
  });
}

void lerp(std::span<const InPlacePart> parts, double a) {
  const Kernels& loops = kernels();
  change(parts, 3, [&](const InPlacePart& part, std::size_t from, std::size_t to) {
    loops.lerp[real_of(part.dtype)](part.y, part.x, a, from, to);
  });
}

double norm(std::span<const NormPart> parts) {
  constexpr double kUp = 0x1p600;
  constexpr double kDown = 0x1p-600;
  // Below, squares that have underflowed may count.
  constexpr double kLeast = 0x1p-960;
  const bool wide = std::any_of(parts.begin(), parts.end(),
                                [](const NormPart& part) { return is_compensated(part.dtype); });
  double squares = sum_squares(parts, 1.0);
  double factor = 1.0;
  // The squares of the narrower types are far from the ends of float64's range. If the sum
  // is infinite, reals that vanish when scaled down do not count beside the largest; if it
  // is tiny, none is too large to be scaled up.
  if (wide && (std::isinf(squares) || squares < kLeast)) {
    factor = squares < kLeast ? kUp : kDown;
    squares = sum_squares(parts, factor);
  }
  // NaN of one sign and payload, whichever the sum has kept.
  if (std::isnan(squares)) return std::numeric_limits<double>::quiet_NaN();
  return std::sqrt(squares) / factor;
}

double clip_by_norm(std::span<const InPlacePart> parts, double most) {
  std::vector<NormPart> read;
  read.reserve(parts.size());
  for (const InPlacePart& part : parts) read.push_back(NormPart{part.dtype, part.size, part.y});
  double before = norm(read);
  if (!std::isfinite(before) || before <= most) return before;
  const double found = before;
  // Where the quotient has few digits left, go there in steps; what these round away is
  // far too small to count in the end.
  constexpr double kStep = 0x1p-512;
  for (; most > 0 && most / before < std::numeric_limits<double>::min(); before *= kStep)
    scale(parts, kStep);
  scale(parts, most / before);
  return found;
}

}  // namespace flatweights
