// The op library: one source, since TensorFlow's headers cost seconds for each.

#include <dlfcn.h>

#include <exception>
#include <new>

#include "alias_buffer.hpp"
#include "bound_ids.hpp"
#include "call_python.hpp"
#include "copy_on_read.hpp"
#include "locked_variables.hpp"
#include "variables_api.hpp"

namespace flatweights {
namespace {

// TensorFlow's C interface to eager execution is in a library that wheels do not offer for
// linking, but that the process has loaded.
struct ExecutorFunctions {
  void* (*executor_of_thread)(void* context);
  bool (*is_async)(void* executor);
  void (*destroy)(void* executor);

  ExecutorFunctions() {
    void* library = dlopen("libtensorflow_cc.so.2", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) library = RTLD_DEFAULT;
    find(library, "TFE_ContextGetExecutorForThread", executor_of_thread);
    find(library, "TFE_ExecutorIsAsync", is_async);
    find(library, "TFE_DeleteExecutor", destroy);
  }

  [[nodiscard]] bool found() const {
    return executor_of_thread != nullptr && is_async != nullptr && destroy != nullptr;
  }

  static const ExecutorFunctions& instance() {
    static const ExecutorFunctions functions;
    return functions;
  }

 private:
  template <class Function>
  static void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
  }
};

// The function behind EagerContextThreadLocalData of TensorFlow's Python module, whose result
// begins with `bool is_eager` (tensorflow/python/eager/pywrap_tfe.h).
using EagerMode = const bool* (*)(void* context);

EagerMode find_eager_mode() {
  constexpr const char* kName = "_ZN10tensorflow31GetEagerContextThreadLocalDataEP7_object";
  for (const char* name : {"lib_pywrap_tensorflow_common.so", "_pywrap_tensorflow_internal.so"}) {
    void* const library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) continue;
    if (void* const function = dlsym(library, kName)) return reinterpret_cast<EagerMode>(function);
  }
  return reinterpret_cast<EagerMode>(dlsym(RTLD_DEFAULT, kName));
}

bool is_async(void* context) {
  const ExecutorFunctions& functions = ExecutorFunctions::instance();
  void* const executor = functions.executor_of_thread(context);
  const bool async = functions.is_async(executor);
  functions.destroy(executor);
  return async;
}

// No exception crosses into code of another compiler.
template <class F>
auto without_exceptions(VariableFailure* failure, F&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    fail(failure, VariableTrouble::kNoMemory, 0);
    return nullptr;
  } catch (const std::exception& error) {
    fail(failure, VariableTrouble::kOther, 0, error.what());
    return nullptr;
  }
}

Variables* make(const WantedVariable* wanted, std::size_t count, VariableFailure* failure) {
  return without_exceptions(failure, [&] { return make_variables(wanted, count, failure); });
}

LockedVariables* lock(Variables* variables, VariableAccess access, const std::size_t* chosen,
                      std::size_t count, const VariableAlias* alias, VariableMemory* memory,
                      VariableFailure* failure) {
  return without_exceptions(failure, [&] {
    return lock_variables(variables, access, chosen, count, alias, memory, failure);
  });
}

}  // namespace
}  // namespace flatweights

extern "C" __attribute__((visibility("default"))) const flatweights::VariablesApi*
flatweights_variables_api() {
  namespace fw = flatweights;
  static const fw::VariablesApi api{
      fw::kVariablesApiVersion,
      fw::BoundIds::instance().nonce(),
      &fw::make,
      [](fw::Variables* variables) { delete variables; },
      [](const fw::Variables* variables) { variables->prefetch(); },
      &fw::lock,
      &fw::unlock_variables,
      &fw::find_aliased,
      [] { return fw::LingeringRoots::instance().sweep(); },
      fw::ExecutorFunctions::instance().found() ? &fw::is_async : nullptr,
      fw::find_eager_mode(),
      [](fw::StepStarter starter, fw::PythonCaller caller) {
        fw::step_starter() = starter;
        fw::python_caller() = caller;
      },
  };
  return &api;
}
