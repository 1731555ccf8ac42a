// Work with Python's objects in a thread that Python may not know.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#ifdef __GLIBCXX__
#include <cxxabi.h>
#endif

namespace flatweights::bind {

// Takes the GIL from here to the end of the scope.
//
// A thread that takes it after the interpreter has ended sleeps for ever, as in `WithoutGil`.
class WithGil {
 public:
  WithGil() : state_(take()) {}
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;
  ~WithGil() { PyGILState_Release(state_); }

 private:
  static PyGILState_STATE take() {
#ifdef __GLIBCXX__
    try {
      return PyGILState_Ensure();
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();
    }
#else
    return PyGILState_Ensure();
#endif
  }

  PyGILState_STATE state_;
};

}  // namespace flatweights::bind
