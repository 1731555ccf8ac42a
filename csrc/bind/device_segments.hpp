// Segments in a GPU's memory, as the bindings pass them: the owner's, and a peer's.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

#include "flatweights/device_segments.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {

// Holds what takes a while to destroy, which it does without the GIL.
template <class T>
class DestroyedWithoutGil {
 public:
  explicit DestroyedWithoutGil(std::shared_ptr<T> object) : object_(std::move(object)) {}
  DestroyedWithoutGil(DestroyedWithoutGil&&) = default;
  DestroyedWithoutGil& operator=(DestroyedWithoutGil&&) = delete;
  ~DestroyedWithoutGil() {
    if (object_ == nullptr) return;
    const WithoutGil nogil;
    object_.reset();
  }

  T& operator*() const noexcept { return *object_; }
  T* operator->() const noexcept { return object_.get(); }
  [[nodiscard]] const std::shared_ptr<T>& pointer() const noexcept { return object_; }

 private:
  std::shared_ptr<T> object_;
};

struct BoundDeviceSegment {
  DestroyedWithoutGil<DeviceSegment> segment;
};

struct PeerDeviceSegment {
  DestroyedWithoutGil<const DeviceSegment> segment;
};

// The segment of either object, which has `nbytes` at least; it is written only if it is the
// owner's. Raises TypeError or ValueError.
[[nodiscard]] const DeviceSegment& segment_of(pybind11::handle object, std::size_t nbytes,
                                              bool is_written);

}  // namespace flatweights::bind
