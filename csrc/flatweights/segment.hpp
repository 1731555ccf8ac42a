// A memory file that one process writes and others read: it holds the buffers of messages.
//
// The owner writes only while the segment is free: no array over the memory is alive in its own
// process (`take` and `give`), and no peer holds a view (counted in the mailboxes). A result that
// was gathered straight into the segment is sent without a copy. If an array over it is still
// alive, the result is copied, since that array could change it while others read it.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "flatweights/memory_file.hpp"

namespace flatweights {

class Segment {
 public:
  // Throws std::system_error if memory is short.
  explicit Segment(std::size_t nbytes) {
    check_free_memory(nbytes);
    file_ = MemoryFile::create(nbytes);
  }

  [[nodiscard]] MemoryFile& file() const noexcept { return *file_; }

  // Whether an array of this process is over the memory.
  [[nodiscard]] bool is_taken() const noexcept { return taken_.load(std::memory_order_acquire); }
  // Returns false if it was taken already.
  [[nodiscard]] bool take() noexcept { return !taken_.exchange(true); }
  void give() noexcept { taken_.store(false); }

 private:
  std::shared_ptr<MemoryFile> file_;
  std::atomic<bool> taken_{false};
};

}  // namespace flatweights
