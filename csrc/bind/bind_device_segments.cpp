// Segments in a GPU's memory for Python. A failure of the driver is a RuntimeError, short memory of
// the GPU a MemoryError.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "checks.hpp"
#include "device_segments.hpp"
#include "flatweights/average_segments.hpp"
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

BoundDeviceSegment create_segment(const py::bytes& gpu, std::size_t nbytes) {
  const DeviceUuid uuid = uuid_of(gpu);
  const WithoutGil nogil;
  return {DestroyedWithoutGil(DeviceSegment::create(context_of_device(uuid), nbytes))};
}

PeerDeviceSegment open_segment(int descriptor, std::size_t nbytes, const py::bytes& gpu) {
  const DeviceUuid uuid = uuid_of(gpu);
  const WithoutGil nogil;
  return {DestroyedWithoutGil(DeviceSegment::open(context_of_device(uuid), descriptor, nbytes))};
}

std::string obstacle_of(const py::bytes& gpu) {
  const DeviceUuid uuid = uuid_of(gpu);
  const WithoutGil nogil;
  try {
    return device_segment_obstacle(context_of_device(uuid));
  } catch (const CudaError& error) {
    return error.what();
  }
}

// Bytes of an array, at `offset` of a segment.
struct Bytes {
  std::byte* data;
  std::size_t size;

  Bytes(const DeviceSegment& segment, const py::array& array, std::size_t offset)
      : data(static_cast<std::byte*>(const_cast<void*>(array.data()))),
        size(static_cast<std::size_t>(array.nbytes())) {
    if (!is_contiguous(array) || has_objects(array.dtype()))
      throw py::value_error("expected a contiguous array of numbers, got " + describe(array));
    if (offset > segment.size() || size > segment.size() - offset)
      throw py::value_error("segment: expected at most " + std::to_string(segment.size()) +
                            " bytes, got " + std::to_string(offset) + " + " + std::to_string(size));
  }
};

void copy_to(const DeviceSegment& segment, const py::array& out, std::size_t offset) {
  if (!out.writeable()) throw py::value_error("out: expected a writable array");
  const Bytes bytes(segment, out, offset);
  const WithoutGil nogil;
  segment.copy_to_host(bytes.data, offset, bytes.size);
}

void copy_from(const BoundDeviceSegment& self, const py::array& source, std::size_t offset) {
  const Bytes bytes(*self.segment, source, offset);
  const WithoutGil nogil;
  self.segment->copy_from_host(bytes.data, offset, bytes.size);
}

// What both sides have.
template <class Side>
py::class_<Side> bind_side(py::module_& m, const char* name) {
  return py::class_<Side>(m, name)
      .def_property_readonly("nbytes", [](const Side& s) { return s.segment->size(); })
      .def_property_readonly("uuid", [](const Side& s) { return as_bytes(s.segment->uuid()); })
      .def_property_readonly(
          "address",
          [](const Side& s) { return reinterpret_cast<std::uintptr_t>(s.segment->data()); })
      .def(
          "copy_to",
          [](const Side& s, const py::array& out, std::size_t offset) {
            copy_to(*s.segment, out, offset);
          },
          py::arg("out").noconvert(), py::arg("offset") = 0);
}

// The weighted mean, in the memory of a GPU, of packed models of one layout that are there. Returns
// for each whether it holds NaN or infinity.
std::vector<bool> average_on_gpu(const BoundLayout& bound, const py::object& out,
                                 const py::list& models, const std::vector<double>& weights) {
  if (models.empty() || models.size() != weights.size())
    throw py::value_error("expected one weight per source, and at least one source");
  if (models.size() > most_averaged_segments())
    throw py::value_error("expected at most " + std::to_string(most_averaged_segments()) +
                          " sources, got " + std::to_string(models.size()));
  const std::size_t nbytes = bound.layout.nbytes();
  const DeviceSegment& target = segment_of(out, nbytes, true);
  std::vector<const std::byte*> sources;
  for (const py::handle model : models) {
    const DeviceSegment& source = segment_of(model, nbytes, false);
    if (source.uuid() != target.uuid())
      throw py::value_error("source " + std::to_string(sources.size()) +
                            ": expected a segment of " + text_of(target.uuid()) + ", got one of " +
                            text_of(source.uuid()));
    if (source.data() == target.data())
      throw py::value_error("source " + std::to_string(sources.size()) + ": overlaps out");
    sources.push_back(source.data());
  }
  RelativeWeights relative;
  const std::vector<double> ratios = relative.add(weights);
  const WithoutGil nogil;
  return average_segments(target.context(), bound.layout, target.data(), sources, ratios,
                          relative.ratios);
}

}  // namespace

const DeviceSegment& segment_of(py::handle object, std::size_t nbytes, bool is_written) {
  const DeviceSegment* segment = nullptr;
  if (py::isinstance<BoundDeviceSegment>(object))
    segment = &*object.cast<const BoundDeviceSegment&>().segment;
  else if (!is_written && py::isinstance<PeerDeviceSegment>(object))
    segment = &*object.cast<const PeerDeviceSegment&>().segment;
  else
    throw py::type_error(
        std::string("segment: expected ") +
        (is_written ? "a DeviceSegment" : "a DeviceSegment or a PeerDeviceSegment") + ", got " +
        py::str(py::type::of(object).attr("__name__")).cast<std::string>());
  if (segment->size() < nbytes)
    throw py::value_error("segment: expected at least " + std::to_string(nbytes) + " bytes, got " +
                          std::to_string(segment->size()));
  return *segment;
}

void bind_device_segments(py::module_& m) {
  m.def("device_uuids", [] {
    py::list uuids;
    for (const DeviceUuid& uuid : device_uuids()) uuids.append(as_bytes(uuid));
    return uuids;
  });
  m.def("device_segment_obstacle", &obstacle_of, py::arg("uuid"));
  m.def(
      "device_name", [](const py::bytes& uuid) { return text_of(uuid_of(uuid)); }, py::arg("uuid"));

  bind_side<BoundDeviceSegment>(m, "DeviceSegment")
      .def(py::init(&create_segment), py::arg("uuid"), py::arg("nbytes"))
      .def_property_readonly("descriptor",
                             [](const BoundDeviceSegment& s) { return s.segment->descriptor(); })
      .def("close_descriptor", [](const BoundDeviceSegment& s) { s.segment->close_descriptor(); })
      .def("copy_from", &copy_from, py::arg("source").noconvert(), py::arg("offset") = 0);

  m.def("average_on_gpu", &average_on_gpu, py::arg("layout"), py::arg("out"), py::arg("models"),
        py::arg("weights"));

  bind_side<PeerDeviceSegment>(m, "PeerDeviceSegment")
      .def(py::init(&open_segment), py::arg("descriptor"), py::arg("nbytes"), py::arg("uuid"));
}

}  // namespace flatweights::bind
