// Where a variable's memory is: TensorFlow does not tell reliably, NVIDIA's driver does.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "xla/stream_executor/stream.h"

namespace flatweights {

// The driver's functions, by the names and with the types of cuda.h; its handles are pointers. It
// is in this process if TensorFlow has found a GPU.
struct GpuDriver {
  int (*stream_context)(void* stream, void** context) = nullptr;
  int (*push_context)(void* context) = nullptr;
  int (*pop_context)(void** context) = nullptr;
  int (*pointer_attribute)(void* value, int attribute, unsigned long long pointer) = nullptr;

  static const GpuDriver& instance() {
    static const GpuDriver driver;
    return driver;
  }

  [[nodiscard]] bool found() const {
    return stream_context != nullptr && push_context != nullptr && pop_context != nullptr &&
           pointer_attribute != nullptr;
  }

 private:
  GpuDriver() {
    void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return;
    find(library, "cuStreamGetCtx", stream_context);
    find(library, "cuCtxPushCurrent_v2", push_context);
    find(library, "cuCtxPopCurrent_v2", pop_context);
    find(library, "cuPointerGetAttribute", pointer_attribute);
  }

  template <class Function>
  static void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
  }
};

// The GPU that a variable belongs to; empty for one of the host's. What it points to lives as long
// as the process.
struct GpuPlace {
  void* stream = nullptr;                      // in the order of which TensorFlow uses the memory
  void* context = nullptr;                     // of the stream
  tensorflow::Allocator* allocator = nullptr;  // of the memory

  // The GPU on which an op runs, if it is the device of this name and one of NVIDIA's.
  static GpuPlace of(tensorflow::OpKernelContext& op, const std::string& name) {
    return op.device()->name() == name ? of(op) : GpuPlace();
  }

  // The GPU on which an op runs, if it is one of NVIDIA's.
  static GpuPlace of(tensorflow::OpKernelContext& op) {
    auto* const device = dynamic_cast<tensorflow::Device*>(op.device());
    if (device == nullptr || device->device_type() != "GPU") return {};
    // Only TensorFlow's own devices, not those of plug-ins, say this.
    constexpr const char* kOfCuda = "compute capability";
    if (device->attributes().physical_device_desc().find(kOfCuda) == std::string::npos) return {};
    tensorflow::DeviceContext* const context = op.op_device_context();
    stream_executor::Stream* const stream = context == nullptr ? nullptr : context->stream();
    if (stream == nullptr || !GpuDriver::instance().found()) return {};
    GpuPlace place;
    place.stream = stream->platform_specific_handle().stream;
    place.allocator = device->GetAllocator(tensorflow::AllocatorAttributes());
    if (place.stream == nullptr || place.allocator == nullptr) return {};
    const int result = GpuDriver::instance().stream_context(place.stream, &place.context);
    return result == 0 ? place : GpuPlace();
  }
};

// Tells where memory is, from here to the end of the scope.
class GpuMemory {
 public:
  GpuMemory() = default;
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  ~GpuMemory() {
    void* popped = nullptr;
    if (is_current_) GpuDriver::instance().pop_context(&popped);
  }

  // Whether the value of a variable of `place` is in a GPU's memory, not in the host's alone. The
  // driver's answer for one address serves for all of the same allocation, of which TensorFlow has
  // few: asking for each variable takes longer than moving many of them. So an object is for one
  // call, whose locks let no memory be freed.
  bool has(const GpuPlace& place, const tensorflow::Tensor& value) {
    constexpr int kMemoryType = 2;  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    constexpr int kIsManaged = 8;   // CU_POINTER_ATTRIBUTE_IS_MANAGED
    constexpr int kBegin = 11;      // CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
    constexpr int kSize = 12;       // CU_POINTER_ATTRIBUTE_RANGE_SIZE
    constexpr unsigned kHost = 1;   // CU_MEMORYTYPE_HOST
    constexpr unsigned kOnGpu = 2;  // CU_MEMORYTYPE_DEVICE
    constexpr int kUnknown = 1;     // CUDA_ERROR_INVALID_VALUE: the driver has not allocated it
    if (place.stream == nullptr) return false;
    const auto address = reinterpret_cast<std::uintptr_t>(value.data());
    if (address - begin_ < size_) return true;
    const GpuDriver& driver = GpuDriver::instance();
    if (!is_current_) is_current_ = driver.push_context(place.context) == 0;
    unsigned type = 0;
    const int result = driver.pointer_attribute(&type, kMemoryType, address);
    // A driver that does not answer, as in a forked process, fails to copy, too, which is safe.
    // Touching a GPU's memory as if it were the host's would end the process.
    if (result != 0) return result != kUnknown;
    unsigned is_managed = 0;
    if (type == kHost) driver.pointer_attribute(&is_managed, kIsManaged, address);
    unsigned long long begin = 0;
    std::size_t size = 0;
    if (type == kOnGpu && driver.pointer_attribute(&begin, kBegin, address) == 0 &&
        driver.pointer_attribute(&size, kSize, address) == 0) {
      begin_ = static_cast<std::uintptr_t>(begin);
      size_ = size;
    }
    return type != kHost || is_managed != 0;
  }

 private:
  bool is_current_ = false;
  std::uintptr_t begin_ = 0;  // of a GPU's memory that the last answer was about
  std::size_t size_ = 0;
};

}  // namespace flatweights
