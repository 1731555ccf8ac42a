#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "bindings.hpp"

// _core, under another name until PyInit__core has checked which interpreter imports it.
PYBIND11_MODULE(_core_of_main_interpreter, m) {
  m.doc() = "Kernels of flatweights.";
  m.attr("__version__") = FLATWEIGHTS_VERSION;
  // Look up NumPy's API here, under the import lock. At the first use, a fork could interrupt
  // the thread that looks it up.
  (void)pybind11::detail::npy_api::get();
  flatweights::bind::bind_buffer_pool(m);
  flatweights::bind::bind_layout(m);
  flatweights::bind::bind_flatten(m);
  flatweights::bind::bind_average(m);
  flatweights::bind::bind_inplace(m);
  flatweights::bind::bind_adaptive(m);
  flatweights::bind::bind_running_average(m);
  flatweights::bind::bind_difference(m);
  flatweights::bind::bind_channels(m);
  flatweights::bind::bind_packets(m);
  flatweights::bind::bind_repeated_calls(m);
  flatweights::bind::bind_worker_answers(m);
  flatweights::bind::bind_device_segments(m);
  flatweights::bind::bind_publication(m);
  flatweights::bind::bind_parallel(m);
  flatweights::bind::bind_variables(m);
}

extern "C" PYBIND11_EXPORT PyObject* PyInit__core() {
  // pybind11 would take the GIL for the main interpreter, and wait for ever.
  if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
    PyErr_SetString(
        PyExc_ImportError,
        "flatweights cannot be imported into a sub-interpreter, only into the main one");
    return nullptr;
  }
  return PyInit__core_of_main_interpreter();
}
