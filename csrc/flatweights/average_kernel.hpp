// Weighted sums and means of ranges. Included only by kernels.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "flatweights/copy_kernel.hpp"
#include "flatweights/real.hpp"
#include "flatweights/two_sum.hpp"

namespace flatweights {
namespace {

inline constexpr std::size_t kBlock = 1024;  // a block's sums stay in L1
// With many sources, larger blocks pay: the prefetcher follows each source for longer, which gains
// more than is lost when the sums spill to L2.
inline constexpr std::size_t kMostBlock = 4 * kBlock;
inline constexpr std::size_t kManySources = 8;
inline constexpr std::size_t kGroup = 4;  // sources whose sum is kept in a register

// The running sum of one element.
struct Sum {
  double total;
  double lost;  // to rounding; used for float64 only
};

// Adds `weight[k] * source[k][i]` for k < Count, in order; unless Weighted, all
// weights are 1.
//
// float16, bfloat16 and float32 are summed in float64; sums of float64 keep what each addition
// rounds away.
template <class T, std::size_t Count, bool Weighted>
[[gnu::always_inline]] inline void add_terms(Sum& sum, const std::byte* const* source,
                                             [[maybe_unused]] const double* weight,
                                             std::size_t i) noexcept {
#pragma GCC unroll 4
  for (std::size_t k = 0; k < Count; ++k) {
    double term = static_cast<double>(load<T>(source[k], i));
    if constexpr (Weighted) term *= weight[k];
    if constexpr (std::is_same_v<T, double>)
      add_exactly(sum.total, sum.lost, term);
    else
      sum.total += term;
  }
}

template <class T, bool First>
[[gnu::always_inline]] inline Sum begin_sum(const double* total,
                                            [[maybe_unused]] const double* lost,
                                            std::size_t i) noexcept {
  if constexpr (First)
    return {0.0, 0.0};
  else if constexpr (std::is_same_v<T, double>)
    return {total[i], lost[i]};
  else
    return {total[i], 0.0};
}

// Adds `weights[k] * sources[k][begin, begin + count)` for k < Count to the sums in
// `total` and `lost`, which count as 0 if First.
template <class T, std::size_t Count, bool First>
inline void add_sources(double* __restrict total, double* __restrict lost,
                        const std::byte* const* sources, const double* weights, std::size_t begin,
                        std::size_t count) noexcept {
  if (count > kMostBlock) __builtin_unreachable();
  const std::byte* source[Count];
  double weight[Count];
  for (std::size_t k = 0; k < Count; ++k) {
    source[k] = sources[k];
    weight[k] = weights[k];
  }
  for (std::size_t i = 0; i < count; ++i) {
    Sum sum = begin_sum<T, First>(total, lost, i);
    add_terms<T, Count, true>(sum, source, weight, begin + i);
    total[i] = sum.total;
    if constexpr (std::is_same_v<T, double>) lost[i] = sum.lost;
  }
}

// Returns the mean of `sum`, and sets `nonfinite` if the sum is not finite.
template <class T, bool Multiply>
[[gnu::always_inline]] inline double divide(Sum sum, double factor,
                                            std::uint64_t& nonfinite) noexcept {
  // Infinity minus itself is NaN, which is not equal to 0.
  nonfinite |= sum.total - sum.total == 0.0 ? 0u : 1u;
  double value = sum.total;
  // An infinite sum has no meaningful remainder.
  if constexpr (std::is_same_v<T, double>) value += sum.lost - sum.lost == 0.0 ? sum.lost : 0.0;
  return Multiply ? value * factor : value / factor;
}

// Writes `value(i, marks)`, rounded to T once, to `out[begin, begin + count)`, count <=
// kMostBlock. Returns the bits that the calls have set in `marks`.
template <class T, class Value>
inline std::uint64_t round_block(std::byte* __restrict out, std::size_t begin, std::size_t count,
                                 Value value) noexcept {
  if (count > kMostBlock) __builtin_unreachable();
  std::uint64_t marks = 0;
  if constexpr (is_half<T>) {
    alignas(kLine) std::uint32_t odd[kMostBlock];
    for (std::size_t i = 0; i < count; ++i) odd[i] = round_to_odd(value(i, marks));
    narrow_block<T>(odd, count, out, begin);
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      store(out, begin + i, with_one_nan(static_cast<T>(value(i, marks))));
    }
  }
  return marks;
}

// Adds the last Count sources to the sums, divides, and writes the means, rounded to Out,
// to `out[to, to + count)`. Returns whether all sums are finite. The sources are of
// type Loaded: float if they had 16 bits.
template <class Out, class Loaded, std::size_t Count, bool First, bool Weighted, bool Multiply>
inline bool finish_sources(std::byte* out, std::size_t to, const double* __restrict total,
                           const double* __restrict lost, const std::byte* const* sources,
                           const double* weights, std::size_t begin, std::size_t count,
                           double factor) noexcept {
  const std::byte* source[Count];
  double weight[Count];
  for (std::size_t k = 0; k < Count; ++k) {
    source[k] = sources[k];
    weight[k] = Weighted ? weights[k] : 1.0;
  }
  return round_block<Out>(out, to, count, [=](std::size_t i, std::uint64_t& nonfinite) {
           Sum sum = begin_sum<Loaded, First>(total, lost, i);
           add_terms<Loaded, Count, Weighted>(sum, source, weight, begin + i);
           return divide<Loaded, Multiply>(sum, factor, nonfinite);
         }) == 0;
}

// At most kGroup sources of one block, to be averaged as Out. 16-bit sources are widened
// first: to float64, with compensated sums, if Out is float64; else to float32.
template <class T, class Out>
class Group {
 public:
  Group(const std::byte* const* sources, std::size_t size, std::size_t begin,
        std::size_t count) noexcept
      : size_(size), begin_(begin), count_(count) {
    if constexpr (is_half<T>) begin_ = 0;
    for (std::size_t k = 0; k < size; ++k) {
      if constexpr (is_half<T>) {
        widen(sources[k], begin, count, wide_[k]);
        sources_[k] = reinterpret_cast<const std::byte*>(wide_[k]);
      } else {
        sources_[k] = sources[k];
      }
    }
  }

  template <bool First>
  void add(double* total, double* lost, const double* weights) const noexcept {
    with_size([&]<std::size_t Count>() {
      add_sources<Loaded, Count, First>(total, lost, sources_, weights, begin_, count_);
      return true;
    });
  }

  template <bool First>
  bool finish(std::byte* out, std::size_t to, const double* total, const double* lost,
              const double* weights, Divisor divisor) const noexcept {
    return with_size([&]<std::size_t Count>() {
      const auto run = [&]<bool Weighted, bool Multiply>() {
        return finish_sources<Out, Loaded, Count, First, Weighted, Multiply>(
            out, to, total, lost, sources_, weights, begin_, count_, divisor.factor);
      };
      if (weights == nullptr)
        return divisor.multiply ? run.template operator()<false, true>()
                                : run.template operator()<false, false>();
      return divisor.multiply ? run.template operator()<true, true>()
                              : run.template operator()<true, false>();
    });
  }

 private:
  using Widened = std::conditional_t<std::is_same_v<Out, double>, double, float>;
  using Loaded = std::conditional_t<is_half<T>, Widened, T>;

  static void widen(const std::byte* source, std::size_t begin, std::size_t count,
                    float* out) noexcept {
    widen_block<T>(source, begin, count, out);
  }
  static void widen(const std::byte* source, std::size_t begin, std::size_t count,
                    double* out) noexcept {
    for (std::size_t i = 0; i < count; ++i) out[i] = widened<T>(source, begin + i);
  }

  template <class Body>
  bool with_size(Body body) const noexcept {
    static_assert(kGroup == 4);
    switch (size_) {
      case 1:
        return body.template operator()<1>();
      case 2:
        return body.template operator()<2>();
      case 3:
        return body.template operator()<3>();
      default:
        return body.template operator()<4>();
    }
  }

  std::size_t size_;
  std::size_t begin_;
  std::size_t count_;
  const std::byte* sources_[kGroup] = {};
  alignas(kLine) Widened wide_[is_half<T> ? kGroup : 1][is_half<T> ? kMostBlock : 1];
};

// Writes the means of one block, rounded to Out, to `out[to, to + size)`; returns whether
// all sums are finite.
template <class T, class Out>
inline bool average_block(std::byte* out, std::size_t to, const std::byte* const* sources,
                          const double* weights, std::size_t count, Divisor divisor,
                          std::size_t begin, std::size_t size) noexcept {
  if (count <= kGroup)
    return Group<T, Out>(sources, count, begin, size)
        .template finish<true>(out, to, nullptr, nullptr, weights, divisor);
  alignas(kLine) double total[kMostBlock];
  alignas(kLine) double lost[std::is_same_v<Out, double> ? kMostBlock : 1];
  static constexpr double kOnes[kGroup] = {1, 1, 1, 1};
  const auto from = [weights](std::size_t k) { return weights == nullptr ? kOnes : weights + k; };
  Group<T, Out>(sources, kGroup, begin, size).template add<true>(total, lost, from(0));
  std::size_t k = kGroup;
  for (; k + kGroup < count; k += kGroup)
    Group<T, Out>(sources + k, kGroup, begin, size).template add<false>(total, lost, from(k));
  return Group<T, Out>(sources + k, count - k, begin, size)
      .template finish<false>(out, to, total, lost, weights == nullptr ? weights : weights + k,
                              divisor);
}

// Implements `average` of Kernels, and `average_widened` if Out is not T.
template <class T, class Out = T>
bool average_range(std::byte* out, const std::byte* const* sources, const double* weights,
                   std::size_t count, double total, std::size_t begin, std::size_t end, bool stream,
                   std::byte*) noexcept {
  const Divisor divisor(total);
  alignas(kLine) std::byte lines[kMostBlock * sizeof(Out)];
  bool finite = true;
  // The first block ends where a cache line of `out` does, so that whole lines follow.
  const std::size_t head = bytes_to_line(out + begin * sizeof(Out));
  if (head % sizeof(Out) != 0) stream = false;  // lines begin within elements
  const std::size_t block = count > kManySources ? kMostBlock : kBlock;
  std::size_t most = stream && head > 0 ? head / sizeof(Out) : block;
  for (; begin < end; most = block) {
    const std::size_t size = end - begin < most ? end - begin : most;
    // `out` may be a source. Writing to `lines` first tells the compiler that the loops do not
    // read what they write.
    finite &= average_block<T, Out>(lines, 0, sources, weights, count, divisor, begin, size);
    if (stream && size == block)
      stream_lines(out + begin * sizeof(Out), lines, size * sizeof(Out));
    else
      std::memcpy(out + begin * sizeof(Out), lines, size * sizeof(Out));
    begin += size;
  }
  if (stream) end_streaming();
  return finite;
}

// Calls `body(done, size)` for consecutive blocks of `[0, count)`.
template <class Body>
inline void for_each_block(std::size_t count, Body body) noexcept {
  for (std::size_t done = 0; done < count; done += kBlock)
    body(done, count - done < kBlock ? count - done : kBlock);
}

// Implements `add` of Kernels.
template <class T>
void add_range(double* sum, double* compensation, const std::byte* source, double weight,
               std::size_t begin, std::size_t end) noexcept {
  for_each_block(end - begin, [&](std::size_t done, std::size_t size) {
    double* const lost = compensation == nullptr ? nullptr : compensation + done;
    Group<T, T>(&source, 1, begin + done, size).template add<false>(sum + done, lost, &weight);
  });
}

// Implements `divide` of Kernels.
template <class T>
void divide_range(std::byte* out, const double* sum, const double* compensation, double total,
                  std::size_t begin, std::size_t end) noexcept {
  const Divisor divisor(total);
  for_each_block(end - begin, [&](std::size_t done, std::size_t size) {
    const auto value = [=]<bool Multiply>(std::size_t i, std::uint64_t& nonfinite) {
      const Sum found = begin_sum<T, false>(sum + done, compensation + done, i);
      return divide<T, Multiply>(found, divisor.factor, nonfinite);
    };
    const auto multiplied = [=](std::size_t i, std::uint64_t& nonfinite) {
      return value.template operator()<true>(i, nonfinite);
    };
    const auto divided = [=](std::size_t i, std::uint64_t& nonfinite) {
      return value.template operator()<false>(i, nonfinite);
    };
    if (divisor.multiply)
      round_block<T>(out, begin + done, size, multiplied);
    else
      round_block<T>(out, begin + done, size, divided);
  });
}

}  // namespace
}  // namespace flatweights
