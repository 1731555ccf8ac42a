#include "relative_weights.hpp"

#include <pybind11/pybind11.h>

#include <string>

namespace flatweights::bind {
namespace {

namespace py = pybind11;

// float32 reaches to 2^128: such a sum over any number of sources stays finite.
constexpr double kMostRatio = 0x1p512;

double ratio(double weight, double base) {
  const double value = weight / base;
  if (value <= kMostRatio) return value;
  const auto text = [](double number) { return py::repr(py::float_(number)).cast<std::string>(); };
  throw py::value_error("expected weights at most 1.3e+154 times the first positive one, got " +
                        text(base) + " and " + text(weight));
}

}  // namespace

std::vector<double> RelativeWeights::add(const std::vector<double>& weights) {
  std::vector<double> added;
  added.reserve(weights.size());
  for (const double weight : weights) {
    if (base == 0.0) base = weight;
    added.push_back(base == 0.0 ? 0.0 : ratio(weight, base));
    ratios += added.back();
    total += weight;
  }
  return added;
}

double RelativeWeights::merge(const RelativeWeights& other) {
  if (base == 0.0) base = other.base;
  const double scale = other.base == 0.0 ? 1.0 : ratio(other.base, base);
  ratios += ratio(scale * other.ratios, 1.0);
  total += other.total;
  return scale;
}

}  // namespace flatweights::bind
