// Moves many pieces of memory at once: parts into a buffer, or a buffer into parts.
#pragma once

#include <cstddef>
#include <span>

namespace flatweights {

struct Copy {
  std::byte* to;
  const std::byte* from;
  std::size_t nbytes;
};

// Copies `from[0, nbytes)` to `to[0, nbytes)` for each of `copies`. Each byte is
// read once and written once. No destination overlaps any other range.
void copy_all(std::span<const Copy> copies);

}  // namespace flatweights
