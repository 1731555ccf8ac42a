// The table of inner loops, compiled once per instruction set, and the choice of one.
#pragma once

#include <cstddef>

#include "flatweights/adaptive.hpp"
#include "flatweights/difference.hpp"
#include "flatweights/dtype.hpp"
#include "flatweights/sorting.hpp"

namespace flatweights {

inline constexpr std::size_t kRoom = std::size_t{128} << 10;
inline constexpr std::size_t kMostStreams = 16;

// One instruction set's loops. Positions are elements of the real type that the index
// stands for; memory need not be aligned. All sets give the same bits.
struct Kernels {
  const char* name;

  // Writes the mean of `sources[k][begin, end)` over k < count, with `weights[k]` (null
  // for weights of 1) and their sum `total`, to `out[begin, end)`. `out` may be one of the sources
  // unless `stream`, which writes past the caches. Returns whether all sums are finite. If so, all
  // sources are; if not, a sum may merely have overflowed. `room` is kRoom bytes at a 64-byte
  // boundary, or null; it only makes streams of more than kMostStreams sources faster.
  bool (*average[kReals])(std::byte* out, const std::byte* const* sources, const double* weights,
                          std::size_t count, double total, std::size_t begin, std::size_t end,
                          bool stream, std::byte* room) noexcept;

  // Like `average`, but from Float16 or BFloat16 (first index) to float or double (second index);
  // `out` is none of the sources.
  bool (*average_widened[2][2])(std::byte* out, const std::byte* const* sources,
                                const double* weights, std::size_t count, double total,
                                std::size_t begin, std::size_t end, bool stream,
                                std::byte* room) noexcept;

  // Writes the means over ranks of the sorted numbers of `sources[k][begin, end)` over k <
  // sorting.count to `out[begin, end)`, which may be one of the sources unless `stream`. NaN
  // where a source is NaN. Returns whether all numbers are finite. `room` is room_bytes(sorting)
  // bytes at a 64-byte boundary.
  bool (*order[kReals])(std::byte* out, const std::byte* const* sources, const Sorting& sorting,
                        std::size_t begin, std::size_t end, bool stream, std::byte* room) noexcept;

  // Adds the squares of `sources[i][begin, end) - sources[j][begin, end)`, for i < j < count, to
  // the kDistanceColumns columns of each pair in `sums`: of (0, 1), (0, 2), ..., (1, 2), ... They
  // are computed in float32, or in float64 (second index, and for float64). The order in which
  // squares are added depends only on end - begin. `room` is, for each source, an address and
  // kDistanceBlock float64, and a line, at a 64-byte boundary.
  void (*distances[kReals][2])(double* sums, const std::byte* const* sources, std::size_t count,
                               std::size_t begin, std::size_t end, std::byte* room) noexcept;

  // Adds `weight * source[begin, end)` to `sum[0, end - begin)`; for float64 only, rounding
  // errors go to `compensation`.
  void (*add[kReals])(double* sum, double* compensation, const std::byte* source, double weight,
                      std::size_t begin, std::size_t end) noexcept;

  // Writes `sum[0, end - begin) / total` to `out[begin, end)`.
  void (*divide[kReals])(std::byte* out, const double* sum, const double* compensation,
                         double total, std::size_t begin, std::size_t end) noexcept;

  // Whether `data[begin, end)` holds NaN or infinity.
  bool (*has_nonfinite[kReals])(const std::byte* data, std::size_t begin, std::size_t end) noexcept;

  // Change `y[begin, end)` in place: to `a * y`, to `y + a * x`, and to `y + a * (x - y)`.
  // `x` may be `y`.
  void (*scale[kReals])(std::byte* y, double a, std::size_t begin, std::size_t end) noexcept;
  void (*axpy[kReals])(std::byte* y, double a, const std::byte* x, std::size_t begin,
                       std::size_t end) noexcept;
  void (*lerp[kReals])(std::byte* y, const std::byte* x, double a, std::size_t begin,
                       std::size_t end) noexcept;

  // Adds the squares of `scale * data[begin, end)` to `total + lost`, in an order that
  // depends only on `begin` and `end`.
  void (*squares[kReals])(double* total, double* lost, const std::byte* data, double scale,
                          std::size_t begin, std::size_t end) noexcept;

  // Writes `from[begin, end)`, of the first index's type, to `to[begin, end)`, of the
  // second's, rounded once. The ranges are disjoint.
  void (*convert[kReals][kReals])(std::byte* to, const std::byte* from, std::size_t begin,
                                  std::size_t end) noexcept;

  // Encodes the difference of numbers [begin, end), from float32 or float64 (first index) to
  // Float16 or BFloat16 (second index). Returns whether what encode_difference checks is finite.
  bool (*encode[2][2])(const DifferencePart& part, std::size_t begin, std::size_t end) noexcept;

  // Takes steps with numbers [begin, end) of float32, and of float64; see adaptive.hpp.
  void (*adapt[2])(const AdaptiveRange& range, SecondMoment kind, const AdaptiveRates& rates,
                   std::size_t begin, std::size_t end) noexcept;

  // Copies `from[0, nbytes)` to `to[0, nbytes)`, which are disjoint; with `stream`, past
  // the caches.
  void (*copy)(std::byte* to, const std::byte* from, std::size_t nbytes, bool stream) noexcept;
};

// The loops in use. Decided at the first call: the set that the environment variable
// FLATWEIGHTS_ISA names, else the best that this processor runs. Throws std::invalid_argument
// if this processor does not run the named set.
[[nodiscard]] const Kernels& kernels();

}  // namespace flatweights
