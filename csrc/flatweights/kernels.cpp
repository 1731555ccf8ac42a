// Compiled once per instruction set, with FLATWEIGHTS_ISA its name.
#include "flatweights/kernels.hpp"

#include "flatweights/adaptive_kernel.hpp"
#include "flatweights/average_kernel.hpp"
#include "flatweights/average_registers.hpp"
#include "flatweights/convert_kernel.hpp"
#include "flatweights/copy_kernel.hpp"
#include "flatweights/inplace_kernel.hpp"
#include "flatweights/nonfinite_kernel.hpp"

#define FLATWEIGHTS_JOIN_(a, b) a##b
#define FLATWEIGHTS_JOIN(a, b) FLATWEIGHTS_JOIN_(a, b)
#define FLATWEIGHTS_TEXT_(a) #a
#define FLATWEIGHTS_TEXT(a) FLATWEIGHTS_TEXT_(a)

// In the order of real_of.
#define FLATWEIGHTS_EACH_REAL(function) \
  {function<Float16>, function<BFloat16>, function<float>, function<double>}

#define FLATWEIGHTS_EACH_WIDENED(function)                   \
  {                                                          \
    {function<Float16, float>, function<Float16, double>}, { \
      function<BFloat16, float>, function<BFloat16, double>  \
    }                                                        \
  }

#define FLATWEIGHTS_CONVERT_FROM(type)                                                      \
  {convert_range<type, Float16>, convert_range<type, BFloat16>, convert_range<type, float>, \
   convert_range<type, double>}

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
    .add = FLATWEIGHTS_EACH_REAL(add_range),
    .divide = FLATWEIGHTS_EACH_REAL(divide_range),
    .has_nonfinite = FLATWEIGHTS_EACH_REAL(has_nonfinite),
    .scale = FLATWEIGHTS_EACH_REAL(scale_range),
    .axpy = FLATWEIGHTS_EACH_REAL(axpy_range),
    .lerp = FLATWEIGHTS_EACH_REAL(lerp_range),
    .squares = FLATWEIGHTS_EACH_REAL(squares_range),
    .convert = {FLATWEIGHTS_CONVERT_FROM(Float16), FLATWEIGHTS_CONVERT_FROM(BFloat16),
                FLATWEIGHTS_CONVERT_FROM(float), FLATWEIGHTS_CONVERT_FROM(double)},
    .adapt = {adapt_range<float>, adapt_range<double>},
    .copy = copy_range,
};
// clang-format on

}  // namespace flatweights
