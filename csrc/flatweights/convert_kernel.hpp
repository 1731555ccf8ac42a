// Converts ranges between real types. Included only by kernels.cpp.
#pragma once

#include <cstddef>
#include <type_traits>

#include "flatweights/average_kernel.hpp"
#include "flatweights/real.hpp"

namespace flatweights {
namespace {

// Implements `convert` of Kernels.
template <class From, class To>
void convert_range(std::byte* to, const std::byte* from, std::size_t begin,
                   std::size_t end) noexcept {
  for_each_block(end - begin, [&](std::size_t done, std::size_t size) {
    if constexpr (is_half<From>) {
      alignas(kLine) float wide[kBlock];
      widen_block<From>(from, begin + done, size, wide);
      round_block<To>(to, begin + done, size, [&wide](std::size_t i, std::uint64_t&) {
        return static_cast<double>(wide[i]);
      });
    } else {
      round_block<To>(to, begin + done, size, [=](std::size_t i, std::uint64_t&) {
        return static_cast<double>(load<From>(from, begin + done + i));
      });
    }
  });
}

}  // namespace
}  // namespace flatweights
