// Python functions that compute tensors, on the host or on a GPU, and the op FlatweightsCallPython
// that calls them by id.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "checks.hpp"
#include "flatweights/device_copies.hpp"
#include "flatweights/flatten.hpp"
#include "member_turn.hpp"
#include "repeated_request.hpp"
#include "tensorflow/variables_api.hpp"

namespace flatweights::bind {

// The tensors that a Python function reads, and those that it writes: as many, of the same dtypes
// and sizes. A tensor and its result may be the same memory. With the GIL.
class CalledTensors {
 public:
  // Those of the op with this id.
  CalledTensors(std::int64_t op, const CalledTensor* tensors, std::size_t count,
                const std::vector<pybind11::dtype>& dtypes);

  // Contiguous arrays, which live longer than this.
  CalledTensors(const pybind11::list& inputs, const pybind11::list& outputs);

  // Eager tensors of the dtypes and sizes of a layout in a GPU's memory, which live longer than
  // this. None if that is not where all of them are.
  static pybind11::object on_gpu(const pybind11::list& inputs, const pybind11::list& outputs,
                                 const BoundLayout& bound);

  // The elements of each tensor: those of some differ from call to call.
  [[nodiscard]] std::vector<std::size_t> sizes() const;

  // Write the tensors to a packed buffer, and the results from one. Its layout has one slot for
  // each tensor, of its dtype and size.
  void gather_into(const BoundLayout& bound, const pybind11::array& buffer) const;
  void scatter(const BoundLayout& bound, const pybind11::array& buffer) const;

  // The UUID of the GPU whose memory all of them are in; None if there is none, or several.
  [[nodiscard]] pybind11::object gpu() const;

  // The same as for packed buffers, but in the memory of that GPU. The bytes are complete on
  // return.
  void gather_into_segment(const BoundLayout& bound, const pybind11::object& segment) const;
  void scatter_segment(const BoundLayout& bound, const pybind11::object& segment) const;

  // Makes each tensor its own result.
  void pass_on(const BoundLayout& bound) const;

  // Lets the op repeat, without Python, the call that has just averaged these tensors, if they are
  // on the host.
  void let_repeat(const BoundLayout& bound, const BoundRepeatedRequest& request, MemberTurn& turn,
                  double weight, double seconds) const;

  // Makes all calls from now on fail: the memory is TensorFlow's again.
  void expire() noexcept { is_expired_ = true; }

 private:
  struct Tensor {
    std::byte* input;
    std::byte* output;
    std::size_t size;
    void* stream;  // see `DeviceCopy`
    bool is_on_gpu;
  };

  // What moves between the tensors and a packed buffer.
  struct Moves {
    std::vector<Copy> on_host;
    std::vector<DeviceCopy> between_gpu;
  };

  CalledTensors() = default;
  [[nodiscard]] Moves moves(const BoundLayout& bound, std::byte* packed, Direction direction) const;
  void check(const BoundLayout& bound) const;
  void move_segment(const BoundLayout& bound, std::byte* segment, Direction direction) const;

  std::int64_t op_ = 0;  // 0, if no op has them
  std::vector<Tensor> tensors_;
  std::vector<pybind11::dtype> dtypes_;
  bool is_expired_ = false;
};

// A function for the op, as long as both this and the function exist: the garbage collector does
// not see that this refers to it. With the GIL.
class PythonCall {
 public:
  // `function` is called with `CalledTensors` of these dtypes, which expire when it returns.
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

// The `StepStarter` and the `PythonCaller` of the op library. A call that repeats the last one
// enters no Python.
StepStart start_step(std::int64_t id, const CalledTensor* tensors, std::size_t count) noexcept;
bool call_python(std::int64_t id, const CalledTensor* tensors, std::size_t count, char* text,
                 std::size_t room) noexcept;

}  // namespace flatweights::bind
