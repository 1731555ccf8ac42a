// Copies memory, within the caches or past them. Included only by kernels.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "flatweights/registers.hpp"

namespace flatweights {
namespace {

inline constexpr std::size_t kLine = 64;

// Copies whole lines to `to`, the beginning of a line, past the caches. The lines are not
// read before they are written, which saves a third of a copy's traffic.
inline void stream_lines(std::byte* to, const std::byte* from, std::size_t nbytes) noexcept {
#if defined(FLATWEIGHTS_STREAMS)
  for (std::size_t i = 0; i < nbytes; i += kRegister)
    store_register<true>(to + i, load_register<Bytes>(from + i));
#else
  std::memcpy(to, from, nbytes);
#endif
}

// Bytes from `to` to the next beginning of a line.
inline std::size_t bytes_to_line(const std::byte* to) noexcept {
  return (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
}

// Implements `copy` of Kernels.
inline void copy_range(std::byte* to, const std::byte* from, std::size_t nbytes,
                       bool stream) noexcept {
  const std::size_t head = bytes_to_line(to);
  if (!stream || nbytes < head + kLine) {
    if (nbytes > 0) std::memcpy(to, from, nbytes);
    return;
  }
  const std::size_t lines = (nbytes - head) / kLine * kLine;
  const std::size_t tail = nbytes - head - lines;
  std::memcpy(to, from, head);
  stream_lines(to + head, from + head, lines);
  std::memcpy(to + head + lines, from + head + lines, tail);
  end_streaming();
}

}  // namespace
}  // namespace flatweights
