// Tables of copies, for the host and nvcc.
#pragma once

#include <cstddef>

namespace probe {

// As in csrc/flatweights/device_copy.cu.
struct Piece {
  const void* from;
  void* to;
  unsigned long long size;
};

constexpr std::size_t kIn4k = 4096 / sizeof(Piece);
constexpr std::size_t kIn32k = 32760 / sizeof(Piece);

template <std::size_t Count>
struct Table {
  Piece pieces[Count];
};

}  // namespace probe
