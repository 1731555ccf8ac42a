// Memory that several processes of a machine map, in a file without a name.
//
// The creator makes a file of a fixed size, writes a header with a random nonce, seals the file,
// and gives a peer its descriptor and, on another channel, the nonce. The peer accepts the file
// only if the seals forbid any change of size (else a read could end in SIGBUS), the header is of
// this version, and size and nonce agree. That the peer can map it proves that both are on one
// machine. All pages are allocated at once: a first write to a fresh page takes ten times as long
// as a later one. If a file may never be filled, its pages are allocated when `reserve` asks for
// them. Nothing is left behind when the last process that maps the file is gone, however it ended.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "flatweights/pinned_memory.hpp"

namespace flatweights {

// Throws std::system_error unless `nbytes` more fit into memory. A memory file counts towards the
// control group of the process that fills it, and beyond the limit of a group the kernel kills one
// of its processes. So whoever makes a large file checks the limit first.
void check_free_memory(std::size_t nbytes);

class MemoryFile {
 public:
  using Nonce = std::array<std::byte, 16>;
  enum class Access { kRead, kWrite };
  // kLater: only memory for which `reserve` was called may be touched.
  enum class Pages { kAtOnce, kLater };

  // A new file with room for `nbytes` zeros. Throws std::system_error if the system refuses it, as
  // a sandbox may. If memory is short, that shows only when the memory is used: check it before.
  [[nodiscard]] static std::shared_ptr<MemoryFile> create(std::size_t nbytes,
                                                          Pages pages = Pages::kAtOnce);

  // Maps the file behind `descriptor`, which stays the caller's. Throws std::system_error, and
  // std::invalid_argument for a file that `create` did not make or with another nonce.
  [[nodiscard]] static std::shared_ptr<MemoryFile> open(int descriptor, const Nonce& nonce,
                                                        Access access,
                                                        Pages pages = Pages::kAtOnce);

  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  ~MemoryFile();

  // Begins at the boundary of a page.
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] const Nonce& nonce() const noexcept { return nonce_; }

  // The creator's descriptor, to be handed to peers; -1 once it was closed, and in a peer.
  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }

  // Creator, before the descriptor is closed: allocates the pages of `data()[begin, begin + size)`.
  // Throws std::system_error if memory is short; a write would end in SIGBUS.
  void reserve(std::size_t begin, std::size_t size);
  void close_descriptor() noexcept;

 private:
  MemoryFile() = default;
  void map(int descriptor, std::size_t nbytes, Access access, Pages pages);

  std::byte* mapping_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  Nonce nonce_{};
  int descriptor_ = -1;
  std::optional<PinnableMemory> pinnable_;
};

}  // namespace flatweights
