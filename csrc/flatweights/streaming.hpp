// When to write past the caches.
#pragma once

#include <cstddef>

namespace flatweights {

// Bytes that a job reads and writes in all above which it pays: FLATWEIGHTS_STREAM_ABOVE, else
// the size of the third cache, or 32 MiB where none is known. Decided at the first call. Throws
// std::invalid_argument where the variable is no number.
[[nodiscard]] std::size_t stream_above();

// Whether a job that reads and writes this many bytes in all should write past the caches:
// it would push everything out of them, its own result included.
[[nodiscard]] bool pays_to_stream(std::size_t nbytes);

}  // namespace flatweights
