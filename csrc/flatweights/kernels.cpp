// Compiled once per instruction set; FLATWEIGHTS_ISA is its name.
#include "flatweights/kernels.hpp"

#include "flatweights/adaptive_kernel.hpp"
#include "flatweights/average_kernel.hpp"
#include "flatweights/average_registers.hpp"
#include "flatweights/convert_kernel.hpp"
#include "flatweights/copy_kernel.hpp"
#include "flatweights/difference_kernel.hpp"
#include "flatweights/distance_kernel.hpp"
#include "flatweights/inplace_kernel.hpp"
#include "flatweights/nonfinite_kernel.hpp"
#include "flatweights/order_kernel.hpp"

#define FLATWEIGHTS_JOIN_(a, b) a##b
#define FLATWEIGHTS_JOIN(a, b) FLATWEIGHTS_JOIN_(a, b)
#define FLATWEIGHTS_TEXT_(a) #a
#define FLATWEIGHTS_TEXT(a) FLATWEIGHTS_TEXT_(a)

#define FLATWEIGHTS_EACH_WIDENED(function)                   \
  {                                                          \
    {function<Float16, float>, function<Float16, double>}, { \
      function<BFloat16, float>, function<BFloat16, double>  \
    }                                                        \
  }

namespace flatweights {

extern const Kernels FLATWEIGHTS_JOIN(kernels_, FLATWEIGHTS_ISA);

// clang-format off
const Kernels FLATWEIGHTS_JOIN(kernels_, FLATWEIGHTS_ISA) = {
    .name = FLATWEIGHTS_TEXT(FLATWEIGHTS_ISA),
#if defined(FLATWEIGHTS_REGISTERS)
    .average = FLATWEIGHTS_EACH_REAL(average_in_registers),
    .average_widened = FLATWEIGHTS_EACH_WIDENED(average_in_registers),
#else
    .average = FLATWEIGHTS_EACH_REAL(average_range),
    .average_widened = FLATWEIGHTS_EACH_WIDENED(average_range),
#endif
    .order = FLATWEIGHTS_EACH_REAL(order_range),
    .distances = {{distances_range<Float16, float>, distances_range<Float16, double>},
                  {distances_range<BFloat16, float>, distances_range<BFloat16, double>},
                  {distances_range<float, float>, distances_range<float, double>},
                  {distances_range<double, double>, distances_range<double, double>}},
    .add = FLATWEIGHTS_EACH_REAL(add_range),
    .divide = FLATWEIGHTS_EACH_REAL(divide_range),
    .has_nonfinite = FLATWEIGHTS_EACH_REAL(has_nonfinite),
    .scale = FLATWEIGHTS_EACH_REAL(scale_range),
    .axpy = FLATWEIGHTS_EACH_REAL(axpy_range),
    .lerp = FLATWEIGHTS_EACH_REAL(lerp_range),
    .squares = FLATWEIGHTS_EACH_REAL(squares_range),
    .convert = FLATWEIGHTS_EACH_TWO_REALS(convert_range),
    .encode = {{encode_range<float, Float16>, encode_range<float, BFloat16>},
               {encode_range<double, Float16>, encode_range<double, BFloat16>}},
    .adapt = {adapt_range<float>, adapt_range<double>},
    .copy = copy_range,
};
// clang-format on

}  // namespace flatweights
