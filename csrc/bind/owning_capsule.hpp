// Capsules that own a C++ object, for instance what keeps the memory of an array.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace flatweights::bind {

// A capsule that deletes `object` when it dies; if it cannot be made, `object` is deleted at once.
template <class T>
pybind11::capsule owning_capsule(std::unique_ptr<T> object, const char* name = nullptr) {
  pybind11::capsule capsule(object.get(), name, [](void* owned) { delete static_cast<T*>(owned); });
  object.release();
  return capsule;
}

}  // namespace flatweights::bind
