#include "flatweights/buffer_pool.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

#include "flatweights/control_groups.hpp"
#include "flatweights/environment.hpp"

namespace flatweights {
namespace {

constexpr std::size_t kLeastKept = std::size_t{64} << 10;  // below, malloc is as fast
constexpr std::size_t kPage = std::size_t{4} << 10;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kLeastAlignment = 64;
constexpr std::size_t kUsuallyKept = std::size_t{1} << 30;
constexpr std::size_t kShare = 32;  // 1/32 of the memory

// The memory of the machine, or less if the control groups set a limit.
std::size_t usable_memory() {
  const auto machine = static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                       static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return static_cast<std::size_t>(std::min(machine, memory_limit()));
}

// A share of the memory, in whole MiB.
std::size_t usually_kept() { return std::min(kUsuallyKept, usable_memory() / kShare) >> 20 << 20; }

std::mutex mutex;

// Oldest first. Never destroyed: arrays may outlive static objects.
std::vector<Buffer>& kept() {
  static auto* const buffers = new std::vector<Buffer>;
  return *buffers;
}

std::size_t total_kept = 0;

bool in_huge_pages(std::size_t capacity) { return capacity >= 2 * kHugePage; }

std::align_val_t alignment_of(std::size_t capacity) {
  return std::align_val_t{in_huge_pages(capacity) ? kHugePage : kLeastAlignment};
}

// Sizes are rounded up, so that models of nearly one size share buffers.
std::size_t capacity_for(std::size_t nbytes) {
  if (nbytes < kLeastKept) return nbytes;
  const std::size_t unit = in_huge_pages(nbytes) ? kHugePage : kPage;
  return (nbytes + unit - 1) / unit * unit;
}

void release(Buffer buffer) noexcept {
  ::operator delete(buffer.memory, alignment_of(buffer.capacity));
}

std::byte* allocate(std::size_t capacity) noexcept {
  // Under sanitizers, the form that throws ends the process if memory is short.
  void* const memory = ::operator new(capacity, alignment_of(capacity), std::nothrow);
  // Only a hint: if it is ignored, pages are small.
  if (memory != nullptr && in_huge_pages(capacity)) madvise(memory, capacity, MADV_HUGEPAGE);
  return static_cast<std::byte*>(memory);
}

// A child must not inherit a lock that another thread of its parent holds. Registered when the
// library is loaded, so that no fork comes before.
[[maybe_unused]] const int guarded_in_forks =
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });

}  // namespace

std::size_t most_kept() {
  static const std::size_t nbytes =
      bytes_from_environment("FLATWEIGHTS_POOL_BYTES").value_or(usually_kept());
  return nbytes;
}

Buffer take_buffer(std::size_t nbytes) {
  const std::size_t capacity = capacity_for(nbytes);
  if (capacity < nbytes) throw std::bad_alloc();  // it does not fit into a number
  if (capacity >= kLeastKept) {
    // This may throw, which give_buffer must not, so it is called here first.
    static_cast<void>(most_kept());
    const std::lock_guard<std::mutex> lock(mutex);
    std::vector<Buffer>& buffers = kept();
    // The newest buffer is the most likely to be in a cache.
    for (std::size_t i = buffers.size(); i-- > 0;) {
      if (buffers[i].capacity != capacity) continue;
      const Buffer found = buffers[i];
      buffers.erase(buffers.begin() + static_cast<std::ptrdiff_t>(i));
      total_kept -= capacity;
      return found;
    }
  }
  std::byte* memory = allocate(capacity);
  if (memory == nullptr) {
    clear_buffers();
    memory = allocate(capacity);
    if (memory == nullptr) throw std::bad_alloc();
  }
  return Buffer{memory, capacity};
}

void give_buffer(Buffer buffer) noexcept {
  if (buffer.capacity < kLeastKept || buffer.capacity > most_kept()) {
    release(buffer);
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<Buffer>& buffers = kept();
  while (total_kept + buffer.capacity > most_kept()) {
    total_kept -= buffers.front().capacity;
    release(buffers.front());
    buffers.erase(buffers.begin());
  }
  try {
    buffers.push_back(buffer);
    total_kept += buffer.capacity;
  } catch (const std::bad_alloc&) {
    release(buffer);
  }
}

void clear_buffers() noexcept {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Buffer& buffer : kept()) release(buffer);
  kept().clear();
  total_kept = 0;
}

std::size_t kept_bytes() noexcept {
  const std::lock_guard<std::mutex> lock(mutex);
  return total_kept;
}

}  // namespace flatweights
