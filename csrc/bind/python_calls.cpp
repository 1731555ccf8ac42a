#include "python_calls.hpp"

#include <cstdio>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "with_gil.hpp"

namespace flatweights::bind {

namespace py = pybind11;

namespace {

constexpr char kGone[] = "the function of this graph is gone, or in another process";

// Looked up and changed with the GIL. Never freed, since ops outlive static objects.
std::map<std::int64_t, const PythonCall*>& calls() {
  static auto* const calls = new std::map<std::int64_t, const PythonCall*>;
  return *calls;
}

std::int64_t next_id() {
  static std::int64_t last = 0;
  return ++last;
}

}  // namespace

PythonCall::PythonCall(const py::function& function, std::vector<py::dtype> dtypes)
    : function_(function, py::handle()), dtypes_(std::move(dtypes)), id_(next_id()) {
  calls().emplace(id_, this);
}

PythonCall::~PythonCall() { calls().erase(id_); }

void PythonCall::operator()(const CalledTensor* tensors, std::size_t count) const {
  if (count != dtypes_.size())
    throw std::invalid_argument("expected " + std::to_string(dtypes_.size()) + " tensors, got " +
                                std::to_string(count));
  const py::object function = function_();
  if (function.is_none()) throw std::runtime_error(kGone);
  py::list inputs(count);
  py::list outputs(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(tensors[i].size)};
    const py::array input(dtypes_[i], shape, {}, tensors[i].input, function);
    py::detail::array_proxy(input.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    inputs[i] = input;
    outputs[i] = py::array(dtypes_[i], shape, {}, tensors[i].output, function);
  }
  function(inputs, outputs);
}

bool call_python(std::int64_t id, const CalledTensor* tensors, std::size_t count, char* text,
                 std::size_t room) noexcept {
  const WithGil gil;
  std::string reason;
  try {
    const auto found = calls().find(id);
    if (found == calls().end()) throw std::runtime_error(kGone);
    (*found->second)(tensors, count);
    return true;
  } catch (py::error_already_set& error) {
    try {
      reason = py::str(error.type().attr("__name__")).cast<std::string>() + ": " +
               py::str(error.value()).cast<std::string>();
    } catch (const std::exception&) {
      reason = "an error without a text";
    }
  } catch (const std::exception& error) {
    reason = error.what();
  }
  std::snprintf(text, room, "%s", reason.c_str());
  return false;
}

}  // namespace flatweights::bind
