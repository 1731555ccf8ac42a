// Large buffers that are used again.
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
// where the system has them and they pay. Throws std::bad_alloc once everything kept
// has been given back and there is still no room.
[[nodiscard]] Buffer take_buffer(std::size_t nbytes);

// Keeps what take_buffer returned for later, or gives it back to the system if it is
// small. What has been kept longest makes room for it: at most most_kept() bytes stay.
void give_buffer(Buffer buffer) noexcept;

// Gives all kept buffers back to the system.
void clear_buffers() noexcept;

// Bytes that are kept.
[[nodiscard]] std::size_t kept_bytes() noexcept;

// The bytes that are kept at most: FLATWEIGHTS_POOL_BYTES, else a thirty-second of the memory of
// the machine, or of what the control group may use, and no more than 1 GiB: a worker for each
// processor of a large machine leaves most of it free. Decided at the first call. Throws
// std::invalid_argument where the variable is no number.
[[nodiscard]] std::size_t most_kept();

}  // namespace flatweights
