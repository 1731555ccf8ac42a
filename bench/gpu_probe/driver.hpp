// NVIDIA's driver, found when the program runs: nothing is linked.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace probe {

// clang-format off
#define PROBE_EACH_FUNCTION(X) \
  X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuDeviceGetCount) X(cuDeviceGet) \
  X(cuDeviceGetName) X(cuDeviceGetAttribute) X(cuDeviceGetUuid) X(cuDeviceTotalMem) \
  X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) X(cuCtxSetCurrent) \
  X(cuCtxPushCurrent) X(cuCtxPopCurrent) X(cuCtxSynchronize) X(cuStreamCreate) \
  X(cuStreamGetCtx) X(cuStreamSynchronize) X(cuEventCreate) X(cuEventRecord) \
  X(cuEventSynchronize) X(cuEventQuery) X(cuEventElapsedTime) X(cuModuleLoadData) \
  X(cuModuleGetFunction) X(cuLaunchKernel) X(cuMemAlloc) X(cuMemFree) X(cuMemHostAlloc) \
  X(cuMemFreeHost) X(cuMemHostRegister) X(cuMemHostUnregister) X(cuMemHostGetDevicePointer) \
  X(cuMemGetInfo) X(cuMemcpyDtoH) X(cuMemcpyHtoD) X(cuMemcpyDtoHAsync) X(cuMemcpyHtoDAsync) \
  X(cuMemcpyDtoDAsync) X(cuMemsetD8) X(cuPointerGetAttribute) X(cuPointerGetAttributes) \
  X(cuMemGetAllocationGranularity) X(cuMemCreate) X(cuMemRelease) \
  X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle) X(cuMemAddressReserve) \
  X(cuMemAddressFree) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess) X(cuMemcpyBatchAsync)
// clang-format on

// Functions that are missing are null.
struct Driver {
#define PROBE_MEMBER(function) decltype(&::function) function = nullptr;
  PROBE_EACH_FUNCTION(PROBE_MEMBER)
#undef PROBE_MEMBER

  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) throw std::runtime_error("no NVIDIA driver (libcuda.so.1)");
#define PROBE_TEXT_(text) #text
#define PROBE_TEXT(text) PROBE_TEXT_(text)
#define PROBE_FIND(function) \
  function = reinterpret_cast<decltype(function)>(dlsym(library, PROBE_TEXT(function)));
    PROBE_EACH_FUNCTION(PROBE_FIND)
#undef PROBE_FIND
  }
};

// The driver of this process. Not before a fork, if the child is to use it, too.
inline const Driver& driver() {
  static const Driver found;
  return found;
}

inline std::string name_of(CUresult result) {
  if (result == CUDA_SUCCESS) return "ok";
  const char* text = nullptr;
  if (driver().cuGetErrorName == nullptr ||
      driver().cuGetErrorName(result, &text) != CUDA_SUCCESS || text == nullptr)
    text = "unknown error";
  return std::string(text) + " (" + std::to_string(result) + ")";
}

struct CudaError : std::runtime_error {
  CudaError(const char* function, CUresult code)
      : std::runtime_error(std::string(function) + ": " + name_of(code)), result(code) {}
  CUresult result;
};

template <class Function, class... Args>
CUresult attempt(Function function, Args... args) {
  return function == nullptr ? CUDA_ERROR_NOT_FOUND : function(args...);
}

// Calls a function of the driver; throws CudaError if it fails.
#define CALL(function, ...)                                                               \
  do {                                                                                    \
    const CUresult result_ =                                                              \
        ::probe::attempt(::probe::driver().function __VA_OPT__(, ) __VA_ARGS__);          \
    if (result_ != CUDA_SUCCESS) throw ::probe::CudaError(PROBE_TEXT(function), result_); \
  } while (false)
// Calls it, and returns the result.
#define TRY(function, ...) ::probe::attempt(::probe::driver().function __VA_OPT__(, ) __VA_ARGS__)

inline CUdevice first_device() {
  CALL(cuInit, 0);
  CUdevice device = 0;
  CALL(cuDeviceGet, &device, 0);
  return device;
}

inline int attribute(CUdevice device, CUdevice_attribute which) {
  int value = -1;
  return TRY(cuDeviceGetAttribute, &value, which, device) == CUDA_SUCCESS ? value : -1;
}

inline std::string& kernels_path() {
  static std::string path;
  return path;
}

// A context, a stream and modules on the first GPU.
class Gpu {
 public:
  Gpu() : device_(first_device()) {
    CALL(cuDevicePrimaryCtxRetain, &context_, device_);
    CALL(cuCtxSetCurrent, context_);
    CALL(cuStreamCreate, &stream_, CU_STREAM_NON_BLOCKING);
  }

  [[nodiscard]] CUdevice device() const { return device_; }
  [[nodiscard]] CUcontext context() const { return context_; }
  [[nodiscard]] CUstream stream() const { return stream_; }

  CUfunction function(const char* ptx, const char* name) {
    CUmodule loaded = nullptr;
    CALL(cuModuleLoadData, &loaded, ptx);
    CUfunction found = nullptr;
    CALL(cuModuleGetFunction, &found, loaded, name);
    return found;
  }

  // One of the probe's own kernels.
  CUfunction own(const char* name) {
    if (own_ == nullptr) {
      std::ifstream file(kernels_path());
      std::stringstream text;
      text << file.rdbuf();
      CALL(cuModuleLoadData, &own_, text.str().c_str());
    }
    CUfunction found = nullptr;
    CALL(cuModuleGetFunction, &found, own_, name);
    return found;
  }

  template <class... Args>
  void launch(CUfunction function, unsigned blocks, unsigned threads, Args... args) const {
    launch2(function, blocks, 1, threads, args...);
  }
  template <class... Args>
  void launch2(CUfunction function, unsigned x, unsigned y, unsigned threads, Args&... args) const {
    void* arguments[] = {static_cast<void*>(&args)...};
    CALL(cuLaunchKernel, function, x, y, 1u, threads, 1u, 1u, 0u, stream_, arguments,
         static_cast<void**>(nullptr));
  }

  // Until the clocks are those of a GPU at work.
  void warm_up() {
    const CUfunction spin = own("probe_spin");
    const int blocks = attribute(device_, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    for (int i = 0; i < 30; ++i) launch(spin, static_cast<unsigned>(blocks), 256, cycles(0.01));
    wait();
  }

  void wait() const { CALL(cuStreamSynchronize, stream_); }

  [[nodiscard]] CUdeviceptr allocate(std::size_t nbytes) const {
    CUdeviceptr memory = 0;
    CALL(cuMemAlloc, &memory, nbytes);
    return memory;
  }
  [[nodiscard]] void* pinned(std::size_t nbytes) const {
    void* memory = nullptr;
    CALL(cuMemHostAlloc, &memory, nbytes, CU_MEMHOSTALLOC_PORTABLE);
    return memory;
  }

  [[nodiscard]] long long cycles(double seconds) const {
    const int khz = attribute(device_, CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
    return static_cast<long long>(seconds * 1e3 * (khz > 0 ? khz : 1'500'000));
  }

  [[nodiscard]] std::size_t free_memory() const {
    std::size_t left = 0;
    std::size_t total = 0;
    CALL(cuMemGetInfo, &left, &total);
    return left;
  }

 private:
  CUdevice device_;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  CUmodule own_ = nullptr;
};

// An event; `flags` as of cuEventCreate.
inline CUevent event(unsigned flags = CU_EVENT_DISABLE_TIMING) {
  CUevent made = nullptr;
  CALL(cuEventCreate, &made, flags);
  return made;
}

}  // namespace probe
