// Reads the memory of TensorFlow's eager tensors through TensorFlow's C API.
//
// The buffer protocol would first make a NumPy array of each tensor, which usually takes longer
// than moving its bytes. The functions are looked up in the libraries that TensorFlow has loaded;
// if one is missing, nothing is read. Handles are opaque, so no TensorFlow header is needed.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "flatweights/dtype.hpp"

namespace flatweights::bind {

class EagerTensors {
 public:
  // Looks up the functions in a loaded library and its dependencies; returns whether all exist.
  static bool find(const std::string& library);
  // Null until they are found.
  static const EagerTensors* found() noexcept;

  // The handle of `object`, valid as long as `object` lives; null if it is not an eager tensor.
  // Needs the GIL.
  [[nodiscard]] void* handle_of(PyObject* object) const noexcept {
    return is_tensor_(object) ? handle_(object) : nullptr;
  }

 private:
  friend class EagerReader;

  template <class Function>
  static bool look_up(void* library, const char* name, Function*& function);

  bool (*is_tensor_)(const PyObject*) = nullptr;
  void* (*handle_)(const PyObject*) = nullptr;
  void* (*new_status_)() = nullptr;
  void (*delete_status_)(void*) = nullptr;
  int (*code_)(const void*) = nullptr;
  int (*data_type_)(void*) = nullptr;
  int (*num_dims_)(void*, void*) = nullptr;
  std::int64_t (*dim_)(void*, int, void*) = nullptr;
  const char* (*device_type_)(void*, void*) = nullptr;
  void* (*pointer_)(void*, void*) = nullptr;
};

// Reads tensors, one after the other, without the GIL: computing a tensor may need it.
class EagerReader {
 public:
  explicit EagerReader(const EagerTensors& tensors)
      : tensors_(tensors), status_(tensors.new_status_()) {}
  EagerReader(const EagerReader&) = delete;
  EagerReader& operator=(const EagerReader&) = delete;
  ~EagerReader() { tensors_.delete_status_(status_); }

  // Begins to fetch what `memory` will read.
  static void prefetch(const void* handle) noexcept;

  // The memory of a tensor, in that of the host or of a GPU, once TensorFlow has computed it, or
  // has told the GPU to; null if it is not of `dtype` and `shape`, or on another device, or could
  // not be computed.
  [[nodiscard]] std::byte* memory(void* handle, DType dtype, const std::vector<std::size_t>& shape);
  // The same for any shape of `size` elements.
  [[nodiscard]] std::byte* memory(void* handle, DType dtype, std::size_t size);

  // Whether the tensor whose memory was returned last may be a GPU's.
  [[nodiscard]] bool may_be_on_gpu() const noexcept { return may_be_on_gpu_; }

 private:
  [[nodiscard]] bool has_shape(void* handle, const std::vector<std::size_t>& shape);
  [[nodiscard]] std::byte* memory(void* handle);
  [[nodiscard]] bool failed() const { return tensors_.code_(status_) != 0; }

  const EagerTensors& tensors_;
  void* status_;
  bool may_be_on_gpu_ = false;
};

}  // namespace flatweights::bind
