// A pool that reuses large buffers.
//
// Freshly mapped memory costs a page fault for every page that is written first, which
// doubles the time of a large result. A loop that drops each result before it asks for
// the next one gets the same memory back.
#pragma once

#include <cstddef>

namespace flatweights {

struct Buffer {
  std::byte* memory;
  std::size_t capacity;
};

// Returns at least `nbytes` of undefined contents at a 64-byte boundary, in huge pages
// where the system has them and they pay. Throws std::bad_alloc if memory is short even
// without the kept buffers.
[[nodiscard]] Buffer take_buffer(std::size_t nbytes);

// Keeps a buffer of take_buffer for later, or returns it to the system if it is small. The
// oldest buffers make room for it: at most most_kept() bytes stay.
void give_buffer(Buffer buffer) noexcept;

// Returns all kept buffers to the system.
void clear_buffers() noexcept;

// Bytes that are kept.
[[nodiscard]] std::size_t kept_bytes() noexcept;

// The most bytes that are kept: FLATWEIGHTS_POOL_BYTES, else 1/32 of the memory of the machine
// or control group, but at most 1 GiB, so that one worker per processor of a large machine leaves
// most of it free. Decided at the first call. Throws std::invalid_argument if the variable is
// not a number.
[[nodiscard]] std::size_t most_kept();

}  // namespace flatweights
