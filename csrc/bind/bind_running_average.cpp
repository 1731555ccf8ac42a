#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "checks.hpp"
#include "flatweights/flatten.hpp"
#include "flatweights/relative_weights.hpp"
#include "flatweights/running_average.hpp"
#include "new_array.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {
namespace {

// base, sum of the ratios and sum of the weights of RelativeWeights
using PickledWeights = std::tuple<double, double, double>;

// A sum with its layout and the weights of its sources. Sum and weights change together: after
// numbers are added, nothing raises until the weights are set.
// Calls for one object are not synchronised: RunningAverage holds a lock.
class BoundSum {
 public:
  explicit BoundSum(py::object layout) : layout_(std::move(layout)), sum_(bound().layout) {
    memory_ = new_memory();
    sum_.use(static_cast<double*>(memory_.mutable_data()), false);
  }

  // A sum that already exists in `memory`. It is copied before more is added to it if it is
  // read-only, and at once if it is not aligned.
  BoundSum(py::object layout, py::array memory, const PickledWeights& weights)
      : layout_(std::move(layout)),
        memory_(std::move(memory)),
        weights_{std::get<0>(weights), std::get<1>(weights), std::get<2>(weights)},
        sum_(bound().layout) {
    const py::ssize_t size = static_cast<py::ssize_t>(sum_.size());
    if (!same_dtype(memory_.dtype(), py::dtype("f8")) || memory_.ndim() != 1 ||
        memory_.size() != size || !is_contiguous(memory_))
      throw py::value_error("memory: expected contiguous float64 (" + std::to_string(size) +
                            ",), got " + describe(memory_));
    if ((memory_.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) == 0) copy_memory();
    sum_.use(const_cast<double*>(static_cast<const double*>(memory_.data())), true);
  }

  [[nodiscard]] const py::array& memory() const noexcept { return memory_; }
  [[nodiscard]] double total_weight() const noexcept { return weights_.total; }
  [[nodiscard]] PickledWeights weights() const noexcept {
    return {weights_.base, weights_.ratios, weights_.total};
  }

  void add(bool packed, const std::vector<py::list>& models, const std::vector<double>& weights) {
    if (models.size() != weights.size())
      throw py::value_error("expected one weight for each source");
    RelativeWeights relative = weights_;
    const std::vector<double> ratios = relative.add(weights);
    std::vector<std::vector<const std::byte*>> sources;
    for (std::size_t k = 0; k < models.size(); ++k) {
      const std::ptrdiff_t source =
          models.size() == 1 ? Place::kNoSource : static_cast<std::ptrdiff_t>(k);
      const auto slots = check_model(models[k], bound(), packed, source, Access::kRead);
      sources.emplace_back(slots.begin(), slots.end());
    }
    check_environment();
    make_writable();
    {
      const WithoutGil nogil;
      sum_.add(sources, ratios);
    }
    weights_ = relative;
  }

  void merge(const BoundSum& other) {
    if (this == &other || !sum_.fits(other.sum_))
      throw py::value_error("expected another sum over parts of the same sizes and dtypes");
    RelativeWeights relative = weights_;
    const double scale = relative.merge(other.weights_);
    check_environment();
    make_writable();
    {
      const WithoutGil nogil;
      sum_.merge(other.sum_, scale);
    }
    weights_ = relative;
  }

  void divide_into(bool packed, const py::list& out) const {
    const auto slots = check_model(out, bound(), packed, Place::kOut, Access::kWrite);
    check_overlap(bound(), slots, {}, 0);
    check_environment();
    const WithoutGil nogil;
    sum_.divide_into(slots, weights_.ratios);
  }

 private:
  [[nodiscard]] const BoundLayout& bound() const { return layout_.cast<const BoundLayout&>(); }

  [[nodiscard]] py::array new_memory() const {
    return new_array(sum_.size() * sizeof(double)).attr("view")("f8");
  }

  void copy_memory() {
    py::array copy = new_memory();
    const Copy bytes{static_cast<std::byte*>(copy.mutable_data()),
                     static_cast<const std::byte*>(memory_.data()),
                     static_cast<std::size_t>(memory_.nbytes()), 1};
    {
      const WithoutGil nogil;
      copy_all({&bytes, 1});
    }
    memory_ = std::move(copy);
  }

  void make_writable() {
    if (memory_.writeable()) return;
    copy_memory();
    sum_.use(static_cast<double*>(memory_.mutable_data()), true);
  }

  py::object layout_;
  py::array memory_;
  RelativeWeights weights_;
  RunningSum sum_;
};

}  // namespace

void bind_running_average(py::module_& m) {
  py::class_<BoundSum>(m, "RunningSum")
      .def(py::init<py::object>(), py::arg("layout"))
      .def(py::init<py::object, py::array, PickledWeights>(), py::arg("layout"), py::arg("memory"),
           py::arg("weights"))
      .def_property_readonly("memory", &BoundSum::memory)
      .def_property_readonly("weights", &BoundSum::weights)
      .def_property_readonly("total_weight", &BoundSum::total_weight)
      .def("add", &BoundSum::add, py::arg("packed"), py::arg("sources"), py::arg("weights"))
      .def("merge", &BoundSum::merge, py::arg("other"))
      .def("divide_into", &BoundSum::divide_into, py::arg("packed"), py::arg("out"));
}

}  // namespace flatweights::bind
