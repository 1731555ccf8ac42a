#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "bound_variables.hpp"
#include "checks.hpp"
#include "flatweights/device_copies.hpp"
#include "python_calls.hpp"
#include "released_owners.hpp"
#include "variables_library.hpp"

namespace flatweights::bind {

void bind_variables(py::module_& m) {
  bind_released_owners();
  py::register_exception<UnreadyError>(m, "UnreadyError");
  m.def("device_obstacle", &device_obstacle);
  py::class_<VariablesLibrary>(m, "VariablesLibrary")
      .def(py::init<const std::string&>(), py::arg("path"))
      .def_property_readonly("nonce",
                             [](const VariablesLibrary& library) { return library.api().nonce; });
  py::class_<PythonCall>(m, "PythonCall")
      .def(py::init<py::function, std::vector<py::dtype>>(), py::arg("function"), py::arg("dtypes"))
      .def_property_readonly("id", &PythonCall::id);
  py::class_<CalledTensors>(m, "CalledTensors")
      .def(py::init<const py::list&, const py::list&>(), py::arg("inputs"), py::arg("outputs"),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def_static("on_gpu", &CalledTensors::on_gpu, py::arg("inputs"), py::arg("outputs"),
                  py::arg("layout"), py::keep_alive<0, 1>(), py::keep_alive<0, 2>())
      .def_property_readonly("sizes", &CalledTensors::sizes)
      .def("gather_into", &CalledTensors::gather_into, py::arg("layout"),
           py::arg("buffer").noconvert())
      .def("scatter", &CalledTensors::scatter, py::arg("layout"), py::arg("buffer").noconvert())
      .def_property_readonly("gpu", &CalledTensors::gpu)
      .def("gather_into_segment", &CalledTensors::gather_into_segment, py::arg("layout"),
           py::arg("segment"))
      .def("scatter_segment", &CalledTensors::scatter_segment, py::arg("layout"),
           py::arg("segment"))
      .def("pass_on", &CalledTensors::pass_on, py::arg("layout"))
      .def("let_repeat", &CalledTensors::let_repeat, py::arg("layout"), py::arg("request"),
           py::arg("turn"), py::arg("weight"), py::arg("seconds"));
  py::class_<BoundVariables>(m, "BoundVariables")
      .def(py::init<const VariablesLibrary&, const BoundLayout&, std::vector<std::size_t>,
                    const std::vector<std::int64_t>&, const std::vector<int>&, const py::object&>(),
           py::arg("library"), py::arg("layout"), py::arg("positions"), py::arg("ids"),
           py::arg("dtypes"), py::arg("context"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def_property_readonly("try_get", &BoundVariables::getter)
      .def_property_readonly("try_set", &BoundVariables::setter)
      .def_property_readonly("try_get_packed", &BoundVariables::packed_getter)
      .def_property_readonly("try_set_packed", &BoundVariables::packed_setter)
      .def("get_vector", &BoundVariables::get_vector, py::arg("out"))
      .def("get_packed", &BoundVariables::get_packed, py::arg("buffer"))
      .def_property_readonly("gpu", &BoundVariables::gpu)
      .def("get_segment", &BoundVariables::get_segment, py::arg("segment"))
      .def("set_segment", &BoundVariables::set_segment, py::arg("segment"), py::arg("positions"))
      .def("get_parts", &BoundVariables::get_parts, py::arg("targets"))
      .def("set_vector", &BoundVariables::set_vector, py::arg("flat"), py::arg("share"))
      .def("set_packed", &BoundVariables::set_packed, py::arg("buffer"), py::arg("share"))
      .def("set_parts", &BoundVariables::set_parts, py::arg("positions"), py::arg("sources"),
           py::arg("share"))
      .def("get_shared", &BoundVariables::get_shared)
      .def(
          "add",
          [](BoundVariables& self, const py::array& x, bool packed, double a) {
            self.update(&axpy, x, packed, a);
          },
          py::arg("x"), py::arg("packed"), py::arg("a"))
      .def(
          "lerp",
          [](BoundVariables& self, const py::array& x, bool packed, double a) {
            self.update(&lerp, x, packed, a);
          },
          py::arg("x"), py::arg("packed"), py::arg("a"));
}

}  // namespace flatweights::bind
