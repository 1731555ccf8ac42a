// Work during which other Python threads run.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#ifdef __GLIBCXX__
#include <cxxabi.h>
#endif

namespace flatweights::bind {

// Returns what `take` returns, which takes the GIL.
//
// A daemon thread whose call ends after the interpreter must not continue. Until Python 3.13,
// taking the GIL then unwinds the thread's stack. That would end the process at the first
// noexcept frame, and would drop Python objects without the GIL. The thread sleeps instead until
// the process ends, as in Python 3.14.
template <typename Take>
auto take_gil(Take take) {
#ifdef __GLIBCXX__
  try {
    return take();
  } catch (const abi::__forced_unwind&) {
    for (;;) pause();
  }
#else
  return take();
#endif
}

// Releases the GIL from here to the end of the scope, like py::gil_scoped_release.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    take_gil([this] { PyEval_RestoreThread(state_); });
  }

 private:
  PyThreadState* state_;
};

}  // namespace flatweights::bind
