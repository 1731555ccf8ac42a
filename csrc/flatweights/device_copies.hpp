// Moves many pieces of memory between GPUs and the host at once.
//
// A separate transfer for each variable takes microseconds, mostly to launch it. One kernel copies
// all of them instead, between the GPU's memory and a buffer of the host that the GPU can reach.
// The processor copies, and converts, between that buffer and ordinary memory, while the next
// pieces are on their way.
#pragma once

#include <cstddef>
#include <cstdint>
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

// Tells which memory is a GPU's. The driver's answer for one address serves for all of the same
// allocation, of which TensorFlow has few: asking for each variable takes longer than moving many
// of them. So an object is for one call, during which nothing is freed.
class DeviceMemory {
 public:
  // The context that `memory` belongs to, so that it can be copied without a known stream; null if
  // it is not a GPU's, or from an allocator in the order of streams.
  [[nodiscard]] void* context_of(const void* memory) noexcept;

 private:
  std::uintptr_t begin_ = 0;
  std::size_t size_ = 0;
  void* context_ = nullptr;
};

// Copies to the host after all work that was queued so far in the stream, or on the GPU if the
// stream is unknown. Throws std::bad_alloc or CudaError.
void copy_from_devices(std::vector<DeviceCopy> copies);

// Copies from the host in the order of the streams: after work that was queued before, and before
// work that is queued later. If a stream is unknown, all is on the GPU on return, after all work
// that was queued so far. On return the host's memory may be reused. Throws std::bad_alloc or
// CudaError; if the driver fails half-way, some memory may have been written.
void copy_to_devices(std::vector<DeviceCopy> copies);

enum class Direction { kToHost, kToDevice };

// Copies within a GPU: `host` is an address of its memory, too. The bytes are complete on return,
// after all work that was queued before in the streams, or on the GPU if the stream is unknown.
// Throws std::bad_alloc or CudaError.
void copy_within_devices(std::vector<DeviceCopy> copies, Direction direction);

}  // namespace flatweights
