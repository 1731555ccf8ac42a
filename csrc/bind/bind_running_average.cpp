#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

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
          [](BoundSum& self, bool packed, const std::vector<py::list>& models,
             const std::vector<double>& weights) {
            if (models.size() != weights.size())
              throw py::value_error("expected one weight for each source");
            std::vector<std::vector<const std::byte*>> sources;
            for (std::size_t k = 0; k < models.size(); ++k) {
              const std::ptrdiff_t source =
                  models.size() == 1 ? Place::kNoSource : static_cast<std::ptrdiff_t>(k);
              const auto slots =
                  check_model(models[k], self.bound(), packed, source, Access::kRead);
              sources.emplace_back(slots.begin(), slots.end());
            }
            check_environment();
            const py::gil_scoped_release nogil;
            self.sum.add(sources, weights);
          },
          py::arg("packed"), py::arg("sources"), py::arg("weights"))
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
