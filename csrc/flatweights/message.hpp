// A message in a mailbox: a header, the extents of its buffers in segments, and a body of bytes.
//
// channels/_message.py writes messages. Readers trust nothing in them: a broken peer may have
// written anything. But it cannot write more than a mailbox holds, nor after it has handed the
// message over.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "flatweights/mailbox.hpp"

namespace flatweights {

// The position of a buffer: a segment's index, the number of its replacements, and bytes in it.
struct Extent {
  std::uint32_t segment, generation;
  std::uint64_t offset, nbytes;
};

class Message {
 public:
  // Reads the message that the peer of `reader` has put into `box`. Call it, and use the message,
  // only while it is the turn of `reader`. Throws std::invalid_argument if it is malformed.
  Message(const Mailbox& box, Mailbox::Side reader)
      : body_(reader == Mailbox::Side::kWorker ? box.command() : box.answer()) {
    read_into(std::span(&header_, 1));
    if (header_.count > body_.size() / sizeof(Extent))
      throw std::invalid_argument("message: expected " + std::to_string(header_.count) +
                                  " extents in " + std::to_string(body_.size()) + " bytes");
    extents_.resize(header_.count);
    read_into(std::span(extents_));
    for (const Extent& extent : extents_)
      if (extent.segment >= Mailbox::kSegments)
        throw std::invalid_argument("message: expected a segment below " +
                                    std::to_string(Mailbox::kSegments) + ", got " +
                                    std::to_string(extent.segment));
  }

  [[nodiscard]] std::uint32_t kind() const noexcept { return header_.kind; }
  [[nodiscard]] std::span<const Extent> extents() const noexcept { return extents_; }
  [[nodiscard]] std::span<const std::byte> body() const noexcept { return body_; }

 private:
  struct Header {
    std::uint32_t kind, count;
  };

  template <class T>
  void read_into(std::span<T> parts) {
    if (body_.size() < parts.size_bytes())
      throw std::invalid_argument("message: expected a header, got " +
                                  std::to_string(body_.size()) + " bytes");
    std::copy_n(body_.begin(), parts.size_bytes(), std::as_writable_bytes(parts).begin());
    body_ = body_.subspan(parts.size_bytes());
  }

  std::span<const std::byte> body_;
  Header header_{};
  std::vector<Extent> extents_;
};

}  // namespace flatweights
