#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "checks.hpp"
#include "flatweights/difference.hpp"
#include "flatweights/flatten.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {
namespace {

std::vector<DifferencePart> difference_parts(const BoundLayout& bound, std::byte* model,
                                             const BoundLayout& narrow,
                                             const std::byte* difference) {
  const std::vector<Slot>& slots = bound.layout.slots();
  const std::vector<Slot>& narrow_slots = narrow.layout.slots();
  if (slots.size() != narrow_slots.size()) throw py::value_error("expected layouts of one model");
  std::vector<DifferencePart> parts;
  parts.reserve(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const bool same = same_dtype(bound.dtypes[i], narrow.dtypes[i]);
    if (slots[i].size != narrow_slots[i].size ||
        !(same || can_convert(slots[i].dtype, narrow_slots[i].dtype)))
      throw py::value_error("expected layouts of one model");
    parts.push_back(DifferencePart{slots[i].dtype, narrow_slots[i].dtype, slots[i].size,
                                   slots[i].nbytes, same, model + slots[i].offset,
                                   difference + narrow_slots[i].offset});
  }
  return parts;
}

// Adds a difference to the packed `model`, unless it is None; copies other packed buffers, pairs
// of to and from; and puts `version` into the list `held`. It raises before it changes anything,
// or does all: nothing that interrupts Python comes in between.
void advance(const BoundLayout& bound, const py::object& model, const BoundLayout& narrow,
             const py::object& difference, const py::list& copied, const py::list& held,
             const py::object& version) {
  std::vector<DifferencePart> parts;
  if (!difference.is_none()) {
    const py::array values = as_array(difference, "difference");
    const std::byte* const from = check_packed(values, narrow, "difference", Access::kRead);
    const py::array target = as_array(model, "model");
    std::byte* const to = check_packed(target, bound, "model", Access::kWrite);
    if (ranges_overlap(to, bound.layout.nbytes(), from, narrow.layout.nbytes()))
      throw py::value_error("difference: overlaps the model");
    parts = difference_parts(bound, to, narrow, from);
  }
  std::vector<Copy> copies;
  for (const py::handle pair : copied) {
    const auto both = pair.cast<std::pair<py::array, py::array>>();
    std::byte* const to = check_packed(both.first, bound, "to", Access::kWrite);
    const std::byte* const from = check_packed(both.second, bound, "from", Access::kRead);
    if (to == from) continue;
    if (ranges_overlap(to, bound.layout.nbytes(), from, bound.layout.nbytes()))
      throw py::value_error("expected buffers that do not overlap");
    copies.push_back(Copy{to, from, bound.layout.nbytes(), 1});
  }
  if (held.size() != 1) throw py::value_error("expected a list of one version");
  check_environment();
  {
    const WithoutGil nogil;
    add_difference(parts);
    copy_all(copies);
  }
  held[0] = version;
}

}  // namespace

void bind_difference(py::module_& m) {
  m.def("advance", &advance, py::arg("layout"), py::arg("model"), py::arg("narrow"),
        py::arg("difference"), py::arg("copied"), py::arg("held"), py::arg("version"));
}

}  // namespace flatweights::bind
