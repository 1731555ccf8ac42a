#include "flatweights/layout.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace flatweights {
namespace {

// The sum of two such numbers still fits a pointer difference.
constexpr std::size_t kMost = PTRDIFF_MAX / 2;

[[noreturn]] void throw_too_large(std::size_t index, const Slot& slot) {
  throw std::overflow_error("slot " + std::to_string(index) + " '" + slot.name +
                            "': more bytes than can be addressed");
}

std::size_t checked_product(std::size_t a, std::size_t b, std::size_t index, const Slot& slot) {
  if (b != 0 && a > kMost / b) throw_too_large(index, slot);
  return a * b;
}

}  // namespace

Layout::Layout(std::vector<Slot> slots) : slots_(std::move(slots)) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    // Strides are computed from every dimension, even if one of them is 0.
    std::size_t extent = slot.itemsize;
    bool empty = false;
    for (const std::size_t dimension : slot.shape) {
      extent = checked_product(extent, std::max<std::size_t>(dimension, 1), i, slot);
      empty = empty || dimension == 0;
    }
    slot.nbytes = empty ? 0 : extent;
    slot.size = slot.nbytes / slot.itemsize;
    slot.start = size_;
    slot.offset = nbytes_;
    const std::size_t padded = (slot.nbytes + kAlignment - 1) / kAlignment * kAlignment;
    if (padded > kMost - nbytes_) throw_too_large(i, slot);
    size_ += slot.size;
    nbytes_ += padded;
  }
}

void Layout::zero_padding(std::byte* packed) const noexcept {
  for (const Slot& slot : slots_) {
    const std::size_t end = slot.offset + slot.nbytes;
    std::memset(packed + end, 0, (kAlignment - end % kAlignment) % kAlignment);
  }
}

}  // namespace flatweights
