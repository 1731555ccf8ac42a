#include "flatweights/device_segments.hpp"

#include <fcntl.h>

#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <new>

#include "flatweights/cuda_driver.hpp"

namespace flatweights {
namespace {

// What was found out about the process's GPUs.
struct Known {
  const pid_t process = getpid();
  std::mutex mutex;
  std::map<int, void*> contexts;           // by device
  std::map<void*, std::string> obstacles;  // by context

  // Throws CudaError in a fork.
  static Known& lock(std::unique_lock<std::mutex>& turn) {
    static auto* const known = new Known;  // threads may call while the process exits
    refuse_fork(known->process);
    turn = std::unique_lock(known->mutex);
    return *known;
  }
};

bool is_active(const CudaDriver& driver, int device) {
  unsigned flags = 0;
  int active = 0;
  driver.check(driver.primary_context_state(device, &flags, &active), "cuDevicePrimaryCtxGetState");
  return active != 0;
}

DeviceUuid uuid_of(int device) {
  const CudaSharing& sharing = CudaSharing::instance();
  if (sharing.device_uuid == nullptr)
    throw CudaError("NVIDIA's driver has no function cuDeviceGetUuid");
  DeviceUuid uuid{};
  CudaDriver::instance().check(sharing.device_uuid(uuid.data(), device), "cuDeviceGetUuid");
  return uuid;
}

// The devices that this process uses.
std::vector<int> devices_in_use() {
  constexpr int kNotInitialized = 3;  // CUDA_ERROR_NOT_INITIALIZED, also in a fork
  constexpr int kNoDevice = 100;      // CUDA_ERROR_NO_DEVICE
  const CudaDriver& driver = CudaDriver::instance();
  int count = 0;
  const int result = driver.count_devices(&count);
  if (result == kNotInitialized || result == kNoDevice) return {};
  driver.check(result, "cuDeviceGetCount");
  std::vector<int> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0;
    driver.check(driver.device_at(&device, ordinal), "cuDeviceGet");
    if (is_active(driver, device)) devices.push_back(device);
  }
  return devices;
}

int current_device() {
  const CudaSharing& sharing = CudaSharing::instance();
  if (sharing.current_device == nullptr)
    throw CudaError("NVIDIA's driver has no function cuCtxGetDevice");
  int device = 0;
  CudaDriver::instance().check(sharing.current_device(&device), "cuCtxGetDevice");
  return device;
}

bool has_attribute(int attribute) {
  int value = 0;
  CudaDriver::instance().check(
      CudaSharing::instance().device_attribute(&value, attribute, current_device()),
      "cuDeviceGetAttribute");
  return value != 0;
}

std::string missing_function() {
  const std::string& missing = CudaSharing::instance().missing;
  return missing.empty() ? "" : "NVIDIA's driver has no function " + missing;
}

// Throws std::bad_alloc, which may not be so the next time.
std::string find_obstacle(void* context) {
  constexpr int kVirtualMemory = 102;  // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
  constexpr int kDescriptors = 103;    // CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_...
  if (const std::string missing = missing_function(); !missing.empty()) return missing;
  try {
    const CurrentContext current(context);
    if (!has_attribute(kVirtualMemory)) return "the GPU has no virtual memory management";
    if (!has_attribute(kDescriptors)) return "the GPU's memory cannot be shared by descriptors";
    const auto segment = DeviceSegment::create(context, 1);
    static_cast<void>(DeviceSegment::open(context, segment->descriptor(), 1));
  } catch (const CudaError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

std::string text_of(const DeviceUuid& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "GPU";
  for (std::size_t i = 0; i < uuid.size(); ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[std::to_integer<unsigned>(uuid[i]) >> 4];
    text += kDigits[std::to_integer<unsigned>(uuid[i]) & 15];
  }
  return text;
}

std::vector<DeviceUuid> device_uuids() {
  std::vector<DeviceUuid> uuids;
  if (!CudaDriver::is_found()) return uuids;
  for (const int device : devices_in_use()) uuids.push_back(uuid_of(device));
  return uuids;
}

void* context_of_device(const DeviceUuid& uuid) {
  const CudaDriver& driver = CudaDriver::instance();
  std::unique_lock<std::mutex> turn;
  Known& known = Known::lock(turn);
  for (const int device : devices_in_use()) {
    if (uuid_of(device) != uuid) continue;
    void*& context = known.contexts[device];
    if (context == nullptr)
      driver.check(driver.retain_primary_context(&context, device), "cuDevicePrimaryCtxRetain");
    return context;
  }
  throw CudaError("the process does not use " + text_of(uuid));
}

DeviceUuid device_uuid(void* context) {
  const CurrentContext current(context);
  return uuid_of(current_device());
}

// Memory that has no address yet; it lives on where it is mapped or exported.
class DeviceSegment::Memory {
 public:
  explicit Memory(std::size_t nbytes) {
    constexpr int kMinimum = 0;  // CU_MEM_ALLOC_GRANULARITY_MINIMUM
    if (nbytes > (std::size_t{1} << 62)) throw std::bad_alloc();
    kind_.location.device = current_device();
    std::size_t unit = 0;
    driver_.check(sharing_.granularity(&unit, &kind_, kMinimum), "cuMemGetAllocationGranularity");
    capacity_ = nbytes == 0 ? unit : (nbytes + unit - 1) / unit * unit;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    if (has_handle_) sharing_.release(handle_);
  }

  void create() {
    driver_.check(sharing_.create(&handle_, capacity_, &kind_, 0), "cuMemCreate");
    has_handle_ = true;
  }

  void import(int descriptor) {
    auto* const shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor));
    driver_.check(sharing_.import_handle(&handle_, shareable, CudaAllocation::kDescriptor),
                  "cuMemImportFromShareableHandle");
    has_handle_ = true;
  }

  [[nodiscard]] int new_descriptor() const {
    int descriptor = -1;
    driver_.check(sharing_.export_handle(&descriptor, handle_, CudaAllocation::kDescriptor, 0),
                  "cuMemExportToShareableHandle");
    fcntl(descriptor, F_SETFD, FD_CLOEXEC);
    return descriptor;
  }

  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] CudaSharing::Handle handle() const noexcept { return handle_; }
  [[nodiscard]] const CudaLocation& location() const noexcept { return kind_.location; }

 private:
  const CudaDriver& driver_ = CudaDriver::instance();
  const CudaSharing& sharing_ = CudaSharing::instance();
  CudaAllocation kind_;
  std::size_t capacity_ = 0;
  CudaSharing::Handle handle_ = 0;
  bool has_handle_ = false;
};

DeviceSegment::DeviceSegment(void* context, std::size_t nbytes)
    : context_(context), uuid_(device_uuid(context)), size_(nbytes) {
  if (const std::string missing = missing_function(); !missing.empty()) throw CudaError(missing);
}

std::shared_ptr<DeviceSegment> DeviceSegment::create(void* context, std::size_t nbytes) {
  const std::shared_ptr<DeviceSegment> segment(new DeviceSegment(context, nbytes));
  const CurrentContext current(context);
  Memory memory(nbytes);
  memory.create();
  segment->descriptor_ = memory.new_descriptor();
  segment->map(memory, CudaAccess::kWrite);
  return segment;
}

std::shared_ptr<const DeviceSegment> DeviceSegment::open(void* context, int descriptor,
                                                         std::size_t nbytes) {
  const std::shared_ptr<DeviceSegment> segment(new DeviceSegment(context, nbytes));
  const CurrentContext current(context);
  Memory memory(nbytes);
  memory.import(descriptor);
  segment->map(memory, CudaAccess::kRead);
  return segment;
}

void DeviceSegment::map(const Memory& memory, int access) {
  const CudaDriver& driver = CudaDriver::instance();
  const CudaSharing& sharing = CudaSharing::instance();
  capacity_ = memory.capacity();
  driver.check(sharing.reserve(&address_, capacity_, 0, 0, 0), "cuMemAddressReserve");
  driver.check(sharing.map(address_, capacity_, 0, memory.handle(), 0), "cuMemMap");
  is_mapped_ = true;
  const CudaAccess allowed{memory.location(), access};
  driver.check(sharing.set_access(address_, capacity_, &allowed, 1), "cuMemSetAccess");
}

DeviceSegment::~DeviceSegment() {
  close_descriptor();
  if (process_ != getpid() || address_ == 0) return;
  const CudaDriver& driver = CudaDriver::instance();
  const CudaSharing& sharing = CudaSharing::instance();
  if (driver.push_context(context_) == 0) {
    // A kernel that touches memory which is mapped no more ends all work of the context.
    driver.synchronize_context();
    void* popped = nullptr;
    driver.pop_context(&popped);
  }
  if (is_mapped_) sharing.unmap(address_, capacity_);
  sharing.free_reserved(address_, capacity_);
}

void DeviceSegment::close_descriptor() noexcept {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

void DeviceSegment::copy_to_host(std::byte* to, std::size_t offset, std::size_t nbytes) const {
  refuse_fork(process_);
  const CurrentContext current(context_);
  CudaDriver::instance().check(CudaSharing::instance().copy_to_host(to, address_ + offset, nbytes),
                               "cuMemcpyDtoH");
}

void DeviceSegment::copy_from_host(const std::byte* from, std::size_t offset, std::size_t nbytes) {
  refuse_fork(process_);
  const CurrentContext current(context_);
  const CudaDriver& driver = CudaDriver::instance();
  driver.check(CudaSharing::instance().copy_to_device(address_ + offset, from, nbytes),
               "cuMemcpyHtoD");
  // From pageable memory, the driver returns once it has a copy of its own: on an H100, others read
  // old bytes for a while.
  driver.check(driver.synchronize_context(), "cuCtxSynchronize");
}

std::string device_segment_obstacle(void* context) {
  try {
    std::unique_lock<std::mutex> turn;
    Known& known = Known::lock(turn);
    const auto found = known.obstacles.find(context);
    if (found != known.obstacles.end()) return found->second;
    return known.obstacles.emplace(context, find_obstacle(context)).first->second;
  } catch (const std::bad_alloc&) {
    return "there is no memory for a trial";
  } catch (const CudaError& error) {
    return error.what();
  }
}

}  // namespace flatweights
