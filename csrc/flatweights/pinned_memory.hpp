// Memory of the host that many copies go through, such as a segment: GPUs reach it directly.
//
// At the first copy, NVIDIA's driver pins the memory, which takes milliseconds for 100 MB; from
// then on kernels read and write it without a stop in other memory of the host. Where the driver
// refuses (confidential computing, a limit of locked memory), copies go as they go for any memory.
// Read-only mappings are pinned for reading: not even a GPU can write to them.
#pragma once

#include <cstddef>

namespace flatweights {

// One mapping that may be pinned, from here until it is destroyed, which comes before its
// unmapping.
class PinnableMemory {
 public:
  PinnableMemory(std::byte* begin, std::size_t size, bool is_writable);
  PinnableMemory(const PinnableMemory&) = delete;
  PinnableMemory& operator=(const PinnableMemory&) = delete;
  ~PinnableMemory();

 private:
  std::byte* begin_;
};

// The address by which GPUs reach `memory[0, size)`; null if it is in no pinnable memory, or that
// cannot be pinned. The context of a GPU must be current.
[[nodiscard]] std::byte* pinned_address(const std::byte* memory, std::size_t size) noexcept;

}  // namespace flatweights
