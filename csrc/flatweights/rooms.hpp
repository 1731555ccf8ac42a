// Scratch memory that several threads share.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <vector>

#include "flatweights/buffer_pool.hpp"

namespace flatweights {

// Rooms of equal size. All are taken before any thread writes a result, since memory may be short.
class Rooms {
 public:
  Rooms(std::size_t nbytes, std::size_t count) {
    try {
      for (std::size_t i = 0; i < count; ++i) buffers_.push_back(take_buffer(nbytes));
      for (const Buffer& buffer : buffers_) free_.push_back(buffer.memory);
    } catch (...) {
      give_back();
      throw;
    }
  }
  Rooms(const Rooms&) = delete;
  Rooms& operator=(const Rooms&) = delete;
  ~Rooms() { give_back(); }

  // Waits for a room that is not in use.
  std::byte* enter() {
    std::unique_lock lock(mutex_);
    left_.wait(lock, [this] { return !free_.empty(); });
    std::byte* const room = free_.back();
    free_.pop_back();
    return room;
  }

  void leave(std::byte* room) {
    {
      const std::lock_guard lock(mutex_);
      free_.push_back(room);
    }
    left_.notify_one();
  }

 private:
  void give_back() noexcept {
    for (const Buffer& buffer : buffers_) give_buffer(buffer);
  }

  std::mutex mutex_;
  std::condition_variable left_;
  std::vector<Buffer> buffers_;
  std::vector<std::byte*> free_;
};

}  // namespace flatweights
