// The limits of this process's control groups: of its own group, and of all groups around it.
//
// Both versions of control groups are read. In a container, paths may be those of the host: groups
// that do not exist there are skipped, and the container's own group is the root. /proc and /sys
// are read below `root`, so that tests can make their own.
#pragma once

#include <cstdint>
#include <string>

namespace flatweights {

// The processors that the groups' quotas allow; 0 if they set no limit.
[[nodiscard]] unsigned processor_limit(const std::string& root = "");

// The bytes of memory that the groups allow; 2^64 - 1 if they set no limit.
[[nodiscard]] std::uint64_t memory_limit(const std::string& root = "");

// The bytes that this process can still take, of the machine and of each group, where a twentieth
// is left to others. Pages of files that the kernel can drop count as free.
[[nodiscard]] std::uint64_t free_memory(const std::string& root = "");

}  // namespace flatweights
