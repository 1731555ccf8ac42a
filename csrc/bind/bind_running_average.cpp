#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "checks.hpp"
#include "flatweights/running_average.hpp"
#include "new_array.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {
namespace {

// A sum with its layout and the weights of its sources. Sum and weights change together: after
// numbers are added, nothing raises until the weights are set.
// Calls for one object are not synchronised: RunningAverage holds a lock.
class BoundSum {
 public:
  explicit BoundSum(py::object layout) : layout_(std::move(layout)), sum_(bound().layout) {
    memory_ = new_array(sum_.size() * sizeof(double)).attr("view")("f8");
    sum_.use(static_cast<double*>(memory_.mutable_data()), false);
  }

  // A sum that already exists in `memory`.
  BoundSum(py::object layout, py::array memory, py::object weights)
      : layout_(std::move(layout)),
        memory_(std::move(memory)),
        weights_(std::move(weights)),
        sum_(bound().layout) {
    const py::ssize_t size = static_cast<py::ssize_t>(sum_.size());
    if (!same_dtype(memory_.dtype(), py::dtype("f8")) || memory_.ndim() != 1 ||
        memory_.size() != size || !is_contiguous(memory_) || !is_aligned(memory_))
      throw py::value_error("memory: expected aligned, contiguous float64 (" +
                            std::to_string(size) + ",), got " + describe(memory_));
    sum_.use(const_cast<double*>(static_cast<const double*>(memory_.data())), true);
  }

  [[nodiscard]] const py::array& memory() const noexcept { return memory_; }
  [[nodiscard]] const py::object& weights() const noexcept { return weights_; }

  void add(bool packed, const std::vector<py::list>& models, const std::vector<double>& ratios,
           py::object weights) {
    check_writable();
    if (models.size() != ratios.size())
      throw py::value_error("expected one weight for each source");
    std::vector<std::vector<const std::byte*>> sources;
    for (std::size_t k = 0; k < models.size(); ++k) {
      const std::ptrdiff_t source =
          models.size() == 1 ? Place::kNoSource : static_cast<std::ptrdiff_t>(k);
      const auto slots = check_model(models[k], bound(), packed, source, Access::kRead);
      sources.emplace_back(slots.begin(), slots.end());
    }
    check_environment();
    {
      const WithoutGil nogil;
      sum_.add(sources, ratios);
    }
    weights_ = std::move(weights);
  }

  void merge(const BoundSum& other, double scale, py::object weights) {
    check_writable();
    if (this == &other || !sum_.fits(other.sum_))
      throw py::value_error("expected another sum over parts of the same sizes and dtypes");
    check_environment();
    {
      const WithoutGil nogil;
      sum_.merge(other.sum_, scale);
    }
    weights_ = std::move(weights);
  }

  void divide_into(bool packed, const py::list& out, double total) const {
    const auto slots = check_model(out, bound(), packed, Place::kOut, Access::kWrite);
    check_overlap(bound(), slots, {}, 0);
    check_environment();
    const WithoutGil nogil;
    sum_.divide_into(slots, total);
  }

 private:
  [[nodiscard]] const BoundLayout& bound() const { return layout_.cast<const BoundLayout&>(); }

  [[nodiscard]] static bool is_aligned(const py::array& array) {
    return (array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) != 0;
  }

  void check_writable() const {
    if (!memory_.writeable())
      throw py::value_error("memory: expected a writable array, got a read-only one");
  }

  py::object layout_;
  py::array memory_;
  py::object weights_ = py::none();
  RunningSum sum_;
};

}  // namespace

void bind_running_average(py::module_& m) {
  py::class_<BoundSum>(m, "RunningSum")
      .def(py::init<py::object>(), py::arg("layout"))
      .def(py::init<py::object, py::array, py::object>(), py::arg("layout"), py::arg("memory"),
           py::arg("weights"))
      .def_property_readonly("memory", &BoundSum::memory)
      .def_property_readonly("weights", &BoundSum::weights)
      .def("add", &BoundSum::add, py::arg("packed"), py::arg("sources"), py::arg("ratios"),
           py::arg("weights"))
      .def("merge", &BoundSum::merge, py::arg("other"), py::arg("scale"), py::arg("weights"))
      .def("divide_into", &BoundSum::divide_into, py::arg("packed"), py::arg("out"),
           py::arg("total"));
}

}  // namespace flatweights::bind
