#include <pybind11/pybind11.h>

#include "bindings.hpp"

PYBIND11_MODULE(_core, m) {
  m.doc() = "Kernels of flatweights.";
  m.attr("__version__") = FLATWEIGHTS_VERSION;
  flatweights::bind::bind_buffer_pool(m);
  flatweights::bind::bind_layout(m);
  flatweights::bind::bind_flatten(m);
  flatweights::bind::bind_average(m);
  flatweights::bind::bind_inplace(m);
  flatweights::bind::bind_adaptive(m);
  flatweights::bind::bind_running_average(m);
  flatweights::bind::bind_parallel(m);
  flatweights::bind::bind_variables(m);
}
