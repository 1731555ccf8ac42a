#include "eager_tensors.hpp"

#include <dlfcn.h>

#include <cstring>

namespace flatweights::bind {
namespace {

const EagerTensors* the_tensors = nullptr;  // written once, with the GIL

// TF_DataType of the types that gradients have, which are the same in all releases.
int tensorflow_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 1;
    case DType::kFloat64:
      return 2;
    case DType::kBFloat16:
      return 14;
    case DType::kFloat16:
      return 19;
    default:
      return 0;
  }
}

}  // namespace

template <class Function>
bool EagerTensors::look_up(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

bool EagerTensors::find(const std::string& library) {
  if (the_tensors != nullptr) return true;
  void* const loaded = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (loaded == nullptr) return false;
  EagerTensors made;
  // The first two are C++: bool (const PyObject*) and TFE_TensorHandle* (const PyObject*).
  if (!look_up(loaded, "_Z22EagerTensor_CheckExactPK7_object", made.is_tensor_) ||
      !look_up(loaded, "_Z18EagerTensor_HandlePK7_object", made.handle_) ||
      !look_up(loaded, "TF_NewStatus", made.new_status_) ||
      !look_up(loaded, "TF_DeleteStatus", made.delete_status_) ||
      !look_up(loaded, "TF_GetCode", made.code_) ||
      !look_up(loaded, "TFE_TensorHandleDataType", made.data_type_) ||
      !look_up(loaded, "TFE_TensorHandleNumDims", made.num_dims_) ||
      !look_up(loaded, "TFE_TensorHandleDim", made.dim_) ||
      !look_up(loaded, "TFE_TensorHandleDeviceType", made.device_type_) ||
      !look_up(loaded, "TFE_TensorHandleDevicePointer", made.pointer_))
    return false;
  the_tensors = new EagerTensors(made);  // for as long as the process lives
  return true;
}

const EagerTensors* EagerTensors::found() noexcept { return the_tensors; }

void EagerReader::prefetch(const void* handle) noexcept {
  constexpr std::size_t kLine = 64;
  constexpr std::size_t kLines = 6;  // of a handle: its value, shape and devices
  for (std::size_t i = 0; i < kLines; ++i)
    __builtin_prefetch(static_cast<const std::byte*>(handle) + i * kLine);
}

std::byte* EagerReader::memory(void* handle, DType dtype, const std::vector<std::size_t>& shape) {
  if (tensors_.data_type_(handle) != tensorflow_type(dtype)) return nullptr;
  return has_shape(handle, shape) ? memory(handle) : nullptr;
}

std::byte* EagerReader::memory(void* handle, DType dtype, std::size_t size) {
  if (tensors_.data_type_(handle) != tensorflow_type(dtype)) return nullptr;
  const int rank = tensors_.num_dims_(handle, status_);
  if (failed()) return nullptr;
  std::size_t elements = 1;
  for (int i = 0; i < rank; ++i) {
    elements *= static_cast<std::size_t>(tensors_.dim_(handle, i, status_));
    if (failed()) return nullptr;
  }
  return elements == size ? memory(handle) : nullptr;
}

std::byte* EagerReader::memory(void* handle) {
  const char* const device = tensors_.device_type_(handle, status_);
  if (failed() || device == nullptr) return nullptr;
  may_be_on_gpu_ = std::strcmp(device, "GPU") == 0;
  if (!may_be_on_gpu_ && std::strcmp(device, "CPU") != 0) return nullptr;
  void* const memory = tensors_.pointer_(handle, status_);
  return failed() ? nullptr : static_cast<std::byte*>(memory);
}

bool EagerReader::has_shape(void* handle, const std::vector<std::size_t>& shape) {
  const int rank = tensors_.num_dims_(handle, status_);
  if (failed() || static_cast<std::size_t>(rank) != shape.size()) return false;
  for (int i = 0; i < rank; ++i) {
    const std::int64_t size = tensors_.dim_(handle, i, status_);
    if (failed() || static_cast<std::size_t>(size) != shape[static_cast<std::size_t>(i)])
      return false;
  }
  return true;
}

}  // namespace flatweights::bind
