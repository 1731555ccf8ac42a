#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "checks.hpp"
#include "flatweights/flatten.hpp"

namespace flatweights::bind {
namespace {

void copy_without_gil(const std::vector<Copy>& copies) {
  check_environment();
  const py::gil_scoped_release nogil;
  copy_all(copies);
}

py::array vector_argument(py::handle object, const char* what, Access access) {
  py::array flat = as_array(object, what);
  if (flat.ndim() != 1 || !is_contiguous(flat))
    throw py::value_error(std::string(what) + ": expected a contiguous vector, got " +
                          describe(flat));
  if (access == Access::kWrite && !flat.writeable())
    throw py::value_error(std::string(what) + ": expected a writable array, got a read-only one");
  return flat;
}

// `total + size`, or the largest number where there is none: broadcast arrays may
// have more elements than memory.
py::ssize_t saturating_sum(py::ssize_t total, py::ssize_t size) {
  return size > PTRDIFF_MAX - total ? PTRDIFF_MAX : total + size;
}

[[noreturn]] void throw_length(const char* what, py::ssize_t expected, const py::array& flat) {
  throw py::value_error(std::string(what) + ": expected shape (" + std::to_string(expected) +
                        ",), got " + describe(flat));
}

// Copies the parts that have the vector's dtype and no strides; returns the
// indices of the others, for NumPy to convert.
py::list flatten_into(const py::object& out_object, const py::list& parts) {
  const py::array out = vector_argument(out_object, "out", Access::kWrite);
  const py::dtype dtype = out.dtype();
  const auto itemsize = static_cast<std::size_t>(dtype.itemsize());
  auto* const begin = static_cast<std::byte*>(const_cast<void*>(out.data()));
  const auto out_bytes = static_cast<std::size_t>(out.nbytes());
  py::ssize_t total = 0;
  std::vector<Copy> copies;
  copies.reserve(parts.size());
  py::list left;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const py::array part = as_array(parts[i], "part " + std::to_string(i));
    const py::ssize_t start = total;
    total = saturating_sum(total, part.size());
    if (total > out.size()) continue;  // refused below, with the whole length
    const auto* data = static_cast<const std::byte*>(part.data());
    const std::size_t nbytes = static_cast<std::size_t>(part.size()) * itemsize;
    std::byte* const to = begin + static_cast<std::size_t>(start) * itemsize;
    if (!same_dtype(part.dtype(), dtype) || !is_contiguous(part)) {
      left.append(i);
      continue;
    }
    if (data == to) continue;
    if (ranges_overlap(data, nbytes, begin, out_bytes))
      throw py::value_error("part " + std::to_string(i) + ": overlaps out");
    copies.push_back(Copy{to, data, nbytes});
  }
  if (total != out.size()) throw_length("out", total, out);
  copy_without_gil(copies);
  return left;
}

// Raises where two of `copies` write to the same memory: which of them came last
// would depend on the threads. `indices` are those of their parts.
void check_disjoint(const std::vector<Copy>& copies, const std::vector<std::size_t>& indices) {
  std::vector<std::size_t> order;
  for (std::size_t j = 0; j < copies.size(); ++j)
    if (copies[j].nbytes > 0) order.push_back(j);
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return copies[a].to < copies[b].to; });
  for (std::size_t k = 1; k < order.size(); ++k) {
    const Copy& before = copies[order[k - 1]];
    if (before.to + before.nbytes > copies[order[k]].to)
      throw py::value_error("part " + std::to_string(indices[order[k]]) + ": overlaps part " +
                            std::to_string(indices[order[k - 1]]));
  }
}

void unflatten_into(const py::list& parts, const py::object& flat_object) {
  const py::array flat = vector_argument(flat_object, "flat", Access::kRead);
  const py::dtype dtype = flat.dtype();
  const auto itemsize = static_cast<std::size_t>(dtype.itemsize());
  const auto* const begin = static_cast<const std::byte*>(flat.data());
  const auto flat_bytes = static_cast<std::size_t>(flat.nbytes());
  py::ssize_t total = 0;
  std::vector<Copy> copies;
  copies.reserve(parts.size());
  std::vector<std::size_t> indices;
  indices.reserve(parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::string where = "part " + std::to_string(i);
    const py::array part = as_array(parts[i], where);
    if (!same_dtype(part.dtype(), dtype))
      throw py::type_error(where + ": expected " + py::str(dtype).cast<std::string>() + ", got " +
                           describe(part));
    if (!is_contiguous(part))
      throw py::value_error(where + ": expected a C-contiguous array, got strides");
    if (!part.writeable())
      throw py::value_error(where + ": expected a writable array, got a read-only one");
    const py::ssize_t start = total;
    total = saturating_sum(total, part.size());
    if (total > flat.size()) continue;  // refused below, with the whole length
    auto* const to = static_cast<std::byte*>(const_cast<void*>(part.data()));
    const std::byte* const from = begin + static_cast<std::size_t>(start) * itemsize;
    const auto nbytes = static_cast<std::size_t>(part.nbytes());
    if (to == from) continue;
    if (ranges_overlap(to, nbytes, begin, flat_bytes))
      throw py::value_error(where + ": overlaps flat");
    copies.push_back(Copy{to, from, nbytes});
    indices.push_back(i);
  }
  if (total != flat.size()) throw_length("flat", total, flat);
  check_disjoint(copies, indices);
  copy_without_gil(copies);
}

// Copies `sources[i]` to `targets[i]` where both have one dtype, one number of
// elements, and no strides or common memory; returns the indices of the others.
// Targets are disjoint from the sources of other pairs.
py::list copy_parts(const py::list& targets, const py::list& sources) {
  if (targets.size() != sources.size())
    throw py::value_error("expected " + std::to_string(targets.size()) + " sources, got " +
                          std::to_string(sources.size()));
  std::vector<Copy> copies;
  copies.reserve(targets.size());
  py::list left;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const py::array target = as_array(targets[i], "target " + std::to_string(i));
    const py::array source = as_array(sources[i], "source " + std::to_string(i));
    if (!target.writeable())
      throw py::value_error("target " + std::to_string(i) + ": expected a writable array");
    auto* const to = static_cast<std::byte*>(const_cast<void*>(target.data()));
    const auto* const from = static_cast<const std::byte*>(source.data());
    const auto nbytes = static_cast<std::size_t>(target.nbytes());
    if (!same_dtype(target.dtype(), source.dtype()) || target.size() != source.size() ||
        !is_contiguous(target) || !is_contiguous(source) ||
        ranges_overlap(to, nbytes, from, nbytes)) {
      left.append(i);
      continue;
    }
    copies.push_back(Copy{to, from, nbytes});
  }
  copy_without_gil(copies);
  return left;
}

}  // namespace

void bind_flatten(py::module_& m) {
  m.def("flatten_into", &flatten_into, py::arg("out"), py::arg("parts"));
  m.def("unflatten_into", &unflatten_into, py::arg("parts"), py::arg("flat"));
  m.def("copy_parts", &copy_parts, py::arg("targets"), py::arg("sources"));
}

}  // namespace flatweights::bind
