// The op that has a function of Python's compute tensors, in the memory of those that it is given.
//
// Less than tf.py_function: no tensor of Python's is made, and no eager context entered. The
// function may wait; the thread of TensorFlow's that runs the op waits with it, without the GIL.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "variables_api.hpp"

namespace flatweights {

// What the bindings have set; null before.
inline std::atomic<PythonCaller>& python_caller() {
  static std::atomic<PythonCaller> caller{nullptr};
  return caller;
}

class CallPythonOp : public tensorflow::OpKernel {
 public:
  explicit CallPythonOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("id", &id_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    std::vector<CalledTensor> tensors;
    for (int i = 0; i < context->num_inputs(); ++i) {
      const tensorflow::Tensor& input = context->input(i);
      tensorflow::Tensor* output = nullptr;
      OP_REQUIRES_OK(context,
                     context->forward_input_or_allocate_output({i}, i, input.shape(), &output));
      tensors.push_back(
          {input.data(), output->data(), static_cast<std::size_t>(input.NumElements())});
    }
    char text[2048] = "flatweights is not loaded";
    const PythonCaller call = python_caller().load();
    OP_REQUIRES(context,
                call != nullptr && call(id_, tensors.data(), tensors.size(), text, sizeof text),
                absl::UnknownError(text));
  }

 private:
  std::int64_t id_;
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

}  // namespace flatweights
