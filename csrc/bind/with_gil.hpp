// Work with Python's objects in a thread that Python may not know.
#pragma once

#include <pybind11/pybind11.h>

namespace flatweights::bind {

// Takes the GIL from here to the end of the scope.
class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;
  ~WithGil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

}  // namespace flatweights::bind
