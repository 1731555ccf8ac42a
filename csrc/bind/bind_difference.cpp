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

// The parts of a model and of a packed difference from it, whose layout is `narrow`.
std::vector<DifferencePart> difference_parts(const BoundLayout& bound,
                                             const std::vector<std::byte*>& model,
                                             const BoundLayout& narrow, std::byte* difference) {
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
                                   slots[i].nbytes, same, model[i],
                                   difference + narrow_slots[i].offset});
  }
  return parts;
}

// The address of a packed buffer of `bound`; null for None.
std::byte* optional_packed(const py::object& object, const BoundLayout& bound, const char* name,
                           Access access) {
  return object.is_none() ? nullptr : check_packed(as_array(object, name), bound, name, access);
}

// Writes `model - reference + residual` to the packed `difference`, and its rounding errors to
// `next_residual`. None counts as zeros. Returns the index of the first slot whose difference
// holds NaN or infinity, or None.
py::object encode_difference_(const BoundLayout& bound, bool packed, const py::list& model,
                              const BoundLayout& narrow, const py::object& difference,
                              const py::object& reference, const py::object& residual,
                              const py::object& next_residual) {
  const auto read = check_model(model, bound, packed, Place::kNoSource, Access::kRead);
  std::byte* const to =
      check_packed(as_array(difference, "difference"), narrow, "difference", Access::kWrite);
  const std::byte* const from = optional_packed(reference, bound, "reference", Access::kRead);
  const std::byte* const before = optional_packed(residual, bound, "residual", Access::kRead);
  std::byte* const after = optional_packed(next_residual, bound, "next_residual", Access::kWrite);
  if ((before == nullptr) != (after == nullptr))
    throw py::value_error("expected both residuals or none");
  std::vector<DifferencePart> parts = difference_parts(bound, read, narrow, to);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    DifferencePart& part = parts[i];
    const bool rounds =
        (part.dtype == DType::kFloat32 || part.dtype == DType::kFloat64) &&
        (part.narrow_dtype == DType::kFloat16 || part.narrow_dtype == DType::kBFloat16);
    if (!part.is_copied && !rounds) throw py::value_error("expected layouts of one model");
    const std::size_t offset = bound.layout.slots()[i].offset;
    if (from != nullptr) part.reference = from + offset;
    if (before != nullptr) part.residual = before + offset;
    if (after != nullptr) part.next_residual = after + offset;
    for (const std::byte* const memory :
         {static_cast<const std::byte*>(part.model), part.reference, part.residual}) {
      if (ranges_overlap(memory, memory == nullptr ? 0 : part.nbytes, to, narrow.layout.nbytes()) ||
          ranges_overlap(memory, memory == nullptr ? 0 : part.nbytes, after,
                         after == nullptr ? 0 : bound.layout.nbytes()))
        throw py::value_error("expected buffers that do not overlap");
    }
  }
  if (ranges_overlap(to, narrow.layout.nbytes(), after,
                     after == nullptr ? 0 : bound.layout.nbytes()))
    throw py::value_error("expected buffers that do not overlap");
  check_environment();
  std::size_t first;
  {
    const WithoutGil nogil;
    first = encode_difference(parts);
  }
  return first < parts.size() ? py::object(py::int_(first)) : py::none();
}

// Adds a difference to the packed `model`, unless it is None; copies other packed buffers, given as
// pairs of target and source; and puts `version` into the list `held`. It either raises before it
// changes anything, or does everything: no interrupt of Python can come in between.
void advance(const BoundLayout& bound, const py::object& model, const BoundLayout& narrow,
             const py::object& difference, const py::list& copied, const py::list& held,
             const py::object& version) {
  std::vector<DifferencePart> parts;
  if (!difference.is_none()) {
    const py::array values = as_array(difference, "difference");
    std::byte* const from = check_packed(values, narrow, "difference", Access::kRead);
    const py::array target = as_array(model, "model");
    std::byte* const to = check_packed(target, bound, "model", Access::kWrite);
    if (ranges_overlap(to, bound.layout.nbytes(), from, narrow.layout.nbytes()))
      throw py::value_error("difference: overlaps the model");
    std::vector<std::byte*> slots;
    for (const Slot& slot : bound.layout.slots()) slots.push_back(to + slot.offset);
    parts = difference_parts(bound, slots, narrow, from);
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
  m.def("encode_difference", &encode_difference_, py::arg("layout"), py::arg("packed"),
        py::arg("model"), py::arg("narrow"), py::arg("difference"), py::arg("reference"),
        py::arg("residual"), py::arg("next_residual"));
  m.def("advance", &advance, py::arg("layout"), py::arg("model"), py::arg("narrow"),
        py::arg("difference"), py::arg("copied"), py::arg("held"), py::arg("version"));
}

}  // namespace flatweights::bind
