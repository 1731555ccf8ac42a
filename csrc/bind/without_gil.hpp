// Work that other Python threads run beside.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#ifdef __GLIBCXX__
#include <cxxabi.h>
#endif

namespace flatweights::bind {

// Lets go of the GIL from here to the end of the scope, as py::gil_scoped_release.
//
// A daemon thread whose call ends after the interpreter has must not go on: until Python 3.13,
// taking the GIL then ends the thread by unwinding its stack. That would end the process at
// the first frame that is noexcept, and would drop Python objects without the GIL on its
// way. The thread sleeps instead until the process ends, as Python 3.14 has it do.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
#ifdef __GLIBCXX__
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();
    }
#else
    PyEval_RestoreThread(state_);
#endif
  }

 private:
  PyThreadState* state_;
};

}  // namespace flatweights::bind
