// Compiled once per instruction set, with FLATWEIGHTS_ISA its name.
#include "flatweights/kernels.hpp"

#include "flatweights/average_kernel.hpp"
#include "flatweights/copy_kernel.hpp"
#include "flatweights/nonfinite_kernel.hpp"

#define FLATWEIGHTS_JOIN_(a, b) a##b
#define FLATWEIGHTS_JOIN(a, b) FLATWEIGHTS_JOIN_(a, b)
#define FLATWEIGHTS_TEXT_(a) #a
#define FLATWEIGHTS_TEXT(a) FLATWEIGHTS_TEXT_(a)

// In the order of Real.
#define FLATWEIGHTS_EACH_REAL(function) \
  {function<Float16>, function<BFloat16>, function<float>, function<double>}

namespace flatweights {

extern const Kernels FLATWEIGHTS_JOIN(kernels_, FLATWEIGHTS_ISA);

const Kernels FLATWEIGHTS_JOIN(kernels_, FLATWEIGHTS_ISA) = {
    FLATWEIGHTS_TEXT(FLATWEIGHTS_ISA),    FLATWEIGHTS_EACH_REAL(average_range),
    FLATWEIGHTS_EACH_REAL(add_range),     FLATWEIGHTS_EACH_REAL(divide_range),
    FLATWEIGHTS_EACH_REAL(has_nonfinite), copy_range,
};

}  // namespace flatweights
