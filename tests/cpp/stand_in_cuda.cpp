// A stand-in for NVIDIA's driver, for tests on machines without a GPU.
//
// Built as a libcuda.so.1 and loaded first, it is what flatweights finds. A GPU's memory is a
// memory file, so that processes share it and it outlives its owner. Only copies and kernels reach
// it: at other times, and for writes through a map that is only for reading, a touch ends the
// process. Kernels run on the processor, one thread after the other, before their launch returns,
// or as late as they may; the bits of a GPU are not tried here. A copying kernel that reaches
// memory that is neither a GPU's nor pinned ends the process.
//
// Like the driver, it refuses calls before cuInit and in forks. Environment variables:
//   STAND_IN_CUDA_GPUS    the number of GPUs; 1 by default
//   STAND_IN_CUDA_MEMORY  bytes of a GPU that one process may have; 8 GiB by default
//   STAND_IN_CUDA_LACKS   an attribute of GPUs, by number, that is 0
//   STAND_IN_CUDA_DEFERS  if it is 1, what is queued in a stream runs only when something waits for
//                         it: an event, the stream, its context, or a query
//   STAND_IN_CUDA_FAIL    name:result:first of a function that returns a failure from its call
//   number
//                         `first` on, which is counted from 1; several, separated by commas
// To leave out a function, compile with -Dname=absent.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

// nvcc's words. A kernel is called once for each thread.
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
struct Index {
  unsigned x, y, z;
};
struct uint4 {
  unsigned x, y, z, w;
};
static thread_local Index gridDim, blockDim, blockIdx, threadIdx;

#include "flatweights/device_copy.cu"
#if __has_include("flatweights/device_average.cu")
#include "flatweights/device_average.cu"
#define STAND_IN_AVERAGES
#endif

#define API extern "C" __attribute__((visibility("default")))

namespace {

using Work = std::function<void()>;

struct Kernel {
  const char* name;
  Work (*bind)(void** arguments);  // what one thread does
};

void check_pieces(const Piece* pieces);

// Kernels by name: each takes its arguments as cuLaunchKernel does.
const Kernel kKernels[] = {
    {"flatweights_copy",
     [](void** a) -> Work {
       return [pieces = *static_cast<const Piece**>(a[0])] {
         if (blockIdx.x == 0 && threadIdx.x == 0) check_pieces(pieces);
         flatweights_copy(pieces);
       };
     }},
#ifdef STAND_IN_AVERAGES
    {"flatweights_average",
     [](void** a) -> Work {
       return [job = *static_cast<const flatweights::DeviceAverage*>(a[0])] {
         flatweights_average(job);
       };
     }},
#endif
};

using Address = unsigned long long;
using Handle = unsigned long long;

enum Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kMapFailed = 205,
  kInvalidImage = 200,
  kInvalidHandle = 400,
  kNotFound = 500,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kNotSupported = 801,
};

constexpr std::size_t kUnit = std::size_t{2} << 20;  // as on NVIDIA's GPUs
constexpr char kFileName[] = "stand_in_cuda";

// As in cuda.h.
struct Location {
  int type, device;
};
struct AllocationKind {
  int type, handle_types;
  Location location;
  void* only_for_segments;
  unsigned char flags[8];
};
struct Access {
  Location location;
  int flags;
};

struct Context {
  int device;
  bool is_active = false;
};

// What is to be done in order.
struct Stream {
  Context* context;
  std::deque<Work> queue{};
  unsigned long queued = 0;  // so far

  void run_until(unsigned long number) {
    while (queued - queue.size() < number) {
      const Work work = std::move(queue.front());
      queue.pop_front();
      work();
    }
  }
};
struct Event {
  Stream* stream = nullptr;  // null if it was not recorded
  unsigned long number = 0;  // of what was queued before
};
struct Module {
  std::string image;
};

// Memory of a GPU that cuMemCreate made, or another process.
struct Allocation {
  int descriptor;
  std::size_t size;
  int device;
  bool is_own;
  int uses = 1;  // its handle, and maps
};

enum class Kind { kReserved, kMapped, kDevice, kHost, kRegistered };

// Addresses that belong together.
struct Range {
  Kind kind;
  std::size_t size;
  Context* context = nullptr;
  Handle handle = 0;           // of what is mapped
  std::size_t mapped = 0;      // bytes
  int protection = PROT_NONE;  // while copies or kernels run

  [[nodiscard]] bool is_device() const { return kind == Kind::kMapped || kind == Kind::kDevice; }
};

struct Failure {
  int result;
  unsigned long first;  // number of the call
  unsigned long last = ULONG_MAX;
};

unsigned long number_of(const char* variable, unsigned long otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoul(text, nullptr, 0);
}

struct State {
  const pid_t process = getpid();
  std::mutex mutex;
  bool is_initialized = false;
  std::vector<Context> contexts;  // the primary ones, by device
  std::vector<std::size_t> in_use;
  std::map<Handle, Allocation> allocations;
  std::map<std::uintptr_t, Range> ranges;
  Handle next_handle = 1;
  int open = 0;  // copies and kernels that run
  std::map<std::string, Failure> failures;
  std::map<std::string, unsigned long> calls;
  unsigned long all_calls = 0;

  // Whoever holds this mutex may take the other one.
  std::mutex streams_mutex;
  std::map<Stream*, std::unique_ptr<Stream>> streams;
  std::map<Context*, Stream> default_streams;
  const bool defers = number_of("STAND_IN_CUDA_DEFERS", 0) == 1;

  State() {
    const std::size_t count = number_of("STAND_IN_CUDA_GPUS", 1);
    for (std::size_t i = 0; i < count; ++i) contexts.push_back({static_cast<int>(i)});
    in_use.resize(count);
    const char* const text = std::getenv("STAND_IN_CUDA_FAIL");
    std::istringstream failing(text == nullptr ? "" : text);
    for (std::string name, result, first; std::getline(failing, name, ':');) {
      std::getline(failing, result, ':');
      std::getline(failing, first, ',');
      failures[name] = {std::stoi(result), std::stoul(first)};
    }
  }

  // The range of an address; null if it is nobody's.
  Range* find(std::uintptr_t address, std::uintptr_t* begin = nullptr) {
    auto after = ranges.upper_bound(address);
    if (after == ranges.begin()) return nullptr;
    --after;
    if (address - after->first >= after->second.size) return nullptr;
    if (begin != nullptr) *begin = after->first;
    return &after->second;
  }

  void release(Handle handle) {
    Allocation& allocation = allocations.at(handle);
    if (--allocation.uses > 0) return;
    if (allocation.is_own) in_use[static_cast<std::size_t>(allocation.device)] -= allocation.size;
    close(allocation.descriptor);
    allocations.erase(handle);
  }

  void protect(std::uintptr_t begin, const Range& range) {
    const std::size_t size = range.kind == Kind::kMapped ? range.mapped : range.size;
    const int protection = open > 0 ? range.protection : PROT_NONE;
    if (range.is_device()) mprotect(reinterpret_cast<void*>(begin), size, protection);
  }

  void protect_all() {
    for (const auto& [begin, range] : ranges) protect(begin, range);
  }
};

State& state() {
  static auto* const made = new State;  // threads may call while the process exits
  return *made;
}
// When the library is loaded: what is a fork is told by it.
[[maybe_unused]] const State& state_of_process = state();

thread_local std::vector<Context*> current_contexts;

Context* current() { return current_contexts.empty() ? nullptr : current_contexts.back(); }

using Lock = std::lock_guard<std::mutex>;

// What every function does first.
int enter(const char* name) {
  State& s = state();
  if (getpid() != s.process) {
    ++s.all_calls;
    return kNotInitialized;
  }
  const Lock lock(s.mutex);
  ++s.all_calls;
  const unsigned long call = ++s.calls[name];
  if (!s.is_initialized && std::strcmp(name, "cuInit") != 0) return kNotInitialized;
  const auto failure = s.failures.find(name);
  if (failure == s.failures.end() || call < failure->second.first || call > failure->second.last)
    return kSuccess;
  return failure->second.result;
}

#define ENTER(name) \
  if (const int failed = enter(#name); failed != kSuccess) return failed

#define ENTER_WITH_CONTEXT(name) \
  ENTER(name);                   \
  if (current() == nullptr) return kInvalidContext

// Lets this process reach the memory of GPUs, from here to the end of the scope.
class Opened {
 public:
  Opened() {
    const Lock lock(state().mutex);
    if (state().open++ == 0) state().protect_all();
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  ~Opened() {
    const Lock lock(state().mutex);
    if (--state().open == 0) state().protect_all();
  }
};

// Whether all `nbytes` at an address are of a GPU, and may be reached.
bool is_reachable(Address address, std::size_t nbytes) {
  const Lock lock(state().mutex);
  std::uintptr_t begin = 0;
  const Range* const range = state().find(address, &begin);
  return range != nullptr && range->is_device() && range->protection != PROT_NONE &&
         nbytes <= begin + range->size - address;
}

// Ends the process if a launch reaches what a GPU cannot reach.
void check_pieces(const Piece* pieces) {
  const Lock lock(state().mutex);
  const auto is_known = [](const void* memory, std::size_t nbytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    std::uintptr_t begin = 0;
    const Range* const range = state().find(address, &begin);
    return range != nullptr && range->kind != Kind::kReserved &&
           nbytes <= begin + range->size - address;
  };
  bool are_known = is_known(pieces, gridDim.x * sizeof *pieces);
  for (unsigned i = 0; are_known && i < gridDim.x; ++i)
    are_known = is_known(pieces[i].from, pieces[i].size) && is_known(pieces[i].to, pieces[i].size);
  if (are_known) return;
  std::fputs("stand_in_cuda: a kernel reaches memory that is neither a GPU's nor pinned\n", stderr);
  std::abort();
}

// With the mutex of streams, as all that follows here.
Stream& stream_of(void* stream) {
  if (stream != nullptr) return *static_cast<Stream*>(stream);
  return state().default_streams.try_emplace(current(), Stream{current()}).first->second;
}

template <class F>
void for_each_stream(const Context* context, F&& take) {
  for (auto& [stream, owned] : state().streams)
    if (stream->context == context) take(*stream);
  for (auto& [of, stream] : state().default_streams)
    if (of == context) take(stream);
}

void run_all(const Context* context) {
  for_each_stream(context, [](Stream& stream) { stream.run_until(stream.queued); });
}

// A GPU that a wait fails for does nothing more.
void forget_all(const Context* context) {
  for_each_stream(context, [](Stream& stream) { stream.queue.clear(); });
}

void add_work(Stream& stream, Work work) {
  stream.queue.push_back(std::move(work));
  ++stream.queued;
  if (!state().defers) stream.run_until(stream.queued);
}

int copy(void* to, const void* from, std::size_t nbytes) {
  const Opened opened;
  std::memcpy(to, from, nbytes);
  return kSuccess;
}

std::size_t count_devices() { return state().contexts.size(); }

bool is_device(int device) {
  return device >= 0 && static_cast<std::size_t>(device) < count_devices();
}

Context& context_of(int device) { return state().contexts[static_cast<std::size_t>(device)]; }

// Anonymous memory, or addresses alone.
void* new_addresses(std::size_t nbytes, int protection) {
  // A whole unit more, so that it can begin at a unit.
  void* const memory =
      mmap(nullptr, nbytes + kUnit, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  const std::uintptr_t first = (begin + kUnit - 1) / kUnit * kUnit;
  if (first > begin) munmap(memory, first - begin);
  const std::uintptr_t end = (first + nbytes + 4095) / 4096 * 4096;
  if (end < begin + nbytes + kUnit)
    munmap(reinterpret_cast<void*>(end), begin + nbytes + kUnit - end);
  return reinterpret_cast<void*>(first);
}

// Frees the range that begins at `address` and has this kind.
int free_range(Address address, Kind kind, int otherwise) {
  const Lock lock(state().mutex);
  const auto found = state().ranges.find(address);
  if (found == state().ranges.end() || found->second.kind != kind) return otherwise;
  if (kind == Kind::kDevice)
    state().in_use[static_cast<std::size_t>(found->second.context->device)] -= found->second.size;
  if (kind != Kind::kRegistered) munmap(reinterpret_cast<void*>(address), found->second.size);
  state().ranges.erase(found);
  return kSuccess;
}

bool has_room(int device, std::size_t nbytes) {
  const std::size_t room = number_of("STAND_IN_CUDA_MEMORY", std::size_t{8} << 30);
  const std::size_t in_use = state().in_use[static_cast<std::size_t>(device)];
  return nbytes <= room && in_use <= room - nbytes;
}

int find_attribute(void* value, int attribute, Address address) {
  const Lock lock(state().mutex);
  std::uintptr_t begin = 0;
  const Range* const range = state().find(address, &begin);
  if (range == nullptr || range->kind == Kind::kReserved) return kInvalidValue;
  switch (attribute) {
    case 1:  // the context; what cuMemCreate made has none
      std::memcpy(value, &range->context, sizeof(void*));
      return kSuccess;
    case 2:  // the type: host, or device
      *static_cast<unsigned*>(value) = range->is_device() ? 2 : 1;
      return kSuccess;
    case 3:  // the address on GPUs, and on the host
    case 4:
      if (attribute == 4 && range->is_device()) return kInvalidValue;
      std::memcpy(value, &address, sizeof address);
      return kSuccess;
    case 8:  // whether it is managed
      *static_cast<unsigned*>(value) = 0;
      return kSuccess;
    case 9:  // the device
      *static_cast<int*>(value) = range->kind == Kind::kMapped
                                      ? state().allocations.at(range->handle).device
                                      : range->context->device;
      return kSuccess;
    case 11:  // where the range begins
      std::memcpy(value, &begin, sizeof begin);
      return kSuccess;
    case 12:  // its size
      std::memcpy(value, &range->size, sizeof range->size);
      return kSuccess;
    default:
      return kInvalidValue;
  }
}

}  // namespace

// For tests.

// Lets a function fail with `result` in its next call number `first`, counted from 1, and from then
// on; never, if `result` is 0.
API void stand_in_cuda_fail(const char* name, int result, unsigned long first) {
  const Lock lock(state().mutex);
  state().failures.erase(name);
  if (result != 0) state().failures[name] = {result, state().calls[name] + first};
}

// Lets only that call fail.
API void stand_in_cuda_fail_once(const char* name, int result, unsigned long number) {
  stand_in_cuda_fail(name, result, number);
  const Lock lock(state().mutex);
  Failure& failure = state().failures.at(name);
  failure.last = failure.first;
}

// The number of calls so far; in a fork, the parent's included.
API unsigned long stand_in_cuda_calls() { return state().all_calls; }

// The number of objects that are to be freed: memory, and ranges of addresses.
API unsigned long stand_in_cuda_objects() {
  const Lock lock(state().mutex);
  return state().allocations.size() + state().ranges.size();
}

// Errors, devices and contexts.

API int cuGetErrorName(int result, const char** name) {
  static const std::map<int, const char*> names{
      {kSuccess, "CUDA_SUCCESS"},
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
      {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {kMapFailed, "CUDA_ERROR_MAP_FAILED"},
      {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
      {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
      {kNotFound, "CUDA_ERROR_NOT_FOUND"},
      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
      {kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
      {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
      {999, "CUDA_ERROR_UNKNOWN"},
  };
  const auto found = names.find(result);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kInvalidValue : kSuccess;
}

API int cuInit(unsigned) {
  ENTER(cuInit);
  const Lock lock(state().mutex);
  state().is_initialized = true;
  return kSuccess;
}

API int cuDriverGetVersion(int* version) {
  *version = 12000;
  return kSuccess;
}

API int cuDeviceGetCount(int* count) {
  ENTER(cuDeviceGetCount);
  *count = static_cast<int>(count_devices());
  return kSuccess;
}

API int cuDeviceGet(int* device, int ordinal) {
  ENTER(cuDeviceGet);
  if (!is_device(ordinal)) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

static int write_uuid(void* uuid, int device) {
  if (!is_device(device)) return kInvalidDevice;
  char text[17] = "stand-in GPU 000";
  text[15] = static_cast<char>('0' + device);
  std::memcpy(uuid, text, 16);
  return kSuccess;
}

API int cuDeviceGetUuid(void* uuid, int device) {
  ENTER(cuDeviceGetUuid);
  return write_uuid(uuid, device);
}

API int cuDeviceGetUuid_v2(void* uuid, int device) {
  ENTER(cuDeviceGetUuid_v2);
  return write_uuid(uuid, device);
}

API int cuDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER(cuDeviceGetAttribute);
  if (!is_device(device)) return kInvalidDevice;
  *value = number_of("STAND_IN_CUDA_LACKS", 0) != static_cast<unsigned long>(attribute);
  return kSuccess;
}

API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
  ENTER(cuDevicePrimaryCtxGetState);
  if (!is_device(device)) return kInvalidDevice;
  const Lock lock(state().mutex);
  *flags = 0;
  *is_active = context_of(device).is_active;
  return kSuccess;
}

API int cuDevicePrimaryCtxRetain(void** context, int device) {
  ENTER(cuDevicePrimaryCtxRetain);
  if (!is_device(device)) return kInvalidDevice;
  const Lock lock(state().mutex);
  context_of(device).is_active = true;
  *context = &context_of(device);
  return kSuccess;
}

API int cuCtxPushCurrent_v2(void* context) {
  ENTER(cuCtxPushCurrent_v2);
  if (context == nullptr) return kInvalidContext;
  current_contexts.push_back(static_cast<Context*>(context));
  return kSuccess;
}

API int cuCtxPopCurrent_v2(void** context) {
  ENTER_WITH_CONTEXT(cuCtxPopCurrent_v2);
  *context = current();
  current_contexts.pop_back();
  return kSuccess;
}

API int cuCtxSetCurrent(void* context) {
  ENTER(cuCtxSetCurrent);
  if (!current_contexts.empty()) current_contexts.pop_back();
  if (context != nullptr) current_contexts.push_back(static_cast<Context*>(context));
  return kSuccess;
}

API int cuCtxGetCurrent(void** context) {
  ENTER(cuCtxGetCurrent);
  *context = current();
  return kSuccess;
}

API int cuCtxGetDevice(int* device) {
  ENTER_WITH_CONTEXT(cuCtxGetDevice);
  *device = current()->device;
  return kSuccess;
}

API int cuCtxSynchronize() {
  const int failed = enter("cuCtxSynchronize");
  if (current() == nullptr) return failed == kSuccess ? kInvalidContext : failed;
  const Lock lock(state().streams_mutex);
  failed == kSuccess ? run_all(current()) : forget_all(current());
  return failed;
}

// Streams and events.

API int cuStreamCreate(void** stream, unsigned) {
  ENTER_WITH_CONTEXT(cuStreamCreate);
  const Lock lock(state().streams_mutex);
  auto made = std::make_unique<Stream>(Stream{current()});
  *stream = made.get();
  state().streams[made.get()] = std::move(made);
  return kSuccess;
}

API int cuStreamDestroy_v2(void* stream) {
  ENTER(cuStreamDestroy_v2);
  const Lock lock(state().streams_mutex);
  stream_of(stream).run_until(stream_of(stream).queued);
  state().streams.erase(static_cast<Stream*>(stream));
  return kSuccess;
}

API int cuStreamGetCtx(void* stream, void** context) {
  ENTER(cuStreamGetCtx);
  *context = stream == nullptr ? current() : static_cast<Stream*>(stream)->context;
  return *context == nullptr ? kInvalidContext : kSuccess;
}

static int wait_for_stream(const char* name, void* handle) {
  const int failed = enter(name);
  if (failed == kNotInitialized) return failed;
  const Lock lock(state().streams_mutex);
  Stream& stream = stream_of(handle);
  failed == kSuccess ? stream.run_until(stream.queued) : forget_all(stream.context);
  return failed;
}

API int cuStreamSynchronize(void* stream) { return wait_for_stream("cuStreamSynchronize", stream); }

API int cuStreamQuery(void* stream) { return wait_for_stream("cuStreamQuery", stream); }

API int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  ENTER(cuStreamWaitEvent);
  const Lock lock(state().streams_mutex);
  const Event awaited = *static_cast<Event*>(event);
  if (awaited.stream != nullptr)
    add_work(stream_of(stream), [awaited] { awaited.stream->run_until(awaited.number); });
  return kSuccess;
}

API int cuEventCreate(void** event, unsigned) {
  ENTER_WITH_CONTEXT(cuEventCreate);
  *event = new Event;
  return kSuccess;
}

API int cuEventDestroy_v2(void* event) {
  ENTER(cuEventDestroy_v2);
  delete static_cast<Event*>(event);
  return kSuccess;
}

API int cuEventRecord(void* event, void* handle) {
  ENTER(cuEventRecord);
  const Lock lock(state().streams_mutex);
  Stream& stream = stream_of(handle);
  *static_cast<Event*>(event) = {&stream, stream.queued};
  return kSuccess;
}

static int wait_for_event(const char* name, void* handle) {
  const int failed = enter(name);
  if (failed == kNotInitialized) return failed;
  const Lock lock(state().streams_mutex);
  const Event& event = *static_cast<Event*>(handle);
  if (event.stream == nullptr) return failed;
  failed == kSuccess ? event.stream->run_until(event.number) : forget_all(event.stream->context);
  return failed;
}

API int cuEventQuery(void* event) { return wait_for_event("cuEventQuery", event); }

API int cuEventSynchronize(void* event) { return wait_for_event("cuEventSynchronize", event); }

// Modules and kernels.

API int cuModuleLoadData(void** module, const void* image) {
  ENTER_WITH_CONTEXT(cuModuleLoadData);
  *module = new Module{static_cast<const char*>(image)};
  return kSuccess;
}

API int cuModuleGetFunction(void** function, void* module, const char* name) {
  ENTER_WITH_CONTEXT(cuModuleGetFunction);
  const std::string entry = std::string(".entry ") + name + "(";
  if (static_cast<Module*>(module)->image.find(entry) == std::string::npos) return kNotFound;
  for (const Kernel& kernel : kKernels) {
    if (std::strcmp(kernel.name, name) != 0) continue;
    *function = const_cast<Kernel*>(&kernel);
    return kSuccess;
  }
  return kNotFound;
}

API int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned, void* stream,
                       void** arguments, void**) {
  ENTER_WITH_CONTEXT(cuLaunchKernel);
  if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x == 0 || block_x > 1024 || block_y != 1 ||
      block_z != 1)
    return kInvalidValue;
  const Lock lock(state().streams_mutex);
  const Work thread = static_cast<const Kernel*>(function)->bind(arguments);
  add_work(stream_of(stream), [=] {
    const Opened opened;
    gridDim = {grid_x, 1, 1};
    blockDim = {block_x, 1, 1};
    blockIdx = threadIdx = {0, 0, 0};
    for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x)
      for (threadIdx.x = 0; threadIdx.x < block_x; ++threadIdx.x) thread();
  });
  return kSuccess;
}

// Memory.

API int cuPointerGetAttribute(void* value, int attribute, Address address) {
  ENTER(cuPointerGetAttribute);
  return find_attribute(value, attribute, address);
}

// Attributes of memory that is not the driver's are 0.
API int cuPointerGetAttributes(unsigned count, int* attributes, void** values, Address address) {
  ENTER(cuPointerGetAttributes);
  for (unsigned i = 0; i < count; ++i) {
    if (find_attribute(values[i], attributes[i], address) == kSuccess) continue;
    const bool is_number = attributes[i] == 2 || attributes[i] == 8 || attributes[i] == 9;
    std::memset(values[i], 0, is_number ? sizeof(int) : sizeof(void*));
    if (attributes[i] == 9) *static_cast<int*>(values[i]) = -2;
  }
  return kSuccess;
}

API int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  ENTER_WITH_CONTEXT(cuMemGetInfo_v2);
  const Lock lock(state().mutex);
  *total = number_of("STAND_IN_CUDA_MEMORY", std::size_t{8} << 30);
  *free = *total - state().in_use[static_cast<std::size_t>(current()->device)];
  return kSuccess;
}

API int cuMemAlloc_v2(Address* address, std::size_t nbytes) {
  ENTER_WITH_CONTEXT(cuMemAlloc_v2);
  if (nbytes == 0) return kInvalidValue;
  const Lock lock(state().mutex);
  if (!has_room(current()->device, nbytes)) return kOutOfMemory;
  const Range range{Kind::kDevice, nbytes, current(), 0, 0, PROT_READ | PROT_WRITE};
  void* const memory = new_addresses(nbytes, state().open > 0 ? range.protection : PROT_NONE);
  if (memory == nullptr) return kOutOfMemory;
  *address = reinterpret_cast<std::uintptr_t>(memory);
  state().in_use[static_cast<std::size_t>(current()->device)] += nbytes;
  state().ranges[*address] = range;
  return kSuccess;
}

API int cuMemFree_v2(Address address) {
  ENTER_WITH_CONTEXT(cuMemFree_v2);
  {
    const Lock lock(state().streams_mutex);
    run_all(current());
  }
  return free_range(address, Kind::kDevice, kInvalidValue);
}

API int cuMemHostAlloc(void** memory, std::size_t nbytes, unsigned) {
  ENTER_WITH_CONTEXT(cuMemHostAlloc);
  if (nbytes == 0) return kInvalidValue;
  *memory = new_addresses(nbytes, PROT_READ | PROT_WRITE);
  if (*memory == nullptr) return kOutOfMemory;
  const Lock lock(state().mutex);
  state().ranges[reinterpret_cast<std::uintptr_t>(*memory)] = {Kind::kHost, nbytes, current()};
  return kSuccess;
}

API int cuMemFreeHost(void* memory) {
  ENTER_WITH_CONTEXT(cuMemFreeHost);
  return free_range(reinterpret_cast<std::uintptr_t>(memory), Kind::kHost, kInvalidValue);
}

API int cuMemHostRegister_v2(void* memory, std::size_t nbytes, unsigned) {
  ENTER_WITH_CONTEXT(cuMemHostRegister_v2);
  if (memory == nullptr || nbytes == 0) return kInvalidValue;
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  const Lock lock(state().mutex);
  const auto next = state().ranges.lower_bound(begin);
  const bool runs_into_next = next != state().ranges.end() && next->first - begin < nbytes;
  if (runs_into_next || state().find(begin) != nullptr) return kAlreadyRegistered;
  state().ranges[begin] = {Kind::kRegistered, nbytes, current()};
  return kSuccess;
}

API int cuMemHostUnregister(void* memory) {
  ENTER_WITH_CONTEXT(cuMemHostUnregister);
  return free_range(reinterpret_cast<std::uintptr_t>(memory), Kind::kRegistered, kNotRegistered);
}

API int cuMemHostGetDevicePointer_v2(Address* address, void* memory, unsigned) {
  ENTER_WITH_CONTEXT(cuMemHostGetDevicePointer_v2);
  const Lock lock(state().mutex);
  *address = reinterpret_cast<std::uintptr_t>(memory);
  const Range* const range = state().find(*address);
  return range == nullptr || range->is_device() || range->kind == Kind::kReserved ? kInvalidValue
                                                                                  : kSuccess;
}

API int cuMemcpyDtoH_v2(void* to, Address from, std::size_t nbytes) {
  ENTER_WITH_CONTEXT(cuMemcpyDtoH_v2);
  if (nbytes == 0) return kSuccess;
  if (!is_reachable(from, nbytes)) return kInvalidValue;
  return copy(to, reinterpret_cast<const void*>(from), nbytes);
}

API int cuMemcpyHtoD_v2(Address to, const void* from, std::size_t nbytes) {
  ENTER_WITH_CONTEXT(cuMemcpyHtoD_v2);
  if (nbytes == 0) return kSuccess;
  if (!is_reachable(to, nbytes)) return kInvalidValue;
  return copy(reinterpret_cast<void*>(to), from, nbytes);
}

API int cuMemcpyDtoD_v2(Address to, Address from, std::size_t nbytes) {
  ENTER_WITH_CONTEXT(cuMemcpyDtoD_v2);
  if (nbytes == 0) return kSuccess;
  if (!is_reachable(to, nbytes) || !is_reachable(from, nbytes)) return kInvalidValue;
  return copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), nbytes);
}

API int cuMemGetAllocationGranularity(std::size_t* nbytes, const AllocationKind* kind, int) {
  ENTER(cuMemGetAllocationGranularity);
  if (kind->type != 1 || kind->location.type != 1 || !is_device(kind->location.device))
    return kInvalidValue;
  *nbytes = kUnit;
  return kSuccess;
}

API int cuMemCreate(Handle* handle, std::size_t nbytes, const AllocationKind* kind,
                    unsigned long long flags) {
  ENTER(cuMemCreate);
  if (flags != 0 || nbytes == 0 || nbytes % kUnit != 0 || kind->type != 1 ||
      kind->handle_types != 1 || kind->location.type != 1 || !is_device(kind->location.device) ||
      kind->only_for_segments != nullptr)
    return kInvalidValue;
  const Lock lock(state().mutex);
  const int device = kind->location.device;
  if (!has_room(device, nbytes)) return kOutOfMemory;
  const std::string name = kFileName + std::to_string(device);
  const int descriptor = memfd_create(name.c_str(), MFD_CLOEXEC);
  if (descriptor < 0) return kOutOfMemory;
  if (ftruncate(descriptor, static_cast<off_t>(nbytes)) != 0) {
    close(descriptor);
    return kOutOfMemory;
  }
  state().in_use[static_cast<std::size_t>(device)] += nbytes;
  *handle = state().next_handle++;
  state().allocations[*handle] = {descriptor, nbytes, device, true};
  return kSuccess;
}

API int cuMemRelease(Handle handle) {
  ENTER(cuMemRelease);
  const Lock lock(state().mutex);
  if (state().allocations.count(handle) == 0) return kInvalidValue;
  state().release(handle);
  return kSuccess;
}

API int cuMemExportToShareableHandle(void* shareable, Handle handle, int type,
                                     unsigned long long flags) {
  ENTER(cuMemExportToShareableHandle);
  const Lock lock(state().mutex);
  if (type != 1 || flags != 0 || state().allocations.count(handle) == 0) return kInvalidValue;
  const int descriptor = dup(state().allocations.at(handle).descriptor);
  if (descriptor < 0) return kNotSupported;
  std::memcpy(shareable, &descriptor, sizeof descriptor);
  return kSuccess;
}

API int cuMemImportFromShareableHandle(Handle* handle, void* shareable, int type) {
  ENTER(cuMemImportFromShareableHandle);
  const auto given = static_cast<int>(reinterpret_cast<std::intptr_t>(shareable));
  const std::string prefix = std::string("/memfd:") + kFileName;
  std::array<char, 64> name{};
  struct stat status{};
  const std::string link = "/proc/self/fd/" + std::to_string(given);
  if (type != 1 || readlink(link.c_str(), name.data(), name.size() - 1) < 0 ||
      std::strncmp(name.data(), prefix.c_str(), prefix.size()) != 0 || fstat(given, &status) != 0)
    return kInvalidValue;
  const int device = std::atoi(name.data() + prefix.size());
  const int descriptor = fcntl(given, F_DUPFD_CLOEXEC, 0);
  if (descriptor < 0) return kNotSupported;
  const Lock lock(state().mutex);
  *handle = state().next_handle++;
  state().allocations[*handle] = {descriptor, static_cast<std::size_t>(status.st_size), device,
                                  false};
  return kSuccess;
}

API int cuMemAddressReserve(Address* address, std::size_t nbytes, std::size_t, Address,
                            unsigned long long flags) {
  ENTER(cuMemAddressReserve);
  if (flags != 0 || nbytes == 0 || nbytes % kUnit != 0) return kInvalidValue;
  void* const memory = new_addresses(nbytes, PROT_NONE);
  if (memory == nullptr) return kOutOfMemory;
  const Lock lock(state().mutex);
  *address = reinterpret_cast<std::uintptr_t>(memory);
  state().ranges[*address] = {Kind::kReserved, nbytes};
  return kSuccess;
}

API int cuMemAddressFree(Address address, std::size_t nbytes) {
  ENTER(cuMemAddressFree);
  {
    const Lock lock(state().mutex);
    const auto found = state().ranges.find(address);
    if (found == state().ranges.end() || found->second.size != nbytes) return kInvalidValue;
  }
  return free_range(address, Kind::kReserved, kInvalidValue);
}

API int cuMemMap(Address address, std::size_t nbytes, std::size_t offset, Handle handle,
                 unsigned long long flags) {
  ENTER(cuMemMap);
  const Lock lock(state().mutex);
  const auto range = state().ranges.find(address);
  const auto allocation = state().allocations.find(handle);
  if (flags != 0 || offset != 0 || nbytes % kUnit != 0 || range == state().ranges.end() ||
      range->second.kind != Kind::kReserved || nbytes > range->second.size ||
      allocation == state().allocations.end() || nbytes > allocation->second.size)
    return kInvalidValue;
  // A descriptor of a memory file allows writes in every process; the maps tell them apart.
  void* const memory = mmap(reinterpret_cast<void*>(address), nbytes, PROT_NONE,
                            MAP_SHARED | MAP_FIXED, allocation->second.descriptor, 0);
  if (memory == MAP_FAILED) return kMapFailed;
  ++allocation->second.uses;
  range->second.kind = Kind::kMapped;
  range->second.handle = handle;
  range->second.mapped = nbytes;
  return kSuccess;
}

API int cuMemSetAccess(Address address, std::size_t nbytes, const Access* access,
                       std::size_t count) {
  ENTER(cuMemSetAccess);
  const Lock lock(state().mutex);
  const auto range = state().ranges.find(address);
  if (count != 1 || access->location.type != 1 || !is_device(access->location.device) ||
      (access->flags != 1 && access->flags != 3) || range == state().ranges.end() ||
      range->second.kind != Kind::kMapped || nbytes != range->second.mapped)
    return kInvalidValue;
  range->second.protection = access->flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ;
  state().protect(address, range->second);
  return kSuccess;
}

API int cuMemUnmap(Address address, std::size_t nbytes) {
  ENTER(cuMemUnmap);
  const Lock lock(state().mutex);
  const auto range = state().ranges.find(address);
  if (range == state().ranges.end() || range->second.kind != Kind::kMapped ||
      nbytes != range->second.mapped)
    return kInvalidValue;
  mmap(reinterpret_cast<void*>(address), nbytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  state().release(range->second.handle);
  range->second = {Kind::kReserved, range->second.size};
  return kSuccess;
}
