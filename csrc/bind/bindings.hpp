// The functions of bind_*.cpp, each of which adds its part to the extension module.
#pragma once

#include <pybind11/pybind11.h>

namespace flatweights::bind {

void bind_adaptive(pybind11::module_& m);
void bind_layout(pybind11::module_& m);
void bind_flatten(pybind11::module_& m);
void bind_buffer_pool(pybind11::module_& m);
void bind_device_segments(pybind11::module_& m);
void bind_difference(pybind11::module_& m);
void bind_average(pybind11::module_& m);
void bind_inplace(pybind11::module_& m);
void bind_channels(pybind11::module_& m);
void bind_packets(pybind11::module_& m);
void bind_publication(pybind11::module_& m);
void bind_repeated_calls(pybind11::module_& m);
void bind_worker_answers(pybind11::module_& m);
void bind_variables(pybind11::module_& m);
void bind_running_average(pybind11::module_& m);
void bind_parallel(pybind11::module_& m);

}  // namespace flatweights::bind
