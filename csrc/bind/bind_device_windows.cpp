// Windows in a GPU's memory for Python. A failure of the driver is a RuntimeError, short memory of
// the GPU a MemoryError.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "checks.hpp"
#include "device_windows.hpp"
#include "flatweights/average_windows.hpp"
#include "flatweights/cuda_driver.hpp"
#include "flatweights/relative_weights.hpp"
#include "memory_files.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {

namespace {

DeviceUuid uuid_of(const py::bytes& bytes) {
  DeviceUuid uuid{};
  const std::span<const std::byte> given = as_span(bytes);
  if (given.size() != uuid.size())
    throw py::value_error("uuid: expected " + std::to_string(uuid.size()) + " bytes, got " +
                          std::to_string(given.size()));
  std::copy(given.begin(), given.end(), uuid.begin());
  return uuid;
}

BoundDeviceWindow create_window(const py::bytes& gpu, std::size_t nbytes) {
  const DeviceUuid uuid = uuid_of(gpu);
  const WithoutGil nogil;
  return {DestroyedWithoutGil(DeviceWindow::create(context_of_device(uuid), nbytes))};
}

PeerDeviceWindow open_window(int descriptor, std::size_t nbytes, const py::bytes& gpu) {
  const DeviceUuid uuid = uuid_of(gpu);
  const WithoutGil nogil;
  return {DestroyedWithoutGil(DeviceWindow::open(context_of_device(uuid), descriptor, nbytes))};
}

std::string obstacle_of(const py::bytes& gpu) {
  const DeviceUuid uuid = uuid_of(gpu);
  const WithoutGil nogil;
  try {
    return device_window_obstacle(context_of_device(uuid));
  } catch (const CudaError& error) {
    return error.what();
  }
}

// Bytes of an array, at `offset` of a window.
struct Bytes {
  std::byte* data;
  std::size_t size;

  Bytes(const DeviceWindow& window, const py::array& array, std::size_t offset)
      : data(static_cast<std::byte*>(const_cast<void*>(array.data()))),
        size(static_cast<std::size_t>(array.nbytes())) {
    if (!is_contiguous(array) || has_objects(array.dtype()))
      throw py::value_error("expected a contiguous array of numbers, got " + describe(array));
    if (offset > window.size() || size > window.size() - offset)
      throw py::value_error("window: expected at most " + std::to_string(window.size()) +
                            " bytes, got " + std::to_string(offset) + " + " + std::to_string(size));
  }
};

void copy_to(const DeviceWindow& window, const py::array& out, std::size_t offset) {
  if (!out.writeable()) throw py::value_error("out: expected a writable array");
  const Bytes bytes(window, out, offset);
  const WithoutGil nogil;
  window.copy_to_host(bytes.data, offset, bytes.size);
}

void copy_from(const BoundDeviceWindow& self, const py::array& source, std::size_t offset) {
  const Bytes bytes(*self.window, source, offset);
  const WithoutGil nogil;
  self.window->copy_from_host(bytes.data, offset, bytes.size);
}

// What both sides have.
template <class Side>
py::class_<Side> bind_side(py::module_& m, const char* name) {
  return py::class_<Side>(m, name)
      .def_property_readonly("nbytes", [](const Side& s) { return s.window->size(); })
      .def_property_readonly("uuid", [](const Side& s) { return as_bytes(s.window->uuid()); })
      .def_property_readonly(
          "address",
          [](const Side& s) { return reinterpret_cast<std::uintptr_t>(s.window->data()); })
      .def(
          "copy_to",
          [](const Side& s, const py::array& out, std::size_t offset) {
            copy_to(*s.window, out, offset);
          },
          py::arg("out").noconvert(), py::arg("offset") = 0);
}

// The weighted mean, in the memory of a GPU, of packed models of one layout that are there. Returns
// for each whether it holds NaN or infinity.
std::vector<bool> average_on_gpu(const BoundLayout& bound, const py::object& out,
                                 const py::list& models, const std::vector<double>& weights) {
  if (models.empty() || models.size() != weights.size())
    throw py::value_error("expected one weight per source, and at least one source");
  if (models.size() > most_averaged_windows())
    throw py::value_error("expected at most " + std::to_string(most_averaged_windows()) +
                          " sources, got " + std::to_string(models.size()));
  const std::size_t nbytes = bound.layout.nbytes();
  const DeviceWindow& target = window_of(out, nbytes, true);
  std::vector<const std::byte*> sources;
  for (const py::handle model : models) {
    const DeviceWindow& source = window_of(model, nbytes, false);
    if (source.uuid() != target.uuid())
      throw py::value_error("source " + std::to_string(sources.size()) + ": expected a window of " +
                            text_of(target.uuid()) + ", got one of " + text_of(source.uuid()));
    if (source.data() == target.data())
      throw py::value_error("source " + std::to_string(sources.size()) + ": overlaps out");
    sources.push_back(source.data());
  }
  RelativeWeights relative;
  const std::vector<double> ratios = relative.add(weights);
  const WithoutGil nogil;
  return average_windows(target.context(), bound.layout, target.data(), sources, ratios,
                         relative.ratios);
}

}  // namespace

const DeviceWindow& window_of(py::handle object, std::size_t nbytes, bool is_written) {
  const DeviceWindow* window = nullptr;
  if (py::isinstance<BoundDeviceWindow>(object))
    window = &*object.cast<const BoundDeviceWindow&>().window;
  else if (!is_written && py::isinstance<PeerDeviceWindow>(object))
    window = &*object.cast<const PeerDeviceWindow&>().window;
  else
    throw py::type_error(std::string("window: expected ") +
                         (is_written ? "a DeviceWindow" : "a DeviceWindow or a PeerDeviceWindow") +
                         ", got " +
                         py::str(py::type::of(object).attr("__name__")).cast<std::string>());
  if (window->size() < nbytes)
    throw py::value_error("window: expected at least " + std::to_string(nbytes) + " bytes, got " +
                          std::to_string(window->size()));
  return *window;
}

void bind_device_windows(py::module_& m) {
  m.def("device_uuids", [] {
    py::list uuids;
    for (const DeviceUuid& uuid : device_uuids()) uuids.append(as_bytes(uuid));
    return uuids;
  });
  m.def("device_window_obstacle", &obstacle_of, py::arg("uuid"));
  m.def(
      "device_name", [](const py::bytes& uuid) { return text_of(uuid_of(uuid)); }, py::arg("uuid"));

  bind_side<BoundDeviceWindow>(m, "DeviceWindow")
      .def(py::init(&create_window), py::arg("uuid"), py::arg("nbytes"))
      .def_property_readonly("descriptor",
                             [](const BoundDeviceWindow& s) { return s.window->descriptor(); })
      .def("close_descriptor", [](const BoundDeviceWindow& s) { s.window->close_descriptor(); })
      .def("copy_from", &copy_from, py::arg("source").noconvert(), py::arg("offset") = 0);

  m.def("average_on_gpu", &average_on_gpu, py::arg("layout"), py::arg("out"), py::arg("models"),
        py::arg("weights"));

  bind_side<PeerDeviceWindow>(m, "PeerDeviceWindow")
      .def(py::init(&open_window), py::arg("descriptor"), py::arg("nbytes"), py::arg("uuid"));
}

}  // namespace flatweights::bind
