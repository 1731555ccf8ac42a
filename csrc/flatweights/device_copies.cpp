// A ring of slots in memory that the host and all GPUs reach. A get has the GPU fill a slot, and
// goes on with the next ones; then it waits for the first slot's event and empties it. A set fills
// a slot, has the GPU empty it, and goes on with the next; it does not wait for the last ones.
// Slots are numbered, and used in turn: before its next use, a slot waits for the event of its last
// one. Copies from and to pinned memory need no slot, only a slot's table of pieces: all are
// launched first, and waited for last.
//
// One mutex guards the ring. Callers may hold locks of variables when they take it, but nobody who
// holds it takes one. Kernels run on TensorFlow's own stream, so everything is in the order in
// which it was queued; TensorFlow relies on that, too, when it reuses memory that kernels still
// read.
#include "flatweights/device_copies.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "flatweights/cuda_driver.hpp"
#include "flatweights/device_copy_ptx.hpp"
#include "flatweights/flatten.hpp"
#include "flatweights/pinned_memory.hpp"

namespace flatweights {
namespace {

// As in device_copy.cu.
struct Piece {
  const std::byte* from;
  std::byte* to;
  std::uint64_t size;
};

// Smaller slots cost launches, which the copies then wait for: with 2 MB, a get of 100 MB from an
// H200 takes 1.15 times as long. With one slot more or less, nothing changes.
constexpr std::size_t kSlots = 4;
constexpr std::size_t kSlotBytes = std::size_t{8} << 20;
constexpr std::size_t kAlign = 16;        // the widest loads of the kernel
constexpr std::size_t kCopyPiece = 4096;  // for one block of threads, 16 bytes for each of them
constexpr std::size_t kMostPieces = 2 * kSlotBytes / kCopyPiece;
constexpr unsigned kCopyThreads = 256;

// What one launch copies at most. Without a slot's memory, only its table sets a limit; pieces are
// larger where there are enough for all multiprocessors of a GPU.
struct Launch {
  std::size_t nbytes;
  std::size_t piece;

  static constexpr Launch of_slot() { return {kSlotBytes, kCopyPiece}; }

  static Launch of_pinned(std::span<const DeviceCopy> copies) {
    constexpr std::size_t kLargePiece = 16 * kCopyPiece;
    std::size_t nbytes = 0;
    for (const DeviceCopy& copy : copies) nbytes += copy.size * copy.device_itemsize;
    return {nbytes, nbytes < kMostPieces / 4 * kCopyPiece ? kCopyPiece : kLargePiece};
  }
};

struct StagingSlot {
  std::byte* memory = nullptr;
  Piece* pieces = nullptr;       // what the GPU copies
  std::size_t count = 0;         // of them
  std::vector<Copy> copies;      // what the processor copies
  void* in_use_until = nullptr;  // an event; null if no GPU uses it

  void clear() noexcept {
    count = 0;
    copies.clear();
  }

  void add(const std::byte* from, std::byte* to, std::size_t nbytes, std::size_t piece) noexcept {
    for (std::size_t done = 0; done < nbytes; done += piece)
      pieces[count++] = {from + done, to + done, std::min(piece, nbytes - done)};
  }
};

// The context of a GPU that the process uses already: to make one takes much of a GPU's memory.
void* context_in_use(const CudaDriver& driver) {
  int count = 0;
  driver.check(driver.count_devices(&count), "cuDeviceGetCount");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0;
    unsigned flags = 0;
    int is_active = 0;
    driver.check(driver.device_at(&device, ordinal), "cuDeviceGet");
    driver.check(driver.primary_context_state(device, &flags, &is_active),
                 "cuDevicePrimaryCtxGetState");
    if (is_active == 0) continue;
    void* context = nullptr;
    driver.check(driver.retain_primary_context(&context, device), "cuDevicePrimaryCtxRetain");
    return context;
  }
  throw CudaError("the process uses none of NVIDIA's GPUs");
}

// The ring, and what each GPU needs to fill and empty its slots.
class Staging {
 public:
  // Waits for other threads. What it returns lives as long as the process, since threads may copy
  // while that exits.
  static Staging& lock(std::unique_lock<std::mutex>& turn) {
    static auto* const staging = new Staging;
    refuse_fork(staging->process_);
    turn = std::unique_lock(staging->mutex_);
    return *staging;
  }

  // The number of the next slot of the ring.
  std::size_t next() noexcept { return next_++; }

  // Slot `number`, after the GPU's last use of it.
  StagingSlot& wait_for(std::size_t number) {
    StagingSlot& slot = slots_[number % kSlots];
    if (slot.in_use_until != nullptr) {
      driver_.check(driver_.synchronize_event(slot.in_use_until), "cuEventSynchronize");
      slot.in_use_until = nullptr;
    }
    return slot;
  }

  // Has the GPU copy the pieces of slot `number`, in the order of `stream`.
  void launch(std::size_t number, void* stream);

  // Gives copies whose stream is unknown one that follows all that their GPU was given so far.
  // Returns whether there were any.
  bool assign_streams(std::vector<DeviceCopy>& copies);

  // Removes from `copies`, and returns, those of bytes between a GPU and pinned memory, with the
  // addresses that GPUs use for it.
  std::vector<DeviceCopy> take_pinned(std::vector<DeviceCopy>& copies) const;

 private:
  // In the context of one GPU.
  struct Device {
    void* function = nullptr;
    void* stream = nullptr;  // for memory whose own stream is unknown
    std::array<void*, kSlots> events{};
  };

  Staging();
  Device& device_of(void* context);

  const CudaDriver& driver_ = CudaDriver::instance();
  void* const context_ = context_in_use(driver_);
  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::array<StagingSlot, kSlots> slots_;
  std::map<void*, Device> devices_;  // by context
  std::size_t next_ = 0;
};

// Fails if no GPU can be used, so that nothing is bound which could not be moved.
Staging::Staging() {
  constexpr unsigned kPortable = 1;  // CU_MEMHOSTALLOC_PORTABLE: all GPUs reach it
  constexpr std::size_t kTableBytes = kMostPieces * sizeof(Piece);
  const CurrentContext guard(context_);
  device_of(context_);
  void* memory = nullptr;
  driver_.check(driver_.allocate_on_host(&memory, kSlots * (kTableBytes + kSlotBytes), kPortable),
                "cuMemHostAlloc");
  auto* begin = static_cast<std::byte*>(memory);
  for (StagingSlot& slot : slots_) {
    slot.pieces = reinterpret_cast<Piece*>(begin);
    slot.memory = begin + kTableBytes;
    begin += kTableBytes + kSlotBytes;
  }
}

Staging::Device& Staging::device_of(void* context) {
  constexpr unsigned kWithoutTiming = 2;  // CU_EVENT_DISABLE_TIMING
  constexpr unsigned kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING
  const auto found = devices_.find(context);
  if (found != devices_.end()) return found->second;
  Device made;
  void* module = nullptr;
  driver_.check(driver_.load_module(&module, kDeviceCopyPtx), "cuModuleLoadData");
  driver_.check(driver_.function_of_module(&made.function, module, "flatweights_copy"),
                "cuModuleGetFunction");
  driver_.check(driver_.create_stream(&made.stream, kNonBlocking), "cuStreamCreate");
  for (void*& event : made.events)
    driver_.check(driver_.create_event(&event, kWithoutTiming), "cuEventCreate");
  return devices_.emplace(context, made).first->second;
}

void Staging::launch(std::size_t number, void* stream) {
  void* const context = context_of_stream(stream);
  const CurrentContext guard(context);
  const Device& device = device_of(context);
  StagingSlot& slot = slots_[number % kSlots];
  void* const event = device.events[number % kSlots];
  void* arguments[] = {&slot.pieces};
  driver_.check(driver_.launch(device.function, static_cast<unsigned>(slot.count), 1, 1,
                               kCopyThreads, 1, 1, 0, stream, arguments, nullptr),
                "cuLaunchKernel");
  const int recorded = driver_.record_event(event, stream);
  if (recorded != 0) driver_.synchronize_context();  // the slot may be reused after the error
  driver_.check(recorded, "cuEventRecord");
  slot.in_use_until = event;
}

bool Staging::assign_streams(std::vector<DeviceCopy>& copies) {
  std::map<void*, void*> streams;  // by context
  DeviceMemory memory;
  for (DeviceCopy& copy : copies) {
    if (copy.stream != nullptr) continue;
    void* const context = memory.context_of(copy.device);
    if (context == nullptr) throw CudaError("a GPU's memory was freed before it was copied");
    void*& stream = streams[context];
    if (stream == nullptr) {
      const CurrentContext guard(context);
      driver_.check(driver_.synchronize_context(), "cuCtxSynchronize");
      stream = device_of(context).stream;
    }
    copy.stream = stream;
  }
  return !streams.empty();
}

std::vector<DeviceCopy> Staging::take_pinned(std::vector<DeviceCopy>& copies) const {
  std::vector<DeviceCopy> pinned;
  const CurrentContext guard(context_);
  std::erase_if(copies, [&](DeviceCopy& copy) {
    if (copy.device_dtype != copy.host_dtype) return false;
    std::byte* const host = pinned_address(copy.host, copy.size * copy.host_itemsize);
    if (host == nullptr) return false;
    pinned.push_back(copy);
    pinned.back().host = host;
    return true;
  });
  return pinned;
}

// Cuts copies into what one launch copies.
class Cutter {
 public:
  // Takes copies in any order; those of one stream are cut together.
  Cutter(std::vector<DeviceCopy>& copies, Launch most) : copies_(copies), most_(most) {
    const auto by_stream = [](const DeviceCopy& a, const DeviceCopy& b) {
      return reinterpret_cast<std::uintptr_t>(a.stream) <
             reinterpret_cast<std::uintptr_t>(b.stream);
    };
    if (!std::ranges::is_sorted(copies, by_stream)) std::ranges::stable_sort(copies, by_stream);
  }

  [[nodiscard]] bool is_done() const noexcept { return copy_ == copies_.size(); }

  // Calls `take(copy, begin, size, at)` for the elements that are copied next: `size` of them from
  // `begin` on, `at` bytes from the beginning of a slot. Returns their stream.
  template <class F>
  void* next(F&& take) {
    void* const stream = copies_[copy_].stream;
    std::size_t at = 0;
    std::size_t pieces = 0;
    while (copy_ < copies_.size() && copies_[copy_].stream == stream) {
      const DeviceCopy& copy = copies_[copy_];
      const std::size_t room =
          std::min(most_.nbytes - std::min(at, most_.nbytes), (kMostPieces - pieces) * most_.piece);
      const std::size_t size = std::min(copy.size - begin_, room / copy.device_itemsize);
      if (size == 0) break;
      take(copy, begin_, size, at);
      const std::size_t nbytes = size * copy.device_itemsize;
      at += (nbytes + kAlign - 1) / kAlign * kAlign;
      pieces += (nbytes + most_.piece - 1) / most_.piece;
      begin_ += size;
      if (begin_ < copy.size) break;
      ++copy_;
      begin_ = 0;
    }
    return stream;
  }

 private:
  std::span<const DeviceCopy> copies_;
  Launch most_;
  std::size_t copy_ = 0;   // the next one
  std::size_t begin_ = 0;  // its next element
};

}  // namespace

std::string device_obstacle() {
  try {
    std::unique_lock<std::mutex> turn;
    static_cast<void>(Staging::lock(turn));
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

void* DeviceMemory::context_of(const void* memory) noexcept {
  constexpr int kContext = 1;      // CU_POINTER_ATTRIBUTE_CONTEXT
  constexpr int kMemoryType = 2;   // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
  constexpr int kBegin = 11;       // CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
  constexpr int kSize = 12;        // CU_POINTER_ATTRIBUTE_RANGE_SIZE
  constexpr unsigned kDevice = 2;  // CU_MEMORYTYPE_DEVICE
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  if (address - begin_ < size_) return context_;
  if (!CudaDriver::is_found()) return nullptr;
  const CudaDriver& driver = CudaDriver::instance();
  unsigned type = 0;
  void* context = nullptr;
  if (driver.pointer_attribute(&type, kMemoryType, address) != 0 || type != kDevice ||
      driver.pointer_attribute(&context, kContext, address) != 0 || context == nullptr)
    return nullptr;
  unsigned long long begin = 0;
  std::size_t size = 0;
  if (driver.pointer_attribute(&begin, kBegin, address) == 0 &&
      driver.pointer_attribute(&size, kSize, address) == 0) {
    begin_ = static_cast<std::uintptr_t>(begin);
    size_ = size;
    context_ = context;
  }
  return context;
}

namespace {

// Launches that a call has to wait for, even after an error: the caller's memory may be gone then.
class Launches {
 public:
  explicit Launches(Staging& staging) : staging_(staging) {}
  Launches(const Launches&) = delete;
  Launches& operator=(const Launches&) = delete;
  ~Launches() {
    try {
      wait();
    } catch (const std::exception&) {  // a GPU that fails writes no more
    }
  }

  void add(std::size_t number) { numbers_.push_back(number); }

  // Where one GPU fails, another still writes: all are waited for before an error is thrown.
  void wait() {
    std::exception_ptr error;
    for (const std::size_t number : std::exchange(numbers_, {})) {
      try {
        staging_.wait_for(number);
      } catch (const std::exception&) {
        if (error == nullptr) error = std::current_exception();
      }
    }
    if (error != nullptr) std::rethrow_exception(error);
  }

 private:
  Staging& staging_;
  std::vector<std::size_t> numbers_;
};

// Launches copies whose both ends GPUs reach.
void launch_direct(Staging& staging, std::vector<DeviceCopy> copies, Direction direction,
                   Launches& launches) {
  const Launch most = Launch::of_pinned(copies);
  for (Cutter cutter(copies, most); !cutter.is_done();) {
    const std::size_t number = staging.next();
    StagingSlot& slot = staging.wait_for(number);
    slot.clear();
    void* const stream =
        cutter.next([&](const DeviceCopy& copy, std::size_t begin, std::size_t size, std::size_t) {
          std::byte* const device = copy.device + begin * copy.device_itemsize;
          std::byte* const host = copy.host + begin * copy.host_itemsize;
          const bool is_to_host = direction == Direction::kToHost;
          slot.add(is_to_host ? device : host, is_to_host ? host : device,
                   size * copy.device_itemsize, most.piece);
        });
    launches.add(number);
    staging.launch(number, stream);
  }
}

}  // namespace

void copy_from_devices(std::vector<DeviceCopy> copies) {
  std::unique_lock<std::mutex> turn;
  Staging& staging = Staging::lock(turn);
  staging.assign_streams(copies);
  Launches launches(staging);
  launch_direct(staging, staging.take_pinned(copies), Direction::kToHost, launches);
  std::deque<std::size_t> under_way;
  const auto finish_one = [&] {
    copy_all(staging.wait_for(under_way.front()).copies);
    under_way.pop_front();
  };
  constexpr Launch kMost = Launch::of_slot();
  for (Cutter cutter(copies, kMost); !cutter.is_done();) {
    if (under_way.size() == kSlots) finish_one();
    const std::size_t number = staging.next();
    StagingSlot& slot = staging.wait_for(number);
    slot.clear();
    void* const stream = cutter.next(
        [&](const DeviceCopy& copy, std::size_t begin, std::size_t size, std::size_t at) {
          slot.add(copy.device + begin * copy.device_itemsize, slot.memory + at,
                   size * copy.device_itemsize, kMost.piece);
          slot.copies.push_back({copy.host + begin * copy.host_itemsize, slot.memory + at, size,
                                 copy.host_itemsize, copy.host_dtype, copy.device_dtype});
        });
    staging.launch(number, stream);
    under_way.push_back(number);
  }
  while (!under_way.empty()) finish_one();
  launches.wait();
}

void copy_to_devices(std::vector<DeviceCopy> copies) {
  std::unique_lock<std::mutex> turn;
  Staging& staging = Staging::lock(turn);
  const bool is_waited_for = staging.assign_streams(copies);
  Launches launches(staging);
  launch_direct(staging, staging.take_pinned(copies), Direction::kToDevice, launches);
  constexpr Launch kMost = Launch::of_slot();
  for (Cutter cutter(copies, kMost); !cutter.is_done();) {
    const std::size_t number = staging.next();
    StagingSlot& slot = staging.wait_for(number);
    slot.clear();
    void* const stream = cutter.next(
        [&](const DeviceCopy& copy, std::size_t begin, std::size_t size, std::size_t at) {
          slot.add(slot.memory + at, copy.device + begin * copy.device_itemsize,
                   size * copy.device_itemsize, kMost.piece);
          slot.copies.push_back({slot.memory + at, copy.host + begin * copy.host_itemsize, size,
                                 copy.device_itemsize, copy.device_dtype, copy.host_dtype});
        });
    copy_all(slot.copies);
    if (is_waited_for) launches.add(number);
    staging.launch(number, stream);
  }
  launches.wait();
}

void copy_within_devices(std::vector<DeviceCopy> copies, Direction direction) {
  std::unique_lock<std::mutex> turn;
  Staging& staging = Staging::lock(turn);
  staging.assign_streams(copies);
  Launches launches(staging);
  launch_direct(staging, std::move(copies), direction, launches);
  launches.wait();
}

}  // namespace flatweights
