// The position of each part of a model: in the vector (elements, back to back) and in the packed
// form (bytes, each part at a 64-byte boundary).
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "flatweights/dtype.hpp"

namespace flatweights {

inline constexpr std::size_t kAlignment = 64;  // one cache line; TensorFlow's and Ray's alignment

struct Slot {
  std::string name;
  std::vector<std::size_t> shape;
  DType dtype = DType::kOther;
  std::size_t itemsize = 0;
  // Filled in by Layout.
  std::size_t size = 0;    // elements
  std::size_t nbytes = 0;  // bytes, without padding
  std::size_t start = 0;   // element in the vector
  std::size_t offset = 0;  // byte in the packed form
};

class Layout {
 public:
  // Places `slots` in order. Throws std::overflow_error if a part, or the whole,
  // has more bytes than can be addressed.
  explicit Layout(std::vector<Slot> slots);

  [[nodiscard]] const std::vector<Slot>& slots() const noexcept { return slots_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }

  // Zeroes the bytes of `packed[0, nbytes())` that belong to no slot.
  void zero_padding(std::byte* packed) const noexcept;

 private:
  std::vector<Slot> slots_;
  std::size_t size_ = 0;
  std::size_t nbytes_ = 0;  // a multiple of kAlignment
};

}  // namespace flatweights
