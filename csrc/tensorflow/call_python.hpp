// The op that calls a Python function to compute tensors in the memory of its inputs, on the host
// or on a GPU.
//
// It does less than tf.py_function: it makes no Python tensors and enters no eager context. The
// function may wait for results of other graphs of the process. So a thread of our own waits: if
// one of TensorFlow's waited for long, those graphs might lack it. What needs no Python, and is
// done in a moment, is done at once.
//
// On a GPU the inputs may not be computed yet, and the outputs not be written when the function
// returns: it reads and writes them in the order of the stream on which TensorFlow computes.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "gpu_memory.hpp"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "variables_api.hpp"
#include "waiting_threads.hpp"

namespace flatweights {

// What the bindings have set; null before.
inline std::atomic<StepStarter>& step_starter() {
  static std::atomic<StepStarter> starter{nullptr};
  return starter;
}

inline std::atomic<PythonCaller>& python_caller() {
  static std::atomic<PythonCaller> caller{nullptr};
  return caller;
}

class CallPythonOp : public tensorflow::AsyncOpKernel {
 public:
  explicit CallPythonOp(tensorflow::OpKernelConstruction* context)
      : AsyncOpKernel(context), is_for_gpu_(context->device_type() == tensorflow::DEVICE_GPU) {
    OP_REQUIRES_OK(context, context->GetAttr("id", &id_));
  }

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override {
    std::vector<CalledTensor> tensors;
    void* stream = nullptr;
    if (is_for_gpu_) {
      stream = GpuPlace::of(*context).stream;
      OP_REQUIRES_ASYNC(context, stream != nullptr,
                        absl::UnimplementedError("expected the host or one of NVIDIA's GPUs"),
                        done);
    }
    for (int i = 0; i < context->num_inputs(); ++i) {
      const tensorflow::Tensor& input = context->input(i);
      tensorflow::Tensor* output = nullptr;
      OP_REQUIRES_OK_ASYNC(
          context, context->forward_input_or_allocate_output({i}, i, input.shape(), &output), done);
      tensors.push_back(
          {input.data(), output->data(), static_cast<std::size_t>(input.NumElements()), stream});
    }
    const StepStarter start = step_starter().load();
    if (start != nullptr && start(id_, tensors.data(), tensors.size()) == StepStart::kDone)
      return done();
    // `done` ends the life of the context, and perhaps of this kernel.
    WaitingThreads::instance().run([id = id_, context, tensors = std::move(tensors),
                                    done = std::move(done)] {
      char text[2048] = "flatweights is not loaded";
      const PythonCaller call = python_caller().load();
      OP_REQUIRES_ASYNC(
          context, call != nullptr && call(id, tensors.data(), tensors.size(), text, sizeof text),
          absl::UnknownError(text), done);
      done();
    });
  }

 private:
  std::int64_t id_;
  bool is_for_gpu_;
};

// Stateful: neither merged with another nor left out.
REGISTER_OP("FlatweightsCallPython")
    .Input("inputs: T")
    .Output("outputs: T")
    .Attr("T: list(type) >= 1")
    .Attr("id: int")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      for (int i = 0; i < context->num_outputs(); ++i) context->set_output(i, context->input(i));
      return absl::OkStatus();
    })
    .Doc(R"(Has the function of Python's with this id compute tensors of the same shapes.)");

REGISTER_KERNEL_BUILDER(Name("FlatweightsCallPython").Device(tensorflow::DEVICE_CPU), CallPythonOp);
REGISTER_KERNEL_BUILDER(Name("FlatweightsCallPython").Device(tensorflow::DEVICE_GPU), CallPythonOp);

}  // namespace flatweights
