#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "bindings.hpp"
#include "flatweights/control_groups.hpp"
#include "flatweights/kernels.hpp"
#include "flatweights/parallel.hpp"
#include "flatweights/streaming.hpp"

namespace flatweights::bind {

namespace py = pybind11;

void bind_parallel(py::module_& m) {
  m.def("get_isa", [] { return kernels().name; });
  m.def("get_num_threads", &num_threads);
  // `root` is the folder that contains /proc and /sys.
  m.def("processor_limit", &processor_limit, py::arg("root") = "");
  m.def("memory_limit", &memory_limit, py::arg("root") = "");
  m.def("free_memory", &free_memory, py::arg("root") = "");
  m.def("get_stream_above", &stream_above);
  m.def(
      "set_num_threads",
      [](py::ssize_t count) {
        constexpr py::ssize_t kMost = 1024;
        if (count < 1 || count > kMost)
          throw py::value_error("expected a number of threads from 1 to " + std::to_string(kMost) +
                                ", got " + std::to_string(count));
        set_num_threads(static_cast<unsigned>(count));
      },
      py::arg("count").noconvert());
}

}  // namespace flatweights::bind
