// The probe's own kernels; nvcc makes PTX of them. Those of flatweights are in csrc/flatweights.
#include <cstddef>
#include <cstdint>

#include "pieces.hpp"

__device__ std::uint32_t pattern(std::uint32_t i, std::uint32_t seed) {
  return (i ^ seed) * 2654435761u;
}

// Keeps the GPU busy.
extern "C" __global__ void probe_spin(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

extern "C" __global__ void probe_fill(std::uint32_t* words, std::uint32_t count,
                                      std::uint32_t seed) {
  for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += gridDim.x * blockDim.x)
    words[i] = pattern(i, seed);
}

// Counts the words in [first, count) that probe_fill has not written.
extern "C" __global__ void probe_check(const std::uint32_t* words, std::uint32_t first,
                                       std::uint32_t count, std::uint32_t seed,
                                       std::uint32_t* wrong) {
  std::uint32_t found = 0;
  for (std::uint32_t i = first + blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += gridDim.x * blockDim.x)
    found += words[i] != pattern(i, seed) ? 1 : 0;
  if (found != 0) atomicAdd(wrong, found);
}

// One block writes [256, 256 + count) again and again, and counts its rounds in the first word.
extern "C" __global__ void probe_write(volatile std::uint32_t* words, std::uint32_t count,
                                       long long cycles) {
  const long long begin = clock64();
  std::uint32_t round = 0;
  while (clock64() - begin < cycles) {
    ++round;
    for (std::uint32_t i = threadIdx.x; i < count; i += blockDim.x) words[256 + i] = round;
    __threadfence_system();
    if (threadIdx.x == 0) words[0] = round;
  }
}

extern "C" __global__ void probe_poke(std::uint32_t* words) { words[threadIdx.x] = 0xdeadbeefu; }

// Like flatweights_copy, of aligned pieces; the table is a parameter. Blocks with the same x share
// a piece.
template <class Table>
__device__ void copy_piece(const Table& table) {
  const probe::Piece piece = table.pieces[blockIdx.x];
  const std::size_t count = piece.size / 16;
  const auto* const from = reinterpret_cast<const uint4*>(piece.from);
  auto* const to = reinterpret_cast<uint4*>(piece.to);
  const std::size_t step = std::size_t{blockDim.x} * gridDim.y;
  for (std::size_t i = blockIdx.y * blockDim.x + threadIdx.x; i < count; i += step) to[i] = from[i];
  if (blockIdx.y == 0)
    for (std::size_t i = count * 16 + threadIdx.x; i < piece.size; i += blockDim.x)
      reinterpret_cast<unsigned char*>(piece.to)[i] =
          reinterpret_cast<const unsigned char*>(piece.from)[i];
}

extern "C" __global__ void probe_copy_4k(const __grid_constant__ probe::Table<probe::kIn4k> table) {
  copy_piece(table);
}

extern "C" __global__ void probe_copy_32k(
    const __grid_constant__ probe::Table<probe::kIn32k> table) {
  copy_piece(table);
}
