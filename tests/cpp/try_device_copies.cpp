// Tries copies between GPUs and the host, and averages on a GPU, with the stand-in for NVIDIA's
// driver: at random places and sizes, in several streams of several GPUs, and with a driver that
// fails.
//
// Usage: try_device_copies LIBRARY SEED. What every byte must be is known, also of those that no
// copy may touch.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "flatweights/average.hpp"
#include "flatweights/average_segments.hpp"
#include "flatweights/cuda_driver.hpp"
#include "flatweights/device_copies.hpp"
#include "flatweights/flatten.hpp"
#include "flatweights/layout.hpp"
#include "flatweights/memory_file.hpp"

namespace {

using flatweights::Copy;
using flatweights::CudaError;
using flatweights::DeviceCopy;
using flatweights::Direction;
using flatweights::DType;
using flatweights::MemoryFile;

const char* part = "";
unsigned long seed = 0;
std::mt19937_64 random_bits;

#define EXPECT(is_so) ((is_so) ? static_cast<void>(0) : fail(#is_so, __LINE__))

[[noreturn]] void fail(const char* what, int line) {
  std::fprintf(stderr, "try_device_copies:%d: %s, seed %lu: expected %s\n", line, part, seed, what);
  std::fflush(stderr);
  std::_Exit(1);
}

// A number from 0 to `most`.
std::size_t any(std::size_t most) {
  return std::uniform_int_distribution<std::size_t>(0, most)(random_bits);
}

bool once_in(std::size_t count) { return any(count - 1) == 0; }

void fill(std::span<std::byte> bytes) {
  std::size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    const std::uint64_t bits = random_bits();
    std::memcpy(bytes.data() + i, &bits, 8);
  }
  for (; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(random_bits());
}

// The driver's functions that a program with a GPU calls.
void* library = nullptr;

template <class... Arguments>
int call(const char* name, Arguments... arguments) {
  auto* const function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
  EXPECT(function != nullptr);
  return function(arguments...);
}

unsigned long count(const char* name) {
  return reinterpret_cast<unsigned long (*)()>(dlsym(library, name))();
}

unsigned long count_objects() { return count("stand_in_cuda_objects"); }

bool can_pin() { return dlsym(library, "cuMemHostRegister_v2") != nullptr; }

void let_fail(const char* name, int result, unsigned long first, bool only_once = false) {
  auto* const function = reinterpret_cast<void (*)(const char*, int, unsigned long)>(
      dlsym(library, only_once ? "stand_in_cuda_fail_once" : "stand_in_cuda_fail"));
  function(name, result, first);
}

void* use_gpu(int gpu) {
  void* context = nullptr;
  EXPECT(call("cuDevicePrimaryCtxRetain", &context, gpu) == 0);
  EXPECT(call("cuCtxSetCurrent", context) == 0);
  return context;
}

void load(const char* path) {
  library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) std::fprintf(stderr, "%s\n", dlerror());
  EXPECT(library != nullptr);
  EXPECT(call("cuInit", 0u) == 0);
}

int count_gpus() {
  int gpus = 0;
  EXPECT(call("cuDeviceGetCount", &gpus) == 0);
  return gpus;
}

void synchronize() {
  for (int gpu = 0; gpu < count_gpus(); ++gpu) {
    use_gpu(gpu);
    EXPECT(call("cuCtxSynchronize") == 0);
  }
}

using Bytes = std::vector<std::byte>;

// The operator compares one byte after the other.
bool is_same(const Bytes& a, const Bytes& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

bool are_same(const std::vector<Bytes>& a, const std::vector<Bytes>& b) {
  return std::ranges::equal(a, b, is_same);
}

// Memory, and what must be in it.
class Area {
 public:
  Area(std::byte* memory, std::size_t size, bool is_device)
      : memory_(memory), is_device_(is_device), expected_(size) {
    renew();
  }

  [[nodiscard]] std::byte* memory() const { return memory_; }
  [[nodiscard]] std::byte* expected(const std::byte* at) {
    return expected_.data() + (at - memory_);
  }
  [[nodiscard]] std::size_t size() const { return expected_.size(); }

  // Gives it other bytes.
  void renew() {
    fill(expected_);
    if (is_device_)
      EXPECT(call("cuMemcpyHtoD_v2", address(), static_cast<const void*>(expected_.data()),
                  expected_.size()) == 0);
    else
      std::ranges::copy(expected_, memory_);
  }

  [[nodiscard]] Bytes bytes() const {
    Bytes found(memory_, memory_ + (is_device_ ? 0 : expected_.size()));
    if (!is_device_) return found;
    found.resize(expected_.size());
    EXPECT(call("cuMemcpyDtoH_v2", static_cast<void*>(found.data()), address(), found.size()) == 0);
    return found;
  }

  [[nodiscard]] bool is_right() const {
    if (!is_device_) return std::memcmp(memory_, expected_.data(), size()) == 0;
    return is_same(bytes(), expected_);
  }
  void accept() { expected_ = bytes(); }

  void begin_round() { taken_ = any(64); }

  // Bytes that nobody else has in this round, at any address; null if there are none.
  std::byte* take(std::size_t nbytes) {
    const std::size_t at = taken_;
    if (at > size() || nbytes > size() - at) return nullptr;
    taken_ += nbytes + (once_in(2) ? any(40) : 0);
    return memory_ + at;
  }

 private:
  [[nodiscard]] unsigned long long address() const {
    return reinterpret_cast<std::uintptr_t>(memory_);
  }

  std::byte* memory_;
  bool is_device_;
  Bytes expected_;
  std::size_t taken_ = 0;
};

// The memory of a stream's variables.
struct StreamArea {
  void* stream;
  int gpu;
  Area area;
};

struct Element {
  DType dtype;
  std::size_t itemsize;
  bool is_real;
};
constexpr Element kElements[] = {
    {DType::kFloat16, 2, true},  {DType::kBFloat16, 2, true},   {DType::kFloat32, 4, true},
    {DType::kFloat64, 8, true},  {DType::kComplex64, 8, false}, {DType::kComplex128, 16, false},
    {DType::kInteger, 1, false}, {DType::kInteger, 8, false},   {DType::kOther, 12, false},
};

constexpr std::size_t kSmall = std::size_t{192} << 10;
constexpr std::size_t kLarge = std::size_t{24} << 20;  // of a stream; two take more than 4 slots

class World {
 public:
  // The memory of one stream, and of each segment, has `size` bytes; the host has more.
  World(int gpus, int streams, std::size_t size)
      : host_size_(size * static_cast<std::size_t>(gpus * streams)),
        plain_memory_(host_size_),
        plain_(plain_memory_.data(), host_size_, false) {
    for (int gpu = 0; gpu < gpus; ++gpu) {
      use_gpu(gpu);
      segments_.push_back(device_area(size));
      for (int i = 0; i < streams; ++i) {
        void* stream = nullptr;
        EXPECT(call("cuStreamCreate", &stream, 1u) == 0);
        streams_.push_back({stream, gpu, device_area(size)});
      }
    }
    make_files();
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  ~World() {
    for (StreamArea& stream : streams_) {
      use_gpu(stream.gpu);
      EXPECT(call("cuMemFree_v2", reinterpret_cast<unsigned long long>(stream.area.memory())) == 0);
      EXPECT(call("cuStreamDestroy_v2", stream.stream) == 0);
    }
    for (const Area& segment : segments_)
      EXPECT(call("cuMemFree_v2", reinterpret_cast<unsigned long long>(segment.memory())) == 0);
  }

  // Memory files that nobody has pinned yet.
  void make_files() {
    files_.clear();
    reader_.reset();
    writer_.reset();
    // A header's page lies before the data, and is pinned, too.
    writable_ = MemoryFile::create(host_size_);
    writer_ = MemoryFile::create(host_size_);
    reader_ = MemoryFile::open(writer_->descriptor(), writer_->nonce(), MemoryFile::Access::kRead);
    files_.emplace_back(writable_->data(), host_size_, false);
    files_.emplace_back(writer_->data(), host_size_, false);
  }

  // `count` copies at most, of `most` elements at most; `pinned` thirds of them from or to pinned
  // memory, and `unknown` quarters of them in unknown streams.
  std::vector<DeviceCopy> choose(bool to_device, std::size_t count, std::size_t most,
                                 std::size_t pinned, std::size_t unknown) {
    for (Area* area : areas()) area->begin_round();
    std::vector<DeviceCopy> copies;
    const std::size_t converting = any(4);
    while (copies.size() < count) {
      StreamArea& stream = streams_[any(streams_.size() - 1)];
      const Element on_device = kElements[any(std::size(kElements) - 1)];
      Element on_host = on_device;
      if (on_device.is_real && any(3) < converting) on_host = kElements[any(3)];
      const std::size_t size = once_in(8) ? 1 : 1 + any(most - 1);
      std::byte* const device = stream.area.take(size * on_device.itemsize);
      Area* host_area = &plain_;
      std::byte* host = nullptr;
      if (any(2) >= pinned) {
        host = plain_.take(size * on_host.itemsize);
      } else if (to_device && once_in(2)) {
        host_area = &files_[1];
        host = host_area->take(size * on_host.itemsize);
        // The bytes are the same, but this map is only for reading.
        if (host != nullptr) host = reader_->data() + (host - writer_->data());
      } else {
        host_area = &files_[0];
        host = host_area->take(size * on_host.itemsize);
      }
      if (device == nullptr || host == nullptr) break;
      copies.push_back({any(3) < unknown ? nullptr : stream.stream, device, host, size,
                        on_device.itemsize, on_host.itemsize, on_device.dtype, on_host.dtype});
    }
    return copies;
  }

  // Copies between segments and variables of one GPU.
  std::vector<DeviceCopy> choose_within(std::size_t count, std::size_t most, std::size_t unknown) {
    for (Area* area : areas()) area->begin_round();
    std::vector<DeviceCopy> copies;
    while (copies.size() < count) {
      StreamArea& stream = streams_[any(streams_.size() - 1)];
      const Element element = kElements[any(std::size(kElements) - 1)];
      const std::size_t size = 1 + any(most - 1);
      std::byte* const device = stream.area.take(size * element.itemsize);
      std::byte* const segment =
          segments_[static_cast<std::size_t>(stream.gpu)].take(size * element.itemsize);
      if (device == nullptr || segment == nullptr) break;
      copies.push_back({any(3) < unknown ? nullptr : stream.stream, device, segment, size,
                        element.itemsize, element.itemsize, element.dtype, element.dtype});
    }
    return copies;
  }

  void expect_from_devices(const std::vector<DeviceCopy>& copies) {
    for (const DeviceCopy& copy : copies)
      apply({expected(copy.host), expected(copy.device), copy.size, copy.host_itemsize,
             copy.host_dtype, copy.device_dtype});
  }

  void expect_to_devices(const std::vector<DeviceCopy>& copies) {
    for (const DeviceCopy& copy : copies)
      apply({expected(copy.device), expected(copy.host), copy.size, copy.device_itemsize,
             copy.device_dtype, copy.host_dtype});
  }

  void expect_host_is_right() const {
    EXPECT(plain_.is_right());
    for (const Area& file : files_) EXPECT(file.is_right());
  }

  void expect_devices_are_right() const {
    for (const StreamArea& stream : streams_) EXPECT(stream.area.is_right());
    for (const Area& segment : segments_) EXPECT(segment.is_right());
  }

  void renew_host() {
    plain_.renew();
    for (Area& file : files_) file.renew();
  }

  void renew_all() {
    for (Area* area : areas()) area->renew();
  }

  void accept_all() {
    for (Area* area : areas()) area->accept();
  }

  [[nodiscard]] std::vector<Bytes> host_bytes() const {
    std::vector<Bytes> all{plain_.bytes()};
    for (const Area& file : files_) all.push_back(file.bytes());
    return all;
  }

  [[nodiscard]] std::vector<Bytes> segment_bytes() const {
    std::vector<Bytes> all;
    for (const Area& segment : segments_) all.push_back(segment.bytes());
    return all;
  }

 private:
  static Area device_area(std::size_t size) {
    unsigned long long address = 0;
    EXPECT(call("cuMemAlloc_v2", &address, size) == 0);
    return {reinterpret_cast<std::byte*>(address), size, true};
  }

  std::vector<Area*> areas() {
    std::vector<Area*> all{&plain_};
    for (Area& file : files_) all.push_back(&file);
    for (StreamArea& stream : streams_) all.push_back(&stream.area);
    for (Area& segment : segments_) all.push_back(&segment);
    return all;
  }

  std::byte* expected(std::byte* at) {
    const auto is_in = [&](const std::byte* begin, std::size_t size) {
      return reinterpret_cast<std::uintptr_t>(at) - reinterpret_cast<std::uintptr_t>(begin) < size;
    };
    if (is_in(reader_->data(), host_size_)) at = writer_->data() + (at - reader_->data());
    for (Area* area : areas())
      if (is_in(area->memory(), area->size())) return area->expected(at);
    fail("an address of an area", __LINE__);
  }

  static void apply(const Copy& copy) { flatweights::copy_all({&copy, 1}); }

  std::size_t host_size_;
  Bytes plain_memory_;
  Area plain_;
  std::shared_ptr<MemoryFile> writable_;
  std::shared_ptr<MemoryFile> writer_;
  std::shared_ptr<MemoryFile> reader_;
  std::vector<Area> files_;  // the writable one, and the one that copies only read
  std::vector<Area> segments_;
  std::vector<StreamArea> streams_;
};

// One call of a kind.
void copy_once(World& world, std::size_t count, std::size_t most, std::size_t kind = any(3),
               std::size_t pinned = any(3), std::size_t unknown = any(3)) {
  switch (kind) {
    case 0: {
      const auto copies = world.choose(false, count, most, pinned, unknown);
      world.expect_from_devices(copies);
      flatweights::copy_from_devices(copies);
      world.expect_host_is_right();
      break;
    }
    case 1: {
      if (once_in(2)) synchronize();
      const auto copies = world.choose(true, count, most, pinned, unknown);
      world.expect_to_devices(copies);
      const bool is_waited_for = once_in(2);
      if (is_waited_for) synchronize();
      flatweights::copy_to_devices(copies);
      world.expect_host_is_right();
      if (once_in(2)) world.renew_host();
      if (is_waited_for && std::ranges::any_of(copies, [](const DeviceCopy& copy) {
            return copy.stream == nullptr;
          }))
        world.expect_devices_are_right();
      break;
    }
    default: {
      const auto copies = world.choose_within(count, most, unknown);
      const auto direction = once_in(2) ? Direction::kToHost : Direction::kToDevice;
      direction == Direction::kToHost ? world.expect_from_devices(copies)
                                      : world.expect_to_devices(copies);
      const bool is_waited_for = once_in(2);
      if (is_waited_for) synchronize();
      flatweights::copy_within_devices(copies, direction);
      if (is_waited_for) world.expect_devices_are_right();
    }
  }
  if (!once_in(3)) return;
  synchronize();
  world.expect_devices_are_right();
  world.expect_host_is_right();
}

void try_copies() {
  part = "small copies";
  World small(count_gpus(), 2, kSmall);
  for (int i = 0; i < 150; ++i) copy_once(small, 1 + any(60), 1 + any(1500));
  part = "unknown streams after known ones";
  for (std::size_t i = 0; i < 20; ++i) {
    synchronize();
    copy_once(small, 30, 500, 1, 0, 0);
    copy_once(small, 30, 500, i % 2 * 2, any(3), 4);
  }
  part = "copies of one element";
  for (int i = 0; i < 20; ++i) copy_once(small, 1, 1);
  part = "more copies than a table of pieces has";
  World many(1, 1, 4 * kSmall);
  for (std::size_t kind = 0; kind < 4; ++kind)
    for (const std::size_t pinned : {0, 1, 3}) copy_once(many, 9000, 2, kind, pinned);
  part = "large copies";
  World large(1, 2, kLarge);
  for (std::size_t kind = 0; kind < 4; ++kind)
    for (const std::size_t pinned : {0, 2})
      copy_once(large, 9000, std::size_t{1} << 20, kind, pinned);
  synchronize();
  large.expect_devices_are_right();
}

// Memory files are pinned at the first copy, and are not once they are gone.
void try_pinning() {
  part = "pinning";
  constexpr std::size_t kSize = std::size_t{256} << 10;
  World world(1, 1, kSmall);
  unsigned long long address = 0;
  EXPECT(call("cuMemAlloc_v2", &address, kSize) == 0);
  Area device(reinterpret_cast<std::byte*>(address), kSize, true);
  const unsigned long before = count_objects();
  std::byte* last = nullptr;
  int reused = 0;
  for (int i = 0; i < 8; ++i) {
    const bool is_refused = i % 4 == 3;
    if (is_refused && can_pin())
      let_fail(i == 3 ? "cuMemHostRegister_v2" : "cuMemHostGetDevicePointer_v2", 801, 1);
    {
      const auto file = MemoryFile::create(kSize);
      reused += file->data() == last;
      last = file->data();
      EXPECT(count_objects() == before);
      for (int k = 0; k < 2; ++k) {
        device.renew();
        flatweights::copy_from_devices({{nullptr, device.memory(), file->data(), kSize, 1, 1,
                                         DType::kInteger, DType::kInteger}});
        EXPECT(std::memcmp(file->data(), device.bytes().data(), kSize) == 0);
        EXPECT(count_objects() == before + (can_pin() && !is_refused ? 1 : 0));
      }
    }
    EXPECT(count_objects() == before);
    if (is_refused && can_pin()) {
      let_fail("cuMemHostRegister_v2", 0, 1);
      let_fail("cuMemHostGetDevicePointer_v2", 0, 1);
    }
  }
  EXPECT(reused > 0);
  EXPECT(call("cuMemFree_v2", address) == 0);
}

// A call while `function` of the driver fails: nothing is written or read once it has returned.
// Returns whether it failed.
bool fails(World& world, int kind, const char* function, int result, unsigned long first,
           bool only_once) {
  synchronize();
  world.renew_all();
  const bool is_within = kind >= 2;
  const auto copies = is_within ? world.choose_within(40, 600, any(3))
                                : world.choose(kind == 1, 40, 600, any(3), any(3));
  const auto direction = kind == 2 ? Direction::kToHost : Direction::kToDevice;
  let_fail(function, result, first, only_once);
  bool has_failed = false;
  try {
    if (kind == 0) flatweights::copy_from_devices(copies);
    if (kind == 1) flatweights::copy_to_devices(copies);
    if (is_within) flatweights::copy_within_devices(copies, direction);
  } catch (const CudaError&) {
    EXPECT(result == 999);
    has_failed = true;
  } catch (const std::bad_alloc&) {
    EXPECT(result == 2);
    has_failed = true;
  }
  let_fail(function, 0, 1);
  const auto host = world.host_bytes();
  const auto segments = world.segment_bytes();
  if (kind == 1) world.make_files();  // the old ones are gone for good
  synchronize();
  if (kind != 1) EXPECT(are_same(world.host_bytes(), host));
  EXPECT(are_same(world.segment_bytes(), segments));
  world.accept_all();
  copy_once(world, 40, 600);
  synchronize();
  world.expect_devices_are_right();
  world.expect_host_is_right();
  return has_failed;
}

void try_failures() {
  part = "a driver that fails";
  World world(count_gpus(), 3, kSmall / 3);
  for (const char* function : {"cuLaunchKernel", "cuEventRecord", "cuEventSynchronize"}) {
    int failures = 0;
    for (unsigned long first = 1; first <= 8; ++first)
      for (int kind = 0; kind < 4; ++kind)
        for (const bool only_once : {false, true})
          failures += fails(world, kind, function, once_in(4) ? 2 : 999, first, only_once);
    EXPECT(failures > 8);
  }
}

DType random_dtype() {
  constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16,  DType::kFloat32,
                              DType::kFloat64, DType::kComplex64, DType::kComplex128,
                              DType::kInteger};
  return kTypes[any(std::size(kTypes) - 1)];
}

std::size_t itemsize_of(DType dtype) {
  if (!flatweights::is_averaged(dtype)) return std::size_t{1} << any(3);
  return flatweights::real_size(dtype) * flatweights::reals_per_element(dtype);
}

// Numbers near one; some are infinite, large or NaN if `odd`.
void fill_numbers(std::span<std::byte> slot, DType dtype, bool odd) {
  fill(slot);
  if (!flatweights::is_averaged(dtype)) return;
  const flatweights::RealFormat format = flatweights::kFormats[flatweights::real_of(dtype)];
  for (std::size_t i = 0; i < slot.size(); i += format.size) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, slot.data() + i, format.size);
    if (odd && once_in(50)) {
      bits |= format.exponent();
      if (once_in(2)) bits -= std::uint64_t{1} << format.mantissa;  // the largest finite exponent
    } else {
      bits = (bits & ~format.exponent()) |
             ((format.bias - 2 + (random_bits() & 3)) << format.mantissa);
    }
    std::memcpy(slot.data() + i, &bits, format.size);
  }
}

bool is_finite(std::span<const std::byte> slot, DType dtype) {
  if (!flatweights::is_averaged(dtype)) return true;
  const flatweights::RealFormat format = flatweights::kFormats[flatweights::real_of(dtype)];
  for (std::size_t i = 0; i < slot.size(); i += format.size) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, slot.data() + i, format.size);
    if ((bits & format.exponent()) == format.exponent()) return false;
  }
  return true;
}

flatweights::Layout random_layout(bool only_empty) {
  std::vector<flatweights::Slot> slots(any(6));
  if (only_empty) slots.resize(2);
  for (flatweights::Slot& slot : slots) {
    slot.dtype = random_dtype();
    slot.itemsize = itemsize_of(slot.dtype);
    slot.shape = {only_empty || once_in(5) ? 0 : once_in(3) ? any(9000) : any(40)};
  }
  return flatweights::Layout(std::move(slots));
}

// Averages packed models of `layout`, as average_segments does.
class Average {
 public:
  Average(void* context, flatweights::Layout layout, std::size_t count, bool weighted, bool odd)
      : context_(context),
        layout_(std::move(layout)),
        room_(layout_.nbytes() + flatweights::kAlignment),
        expected_flags_(count) {
    unsigned long long address = 0;
    EXPECT(call("cuMemAlloc_v2", &address, room_ * (count + 1)) == 0);
    for (std::size_t k = 0; k <= count; ++k)
      areas_.emplace_back(reinterpret_cast<std::byte*>(address) + k * room_, room_, true);
    const std::size_t odd_one = any(count);
    for (std::size_t k = 0; k < count; ++k) {
      weights_.push_back(weighted ? 0.25 + static_cast<double>(any(1000)) / 300 : 1);
      total_ += weights_.back();
      for (const flatweights::Slot& slot : layout_.slots()) {
        const auto bytes = slot_of(k, slot);
        fill_numbers(bytes, slot.dtype, odd && (k == odd_one || once_in(4)));
        if (!is_finite(bytes, slot.dtype)) expected_flags_[k] = true;
      }
      areas_[k].restore();
    }
    find_expected();
  }
  Average(const Average&) = delete;
  Average& operator=(const Average&) = delete;
  ~Average() {
    EXPECT(call("cuMemFree_v2", reinterpret_cast<unsigned long long>(areas_.front().memory())) ==
           0);
  }

  [[nodiscard]] std::vector<bool> run() const {
    std::vector<const std::byte*> sources;
    for (const auto& area : areas_) sources.push_back(area.memory());
    sources.pop_back();
    return flatweights::average_segments(context_, layout_, areas_.back().memory(), sources,
                                         weights_, total_);
  }

  void expect_right() {
    const std::vector<bool> flags = run();
    EXPECT(flags == expected_flags_);
    areas_.back().set_expected(mean_);
    for (const auto& area : areas_) EXPECT(area.is_right());
  }

  [[nodiscard]] Bytes out() const { return areas_.back().bytes(); }

 private:
  struct Model : Area {
    using Area::Area;
    std::byte* begin() { return expected(memory()); }
    void restore() {
      EXPECT(call("cuMemcpyHtoD_v2", reinterpret_cast<unsigned long long>(memory()),
                  static_cast<const void*>(begin()), size()) == 0);
    }
    void set_expected(const Bytes& bytes) { std::ranges::copy(bytes, begin()); }
  };

  std::span<std::byte> slot_of(std::size_t k, const flatweights::Slot& slot) {
    return {areas_[k].begin() + slot.offset, slot.nbytes};
  }

  void find_expected() {
    mean_.assign(areas_.back().begin(), areas_.back().begin() + room_);
    std::vector<flatweights::AveragePart> parts;
    std::vector<const std::byte*> sources;
    for (const flatweights::Slot& slot : layout_.slots()) {
      parts.push_back({slot.dtype, slot.size, slot.nbytes, mean_.data() + slot.offset, slot.dtype});
      for (std::size_t k = 0; k < weights_.size(); ++k) sources.push_back(slot_of(k, slot).data());
    }
    flatweights::average_into(parts, sources, weights_, total_);
  }

  void* context_;
  flatweights::Layout layout_;
  std::size_t room_;
  std::vector<Model> areas_;  // the sources, and the mean
  std::vector<bool> expected_flags_;
  std::vector<double> weights_;
  double total_ = 0;
  Bytes mean_;
};

void try_averages() {
  part = "averages";
  for (int i = 0; i < 60; ++i) {
    void* const context =
        use_gpu(static_cast<int>(any(static_cast<std::size_t>(count_gpus() - 1))));
    const std::size_t count = i % 20 == 7 ? 128 : once_in(4) ? 1 : 1 + any(8);
    Average average(context, random_layout(i % 10 == 9), count, once_in(2), i % 2 == 0);
    average.expect_right();
  }
  part = "an average of more pieces than before";
  void* const context = use_gpu(0);
  const flatweights::Slot large{"", {700000}, DType::kFloat64, 8};
  Average(context, flatweights::Layout({large}), 2, true, true).expect_right();
  part = "an empty average after one with NaN";
  flatweights::Slot slot{"", {100}, DType::kFloat32, 4};
  Average(context, flatweights::Layout({slot}), 3, false, true).expect_right();
  Average(context, random_layout(true), 3, false, false).expect_right();
  part = "an average while the driver fails";
  for (const char* function : {"cuLaunchKernel", "cuEventRecord", "cuEventSynchronize"}) {
    Average average(context, flatweights::Layout({slot}), 3, false, true);
    bool has_failed = false;
    let_fail(function, 999, 1);
    try {
      static_cast<void>(average.run());
    } catch (const CudaError&) {
      has_failed = true;
    }
    let_fail(function, 0, 1);
    EXPECT(has_failed);
    const auto out = average.out();
    synchronize();
    EXPECT(is_same(average.out(), out));
    average.expect_right();
  }
}

// Runs `body` in a fork, which must end well.
template <class F>
void in_fork(F&& body) {
  const pid_t child = fork();
  EXPECT(child >= 0);
  if (child == 0) {
    body();
    std::_Exit(0);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

template <class F>
bool throws_cuda_error(F&& body) {
  try {
    body();
  } catch (const CudaError&) {
    return true;
  }
  return false;
}

void try_forks() {
  part = "a fork of a process that uses a GPU";
  World world(1, 2, kSmall);
  void* const context = use_gpu(0);
  const flatweights::Slot slot{"", {100}, DType::kFloat32, 4};
  Average average(context, flatweights::Layout({slot}), 3, false, false);
  average.expect_right();
  for (int i = 0; i < 8; ++i) copy_once(world, 20, 100);
  const auto copies = world.choose(false, 20, 100, 2, 2);
  flatweights::copy_from_devices(copies);  // pins the files
  world.accept_all();
  in_fork([&] {
    const unsigned long calls = count("stand_in_cuda_calls");
    EXPECT(throws_cuda_error([&] { flatweights::copy_from_devices(copies); }));
    EXPECT(throws_cuda_error([&] { flatweights::copy_to_devices(copies); }));
    EXPECT(
        throws_cuda_error([&] { flatweights::copy_within_devices(copies, Direction::kToHost); }));
    EXPECT(throws_cuda_error([&] { static_cast<void>(average.run()); }));
    EXPECT(!flatweights::device_obstacle().empty());
    world.make_files();
    EXPECT(count("stand_in_cuda_calls") == calls);
  });
  for (int i = 0; i < 8; ++i) copy_once(world, 20, 100);
  synchronize();
  world.expect_devices_are_right();
}

// A fork may be the first to use a GPU; then its parent's files are memory like any other.
void try_first_use_in_fork(const char* path) {
  part = "a fork that is the first to use a GPU";
  constexpr std::size_t kSize = std::size_t{256} << 10;
  auto file = MemoryFile::create(kSize);
  in_fork([&] {
    load(path);
    World world(1, 1, kSmall);
    EXPECT(flatweights::device_obstacle().empty());
    unsigned long long address = 0;
    EXPECT(call("cuMemAlloc_v2", &address, kSize) == 0);
    Area device(reinterpret_cast<std::byte*>(address), kSize, true);
    const unsigned long before = count_objects();
    for (int i = 0; i < 3; ++i) {
      device.renew();
      flatweights::copy_from_devices({{nullptr, device.memory(), file->data(), kSize, 1, 1}});
      EXPECT(std::memcmp(file->data(), device.bytes().data(), kSize) == 0);
      file.reset();
      EXPECT(count_objects() == before);
      file = MemoryFile::create(kSize);
    }
    for (int i = 0; i < 8; ++i) copy_once(world, 20, 100);
  });
}

}  // namespace

int main(int count_arguments, char** arguments) {
  EXPECT(count_arguments == 3);
  seed = std::strtoul(arguments[2], nullptr, 0);
  random_bits.seed(seed);
  try_first_use_in_fork(arguments[1]);
  load(arguments[1]);
  for (int gpu = count_gpus() - 1; gpu >= 0; --gpu) use_gpu(gpu);
  try_copies();
  try_pinning();
  try_failures();
  try_averages();
  try_forks();
  return 0;
}
