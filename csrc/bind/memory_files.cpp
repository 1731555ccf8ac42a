#include "memory_files.hpp"

#include <algorithm>

#include "without_gil.hpp"

namespace flatweights::bind {

namespace py = pybind11;

py::bytes as_bytes(const MemoryFile::Nonce& nonce) {
  return py::bytes(reinterpret_cast<const char*>(nonce.data()), nonce.size());
}

py::bytes as_bytes(std::span<const std::byte> bytes) {
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::span<const std::byte> as_span(const py::bytes& bytes) {
  const auto view = static_cast<std::string_view>(bytes);
  return {reinterpret_cast<const std::byte*>(view.data()), view.size()};
}

void raise_os_error(const std::system_error& error) {
  const auto raised = py::reinterpret_steal<py::object>(
      PyObject_CallFunction(PyExc_OSError, "is", error.code().value(), error.what()));
  // Its type may be a class of its own, such as ConnectionResetError.
  if (raised) PyErr_SetObject(py::type::of(raised).ptr(), raised.ptr());
  throw py::error_already_set();
}

std::shared_ptr<MemoryFile> create_file(std::size_t nbytes, MemoryFile::Pages pages) {
  return with_os_errors([nbytes, pages] {
    const WithoutGil nogil;  // pages are filled with zeros
    return MemoryFile::create(nbytes, pages);
  });
}

std::shared_ptr<MemoryFile> open_file(int descriptor, const py::bytes& nonce,
                                      MemoryFile::Access access, MemoryFile::Pages pages) {
  const std::span<const std::byte> given = as_span(nonce);
  MemoryFile::Nonce expected;
  if (given.size() != expected.size())
    throw py::value_error("nonce: expected " + std::to_string(expected.size()) + " bytes, got " +
                          std::to_string(given.size()));
  std::copy(given.begin(), given.end(), expected.begin());
  return with_os_errors([&] {
    const WithoutGil nogil;
    return MemoryFile::open(descriptor, expected, access, pages);
  });
}

}  // namespace flatweights::bind
