// Decides when to write past the caches.
#pragma once

#include <cstddef>

namespace flatweights {

// Writing past the caches pays for jobs that read and write more bytes than this in all:
// FLATWEIGHTS_STREAM_ABOVE, else the size of the third-level cache, else 32 MiB. Decided at the
// first call. Throws std::invalid_argument if the variable is not a number.
[[nodiscard]] std::size_t stream_above();

// Whether a job that reads and writes this many bytes in all should write past the caches: a job
// above the bound evicts everything from them, its own result included.
[[nodiscard]] bool pays_to_stream(std::size_t nbytes);

}  // namespace flatweights
