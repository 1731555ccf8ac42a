#include "flatweights/relative_weights.hpp"

#include <array>
#include <charconv>
#include <stdexcept>
#include <string>

#include "flatweights/float_environment.hpp"

namespace flatweights {
namespace {

// float32 reaches to 2^128: such a sum over any number of sources stays finite.
constexpr double kMostRatio = 0x1p512;

// The shortest text that is read as `number`.
std::string text_of(double number) {
  std::array<char, 32> digits{};
  char* const end = std::to_chars(digits.begin(), digits.end(), number).ptr;
  std::string text(digits.begin(), end);
  return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
}

double ratio(double weight, double base) {
  const double value = weight / base;
  if (value <= kMostRatio) return value;
  throw std::invalid_argument(
      "expected weights at most 1.3e+154 times the first positive one, got " + text_of(base) +
      " and " + text_of(weight));
}

}  // namespace

std::vector<double> RelativeWeights::add(const std::vector<double>& weights) {
  const DefaultFloatEnvironment standard;
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
  const DefaultFloatEnvironment standard;
  if (base == 0.0) base = other.base;
  const double scale = other.base == 0.0 ? 1.0 : ratio(other.base, base);
  ratios += ratio(scale * other.ratios, 1.0);
  total += other.total;
  return scale;
}

}  // namespace flatweights
