#include "flatweights/nonfinite.hpp"

#include <atomic>
#include <vector>

#include "flatweights/parallel.hpp"

namespace flatweights {
namespace {

constexpr std::size_t kGrain = std::size_t{1} << 19;  // reals

// The bits of the exponent: all set in NaN and infinity, and in nothing else.
template <class T>
struct Exponent;
template <>
struct Exponent<Float16> {
  using Bits = std::uint16_t;
  static constexpr Bits kMask = 0x7c00;
};
template <>
struct Exponent<BFloat16> {
  using Bits = std::uint16_t;
  static constexpr Bits kMask = 0x7f80;
};
template <>
struct Exponent<float> {
  using Bits = std::uint32_t;
  static constexpr Bits kMask = 0x7f800000;
};
template <>
struct Exponent<double> {
  using Bits = std::uint64_t;
  static constexpr Bits kMask = 0x7ff0000000000000;
};

template <class T>
bool has_nonfinite(const std::byte* data, std::size_t begin, std::size_t end) noexcept {
  using Bits = typename Exponent<T>::Bits;
  constexpr Bits kMask = Exponent<T>::kMask;
  Bits found = 0;  // no early exit: it would keep the loop from being vectorised
  for (std::size_t i = begin; i < end; ++i)
    found = static_cast<Bits>(found | ((load<Bits>(data, i) & kMask) == kMask ? 1 : 0));
  return found != 0;
}

}  // namespace

std::size_t first_nonfinite(std::span<const ScreenedPart> parts) {
  std::vector<std::size_t> starts;
  starts.reserve(parts.size() + 1);
  std::size_t reals = 0;
  for (const ScreenedPart& part : parts) {
    starts.push_back(reals);
    reals += part.size * reals_per_element(part.dtype);
  }
  starts.push_back(reals);

  std::atomic<std::size_t> first{parts.size()};
  parallel_for(reals, kGrain, [&](std::size_t begin, std::size_t end) {
    for_each_piece(starts, begin, end, [&](std::size_t i, std::size_t from, std::size_t to) {
      if (i >= first.load(std::memory_order_relaxed)) return;
      const bool found = visit_real(
          parts[i].dtype, [&]<class T>() { return has_nonfinite<T>(parts[i].data, from, to); });
      if (!found) return;
      std::size_t least = first.load(std::memory_order_relaxed);
      while (i < least && !first.compare_exchange_weak(least, i)) {
      }
    });
  });
  return first.load();
}

}  // namespace flatweights
