// Memory of a GPU that one process writes and others of the node read.
//
// The owner creates a segment and gives its peers the descriptor, as with a memory file. Each peer
// maps the memory for reading. The driver frees it when no process maps it or has a descriptor of
// it, however they ended. A descriptor can be forwarded by a process that uses no GPU.
//
// Nothing here orders writes and reads: the owner waits until the GPU has written, and then tells
// its peers.
#pragma once

#include <unistd.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace flatweights {

// The identity of a GPU; its number differs between processes that see different GPUs.
using DeviceUuid = std::array<std::byte, 16>;

// As nvidia-smi writes it: GPU-01234567-89ab-cdef-0123-456789abcdef.
[[nodiscard]] std::string text_of(const DeviceUuid& uuid);

// The GPUs that this process uses already: to make a context takes much of a GPU's memory. Throws
// CudaError.
[[nodiscard]] std::vector<DeviceUuid> device_uuids();

// The context of a GPU that this process uses already; it stays valid. Throws CudaError.
[[nodiscard]] void* context_of_device(const DeviceUuid& uuid);

// Throws CudaError.
[[nodiscard]] DeviceUuid device_uuid(void* context);

class DeviceSegment {
 public:
  // A new segment on the context's GPU, contents undefined. Throws std::bad_alloc if memory is
  // short, CudaError otherwise.
  [[nodiscard]] static std::shared_ptr<DeviceSegment> create(void* context, std::size_t nbytes);

  // Maps a peer's segment of `nbytes`, for reading. The descriptor stays the caller's, and may be
  // closed at once. Throws std::bad_alloc or CudaError, also if the segment is smaller or no
  // segment.
  [[nodiscard]] static std::shared_ptr<const DeviceSegment> open(void* context, int descriptor,
                                                                 std::size_t nbytes);

  DeviceSegment(const DeviceSegment&) = delete;
  DeviceSegment& operator=(const DeviceSegment&) = delete;
  // Waits for all work of the context, which may use the memory.
  ~DeviceSegment();

  // An address of the GPU, at the boundary of a page.
  [[nodiscard]] std::byte* data() const noexcept { return reinterpret_cast<std::byte*>(address_); }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] void* context() const noexcept { return context_; }
  [[nodiscard]] const DeviceUuid& uuid() const noexcept { return uuid_; }

  // The owner's descriptor, to be given to peers; -1 once it was closed, and in a peer.
  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }
  void close_descriptor() noexcept;

  // Copy bytes within the segment from or to ordinary memory. They wait for the copy, but not for
  // work on streams that use the memory. Throw CudaError.
  void copy_to_host(std::byte* to, std::size_t offset, std::size_t nbytes) const;
  void copy_from_host(const std::byte* from, std::size_t offset, std::size_t nbytes);

 private:
  class Memory;

  DeviceSegment(void* context, std::size_t nbytes);
  void map(const Memory& memory, int access);

  void* context_;
  DeviceUuid uuid_;
  std::size_t size_;
  std::size_t capacity_ = 0;        // of the memory, in whole units of the driver
  unsigned long long address_ = 0;  // 0 if none is reserved
  bool is_mapped_ = false;
  int descriptor_ = -1;
  pid_t process_ = getpid();  // in its forks, the driver does not work
};

// Why there are no segments on the context's GPU; empty if there are. The first call for a context
// tries it.
[[nodiscard]] std::string device_segment_obstacle(void* context);

}  // namespace flatweights
