// Work during which other Python threads run.
#pragma once

#include <pybind11/pybind11.h>

namespace flatweights::bind {

// Releases the GIL from here to the end of the scope, like py::gil_scoped_release.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

}  // namespace flatweights::bind
