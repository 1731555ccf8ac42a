// Moves many pieces of memory between GPUs and the host at once.
//
// A separate transfer for each variable takes microseconds, mostly to launch it. One kernel copies
// all of them instead, between the GPU's memory and a buffer of the host that the GPU can reach.
// The processor copies, and converts, between that buffer and ordinary memory, while the next
// pieces are on their way.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "flatweights/dtype.hpp"

namespace flatweights {

// The memory of `size` elements, at least one, on a GPU and on the host.
struct DeviceCopy {
  void* stream;  // CUDA's, in the order of which the GPU's memory is used; null if unknown
  std::byte* device;
  std::byte* host;
  std::size_t size;
  std::size_t device_itemsize;  // bytes of an element
  std::size_t host_itemsize;
  DType device_dtype = DType::kOther;  // as in Copy: values of two real dtypes are converted
  DType host_dtype = DType::kOther;
};

// Why no GPU's memory can be copied from here; empty if it can. The first call prepares for it,
// which takes some ten milliseconds.
[[nodiscard]] std::string device_obstacle();

// Whether `memory` is a GPU's, and can be copied without a known stream.
[[nodiscard]] bool is_on_device(const void* memory) noexcept;

// Copies to the host after all work that was queued so far in the stream, or on the GPU if the
// stream is unknown. Throws std::bad_alloc or CudaError.
void copy_from_devices(std::vector<DeviceCopy> copies);

// Copies from the host in the order of the streams, which are known: after work that was queued
// before, and before work that is queued later. On return the host's memory may be reused. Throws
// std::bad_alloc or CudaError; if the driver fails half-way, some memory may have been written.
void copy_to_devices(std::vector<DeviceCopy> copies);

}  // namespace flatweights
