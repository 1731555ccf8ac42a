#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "casts.hpp"
#include "checks.hpp"
#include "new_array.hpp"

namespace flatweights::bind {
namespace {

constexpr std::size_t kMostDimensions = 64;  // NPY_MAXDIMS of NumPy 2

std::string text_of(py::handle object) { return py::repr(object).cast<std::string>(); }

std::string name_of(py::handle name, std::size_t i) {
  const std::string where = "slot " + std::to_string(i) + ": ";
  if (PyUnicode_Check(name.ptr()) == 0)
    throw py::type_error(where + "expected a name of type str, got " + text_of(name));
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(name.ptr(), &size);
  if (text != nullptr) return {text, static_cast<std::size_t>(size)};
  PyErr_Clear();
  throw py::value_error(where + "expected a name in Unicode, got " + text_of(name));
}

// The dimensions in a tuple of integers.
std::vector<std::size_t> shape_of(const py::tuple& dimensions, const std::string& where) {
  std::vector<std::size_t> shape;
  shape.reserve(dimensions.size());
  for (const py::handle dimension : dimensions) {
    int overflow = 0;
    const long long size = PyLong_AsLongLongAndOverflow(dimension.ptr(), &overflow);
    if (overflow > 0) throw std::overflow_error(where + "more bytes than can be addressed");
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (size < 0)  // or it overflows
      throw py::value_error(where + "expected no negative dimension, got " + text_of(dimensions));
    shape.push_back(static_cast<std::size_t>(size));
  }
  return shape;
}

BoundLayout make_layout(const py::tuple& names, const std::vector<py::tuple>& shapes,
                        std::vector<py::dtype> dtypes) {
  if (names.size() != shapes.size() || names.size() != dtypes.size())
    throw py::value_error("expected one shape and one dtype per name, got " +
                          std::to_string(names.size()) + " names, " +
                          std::to_string(shapes.size()) + " shapes, " +
                          std::to_string(dtypes.size()) + " dtypes");
  std::vector<Slot> slots(names.size());
  const PyObject* last_dtype = nullptr;
  DType last_class = DType::kOther;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    Slot& slot = slots[i];
    slot.name = name_of(names[i], i);
    const std::string where = "slot " + std::to_string(i) + " '" + slot.name + "': ";
    if (shapes[i].size() > kMostDimensions)
      throw py::value_error(where + "expected at most " + std::to_string(kMostDimensions) +
                            " dimensions, got " + std::to_string(shapes[i].size()));
    slot.shape = shape_of(shapes[i], where);
    // Models have few dtypes and runs of one: classify each run once.
    if (dtypes[i].ptr() != last_dtype) {
      last_dtype = dtypes[i].ptr();
      last_class = classify(dtypes[i]);
    }
    slot.dtype = last_class;
    slot.itemsize = static_cast<std::size_t>(dtypes[i].itemsize());
    if (slot.itemsize == 0 || has_objects(dtypes[i]))
      throw py::type_error(where + "expected a dtype of fixed size without Python objects, got " +
                           py::str(dtypes[i]).cast<std::string>());
  }
  return BoundLayout{Layout(std::move(slots)), std::move(dtypes)};
}

std::vector<py::ssize_t> shape_of(const Slot& slot) {
  return {slot.shape.begin(), slot.shape.end()};
}

// Calls `take` with the index of each slot and a view of it in the packed buffer `object`.
template <class Take>
void for_each_packed_view(const BoundLayout& self, const py::object& object, Take take) {
  const py::array buffer = as_array(object, "buffer");
  const std::byte* packed = check_packed(buffer, self, "buffer", Access::kRead);
  const std::vector<Slot>& slots = self.layout.slots();
  for (std::size_t i = 0; i < slots.size(); ++i)
    take(i, view(buffer, self.dtypes[i], shape_of(slots[i]), packed + slots[i].offset));
}

py::list packed_views(const BoundLayout& self, const py::object& object) {
  py::list views(self.dtypes.size());
  for_each_packed_view(self, object, [&](std::size_t i, py::array part) { views[i] = part; });
  return views;
}

// Puts the views of `packed_views` into a dict under `names` (or into a subclass, whose methods it
// does not call).
void put_packed_views(const BoundLayout& self, const py::object& object, const py::tuple& names,
                      const py::dict& into) {
  if (names.size() != self.dtypes.size())
    throw py::value_error("names: expected " + std::to_string(self.dtypes.size()) + ", got " +
                          std::to_string(names.size()));
  for_each_packed_view(self, object, [&](std::size_t i, const py::array& part) {
    if (PyDict_SetItem(into.ptr(), names[i].ptr(), part.ptr()) != 0) throw py::error_already_set();
  });
}

py::list vector_views(const BoundLayout& self, const py::object& object) {
  const py::array flat = as_array(object, "flat");
  const auto size = static_cast<py::ssize_t>(self.layout.size());
  if (flat.ndim() != 1 || flat.size() != size)
    throw py::value_error("flat: expected shape (" + std::to_string(size) + ",), got " +
                          describe(flat));
  if (!is_contiguous(flat)) throw py::value_error("flat: expected a contiguous array, got strides");
  const py::dtype dtype = flat.dtype();
  const auto itemsize = static_cast<std::size_t>(dtype.itemsize());
  const auto* begin = static_cast<const std::byte*>(flat.data());
  const std::vector<Slot>& slots = self.layout.slots();
  py::list views(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i)
    views[i] = view(flat, dtype, shape_of(slots[i]), begin + slots[i].start * itemsize);
  return views;
}

// Whether each of `parts` is an array with the dtype and shape of its slot.
bool fits(const BoundLayout& self, const py::list& parts) {
  const std::vector<Slot>& slots = self.layout.slots();
  if (parts.size() != slots.size()) return false;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (!py::isinstance<py::array>(parts[i])) return false;
    const auto part = py::reinterpret_borrow<py::array>(parts[i]);
    if (!has_shape(part, slots[i].shape) || !same_dtype(part.dtype(), self.dtypes[i])) return false;
  }
  return true;
}

template <class Field>
py::list each_slot(const BoundLayout& self, Field field) {
  py::list values;
  for (const Slot& slot : self.layout.slots()) values.append(slot.*field);
  return values;
}

}  // namespace

void bind_layout(py::module_& m) {
  py::class_<BoundLayout>(m, "Layout")
      .def(py::init(&make_layout), py::arg("names"), py::arg("shapes"), py::arg("dtypes"))
      .def_property_readonly("size", [](const BoundLayout& self) { return self.layout.size(); })
      .def_property_readonly("nbytes", [](const BoundLayout& self) { return self.layout.nbytes(); })
      .def_property_readonly("starts",
                             [](const BoundLayout& self) { return each_slot(self, &Slot::start); })
      .def_property_readonly("offsets",
                             [](const BoundLayout& self) { return each_slot(self, &Slot::offset); })
      .def("new_buffer",
           [](const BoundLayout& self) {
             auto buffer = new_array(self.layout.nbytes());
             self.layout.zero_padding(reinterpret_cast<std::byte*>(buffer.mutable_data()));
             return buffer;
           })
      .def("packed_views", &packed_views, py::arg("buffer"))
      .def("put_packed_views", &put_packed_views, py::arg("buffer"), py::arg("names"),
           py::arg("into"))
      .def("vector_views", &vector_views, py::arg("flat"))
      .def("fits", &fits, py::arg("parts"))
      .def(
          "cast_for_slot",
          [](const BoundLayout& self, std::size_t slot, const py::array& value,
             const std::optional<py::dtype>& dtype) {
            if (slot >= self.dtypes.size()) throw py::index_error("no such slot");
            return cast_for_slot(value, dtype.value_or(self.dtypes[slot]), Place{self, slot});
          },
          py::arg("slot"), py::arg("value"), py::arg("dtype"));
  m.def("is_settable", &is_settable, py::arg("source"), py::arg("target"));
}

}  // namespace flatweights::bind
