// The op that ends TensorFlow's copying of a variable at each read.
//
// An update of some rows writes them in place, so TensorFlow switches a variable to
// `copy_on_read_mode` before the first one, for good: each later read copies all of it, for a
// table of embeddings 128 MB a step. Without the mode, a read aliases the value, and the next
// update copies it only if such an alias is still there. A step of training has none by then.
#pragma once

#include "bound_ids.hpp"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace flatweights {

// As AssignVariableOp does, it switches the mode off under the exclusive lock: no update is
// under way. Variables of a GPU are left as they are.
class EndCopyOnReadOp : public tensorflow::OpKernel {
 public:
  using tensorflow::OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::ResourceHandle& handle = tensorflow::HandleFromInput(context, 0);
    if (!is_on_host(handle.device())) return;
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(context, handle, &variable));
    const tensorflow::mutex_lock lock(*variable->mu());
    variable->copy_on_read_mode.store(false);
  }
};

// Stateful with a resource: TensorFlow runs it after what writes the variable before it in a
// function, and before what reads it later.
REGISTER_OP("FlatweightsEndCopyOnRead")
    .Input("resource: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"(Makes reads of a variable alias its value again, after an update of some rows.)");

REGISTER_KERNEL_BUILDER(
    Name("FlatweightsEndCopyOnRead").Device(tensorflow::DEVICE_DEFAULT).HostMemory("resource"),
    EndCopyOnReadOp);

}  // namespace flatweights
