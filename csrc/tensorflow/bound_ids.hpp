// The op that hands a variable out of TensorFlow: resource handle in, id out.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <utility>

#include "gpu_memory.hpp"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace flatweights {

inline bool is_on_host(const std::string& device) {
  tensorflow::DeviceNameUtils::ParsedName name;
  return tensorflow::DeviceNameUtils::ParseFullName(device, &name) && name.type == "CPU";
}

struct PlacedVariable {
  tensorflow::core::WeakPtr<tensorflow::Var> variable;
  GpuPlace place;
};

// Variables between the op that finds them and the call that binds them. An id is looked up
// here, never turned into an address: it may come from the process of a remote session.
class BoundIds {
 public:
  static BoundIds& instance() {
    static auto* const ids = new BoundIds;  // kernels may run while the process exits
    return *ids;
  }

  [[nodiscard]] std::int64_t nonce() const noexcept { return nonce_; }

  // Keeps `variable`, without keeping it alive.
  std::int64_t put(tensorflow::Var* variable, const GpuPlace& place) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (variables_.size() >= kMost) variables_.erase(variables_.begin());
    variables_.emplace_hint(
        variables_.end(), ++last_,
        PlacedVariable{tensorflow::core::WeakPtr<tensorflow::Var>(variable), place});
    return last_;
  }

  // Takes out the variable that was put under `id`; a null one if there is none.
  PlacedVariable take(std::int64_t id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = variables_.find(id);
    if (found == variables_.end()) return {};
    auto variable = std::move(found->second);
    variables_.erase(found);
    return variable;
  }

 private:
  // Bounded: ids that are never looked up (an exported graph that runs elsewhere) do not pile up.
  static constexpr std::size_t kMost = std::size_t{1} << 20;

  BoundIds() {
    std::random_device random;
    const std::uint64_t high = random();
    nonce_ = static_cast<std::int64_t>(high << 32 ^ random());
    // A child must not inherit a lock that another thread of its parent holds.
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().mutex_.unlock(); });
  }

  std::mutex mutex_;
  std::map<std::int64_t, PlacedVariable> variables_;
  std::int64_t last_ = 0;
  std::int64_t nonce_;
};

enum class BindStatus : std::int64_t { kBound, kUninitialized, kOutOfReach, kBoundOnGpu };

class BindVariableOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    tensorflow::Tensor* binding = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, tensorflow::TensorShape({3}), &binding));
    auto values = binding->vec<std::int64_t>();
    values(0) = 0;
    values(1) = BoundIds::instance().nonce();
    const tensorflow::ResourceHandle& handle = tensorflow::HandleFromInput(context, 0);
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    const bool is_hosts = is_on_host(handle.device());
    const GpuPlace place = is_hosts ? GpuPlace() : GpuPlace::of(*context, handle.device());
    if (!is_hosts && place.stream == nullptr) {
      values(2) = static_cast<std::int64_t>(BindStatus::kOutOfReach);
    } else if (!tensorflow::LookupResource(context, handle, &variable).ok()) {
      values(2) = static_cast<std::int64_t>(BindStatus::kUninitialized);
    } else {
      values(0) = BoundIds::instance().put(variable.get(), place);
      values(2) =
          static_cast<std::int64_t>(is_hosts ? BindStatus::kBound : BindStatus::kBoundOnGpu);
    }
  }
};

// Stateful: neither folded into a constant nor merged with another.
REGISTER_OP("FlatweightsBindVariable")
    .Input("resource: resource")
    .Output("binding: int64")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      context->set_output(0, context->Vector(3));
      return absl::OkStatus();
    })
    .Doc(R"(Makes a variable known to flatweights: its id, the process, and a status.)");

// For any device, so that the op moves no variable to another one: it only uses host memory.
REGISTER_KERNEL_BUILDER(Name("FlatweightsBindVariable")
                            .Device(tensorflow::DEVICE_DEFAULT)
                            .HostMemory("resource")
                            .HostMemory("binding"),
                        BindVariableOp);

}  // namespace flatweights
