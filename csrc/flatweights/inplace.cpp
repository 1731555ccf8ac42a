#include "flatweights/inplace.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "flatweights/float_environment.hpp"
#include "flatweights/kernels.hpp"
#include "flatweights/two_sum.hpp"

namespace flatweights {
namespace {

// Real numbers whose squares have one sum; parallel_for's borders are multiples of it.
constexpr std::size_t kNormBlock = 4096;

// Calls `body(part, from, to)` for ranges of reals that cover all averaged parts, on several
// threads. Each real is read and written `passes` times in all.
template <class F>
void change(std::span<const InPlacePart> parts, std::size_t passes, F&& body) {
  const std::vector<std::size_t> starts = starts_of(parts);
  parallel_for_parts(
      starts, passes * real_bytes(parts, starts),
      [&](std::size_t i, std::size_t from, std::size_t to) { body(parts[i], from, to); });
}

struct Sum {
  double total = 0;
  double lost = 0;  // to rounding

  [[nodiscard]] double value() const {
    // An infinite sum has no meaningful remainder.
    return std::isfinite(lost) ? total + lost : total;
  }
};

// The sum of the squares of `factor` times all reals. Each block has its own sum; these are
// added in the order of the blocks.
double sum_squares(std::span<const ReadPart> parts, double factor) {
  const Kernels& loops = kernels();
  const std::vector<std::size_t> starts = starts_of(parts);
  std::vector<Sum> sums(starts.back() / kNormBlock + 1);
  const std::size_t traffic = real_bytes(parts, starts);
  parallel_for_parts(starts, traffic, [&](std::size_t i, std::size_t from, std::size_t to) {
    const auto squares = loops.squares[real_of(parts[i].dtype)];
    while (from < to) {
      const std::size_t at = starts[i] + from;
      const std::size_t stop = std::min(to, from + kNormBlock - at % kNormBlock);
      Sum& sum = sums[at / kNormBlock];
      squares(&sum.total, &sum.lost, parts[i].data, factor, from, stop);
      from = stop;
    }
  });
  Sum all;
  for (const Sum& sum : sums) {
    add_exactly(all.total, all.lost, sum.total);
    all.lost += sum.lost;
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

double norm(std::span<const ReadPart> parts) {
  const DefaultFloatEnvironment standard;
  constexpr double kUp = 0x1p600;
  constexpr double kDown = 0x1p-600;
  // Below this, squares that have underflowed may matter.
  constexpr double kLeast = 0x1p-960;
  const bool wide = std::any_of(parts.begin(), parts.end(),
                                [](const ReadPart& part) { return is_compensated(part.dtype); });
  double squares = sum_squares(parts, 1.0);
  double factor = 1.0;
  // The squares of the narrower types are far from the ends of float64's range. If the sum
  // is infinite, reals that vanish when scaled down do not matter beside the largest; if it
  // is tiny, none is too large to be scaled up.
  if (wide && (std::isinf(squares) || squares < kLeast)) {
    factor = squares < kLeast ? kUp : kDown;
    squares = sum_squares(parts, factor);
  }
  // Always the same NaN, whichever one the sum ended with.
  if (std::isnan(squares)) return std::numeric_limits<double>::quiet_NaN();
  return std::sqrt(squares) / factor;
}

double clip_by_norm(std::span<const InPlacePart> parts, double most) {
  const DefaultFloatEnvironment standard;
  std::vector<ReadPart> read;
  read.reserve(parts.size());
  for (const InPlacePart& part : parts) read.push_back(ReadPart{part.dtype, part.size, part.y});
  double before = norm(read);
  if (!std::isfinite(before) || before <= most) return before;
  const double found = before;
  // A subnormal quotient has few significant bits, so scale in steps. What the steps round away is
  // too small to show in the result.
  constexpr double kStep = 0x1p-512;
  for (; most > 0 && most / before < std::numeric_limits<double>::min(); before *= kStep)
    scale(parts, kStep);
  scale(parts, most / before);
  return found;
}

}  // namespace flatweights
