#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

#include "bindings.hpp"
#include "checks.hpp"
#include "flatweights/adaptive.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {
namespace {

// `object` as a contiguous and aligned vector of the dtype and length of `like`.
py::array vector_like(py::handle object, const py::array& like, const char* what, Access access) {
  py::array vector = as_array(object, what);
  if (vector.ndim() != 1 || !is_contiguous(vector) || vector.size() != like.size() ||
      !same_dtype(vector.dtype(), like.dtype()))
    throw py::value_error(std::string(what) + ": expected a contiguous vector, " + describe(like) +
                          ", got " + describe(vector));
  if ((vector.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) == 0)
    throw py::value_error(std::string(what) + ": expected an aligned array");
  if (access == Access::kWrite && !vector.writeable())
    throw py::value_error(std::string(what) + ": expected a writable array, got a read-only one");
  return vector;
}

SecondMoment read_kind(const std::string& name) {
  if (name == "sum") return SecondMoment::kSum;
  if (name == "mean") return SecondMoment::kMean;
  if (name == "sign") return SecondMoment::kSign;
  throw py::value_error("kind: expected 'sum', 'mean' or 'sign', got '" + name + "'");
}

bool overlap(const py::array& a, const py::array& b) {
  return ranges_overlap(
      static_cast<const std::byte*>(a.data()), static_cast<std::size_t>(a.nbytes()),
      static_cast<const std::byte*>(b.data()), static_cast<std::size_t>(b.nbytes()));
}

void adapt_(const std::string& kind, const py::object& weights_object,
            const py::object& first_object, const py::object& second_object,
            const py::object& average_object, const py::object& before_object, double learning_rate,
            double beta1, double beta2, double tau) {
  const SecondMoment second_moment = read_kind(kind);
  py::array weights = as_array(weights_object, "weights");
  const DType dtype = classify(weights.dtype());
  if (dtype != DType::kFloat32 && dtype != DType::kFloat64)
    throw py::type_error("weights: expected float32 or float64, got " + describe(weights));
  weights = vector_like(weights, weights, "weights", Access::kWrite);
  const bool has_first = !first_object.is_none();
  const py::array first =
      has_first ? vector_like(first_object, weights, "first", Access::kWrite) : py::array();
  const py::array second = vector_like(second_object, weights, "second", Access::kWrite);
  const py::array average = vector_like(average_object, weights, "average", Access::kRead);
  const bool has_before = !before_object.is_none();
  const py::array before =
      has_before ? vector_like(before_object, weights, "before", Access::kRead) : average;
  const auto meets_kept = [&](const py::array& array) {
    return overlap(array, second) || (has_first && overlap(array, first));
  };
  const auto meets_weights = [&](const py::array& array) {
    return array.data() != weights.data() && overlap(array, weights);
  };
  if (meets_kept(weights) || (has_first && overlap(first, second)) || meets_kept(average) ||
      meets_kept(before) || meets_weights(average) || meets_weights(before))
    throw py::value_error("expected vectors that do not overlap");
  check_environment();
  const auto memory = [](const py::array& array) { return const_cast<void*>(array.data()); };
  const AdaptiveRange range{dtype == DType::kFloat64,
                            static_cast<std::size_t>(weights.size()),
                            memory(weights),
                            has_first ? memory(first) : nullptr,
                            memory(second),
                            average.data(),
                            has_before ? before.data() : nullptr};
  const WithoutGil nogil;
  adapt(range, second_moment, {learning_rate, beta1, beta2, tau});
}

}  // namespace

void bind_adaptive(py::module_& m) {
  m.def("adapt_", &adapt_, py::arg("kind"), py::arg("weights"), py::arg("first"), py::arg("second"),
        py::arg("average"), py::arg("before"), py::arg("learning_rate"), py::arg("beta1"),
        py::arg("beta2"), py::arg("tau"));
}

}  // namespace flatweights::bind
