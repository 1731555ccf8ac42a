#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "bindings.hpp"
#include "checks.hpp"
#include "flatweights/running_average.hpp"

namespace flatweights::bind {
namespace {

// A sum with the layout that it was made for. Calls for one object are not
// synchronised: RunningAverage holds a lock.
struct BoundSum {
  py::object layout;
  RunningSum sum;

  [[nodiscard]] const BoundLayout& bound() const { return layout.cast<const BoundLayout&>(); }
};

}  // namespace

void bind_running_average(py::module_& m) {
  py::class_<BoundSum>(m, "RunningSum")
      .def(py::init([](const py::object& layout) {
             return BoundSum{layout, RunningSum(layout.cast<const BoundLayout&>().layout)};
           }),
           py::arg("layout"))
      .def(
          "add",
          [](BoundSum& self, bool packed, const py::list& parts, double weight) {
            const auto slots =
                check_model(parts, self.bound(), packed, Place::kNoSource, Access::kRead);
            const std::vector<const std::byte*> source(slots.begin(), slots.end());
            check_environment();
            const py::gil_scoped_release nogil;
            self.sum.add(source, weight);
          },
          py::arg("packed"), py::arg("parts"), py::arg("weight"))
      .def(
          "merge",
          [](BoundSum& self, const BoundSum& other, double scale) {
            if (&self == &other || !self.sum.fits(other.sum))
              throw py::value_error("expected another sum over parts of the same sizes and dtypes");
            check_environment();
            const py::gil_scoped_release nogil;
            self.sum.merge(other.sum, scale);
          },
          py::arg("other"), py::arg("scale"))
      .def(
          "divide_into",
          [](const BoundSum& self, bool packed, const py::list& out, double total) {
            const auto slots = check_model(out, self.bound(), packed, Place::kOut, Access::kWrite);
            check_overlap(self.bound(), slots, {}, 0);
            check_environment();
            const py::gil_scoped_release nogil;
            self.sum.divide_into(slots, total);
          },
          py::arg("packed"), py::arg("out"), py::arg("total"));
}

}  // namespace flatweights::bind
