// Python functions that the op FlatweightsCallPython calls by id.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tensorflow/variables_api.hpp"

namespace flatweights::bind {

// A function for the op, as long as both this and the function exist: the garbage collector does
// not see that this refers to it. With the GIL.
class PythonCall {
 public:
  // `function` is called with two lists of one-dimensional arrays, of these dtypes: to read, and to
  // write. Their memory is TensorFlow's and becomes invalid when the function returns.
  PythonCall(const pybind11::function& function, std::vector<pybind11::dtype> dtypes);
  PythonCall(const PythonCall&) = delete;
  PythonCall& operator=(const PythonCall&) = delete;
  ~PythonCall();

  [[nodiscard]] std::int64_t id() const noexcept { return id_; }

  void operator()(const CalledTensor* tensors, std::size_t count) const;

 private:
  pybind11::weakref function_;
  std::vector<pybind11::dtype> dtypes_;
  std::int64_t id_;
};

// The `PythonCaller` of the op library.
bool call_python(std::int64_t id, const CalledTensor* tensors, std::size_t count, char* text,
                 std::size_t room) noexcept;

}  // namespace flatweights::bind
