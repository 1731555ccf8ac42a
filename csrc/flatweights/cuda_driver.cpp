#include "flatweights/cuda_driver.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <new>
#include <string>

namespace flatweights {
namespace {

struct Search {
  CudaDriver driver{};
  std::string obstacle;
  CudaSharing sharing{};

  Search() {
    library_ = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (library_ == nullptr) {
      obstacle = "NVIDIA's driver is not loaded";
      return;
    }
    find_all();
    find_sharing();
  }

 private:
  void find_all() {
    std::string missing;
    find("cuGetErrorName", driver.error_name, missing);
    find("cuDeviceGetCount", driver.count_devices, missing);
    find("cuDeviceGet", driver.device_at, missing);
    find("cuDevicePrimaryCtxGetState", driver.primary_context_state, missing);
    find("cuDevicePrimaryCtxRetain", driver.retain_primary_context, missing);
    find("cuStreamGetCtx", driver.context_of_stream, missing);
    find("cuCtxPushCurrent_v2", driver.push_context, missing);
    find("cuCtxPopCurrent_v2", driver.pop_context, missing);
    find("cuCtxSynchronize", driver.synchronize_context, missing);
    find("cuPointerGetAttribute", driver.pointer_attribute, missing);
    find("cuStreamCreate", driver.create_stream, missing);
    find("cuMemHostAlloc", driver.allocate_on_host, missing);
    find("cuModuleLoadData", driver.load_module, missing);
    find("cuModuleGetFunction", driver.function_of_module, missing);
    find("cuLaunchKernel", driver.launch, missing);
    find("cuEventCreate", driver.create_event, missing);
    find("cuEventRecord", driver.record_event, missing);
    find("cuEventSynchronize", driver.synchronize_event, missing);
    if (!missing.empty()) obstacle = "NVIDIA's driver has no function " + missing;
    std::string unneeded;
    find("cuCtxGetCurrent", driver.current_context, unneeded);
    find("cuMemHostRegister_v2", driver.pin, unneeded);
    find("cuMemHostUnregister", driver.unpin, unneeded);
    find("cuMemHostGetDevicePointer_v2", driver.pinned_address, unneeded);
  }

  void find_sharing() {
    std::string& missing = sharing.missing;
    std::string newer;
    find("cuDeviceGetUuid_v2", sharing.device_uuid, newer);
    // The older one gives all parts of a GPU (MIG) the same UUID.
    if (!newer.empty()) find("cuDeviceGetUuid", sharing.device_uuid, missing);
    find("cuDeviceGetAttribute", sharing.device_attribute, missing);
    find("cuCtxGetDevice", sharing.current_device, missing);
    find("cuMemGetAllocationGranularity", sharing.granularity, missing);
    find("cuMemCreate", sharing.create, missing);
    find("cuMemExportToShareableHandle", sharing.export_handle, missing);
    find("cuMemImportFromShareableHandle", sharing.import_handle, missing);
    find("cuMemRelease", sharing.release, missing);
    find("cuMemAddressReserve", sharing.reserve, missing);
    find("cuMemAddressFree", sharing.free_reserved, missing);
    find("cuMemMap", sharing.map, missing);
    find("cuMemUnmap", sharing.unmap, missing);
    find("cuMemSetAccess", sharing.set_access, missing);
    find("cuMemcpyDtoH_v2", sharing.copy_to_host, missing);
    find("cuMemcpyHtoD_v2", sharing.copy_to_device, missing);
  }

  template <class Function>
  void find(const char* name, Function& function, std::string& missing) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    if (function == nullptr) missing = name;
  }

  void* library_;
};

const Search& search() {
  static const auto* const found = new Search;  // threads may call while the process exits
  return *found;
}

}  // namespace

bool CudaDriver::is_found() { return search().obstacle.empty(); }

void refuse_fork(pid_t process) {
  if (getpid() != process) throw CudaError("NVIDIA's driver does not work in a forked process");
}

const CudaDriver& CudaDriver::instance() {
  if (!search().obstacle.empty()) throw CudaError(search().obstacle);
  return search().driver;
}

void CudaDriver::check(int result, const char* name) const {
  constexpr int kOutOfMemory = 2;
  if (result == 0) return;
  if (result == kOutOfMemory) throw std::bad_alloc();
  const char* text = nullptr;
  if (error_name(result, &text) != 0 || text == nullptr) text = "an unknown error";
  throw CudaError(std::string(name) + " of NVIDIA's driver: " + text);
}

const CudaSharing& CudaSharing::instance() {
  static_cast<void>(CudaDriver::instance());
  return search().sharing;
}

void* context_of_stream(void* stream) {
  const CudaDriver& driver = CudaDriver::instance();
  void* context = nullptr;
  driver.check(driver.context_of_stream(stream, &context), "cuStreamGetCtx");
  return context;
}

CurrentContext::CurrentContext(void* context) {
  const CudaDriver& driver = CudaDriver::instance();
  driver.check(driver.push_context(context), "cuCtxPushCurrent");
}

CurrentContext::~CurrentContext() {
  void* popped = nullptr;
  CudaDriver::instance().pop_context(&popped);
}

}  // namespace flatweights
