// A tensor's buffer in memory that somebody else owns and nobody writes to.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/framework/tensor.h"

namespace flatweights {

// What all buffers over one piece of memory share; releases it with the last of them.
class AliasOwner {
 public:
  AliasOwner(void* owner, void (*release)(void*)) : owner_(owner), release_(release) {}
  AliasOwner(const AliasOwner&) = delete;
  AliasOwner& operator=(const AliasOwner&) = delete;
  ~AliasOwner() { release_(owner_); }

 private:
  void* owner_;
  void (*release_)(void*);
};

class AliasBuffer : public tensorflow::TensorBuffer {
 public:
  AliasBuffer(const void* data, std::size_t size, std::shared_ptr<AliasOwner> owner)
      : TensorBuffer(const_cast<void*>(data)), size_(size), owner_(std::move(owner)) {}

  size_t size() const override { return size_; }
  TensorBuffer* root_buffer() override { return this; }
  // TensorFlow copies such a value before it writes to it.
  bool OwnsMemory() const override { return false; }
  void FillAllocationDescription(tensorflow::AllocationDescription* proto) const override {
    proto->set_requested_bytes(static_cast<std::int64_t>(size_));
    proto->set_allocator_name("flatweights");
  }

 private:
  std::size_t size_;
  std::shared_ptr<AliasOwner> owner_;
};

}  // namespace flatweights
