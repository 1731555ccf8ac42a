#include "flatweights/cuda_driver.hpp"

#include <dlfcn.h>

#include <new>
#include <string>

namespace flatweights {
namespace {

struct Search {
  CudaDriver driver{};
  std::string obstacle;

  Search() {
    library_ = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (library_ == nullptr) {
      obstacle = "NVIDIA's driver is not loaded";
      return;
    }
    find("cuGetErrorName", driver.error_name);
    find("cuDeviceGetCount", driver.count_devices);
    find("cuDeviceGet", driver.device_at);
    find("cuDevicePrimaryCtxGetState", driver.primary_context_state);
    find("cuDevicePrimaryCtxRetain", driver.retain_primary_context);
    find("cuStreamGetCtx", driver.context_of_stream);
    find("cuCtxPushCurrent_v2", driver.push_context);
    find("cuCtxPopCurrent_v2", driver.pop_context);
    find("cuCtxSynchronize", driver.synchronize_context);
    find("cuPointerGetAttribute", driver.pointer_attribute);
    find("cuStreamCreate", driver.create_stream);
    find("cuMemHostAlloc", driver.allocate_on_host);
    find("cuModuleLoadData", driver.load_module);
    find("cuModuleGetFunction", driver.function_of_module);
    find("cuLaunchKernel", driver.launch);
    find("cuEventCreate", driver.create_event);
    find("cuEventRecord", driver.record_event);
    find("cuEventSynchronize", driver.synchronize_event);
    find_if_there("cuCtxGetCurrent", driver.current_context);
    find_if_there("cuMemHostRegister_v2", driver.pin);
    find_if_there("cuMemHostUnregister", driver.unpin);
    find_if_there("cuMemHostGetDevicePointer_v2", driver.pinned_address);
  }

 private:
  template <class Function>
  void find_if_there(const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
  }

  template <class Function>
  void find(const char* name, Function& function) {
    find_if_there(name, function);
    if (function == nullptr) obstacle = std::string("NVIDIA's driver has no function ") + name;
  }

  void* library_;
};

const Search& search() {
  static const auto* const found = new Search;  // threads may call while the process exits
  return *found;
}

}  // namespace

bool CudaDriver::is_found() { return search().obstacle.empty(); }

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

}  // namespace flatweights
