#include "flatweights/pinned_memory.hpp"

#include <unistd.h>

#include <cstdint>
#include <map>
#include <mutex>

#include "flatweights/cuda_driver.hpp"

namespace flatweights {
namespace {

enum class State { kUntried, kPinned, kRefused };

struct Mapping {
  std::size_t size;
  bool is_writable;
  State state = State::kUntried;
  std::byte* device = nullptr;  // of a pinned one: its address for GPUs
  void* context = nullptr;      // in which it was pinned
};

// Never freed, since mappings are destroyed while the process exits.
struct Mappings {
  std::mutex mutex;
  std::map<const std::byte*, Mapping> by_begin;
  const pid_t process = getpid();

  // In a forked process the lock may be taken for ever, and NVIDIA's driver does not work.
  [[nodiscard]] bool is_own_process() const noexcept { return getpid() == process; }

  static Mappings& instance() {
    static auto* const mappings = new Mappings;
    return *mappings;
  }
};

void pin(const CudaDriver& driver, const std::byte* begin, Mapping& mapping) noexcept {
  constexpr unsigned kPortable = 1;  // CU_MEMHOSTREGISTER_PORTABLE: all GPUs reach it
  constexpr unsigned kMapped = 2;    // CU_MEMHOSTREGISTER_DEVICEMAP
  constexpr unsigned kReadOnly = 8;  // CU_MEMHOSTREGISTER_READ_ONLY
  mapping.state = State::kRefused;
  if (driver.current_context == nullptr || driver.pin == nullptr || driver.unpin == nullptr ||
      driver.pinned_address == nullptr)
    return;
  auto* const memory = const_cast<std::byte*>(begin);
  const unsigned flags = kPortable | kMapped | (mapping.is_writable ? 0 : kReadOnly);
  if (driver.current_context(&mapping.context) != 0 || mapping.context == nullptr) return;
  if (driver.pin(memory, mapping.size, flags) != 0) return;
  unsigned long long address = 0;
  if (driver.pinned_address(&address, memory, 0) != 0) {
    driver.unpin(memory);
    return;
  }
  mapping.device = reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
  mapping.state = State::kPinned;
}

}  // namespace

PinnableMemory::PinnableMemory(std::byte* begin, std::size_t size, bool is_writable)
    : begin_(begin) {
  Mappings& mappings = Mappings::instance();
  if (!mappings.is_own_process()) return;
  const std::lock_guard lock(mappings.mutex);
  mappings.by_begin[begin] = {size, is_writable};
}

PinnableMemory::~PinnableMemory() {
  Mappings& mappings = Mappings::instance();
  if (!mappings.is_own_process()) return;
  const std::lock_guard lock(mappings.mutex);
  const auto found = mappings.by_begin.find(begin_);
  if (found == mappings.by_begin.end()) return;
  if (found->second.state == State::kPinned) {
    const CudaDriver& driver = CudaDriver::instance();
    const bool entered = driver.push_context(found->second.context) == 0;
    driver.unpin(begin_);
    void* popped = nullptr;
    if (entered) driver.pop_context(&popped);
  }
  mappings.by_begin.erase(found);
}

std::byte* pinned_address(const std::byte* memory, std::size_t size) noexcept {
  Mappings& mappings = Mappings::instance();
  // A fork that is the first to use a GPU would not unpin what it has pinned.
  if (!mappings.is_own_process()) return nullptr;
  const std::lock_guard lock(mappings.mutex);
  auto found = mappings.by_begin.upper_bound(memory);
  if (found == mappings.by_begin.begin()) return nullptr;
  --found;
  Mapping& mapping = found->second;
  const auto at = static_cast<std::size_t>(memory - found->first);
  if (at >= mapping.size || size > mapping.size - at) return nullptr;
  if (mapping.state == State::kUntried) pin(CudaDriver::instance(), found->first, mapping);
  return mapping.state == State::kPinned ? mapping.device + at : nullptr;
}

}  // namespace flatweights
