#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "checks.hpp"
#include "flatweights/average.hpp"
#include "flatweights/distances.hpp"
#include "flatweights/nonfinite.hpp"
#include "flatweights/order.hpp"
#include "flatweights/relative_weights.hpp"
#include "new_array.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {
namespace {

// The address of slot i of source k; all sources of one slot are side by side.
class SourceTable {
 public:
  SourceTable(std::size_t num_slots, std::size_t num_sources)
      : num_sources_(num_sources), starts_(num_slots * num_sources) {}

  void set(std::size_t source, const std::vector<std::byte*>& slots) {
    for (std::size_t i = 0; i < slots.size(); ++i) starts_[i * num_sources_ + source] = slots[i];
  }
  [[nodiscard]] const std::vector<const std::byte*>& starts() const { return starts_; }

 private:
  std::size_t num_sources_;
  std::vector<const std::byte*> starts_;
};

// Whether all are contiguous NumPy arrays, which can be read as they are.
bool are_plain(const py::list& arrays) {
  return std::all_of(arrays.begin(), arrays.end(), [](py::handle object) {
    return py::isinstance<py::array>(object) &&
           is_contiguous(py::reinterpret_borrow<py::array>(object));
  });
}

// Whether a slot of `out` has the same memory as that slot of a source. Any other overlap is
// refused by check_overlap.
bool shares_slots(const py::list& out, const py::list& sources) {
  const auto is_same = [](py::handle a, py::handle b) {
    return py::isinstance<py::array>(a) && py::isinstance<py::array>(b) &&
           py::reinterpret_borrow<py::array>(a).data() ==
               py::reinterpret_borrow<py::array>(b).data();
  };
  for (const py::handle source : sources) {
    const auto slots = source.cast<py::list>();
    // Sources with too few or too many parts are refused later, by name.
    for (std::size_t i = 0; i < std::min(out.size(), slots.size()); ++i)
      if (is_same(out[i], slots[i])) return true;
  }
  return false;
}

// The ratios of the weights of an average, and their sum. One weight is positive: Python checks
// them before it takes the sources.
std::pair<std::vector<double>, double> ratios_of(const std::vector<double>& weights,
                                                 std::size_t num_sources) {
  if (weights.empty() || num_sources != weights.size())
    throw py::value_error("expected one weight per source, and at least one source");
  RelativeWeights relative;
  std::vector<double> ratios = relative.add(weights);
  return {std::move(ratios), relative.ratios};
}

// The parts of `out` and the addresses of those of all sources, checked.
struct Job {
  std::vector<AveragePart> parts;
  SourceTable sources;

  Job(const BoundLayout& bound, bool packed, const py::list& out_parts, const py::list& models)
      : sources(bound.layout.slots().size(), models.size()) {
    const auto out = check_model(out_parts, bound, packed, Place::kOut, Access::kWrite);
    for (std::size_t k = 0; k < models.size(); ++k)
      sources.set(k, check_model(models[k].cast<py::list>(), bound, packed,
                                 static_cast<std::ptrdiff_t>(k), Access::kRead));
    check_overlap(bound, out, sources.starts(), models.size());
    check_environment();
    parts.reserve(out.size());
    for (std::size_t i = 0; i < out.size(); ++i) {
      const Slot& slot = bound.layout.slots()[i];
      parts.push_back(AveragePart{slot.dtype, slot.size, slot.nbytes, out[i], slot.dtype});
    }
  }
};

bool average_arrays_into(const BoundLayout& bound, bool packed, const py::list& out,
                         const py::list& models, const std::vector<double>& weights) {
  const auto [ratios, total] = ratios_of(weights, models.size());
  const Job job(bound, packed, out, models);
  const WithoutGil nogil;
  return average_into(job.parts, job.sources.starts(), ratios, total);
}

// The mean of ranks [first, last) of the sorted numbers; or, if `nearest` is not 0, of that many
// numbers nearest to the median.
bool order_arrays_into(const BoundLayout& bound, bool packed, const py::list& out,
                       const py::list& models, std::size_t first, std::size_t last,
                       std::size_t nearest) {
  const std::size_t count = models.size();
  if (count > kMostSources)
    throw py::value_error("expected at most " + std::to_string(kMostSources) + " sources, got " +
                          std::to_string(count));
  if (first >= last || last > count || nearest > count)
    throw py::value_error("expected ranks below the number of sources");
  for (std::size_t i = 0; i < bound.dtypes.size(); ++i)
    if (reals_per_element(bound.layout.slots()[i].dtype) == 2)
      throw py::type_error(Place{bound, i, 0}.text() + ": expected real numbers, got " +
                           py::str(bound.dtypes[i]).cast<std::string>() +
                           ", whose numbers have no order");
  const Job job(bound, packed, out, models);
  const WithoutGil nogil;
  return order_into(job.parts, job.sources.starts(), count, Ranks{first, last, nearest});
}

// The squared distances between all pairs of models, of which there is at least one.
py::array_t<double> distances_of(const BoundLayout& bound, bool packed, const py::list& models) {
  const std::size_t count = models.size();
  SourceTable sources(bound.layout.slots().size(), count);
  for (std::size_t k = 0; k < count; ++k)
    sources.set(k, check_model(models[k].cast<py::list>(), bound, packed,
                               static_cast<std::ptrdiff_t>(k), Access::kRead));
  const std::vector<ReadPart> parts = read_parts(models[0].cast<py::list>(), bound, packed, 0);
  const auto side = static_cast<py::ssize_t>(count);
  py::array_t<double> distances({side, side});
  double* const out = distances.mutable_data();
  const WithoutGil nogil;
  squared_distances(out, parts, sources.starts(), count);
  return distances;
}

// Whether `object` is a contiguous array, and of no subclass.
bool is_plain(py::handle object) {
  return is_exact_array(object) && is_contiguous(py::reinterpret_borrow<py::array>(object));
}

bool agree(const py::array& a, const py::array& b) {
  return a.ndim() == b.ndim() && std::equal(a.shape(), a.shape() + a.ndim(), b.shape()) &&
         same_dtype(a.dtype(), b.dtype());
}

// The mean of plain arrays that agree, with equal weights, written to `out` or a new array. Returns
// None, and does nothing, for anything else. Inspecting small arrays from Python and binding them
// to a layout would take longer than averaging them.
py::object try_average(const py::object& sources_object, const py::object& out_object) {
  const PyObject* const list = sources_object.ptr();
  if (!PyList_CheckExact(list)) return py::none();
  const auto sources = py::reinterpret_borrow<py::list>(sources_object);
  if (sources.empty() || !is_plain(sources[0])) return py::none();
  const auto first = py::reinterpret_borrow<py::array>(sources[0]);
  const DType dtype = classify(first.dtype());
  if (!is_averaged(dtype) || first.size() == 0) return py::none();
  const auto nbytes = static_cast<std::size_t>(first.nbytes());
  py::array out;
  if (!out_object.is_none()) {
    if (!is_plain(out_object)) return py::none();
    out = py::reinterpret_borrow<py::array>(out_object);
    if (!agree(out, first) || !out.writeable()) return py::none();
  }
  const auto* const target = static_cast<const std::byte*>(out.data());
  std::vector<const std::byte*> starts;
  starts.reserve(sources.size());
  for (const py::handle object : sources) {
    if (!is_plain(object)) return py::none();
    const auto source = py::reinterpret_borrow<py::array>(object);
    const auto* const begin = static_cast<const std::byte*>(source.data());
    if (!agree(source, first)) return py::none();
    if (!out_object.is_none() && begin != target && ranges_overlap(begin, nbytes, target, nbytes))
      return py::none();
    starts.push_back(begin);
  }
  check_environment();
  if (out_object.is_none()) {
    const py::array_t<std::uint8_t> bytes = new_array(nbytes);
    const std::vector<py::ssize_t> shape(first.shape(), first.shape() + first.ndim());
    out = py::array(first.dtype(), shape, bytes.data(), bytes);
  }
  const AveragePart part{dtype, static_cast<std::size_t>(first.size()), nbytes,
                         static_cast<std::byte*>(const_cast<void*>(out.data())), dtype};
  const std::vector<double> weights(starts.size(), 1.0);
  {
    const WithoutGil nogil;
    average_into({&part, 1}, starts, weights, static_cast<double>(starts.size()));
  }
  return out;
}

bool widens(DType from, DType to) {
  return (from == DType::kFloat16 || from == DType::kBFloat16) &&
         (to == DType::kFloat32 || to == DType::kFloat64);
}

// Like average_arrays_into, but from packed buffers into one whose slots may be wider.
void average_widened_into(const BoundLayout& wide, const py::object& out_object,
                          const BoundLayout& narrow, const py::list& sources,
                          const std::vector<double>& weights) {
  const auto [ratios, total] = ratios_of(weights, sources.size());
  const std::vector<Slot>& slots = narrow.layout.slots();
  const std::vector<Slot>& wide_slots = wide.layout.slots();
  if (slots.size() != wide_slots.size()) throw py::value_error("expected layouts of one model");
  const py::array out = as_array(out_object, "out");
  std::byte* const begin = check_packed(out, wide, "out", Access::kWrite);
  SourceTable table(slots.size(), sources.size());
  for (std::size_t k = 0; k < sources.size(); ++k) {
    const std::string what = "source " + std::to_string(k);
    const py::array source = as_array(sources[k], what);
    std::byte* const from = check_packed(source, narrow, what, Access::kRead);
    if (ranges_overlap(begin, wide.layout.nbytes(), from, narrow.layout.nbytes()))
      throw py::value_error(what + ": overlaps out");
    std::vector<std::byte*> starts;
    starts.reserve(slots.size());
    for (const Slot& slot : slots) starts.push_back(from + slot.offset);
    table.set(k, starts);
  }
  std::vector<AveragePart> parts;
  parts.reserve(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const Slot& to = wide_slots[i];
    const bool same = same_dtype(narrow.dtypes[i], wide.dtypes[i]);
    if (slots[i].size != to.size || !(same || widens(slots[i].dtype, to.dtype)))
      throw py::value_error("expected layouts of one model");
    parts.push_back(AveragePart{slots[i].dtype, to.size, to.nbytes, begin + to.offset, to.dtype});
  }
  check_environment();
  const WithoutGil nogil;
  average_into(parts, table.starts(), ratios, total);
}

}  // namespace

void bind_average(py::module_& m) {
  m.def("try_average", &try_average, py::arg("sources"), py::arg("out"));
  m.def("are_plain", &are_plain, py::arg("arrays"));
  m.def("shares_slots", &shares_slots, py::arg("out"), py::arg("sources"));
  m.def(
      "check_average",
      [](const BoundLayout& bound, bool packed, const py::list& out, const py::list& models) {
        const Job checked(bound, packed, out, models);
      },
      py::arg("layout"), py::arg("packed"), py::arg("out"), py::arg("sources"));
  m.def("average_into", &average_arrays_into, py::arg("layout"), py::arg("packed"), py::arg("out"),
        py::arg("sources"), py::arg("weights"));
  m.def("order_into", &order_arrays_into, py::arg("layout"), py::arg("packed"), py::arg("out"),
        py::arg("sources"), py::arg("first"), py::arg("last"), py::arg("nearest"));
  m.def("distances", &distances_of, py::arg("layout"), py::arg("packed"), py::arg("sources"));
  m.def("average_widened_into", &average_widened_into, py::arg("wide"), py::arg("out"),
        py::arg("narrow"), py::arg("sources"), py::arg("weights"));
  m.def(
      "first_nonfinite",
      [](const BoundLayout& bound, bool packed, const py::list& parts, std::size_t source) {
        const auto screened = read_parts(parts, bound, packed, static_cast<std::ptrdiff_t>(source));
        const WithoutGil nogil;
        return first_nonfinite(screened);
      },
      py::arg("layout"), py::arg("packed"), py::arg("parts"), py::arg("source"));
}

}  // namespace flatweights::bind
