#include "flatweights/memory_file.hpp"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

#include "flatweights/control_groups.hpp"

namespace flatweights {

void check_free_memory(std::size_t nbytes) {
  const std::uint64_t free = free_memory();
  if (nbytes > free)
    throw std::system_error(ENOMEM, std::generic_category(),
                            "memory file: " + std::to_string(nbytes) + " bytes do not fit, " +
                                std::to_string(free) + " are free");
}

namespace {

struct Header {
  std::uint64_t magic;
  std::uint64_t size;  // of the data behind the header's page
  MemoryFile::Nonce nonce;
};

constexpr std::uint64_t kMagic = 0x316e6168632d7766;  // "fw-chan1"
constexpr std::size_t kHeader = 4096;                 // data begins at a page
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Smaller files are moved as fast through memory that is pinned anyway.
constexpr std::size_t kLeastPinned = std::size_t{128} << 10;

// Many kernels end an allocation when a signal comes, and free what it had until then. A piece
// takes less than a millisecond, so that a program with a timer gets on.
constexpr std::size_t kPiece = std::size_t{1} << 20;

constexpr int kPopulateForWrites = 23;  // MADV_POPULATE_WRITE, of Linux 5.14

constexpr unsigned kNotExecutable = 8;  // MFD_NOEXEC_SEAL, of Linux 6.3

// By number: the C library has a function for it only since glibc 2.27.
int new_descriptor(unsigned flags) {
  return static_cast<int>(
      syscall(SYS_memfd_create, "flatweights", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
}

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

std::shared_ptr<MemoryFile> MemoryFile::create(std::size_t nbytes, Pages pages) {
  const std::shared_ptr<MemoryFile> file(new MemoryFile);
  if (nbytes > (std::size_t{1} << 62)) {
    errno = ENOMEM;
    fail("memory file");
  }
  // Hardened kernels refuse files that could be executed; kernels before 6.3 reject the flag.
  file->descriptor_ = new_descriptor(kNotExecutable);
  if (file->descriptor_ < 0 && errno == EINVAL) file->descriptor_ = new_descriptor(0);
  if (file->descriptor_ < 0) fail("memfd_create");
  if (ftruncate(file->descriptor_, static_cast<off_t>(kHeader + nbytes)) != 0) fail("ftruncate");
  file->map(file->descriptor_, nbytes, Access::kWrite, pages);
  auto* const header = reinterpret_cast<Header*>(file->mapping_);
  header->magic = kMagic;
  header->size = nbytes;
  const auto got = syscall(SYS_getrandom, header->nonce.data(), header->nonce.size(), 0);
  if (got != static_cast<long>(header->nonce.size())) fail("getrandom");
  file->nonce_ = header->nonce;
  if (fcntl(file->descriptor_, F_ADD_SEALS, kSeals) != 0) fail("seals of a memory file");
  return file;
}

std::shared_ptr<MemoryFile> MemoryFile::open(int descriptor, const Nonce& nonce, Access access,
                                             Pages pages) {
  const int seals = fcntl(descriptor, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals)
    throw std::invalid_argument("expected a memory file of fixed size, got another file");
  struct stat status{};
  if (fstat(descriptor, &status) != 0) fail("fstat");
  const auto length = static_cast<std::size_t>(status.st_size);
  if (length < kHeader) throw std::invalid_argument("expected a memory file with a header");
  const std::shared_ptr<MemoryFile> file(new MemoryFile);
  file->map(descriptor, length - kHeader, access, pages);
  const auto* const header = reinterpret_cast<const Header*>(file->mapping_);
  if (header->magic != kMagic)
    throw std::invalid_argument("expected a memory file of this version of flatweights");
  if (header->size != file->size_)
    throw std::invalid_argument("memory file: expected " + std::to_string(header->size) +
                                " bytes, got " + std::to_string(file->size_));
  if (header->nonce != nonce)
    throw std::invalid_argument("memory file: its nonce is not the one that was sent");
  file->nonce_ = nonce;
  return file;
}

void MemoryFile::map(int descriptor, std::size_t nbytes, Access access, Pages pages) {
  const int protection = access == Access::kWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  const int flags = MAP_SHARED | (pages == Pages::kAtOnce ? MAP_POPULATE : 0);
  void* const memory = mmap(nullptr, kHeader + nbytes, protection, flags, descriptor, 0);
  if (memory == MAP_FAILED) fail("mapping a memory file");
  mapping_ = static_cast<std::byte*>(memory);
  data_ = mapping_ + kHeader;
  size_ = nbytes;
  if (pages == Pages::kAtOnce && nbytes >= kLeastPinned)
    pinnable_.emplace(mapping_, kHeader + nbytes, access == Access::kWrite);
}

void MemoryFile::reserve(std::size_t begin, std::size_t size) {
  const std::size_t end = begin + size;
  for (std::size_t at = begin; at < end;) {
    const std::size_t piece = std::min(end - at, kPiece);
    const int failed =
        posix_fallocate(descriptor_, static_cast<off_t>(kHeader + at), static_cast<off_t>(piece));
    if (failed == 0) {
      at += piece;
    } else if (failed != EINTR) {
      errno = failed;
      fail("memory for a slot");
    }
  }
  // Where the kernel is older than 5.14, the first write finds the pages one by one.
  (void)madvise(data_ + begin, size, kPopulateForWrites);
}

MemoryFile::~MemoryFile() {
  pinnable_.reset();
  if (mapping_ != nullptr) munmap(mapping_, kHeader + size_);
  close_descriptor();
}

void MemoryFile::close_descriptor() noexcept {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

}  // namespace flatweights
