// The weights of sources as ratios to the first positive one, so that equal weights give the bits
// of an average without weights.
#pragma once

#include <vector>

namespace flatweights {

struct RelativeWeights {
  double base = 0.0;    // the first positive weight; 0 as long as there is none
  double ratios = 0.0;  // the sum of all ratios: one rounded addition after the other
  double total = 0.0;   // the sum of all weights

  // Adds `weights`; returns their ratios, 0 for weights before the first positive one. Throws
  // std::invalid_argument if one is so large that float64 sums could overflow.
  [[nodiscard]] std::vector<double> add(const std::vector<double>& weights);

  // Adds all weights of `other`; returns the factor from its ratios to these. Throws as `add`.
  [[nodiscard]] double merge(const RelativeWeights& other);
};

}  // namespace flatweights
