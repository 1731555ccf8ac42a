// Arrays over memory from the pool of buffers.
#pragma once

#include <pybind11/numpy.h>

#include <cstddef>
#include <cstdint>

namespace flatweights::bind {

// The name of the capsules that own an array's memory and return it to the pool. Nothing else has
// that memory, so nothing else can write to it.
inline constexpr char kOwner[] = "flatweights.buffer";

// A new one-dimensional uint8 array at a 64-byte boundary, contents undefined. Its
// memory goes back to the pool when it dies.
[[nodiscard]] pybind11::array_t<std::uint8_t> new_array(std::size_t nbytes);

}  // namespace flatweights::bind
