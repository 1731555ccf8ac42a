// Memory files for Python: nonces are bytes, errors of the system OSError with their number.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

#include "flatweights/memory_file.hpp"

namespace flatweights::bind {

[[nodiscard]] pybind11::bytes as_bytes(const MemoryFile::Nonce& nonce);
[[nodiscard]] pybind11::bytes as_bytes(std::span<const std::byte> bytes);
[[nodiscard]] std::span<const std::byte> as_span(const pybind11::bytes& bytes);

// Raises a std::system_error as Python's OSError, with its number.
[[noreturn]] void raise_os_error(const std::system_error& error);

// Calls `make`; raises a std::system_error as Python's OSError.
template <class F>
auto with_os_errors(F&& make) {
  try {
    return make();
  } catch (const std::system_error& error) {
    raise_os_error(error);
  }
}

[[nodiscard]] std::shared_ptr<MemoryFile> create_file(
    std::size_t nbytes, MemoryFile::Pages pages = MemoryFile::Pages::kAtOnce);

[[nodiscard]] std::shared_ptr<MemoryFile> open_file(
    int descriptor, const pybind11::bytes& nonce, MemoryFile::Access access,
    MemoryFile::Pages pages = MemoryFile::Pages::kAtOnce);

// A peer's file that holds one T, which both sides write.
template <class T>
std::shared_ptr<MemoryFile> open_shared(int descriptor, const pybind11::bytes& nonce,
                                        const char* name) {
  std::shared_ptr<MemoryFile> file = open_file(descriptor, nonce, MemoryFile::Access::kWrite);
  if (file->size() != sizeof(T))
    throw pybind11::value_error(std::string(name) + ": expected " + std::to_string(sizeof(T)) +
                                " bytes, got " + std::to_string(file->size()));
  return file;
}

}  // namespace flatweights::bind
