// The kernel of device_copies.cpp: one launch moves any number of variables between a GPU and the
// host's pinned memory. device_copy_ptx.hpp is what nvcc makes of it; CONTRIBUTING.md says how.
#include <cstddef>
#include <cstdint>

// As in device_copies.cpp.
struct Piece {
  const unsigned char* from;
  unsigned char* to;
  unsigned long long size;  // bytes
};

template <class Word>
__device__ std::size_t copy_words(const Piece& piece) {
  const auto* const from = reinterpret_cast<const Word*>(piece.from);
  auto* const to = reinterpret_cast<Word*>(piece.to);
  const std::size_t count = piece.size / sizeof(Word);
#pragma unroll 1
  for (std::size_t i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
  return count * sizeof(Word);
}

// Each block copies one piece.
extern "C" __global__ void flatweights_copy(const Piece* pieces) {
  const Piece piece = pieces[blockIdx.x];
  const std::uintptr_t both =
      reinterpret_cast<std::uintptr_t>(piece.from) | reinterpret_cast<std::uintptr_t>(piece.to);
  std::size_t done = 0;
  if (both % 16 == 0)
    done = copy_words<uint4>(piece);
  else if (both % 4 == 0)
    done = copy_words<std::uint32_t>(piece);
#pragma unroll 1
  for (std::size_t i = done + threadIdx.x; i < piece.size; i += blockDim.x)
    piece.to[i] = piece.from[i];
}
