#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "bindings.hpp"
#include "checks.hpp"
#include "flatweights/inplace.hpp"
#include "flatweights/nonfinite.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {
namespace {

std::vector<InPlacePart> parts_of(const BoundLayout& bound, const std::vector<std::byte*>& y,
                                  const std::vector<const std::byte*>& x) {
  check_overlap(bound, y, x, x.empty() ? 0 : 1, Place::kY, Place::kX);
  check_environment();
  std::vector<InPlacePart> parts;
  parts.reserve(y.size());
  for (std::size_t i = 0; i < y.size(); ++i) {
    const Slot& slot = bound.layout.slots()[i];
    parts.push_back(InPlacePart{slot.dtype, slot.size, y[i], x.empty() ? nullptr : x[i]});
  }
  return parts;
}

std::vector<InPlacePart> check_y(const BoundLayout& bound, bool packed, const py::list& y) {
  return parts_of(bound, check_model(y, bound, packed, Place::kY, Access::kWrite), {});
}

std::vector<InPlacePart> check_y_and_x(const BoundLayout& bound, bool packed, const py::list& y,
                                       const py::list& x) {
  const auto written = check_model(y, bound, packed, Place::kY, Access::kWrite);
  const auto read = check_model(x, bound, packed, Place::kX, Access::kRead);
  return parts_of(bound, written, {read.begin(), read.end()});
}

}  // namespace

void bind_inplace(py::module_& m) {
  m.def(
      "scale_",
      [](const BoundLayout& bound, bool packed, const py::list& y, double a) {
        const auto parts = check_y(bound, packed, y);
        const WithoutGil nogil;
        scale(parts, a);
      },
      py::arg("layout"), py::arg("packed"), py::arg("y"), py::arg("a"));
  m.def(
      "axpy_",
      [](const BoundLayout& bound, bool packed, const py::list& y, double a, const py::list& x) {
        const auto parts = check_y_and_x(bound, packed, y, x);
        const WithoutGil nogil;
        axpy(parts, a);
      },
      py::arg("layout"), py::arg("packed"), py::arg("y"), py::arg("a"), py::arg("x"));
  m.def(
      "lerp_",
      [](const BoundLayout& bound, bool packed, const py::list& y, const py::list& x, double a) {
        const auto parts = check_y_and_x(bound, packed, y, x);
        const WithoutGil nogil;
        lerp(parts, a);
      },
      py::arg("layout"), py::arg("packed"), py::arg("y"), py::arg("x"), py::arg("a"));
  m.def(
      "norm",
      [](const BoundLayout& bound, bool packed, const py::list& x) {
        const auto parts = read_parts(x, bound, packed, Place::kX);
        const WithoutGil nogil;
        return norm(parts);
      },
      py::arg("layout"), py::arg("packed"), py::arg("x"));
  m.def(
      "clip_by_norm_",
      [](const BoundLayout& bound, bool packed, const py::list& y, double max_norm) {
        const auto parts = check_y(bound, packed, y);
        const WithoutGil nogil;
        return clip_by_norm(parts, max_norm);
      },
      py::arg("layout"), py::arg("packed"), py::arg("y"), py::arg("max_norm"));
  m.def(
      "isfinite",
      [](const BoundLayout& bound, bool packed, const py::list& x) {
        const auto parts = read_parts(x, bound, packed, Place::kX);
        const WithoutGil nogil;
        return first_nonfinite(parts) == parts.size();
      },
      py::arg("layout"), py::arg("packed"), py::arg("x"));
}

}  // namespace flatweights::bind
