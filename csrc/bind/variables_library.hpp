// The op library, as the bindings use it.
#pragma once

#include <string>
#include <vector>

#include "tensorflow/variables_api.hpp"

namespace flatweights::bind {

// The op library that TensorFlow has loaded from a path.
class VariablesLibrary {
 public:
  // Raises ImportError if no library of this version is loaded from that path.
  explicit VariablesLibrary(const std::string& path);

  [[nodiscard]] const VariablesApi& api() const noexcept { return *api_; }

 private:
  const VariablesApi* api_;
};

// Some variables, locked from here to the end of the scope. Needs no GIL.
class VariablesLock {
 public:
  // Locks all variables, or those `chosen`; see VariablesApi::lock.
  VariablesLock(const VariablesApi& api, Variables* variables, VariableAccess access,
                const std::vector<std::size_t>* chosen, const VariableAlias* alias,
                VariableMemory* memory, VariableFailure& failure)
      : api_(api),
        locked_(api.lock(variables, access, positions_of(chosen),
                         chosen == nullptr ? 0 : chosen->size(), alias, memory, &failure)) {}
  VariablesLock(const VariablesLock&) = delete;
  VariablesLock& operator=(const VariablesLock&) = delete;
  ~VariablesLock() {
    if (locked_ != nullptr) api_.unlock(locked_, commit_);
  }

  explicit operator bool() const noexcept { return locked_ != nullptr; }

  // The variables get the written values when the scope ends.
  void commit() noexcept { commit_ = true; }

 private:
  // Null only for all variables: an empty vector may have no memory.
  static const std::size_t* positions_of(const std::vector<std::size_t>* chosen) noexcept {
    static constexpr std::size_t kNone = 0;
    if (chosen == nullptr) return nullptr;
    return chosen->empty() ? &kNone : chosen->data();
  }

  const VariablesApi& api_;
  LockedVariables* locked_;
  bool commit_ = false;
};

}  // namespace flatweights::bind
