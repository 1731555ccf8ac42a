#include "variables_library.hpp"

#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include "python_calls.hpp"
#include "released_owners.hpp"

namespace flatweights::bind {

namespace py = pybind11;

VariablesLibrary::VariablesLibrary(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) throw py::import_error(path + ": expected a library that is loaded");
  using Function = const VariablesApi* (*)();
  const auto function = reinterpret_cast<Function>(dlsym(library, kVariablesApiSymbol));
  api_ = function == nullptr ? nullptr : function();
  if (api_ == nullptr || api_->version != kVariablesApiVersion)
    throw py::import_error(path + ": expected an op library of this version of flatweights");
  sweep_owners(api_->sweep);
  api_->set_python_caller(&start_step, &call_python);
}

}  // namespace flatweights::bind
