#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "casts.hpp"
#include "checks.hpp"
#include "eager_tensors.hpp"
#include "flatweights/device_copies.hpp"
#include "flatweights/flatten.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {
namespace {

void copy_without_gil(const std::vector<Copy>& copies) {
  check_environment();
  const WithoutGil nogil;
  copy_all(copies);
}

py::array vector_argument(py::handle object, const char* what, Access access) {
  py::array flat = as_array(object, what);
  if (flat.ndim() != 1 || !is_contiguous(flat))
    throw py::value_error(std::string(what) + ": expected a contiguous vector, got " +
                          describe(flat));
  if (access == Access::kWrite && !flat.writeable())
    throw py::value_error(std::string(what) + ": expected a writable array, got a read-only one");
  return flat;
}

// Raises unless `object` is a vector of this size and dtype that can be written to.
void check_out(const py::object& object, std::size_t size, const py::dtype& dtype) {
  const py::array out = as_array(object, "out");
  const auto expected = [&] { return describe(dtype, {size}) + ", got " + describe(out); };
  if (!same_dtype(out.dtype(), dtype)) throw py::type_error("out: expected " + expected());
  if (out.ndim() != 1 || static_cast<std::size_t>(out.size()) != size || !is_contiguous(out))
    throw py::value_error("out: expected contiguous " + expected() + " with strides " +
                          py::str(out.attr("strides")).cast<std::string>());
  if (!out.writeable())
    throw py::value_error("out: expected a writable array, got a read-only one");
}

// `total + size`, or the largest number if that overflows: broadcast arrays may
// have more elements than memory.
py::ssize_t saturating_sum(py::ssize_t total, py::ssize_t size) {
  return size > PTRDIFF_MAX - total ? PTRDIFF_MAX : total + size;
}

[[noreturn]] void throw_length(const char* what, py::ssize_t expected, const py::array& flat) {
  throw py::value_error(std::string(what) + ": expected shape (" + std::to_string(expected) +
                        ",), got " + describe(flat));
}

std::string part_text(std::size_t i) { return "part " + std::to_string(i); }

// The array at `parts[i]`; its name is built only for the error.
py::array part_at(const py::list& parts, std::size_t i) {
  return is_exact_array(parts[i]) ? py::reinterpret_borrow<py::array>(parts[i])
                                  : as_array(parts[i], part_text(i));
}

// Whether the kernels carry out `copy`, from an array of dtype `from` to one of dtype `to`. Sets
// its dtypes.
bool plan_dtypes(Copy& copy, const py::dtype& to, const py::dtype& from) {
  if (same_dtype(to, from)) return !has_objects(to);
  copy.to_dtype = classify(to);
  copy.from_dtype = classify(from);
  return can_convert(copy.to_dtype, copy.from_dtype);
}

// The memory that the elements of `array` lie in, whatever its strides.
std::pair<const std::byte*, std::size_t> extent(const py::array& array) {
  const auto* low = static_cast<const std::byte*>(array.data());
  if (array.size() == 0) return {low, 0};
  const std::byte* high = low + array.itemsize();
  for (py::ssize_t i = 0; i < array.ndim(); ++i) {
    const py::ssize_t reach = (array.shape(i) - 1) * array.strides(i);
    (reach < 0 ? low : high) += reach;
  }
  return {low, static_cast<std::size_t>(high - low)};
}

// The total number of elements if all parts are arrays of one dtype that promotes to
// itself; else -1. Called first, because looking at each part from Python takes longer
// than copying it.
py::ssize_t uniform_size(const py::list& parts) {
  if (parts.empty() || !is_exact_array(parts[0])) return -1;
  const py::dtype first = py::reinterpret_borrow<py::array>(parts[0]).dtype();
  if (classify(first) == DType::kOther) return -1;
  py::ssize_t total = 0;
  for (const py::handle part : parts) {
    if (!is_exact_array(part)) return -1;
    const auto array = py::reinterpret_borrow<py::array>(part);
    if (array.dtype().ptr() != first.ptr()) return -1;
    total = saturating_sum(total, array.size());
  }
  return total;
}

// Moves the parts to `out`, back to back, cast to its dtype.
void flatten_into(const py::object& out_object, const py::list& parts) {
  const py::array out = vector_argument(out_object, "out", Access::kWrite);
  const py::dtype dtype = out.dtype();
  const auto itemsize = static_cast<std::size_t>(dtype.itemsize());
  auto* const begin = static_cast<std::byte*>(const_cast<void*>(out.data()));
  const auto out_bytes = static_cast<std::size_t>(out.nbytes());
  py::ssize_t total = 0;
  std::vector<Copy> copies;
  copies.reserve(parts.size());
  Casts casts;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const py::array part = part_at(parts, i);
    const py::ssize_t start = total;
    total = saturating_sum(total, part.size());
    if (total > out.size()) continue;  // raises below, with the total length
    const auto size = static_cast<std::size_t>(part.size());
    Copy copy{begin + static_cast<std::size_t>(start) * itemsize,
              static_cast<const std::byte*>(part.data()), size, itemsize};
    const bool planned = plan_dtypes(copy, dtype, part.dtype()) && is_contiguous(part);
    if (planned && copy.from == copy.to && copy.from_dtype == copy.to_dtype) continue;
    const auto [low, nbytes] = extent(part);
    if (ranges_overlap(low, nbytes, begin, out_bytes))
      throw py::value_error(part_text(i) + ": overlaps out");
    if (planned)
      copies.push_back(copy);
    else
      casts.emplace_back(view(out, dtype, {part.shape(), part.shape() + part.ndim()}, copy.to),
                         part);
  }
  if (total != out.size()) throw_length("out", total, out);
  copy_without_gil(copies);
  cast_all(casts);
}

// Raises if two of `copies` write to the same memory: threads would decide which one comes last.
// `indices` are the indices of their parts.
void check_disjoint(const std::vector<Copy>& copies, const std::vector<std::size_t>& indices) {
  std::vector<std::size_t> order;
  for (std::size_t j = 0; j < copies.size(); ++j)
    if (copies[j].size > 0) order.push_back(j);
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return copies[a].to < copies[b].to; });
  for (std::size_t k = 1; k < order.size(); ++k) {
    const Copy& before = copies[order[k - 1]];
    if (before.to + before.size * before.itemsize > copies[order[k]].to)
      throw py::value_error("part " + std::to_string(indices[order[k]]) + ": overlaps part " +
                            std::to_string(indices[order[k - 1]]));
  }
}

void unflatten_into(const py::list& parts, const py::object& flat_object) {
  const py::array flat = vector_argument(flat_object, "flat", Access::kRead);
  const py::dtype dtype = flat.dtype();
  if (has_objects(dtype))
    throw py::type_error("flat: expected numbers without Python objects, got " +
                         py::str(dtype).cast<std::string>());
  const auto itemsize = static_cast<std::size_t>(dtype.itemsize());
  const auto* const begin = static_cast<const std::byte*>(flat.data());
  const auto flat_bytes = static_cast<std::size_t>(flat.nbytes());
  py::ssize_t total = 0;
  std::vector<Copy> copies;
  copies.reserve(parts.size());
  std::vector<std::size_t> indices;
  indices.reserve(parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const py::array part = part_at(parts, i);
    if (!same_dtype(part.dtype(), dtype))
      throw py::type_error(part_text(i) + ": expected " + py::str(dtype).cast<std::string>() +
                           ", got " + describe(part));
    if (!is_contiguous(part))
      throw py::value_error(part_text(i) + ": expected a C-contiguous array, got strides");
    if (!part.writeable())
      throw py::value_error(part_text(i) + ": expected a writable array, got a read-only one");
    const py::ssize_t start = total;
    total = saturating_sum(total, part.size());
    if (total > flat.size()) continue;  // raises below, with the total length
    auto* const to = static_cast<std::byte*>(const_cast<void*>(part.data()));
    const std::byte* const from = begin + static_cast<std::size_t>(start) * itemsize;
    const auto size = static_cast<std::size_t>(part.size());
    if (to == from) continue;
    if (ranges_overlap(to, size * itemsize, begin, flat_bytes))
      throw py::value_error(part_text(i) + ": overlaps flat");
    copies.push_back(Copy{to, from, size, itemsize});
    indices.push_back(i);
  }
  if (total != flat.size()) throw_length("flat", total, flat);
  check_disjoint(copies, indices);
  copy_without_gil(copies);
}

// Moves `sources[i]`, of the shape of `targets[i]`, to `targets[i]`, cast to its dtype. Targets are
// disjoint from the sources of other pairs.
void move_parts(const py::list& targets, const py::list& sources) {
  if (targets.size() != sources.size())
    throw py::value_error("expected " + std::to_string(targets.size()) + " sources, got " +
                          std::to_string(sources.size()));
  std::vector<Copy> copies;
  copies.reserve(targets.size());
  Casts casts;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const py::array target = part_at(targets, i);
    const py::array source = part_at(sources, i);
    if (!target.writeable()) throw py::value_error(part_text(i) + ": expected a writable array");
    Copy copy{static_cast<std::byte*>(const_cast<void*>(target.data())),
              static_cast<const std::byte*>(source.data()), static_cast<std::size_t>(target.size()),
              static_cast<std::size_t>(target.itemsize())};
    const bool planned = target.size() == source.size() && is_contiguous(target) &&
                         is_contiguous(source) &&
                         plan_dtypes(copy, target.dtype(), source.dtype()) &&
                         !ranges_overlap(copy.to, static_cast<std::size_t>(target.nbytes()),
                                         copy.from, static_cast<std::size_t>(source.nbytes()));
    if (planned)
      copies.push_back(copy);
    else
      casts.emplace_back(target, source);
  }
  copy_without_gil(copies);
  cast_all(casts);
}

// Buffers that other objects export, until the end of a scope.
class Exports {
 public:
  explicit Exports(std::size_t most) { views_.reserve(most); }
  Exports(const Exports&) = delete;
  Exports& operator=(const Exports&) = delete;
  ~Exports() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }

  // The C-contiguous memory of `object`; null if it exports none.
  const Py_buffer* add(py::handle object) {
    Py_buffer view;
    if (PyObject_CheckBuffer(object.ptr()) == 0) return nullptr;
    if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
      PyErr_Clear();
      return nullptr;
    }
    views_.push_back(view);
    return &views_.back();
  }

 private:
  std::vector<Py_buffer> views_;
};

bool view_has_shape(const Py_buffer& view, const std::vector<std::size_t>& shape) {
  if (static_cast<std::size_t>(view.ndim) != shape.size()) return false;
  for (std::size_t i = 0; i < shape.size(); ++i)
    if (static_cast<std::size_t>(view.shape[i]) != shape[i]) return false;
  return true;
}

// Moves one object per slot of `bound` to the vector `out`: eager tensors of TensorFlow, and others
// that export their memory, in the shape of the slot and the dtype of `out`; None becomes zeros.
// Returns false, without moving anything, if there is any other object. Making an array of each
// tensor would take longer than everything else.
bool gather(const BoundLayout& bound, const py::list& objects, const py::array& out) {
  struct Part {
    Copy copy;
    void* handle;  // of an eager tensor, whose memory is not known yet; or null
    const Slot* slot;
  };
  const std::vector<Slot>& slots = bound.layout.slots();
  const char format = out.dtype().char_();
  const DType dtype = classify(out.dtype());
  if (objects.size() != slots.size() || !is_averaged(dtype) || dtype == DType::kInteger)
    return false;
  const auto itemsize = static_cast<std::size_t>(out.itemsize());
  auto* const begin = static_cast<std::byte*>(const_cast<void*>(out.data()));
  const auto nbytes = static_cast<std::size_t>(out.nbytes());
  const EagerTensors* const tensors = EagerTensors::found();
  if (tensors != nullptr)
    for (const py::handle object : objects) __builtin_prefetch(object.ptr());
  Exports exports(slots.size());
  std::vector<Part> parts;
  parts.reserve(slots.size());
  std::vector<std::span<std::byte>> zeros;
  std::size_t start = 0;
  for (std::size_t i = 0; i < slots.size(); start += slots[i].size, ++i) {
    const std::size_t size = slots[i].size;
    if (start + size > static_cast<std::size_t>(out.size())) return false;
    std::byte* const to = begin + start * itemsize;
    PyObject* const object = PyList_GET_ITEM(objects.ptr(), static_cast<Py_ssize_t>(i));
    if (object == Py_None) {
      zeros.emplace_back(to, size * itemsize);
      continue;
    }
    Part part{Copy{to, nullptr, size, itemsize}, nullptr, &slots[i]};
    if (tensors != nullptr) part.handle = tensors->handle_of(object);
    if (part.handle != nullptr) {
      EagerReader::prefetch(part.handle);
    } else {
      const Py_buffer* const view = exports.add(object);
      if (view == nullptr || view->format == nullptr || view->format[0] != format ||
          view->format[1] != '\0' || !view_has_shape(*view, slots[i].shape))
        return false;
      part.copy.from = static_cast<const std::byte*>(view->buf);
    }
    parts.push_back(part);
  }
  if (start != static_cast<std::size_t>(out.size())) return false;
  check_environment();
  const WithoutGil nogil;
  std::vector<Copy> copies;
  std::vector<DeviceCopy> device_copies;
  copies.reserve(parts.size());
  DeviceMemory device_memory;
  std::optional<EagerReader> reader;
  if (tensors != nullptr) reader.emplace(*tensors);
  for (Part& part : parts) {
    if (part.handle != nullptr) {
      std::byte* const memory = reader->memory(part.handle, dtype, part.slot->shape);
      if (memory == nullptr) return false;
      if (part.copy.size == 0) continue;
      if (reader->may_be_on_gpu()) {
        if (device_memory.context_of(memory) == nullptr) return false;
        device_copies.push_back(
            {nullptr, memory, part.copy.to, part.copy.size, itemsize, itemsize, dtype, dtype});
        continue;
      }
      part.copy.from = memory;
    }
    if (ranges_overlap(part.copy.from, part.copy.size * itemsize, begin, nbytes)) return false;
    copies.push_back(part.copy);
  }
  if (!device_copies.empty()) copy_from_devices(std::move(device_copies));
  copy_all(copies);
  for (const std::span<std::byte> zero : zeros) std::ranges::fill(zero, std::byte{0});
  return true;
}

}  // namespace

void bind_flatten(py::module_& m) {
  m.def("uniform_size", &uniform_size, py::arg("parts"));
  m.def("check_out", &check_out, py::arg("out"), py::arg("size"), py::arg("dtype"));
  m.def("flatten_into", &flatten_into, py::arg("out"), py::arg("parts"));
  m.def("unflatten_into", &unflatten_into, py::arg("parts"), py::arg("flat"));
  m.def("find_eager_tensors", &EagerTensors::find, py::arg("library"));
  m.def("gather", &gather, py::arg("layout"), py::arg("objects"), py::arg("out").noconvert());
  m.def("move_parts", &move_parts, py::arg("targets"), py::arg("sources"));
}

}  // namespace flatweights::bind
