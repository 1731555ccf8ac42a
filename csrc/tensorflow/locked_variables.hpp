// Variables that are bound, and the locks that a gather or a scatter holds on them.
//
// TensorFlow lets several locks be held if they are taken in the order of the mutexes'
// addresses (resource_var.h), as its own optimizers do. Here all are, from the first check
// to the last byte: nothing is half-written, and a gather sees all of a scatter or nothing.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "alias_buffer.hpp"
#include "bound_ids.hpp"
#include "gpu_memory.hpp"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "variables_api.hpp"

namespace flatweights {

struct BoundVariable {
  tensorflow::core::WeakPtr<tensorflow::Var> variable;
  GpuPlace place;
  tensorflow::DataType dtype;
  tensorflow::TensorShape shape;
};

// The last known addresses of a variable and its value: only for prefetching, never for reading,
// since both may be gone.
class LastSeen {
 public:
  // Remembers a variable and its weak pointer, which is one to an object of TensorFlow's.
  void see(const tensorflow::Var* variable,
           const tensorflow::core::WeakPtr<tensorflow::Var>& weak) noexcept {
    variable_ = variable;
    static_assert(sizeof weak >= sizeof weak_);
    std::memcpy(&weak_, &weak, sizeof weak_);
  }

  // Remembers the value. Several threads that read a variable may see it at once.
  void see(tensorflow::Tensor& value) noexcept {
    const void* const buffer = tensorflow::DMAHelper::buffer(&value);
    if (buffer_.load(std::memory_order_relaxed) == buffer) return;
    buffer_.store(buffer, std::memory_order_relaxed);
    data_.store(value.data(), std::memory_order_relaxed);
    nbytes_.store(value.TotalBytes(), std::memory_order_relaxed);
  }

  void prefetch() const noexcept {
    fetch(weak_, kLine);
    fetch(variable_, sizeof(tensorflow::Var));
    fetch(buffer_.load(std::memory_order_relaxed), sizeof(tensorflow::TensorBuffer));
    // Behind the first lines of a large value, the processor's own prefetcher takes over.
    fetch(data_.load(std::memory_order_relaxed),
          std::min(nbytes_.load(std::memory_order_relaxed), kMostBytes));
  }

 private:
  static constexpr std::size_t kLine = 64;
  static constexpr std::size_t kMostBytes = 512;

  static void fetch(const void* memory, std::size_t nbytes) noexcept {
    const auto begin = reinterpret_cast<std::uintptr_t>(memory);
    for (std::uintptr_t line = begin / kLine * kLine; line < begin + nbytes; line += kLine)
      __builtin_prefetch(reinterpret_cast<const void*>(line));
  }

  const void* weak_ = nullptr;
  const void* variable_ = nullptr;
  std::atomic<const void*> buffer_{nullptr};
  std::atomic<const void*> data_{nullptr};
  std::atomic<std::size_t> nbytes_{0};
};

// In the order of their mutexes' addresses; `index` is the position that the caller knows.
//
// Between two calls of a training loop the caches are overwritten. Following the pointers from
// the weak pointer to the variable, its buffer and its data would then cost a miss each, so all
// are prefetched side by side.
class Variables {
 public:
  struct Entry {
    BoundVariable bound;
    std::size_t index;
  };

  void prefetch() const noexcept {
    for (std::size_t i = 0; i < entries.size(); ++i) last_seen[i].prefetch();
  }

  std::vector<Entry> entries;
  std::unique_ptr<LastSeen[]> last_seen;  // of each entry
};

// In NumPy's words: "float64 (64,)".
inline std::string describe(tensorflow::DataType dtype, const tensorflow::TensorShape& shape) {
  std::string text = tensorflow::DataTypeString(dtype);
  if (dtype == tensorflow::DT_FLOAT) text = "float32";
  if (dtype == tensorflow::DT_DOUBLE) text = "float64";
  if (dtype == tensorflow::DT_HALF) text = "float16";
  text += " (";
  for (int i = 0; i < shape.dims(); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(shape.dim_size(i));
  return text + (shape.dims() == 1 ? ",)" : ")");
}

inline void fail(VariableFailure* failure, VariableTrouble trouble, std::size_t index,
                 const std::string& text = "") {
  failure->trouble = trouble;
  failure->index = index;
  std::snprintf(failure->text, sizeof failure->text, "%s", text.c_str());
}

inline Variables* make_variables(const WantedVariable* wanted, std::size_t count,
                                 VariableFailure* failure) {
  auto variables = std::make_unique<Variables>();
  std::vector<std::pair<const void*, std::size_t>> order;  // a mutex's address, a position
  std::vector<BoundVariable> found(count);
  std::vector<const tensorflow::Var*> addresses(count);
  for (std::size_t i = 0; i < count; ++i) {
    PlacedVariable taken = BoundIds::instance().take(wanted[i].id);
    found[i].variable = std::move(taken.variable);
    found[i].place = taken.place;
    found[i].dtype = static_cast<tensorflow::DataType>(wanted[i].dtype);
    for (int d = 0; d < wanted[i].rank; ++d) found[i].shape.AddDim(wanted[i].dims[d]);
    const auto variable = found[i].variable.GetNewRef();
    if (variable == nullptr) {
      fail(failure, VariableTrouble::kGone, i);
      return nullptr;
    }
    order.emplace_back(variable->mu(), i);
    addresses[i] = variable.get();
  }
  std::sort(order.begin(), order.end());
  for (std::size_t i = 1; i < count; ++i) {
    if (order[i].first == order[i - 1].first) {
      fail(failure, VariableTrouble::kOther, order[i].second, "the same variable twice");
      return nullptr;
    }
  }
  variables->entries.reserve(count);
  variables->last_seen = std::make_unique<LastSeen[]>(count);
  for (std::size_t place = 0; place < count; ++place) {
    const std::size_t i = order[place].second;
    variables->last_seen[place].see(addresses[i], found[i].variable);
    variables->entries.push_back({std::move(found[i]), i});
  }
  return variables.release();
}

class LockedVariables {
 public:
  LockedVariables() = default;
  LockedVariables(const LockedVariables&) = delete;
  LockedVariables& operator=(const LockedVariables&) = delete;

  // Old values are dropped last, without a lock: that may run an owner's code.
  ~LockedVariables() {
    for (const Held& held : held_) {
      if (held.exclusive)
        held.variable->mu()->unlock();
      else
        held.variable->mu()->unlock_shared();
    }
  }

  void reserve(std::size_t count) { held_.reserve(count); }

  // Locks and checks one variable. Returns false after a failure. Then the variable may be locked;
  // deleting this object unlocks it.
  bool add(const Variables::Entry& entry, LastSeen& last_seen, VariableAccess access,
           const VariableAlias* alias, const std::shared_ptr<AliasOwner>& owner,
           VariableMemory* memory, VariableFailure* failure);

  void commit() noexcept {
    for (auto& [variable, value] : values_) std::swap(*variable->tensor(), value);
  }

 private:
  struct Held {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    bool exclusive;
  };
  struct Value {
    tensorflow::Var* variable;
    tensorflow::Tensor tensor;
  };

  GpuMemory gpu_memory_;
  std::vector<Held> held_;
  std::vector<Value> values_;  // what variables get when it is committed
};

// Sparse updates write in place while they hold the lock shared, so reading such
// a variable needs the lock exclusively.
inline bool lock_for(tensorflow::Var& variable, VariableAccess access) {
  if (access == VariableAccess::kRead) {
    if (!variable.copy_on_read_mode.load()) {
      variable.mu()->lock_shared();
      // The mode is switched under the exclusive lock.
      if (!variable.copy_on_read_mode.load()) return false;
      variable.mu()->unlock_shared();
    }
  }
  variable.mu()->lock();
  return true;
}

// Whether nothing else sees the memory of `value`. RefCountIsOne counts a slice as the owner of its
// memory; the root knows if the memory is someone else's, such as an array that was fed.
inline bool is_exclusive(tensorflow::Tensor& value) {
  return value.RefCountIsOne() &&
         tensorflow::DMAHelper::buffer(&value)->root_buffer()->OwnsMemory();
}

inline bool LockedVariables::add(const Variables::Entry& entry, LastSeen& last_seen,
                                 VariableAccess access, const VariableAlias* alias,
                                 const std::shared_ptr<AliasOwner>& owner, VariableMemory* memory,
                                 VariableFailure* failure) {
  const BoundVariable& bound = entry.bound;
  auto variable = bound.variable.GetNewRef();
  if (variable == nullptr) {
    fail(failure, VariableTrouble::kGone, entry.index);
    return false;
  }
  tensorflow::Var& locked = *variable;
  const bool exclusive = lock_for(locked, access);
  held_.push_back({std::move(variable), exclusive});

  tensorflow::Tensor& value = *locked.tensor();
  if (!locked.is_initialized || !value.IsInitialized()) {
    fail(failure, VariableTrouble::kUninitialized, entry.index);
    return false;
  }
  if (value.dtype() != bound.dtype || value.shape() != bound.shape) {
    fail(failure, VariableTrouble::kOther, entry.index, describe(value.dtype(), value.shape()));
    return false;
  }
  VariableMemory& where = memory[entry.index];
  where = {nullptr, nullptr, nullptr};
  if (value.NumElements() == 0) return true;
  where.stream = gpu_memory_.has(bound.place, value) ? bound.place.stream : nullptr;
  if (where.stream == nullptr) last_seen.see(value);
  if (alias != nullptr && where.stream == nullptr && alias->data[entry.index] != nullptr &&
      !locked.copy_on_read_mode.load()) {
    values_.push_back({&locked, flatweights::alias(alias->data[entry.index], bound.dtype,
                                                   bound.shape, value.TotalBytes(), owner)});
    return true;
  }
  if (access == VariableAccess::kRead || is_exclusive(value)) {
    where.data = value.data();
    return true;
  }
  tensorflow::Tensor fresh =
      where.stream == nullptr ? tensorflow::Tensor(bound.dtype, bound.shape)
                              : tensorflow::Tensor(bound.place.allocator, bound.dtype, bound.shape);
  if (!fresh.IsInitialized()) {
    fail(failure, VariableTrouble::kNoMemory, entry.index);
    return false;
  }
  where.data = fresh.data();
  if (access == VariableAccess::kUpdate) where.before = value.data();
  values_.push_back({&locked, std::move(fresh)});
  return true;
}

inline LockedVariables* lock_variables(Variables* variables, VariableAccess access,
                                       const std::size_t* chosen, std::size_t count,
                                       const VariableAlias* alias, VariableMemory* memory,
                                       VariableFailure* failure) {
  const std::vector<Variables::Entry>& entries = variables->entries;
  // First: from here on the owner is released, whatever happens.
  std::shared_ptr<AliasOwner> owner;
  if (alias != nullptr) owner = std::make_shared<AliasOwner>(*alias);
  LingeringRoots::instance().sweep();
  auto locked = std::make_unique<LockedVariables>();
  std::vector<char> wanted(chosen == nullptr ? 0 : entries.size());
  for (std::size_t i = 0; chosen != nullptr && i < count; ++i) wanted[chosen[i]] = 1;
  locked->reserve(chosen == nullptr ? entries.size() : count);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (chosen != nullptr && wanted[entries[i].index] == 0) continue;
    if (!locked->add(entries[i], variables->last_seen[i], access, alias, owner, memory, failure))
      return nullptr;
  }
  return locked.release();
}

inline void unlock_variables(LockedVariables* locked, bool commit) noexcept {
  if (commit) locked->commit();
  delete locked;
}

inline void find_aliased(Variables* variables, bool* aliased) noexcept {
  for (const Variables::Entry& entry : variables->entries) {
    aliased[entry.index] = false;
    const auto variable = entry.bound.variable.GetNewRef();
    if (variable == nullptr) continue;
    const tensorflow::tf_shared_lock lock(*variable->mu());
    tensorflow::TensorBuffer* const buffer = tensorflow::DMAHelper::buffer(variable->tensor());
    aliased[entry.index] =
        buffer != nullptr && dynamic_cast<AliasRoot*>(buffer->root_buffer()) != nullptr;
  }
}

}  // namespace flatweights
