// Tensors over read-only memory with another owner.
//
// TensorFlow computes in place where Tensor::RefCountIsOne holds: the counts of the tensor's
// buffer and of that buffer's root are one, and the buffer owns its memory. The buffer of a value
// that aliases foreign memory says that it does not own it. But Tensor::Slice (v[:n], unstack,
// split, datasets) makes a buffer that refers only to the root and says that it owns its memory,
// whatever the root says. So the root is a separate object that also counts itself: a slice is
// never its only reference, so slices, too, are copied before they are written to.
//
//   value's tensors -> AliasBuffer -> AliasRoot <- slices
//
// A root whose count is one has no slices, of which there could be slices in turn. Without its
// AliasBuffer it gets none any more, so the end of the AliasBuffer or a later sweep deletes such a
// root. The end of a slice does not, so roots whose slices outlive the AliasBuffer linger until a
// sweep.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/framework/tensor.h"
#include "variables_api.hpp"

namespace flatweights {

// Shared by all buffers over one piece of memory; releases the memory with the last of them.
class AliasOwner {
 public:
  explicit AliasOwner(const VariableAlias& alias) : alias_(alias) {}
  AliasOwner(const AliasOwner&) = delete;
  AliasOwner& operator=(const AliasOwner&) = delete;
  ~AliasOwner() { alias_.release(alias_.owner); }

  [[nodiscard]] const VariableAlias& alias() const noexcept { return alias_; }

 private:
  const VariableAlias alias_;
};

class AliasRoot : public tensorflow::TensorBuffer {
 public:
  AliasRoot(const void* data, std::size_t size, std::shared_ptr<AliasOwner> owner)
      : TensorBuffer(const_cast<void*>(data)), size_(size), owner_(std::move(owner)) {}

  size_t size() const override { return size_; }
  TensorBuffer* root_buffer() override { return this; }
  bool OwnsMemory() const override { return false; }
  void FillAllocationDescription(tensorflow::AllocationDescription* proto) const override {
    proto->set_requested_bytes(static_cast<std::int64_t>(size_));
    proto->set_allocator_name("flatweights");
  }

 private:
  friend class LingeringRoots;

  std::size_t size_;
  std::shared_ptr<AliasOwner> owner_;
  AliasRoot* next_ = nullptr;  // the next lingering root
};

// Roots to which only slices refer, no AliasBuffer: a list without a lock, since buffers die on any
// thread, under any lock, and in forked children.
class LingeringRoots {
 public:
  static LingeringRoots& instance() {
    static LingeringRoots roots;
    return roots;
  }

  // Takes a root over from its AliasBuffer.
  void take(AliasRoot* root) noexcept {
    if (root->RefCountIsOne()) {
      root->Unref();
      return;
    }
    const auto linger = root->owner_->alias().linger;  // another thread may sweep at once
    count_.fetch_add(1);
    push(root);
    linger();
  }

  // Deletes the roots that no slice refers to any more; returns whether others remain.
  bool sweep() noexcept {
    AliasRoot* root = first_.exchange(nullptr);
    while (root != nullptr) {
      AliasRoot* const next = root->next_;
      if (root->RefCountIsOne()) {
        root->Unref();
        count_.fetch_sub(1);
      } else {
        push(root);
      }
      root = next;
    }
    return count_.load() != 0;
  }

 private:
  void push(AliasRoot* root) noexcept {
    root->next_ = first_.load();
    while (!first_.compare_exchange_weak(root->next_, root)) {
    }
  }

  std::atomic<AliasRoot*> first_{nullptr};
  std::atomic<std::size_t> count_{0};
};

// The buffer of a value that aliases.
class AliasBuffer : public tensorflow::TensorBuffer {
 public:
  explicit AliasBuffer(AliasRoot* root) : TensorBuffer(root->data()), root_(root) {}

  size_t size() const override { return root_->size(); }
  TensorBuffer* root_buffer() override { return root_; }
  bool OwnsMemory() const override { return false; }
  void FillAllocationDescription(tensorflow::AllocationDescription* proto) const override {
    root_->FillAllocationDescription(proto);
  }

 private:
  ~AliasBuffer() override { LingeringRoots::instance().take(root_); }

  AliasRoot* root_;
};

// A value of `dtype` and `shape` at `data`.
inline tensorflow::Tensor alias(const void* data, tensorflow::DataType dtype,
                                const tensorflow::TensorShape& shape, std::size_t size,
                                std::shared_ptr<AliasOwner> owner) {
  auto* const buffer = new AliasBuffer(new AliasRoot(data, size, std::move(owner)));
  tensorflow::Tensor value(dtype, shape, buffer);
  buffer->Unref();  // the tensor has taken its own reference
  return value;
}

}  // namespace flatweights
