#include "checks.hpp"

#include <algorithm>
#include <utility>

#include "flatweights/buffer_pool.hpp"
#include "flatweights/kernels.hpp"
#include "flatweights/streaming.hpp"
#include "numpy_types.hpp"

namespace flatweights::bind {
namespace {

std::string shape_text(const std::vector<std::size_t>& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::vector<std::size_t> shape_of(const py::array& array) {
  std::vector<std::size_t> shape;
  for (py::ssize_t i = 0; i < array.ndim(); ++i)
    shape.push_back(static_cast<std::size_t>(array.shape(i)));
  return shape;
}

std::byte* memory_of(const py::array& array) {
  return static_cast<std::byte*>(const_cast<void*>(array.data()));
}

[[noreturn]] void throw_no_array(py::handle object, const std::string& what) {
  throw py::type_error(what + ": expected a NumPy array, got " +
                       py::str(py::type::of(object).attr("__name__")).cast<std::string>());
}

// The name of a model in messages; "" if it is the only one.
std::string model_text(std::ptrdiff_t source) {
  switch (source) {
    case Place::kNoSource:
      return "";
    case Place::kOut:
      return "out";
    case Place::kX:
      return "x";
    case Place::kY:
      return "y";
    default:
      return "source " + std::to_string(source);
  }
}

}  // namespace

std::string Place::text() const {
  std::string text = model_text(source);
  const std::string& name = bound.layout.slots()[slot].name;
  if (bound.layout.slots().size() == 1 && name.empty()) return text.empty() ? "array" : text;
  if (!text.empty()) text += ", ";
  return text + "slot " + std::to_string(slot) + " '" + name + "'";
}

void check_environment() {
  (void)num_threads();
  (void)kernels();
  (void)stream_above();
  (void)most_kept();
}

DType classify(const py::dtype& dtype) {
  if (!dtype.attr("isnative").cast<bool>()) return DType::kOther;
  const int number = dtype.num();
  if (number >= kNumPyBool && number <= kNumPyLastInteger) return DType::kInteger;
  switch (number) {
    case kNumPyFloat16:
      return DType::kFloat16;
    case kNumPyFloat32:
      return DType::kFloat32;
    case kNumPyFloat64:
      return DType::kFloat64;
    case kNumPyComplex64:
      return DType::kComplex64;
    case kNumPyComplex128:
      return DType::kComplex128;
    default:
      break;
  }
  if (number >= kNumPyFirstUser) {  // registered by ml_dtypes
    const auto name = dtype.attr("name").cast<std::string>();
    if (name == "bfloat16") return DType::kBFloat16;
    if (name.starts_with("int") || name.starts_with("uint")) return DType::kInteger;
  }
  return DType::kOther;
}

bool same_dtype(const py::dtype& a, const py::dtype& b) {
  return a.ptr() == b.ptr() || py::detail::npy_api::get().PyArray_EquivTypes_(a.ptr(), b.ptr());
}

bool has_objects(const py::dtype& dtype) { return (dtype.flags() & kNumPyHasObjects) != 0; }

std::string describe(const py::dtype& dtype, const std::vector<std::size_t>& shape) {
  return py::str(dtype).cast<std::string>() + " " + shape_text(shape);
}

std::string describe(const py::array& array) { return describe(array.dtype(), shape_of(array)); }

bool is_contiguous(const py::array& array) {
  return (array.flags() & py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_) != 0;
}

bool has_shape(const py::array& array, const std::vector<std::size_t>& shape) {
  return std::equal(shape.begin(), shape.end(), array.shape(), array.shape() + array.ndim(),
                    [](std::size_t a, py::ssize_t b) { return static_cast<py::ssize_t>(a) == b; });
}

py::array view(const py::array& owner, const py::dtype& dtype, std::vector<py::ssize_t> shape,
               const std::byte* at) {
  if (std::find(shape.begin(), shape.end(), 0) == shape.end())
    return py::array(dtype, std::move(shape), at, owner);
  // The strides of an array without elements may overflow. They are never used.
  std::vector<py::ssize_t> strides(shape.size(), dtype.itemsize());
  return py::array(dtype, std::move(shape), std::move(strides), at, owner);
}

bool is_exact_array(py::handle object) {
  return Py_TYPE(object.ptr()) == py::detail::npy_api::get().PyArray_Type_;
}

py::array as_array(py::handle object, const std::string& what) {
  if (!py::isinstance<py::array>(object)) throw_no_array(object, what);
  if (!is_exact_array(object) &&
      py::module_::import("numpy").attr("ma").attr("is_masked")(object).cast<bool>())
    throw py::type_error(what + ": expected an array without masked elements, got " +
                         py::str(py::type::of(object).attr("__name__")).cast<std::string>() +
                         "; array.filled(value) has none");
  return py::reinterpret_borrow<py::array>(object);
}

void check_count(std::size_t got, std::size_t expected) {
  if (got != expected)
    throw py::value_error("expected " + std::to_string(expected) + " arrays, got " +
                          std::to_string(got));
}

std::byte* check_part(py::handle object, const Place& place, Access access) {
  const Slot& slot = place.bound.layout.slots()[place.slot];
  const py::dtype& dtype = place.bound.dtypes[place.slot];
  // This runs once per part, so the text of the place is built only for errors.
  const auto array = is_exact_array(object) ? py::reinterpret_borrow<py::array>(object)
                                            : as_array(object, place.text());
  const bool dtype_agrees = same_dtype(array.dtype(), dtype);
  if (!dtype_agrees || !has_shape(array, slot.shape)) {
    const std::string message =
        place.text() + ": expected " + describe(dtype, slot.shape) + ", got " + describe(array);
    if (!dtype_agrees) throw py::type_error(message);
    throw py::value_error(message);
  }
  if (!is_contiguous(array))
    throw py::value_error(place.text() + ": expected a C-contiguous array, got strides");
  if (access == Access::kWrite && !array.writeable())
    throw py::value_error(place.text() + ": expected a writable array, got a read-only one");
  return memory_of(array);
}

std::vector<std::byte*> check_parts(const py::list& parts, const BoundLayout& bound,
                                    std::ptrdiff_t source, Access access) {
  const std::size_t count = bound.layout.slots().size();
  if (parts.size() != count) {
    const std::string text = model_text(source);
    throw py::value_error((text.empty() ? text : text + ": ") + "expected " +
                          std::to_string(count) + " parts, got " + std::to_string(parts.size()));
  }
  std::vector<std::byte*> starts;
  starts.reserve(count);
  for (std::size_t i = 0; i < count; ++i)
    starts.push_back(check_part(parts[i], Place{bound, i, source}, access));
  return starts;
}

std::byte* check_packed(const py::array& buffer, const BoundLayout& bound, const std::string& what,
                        Access access) {
  const std::size_t nbytes = bound.layout.nbytes();
  if (buffer.ndim() != 1 || !is_contiguous(buffer) ||
      !same_dtype(buffer.dtype(), py::dtype("u1")) ||
      static_cast<std::size_t>(buffer.size()) != nbytes)
    throw py::value_error(what + ": expected contiguous uint8 (" + std::to_string(nbytes) +
                          ",), got " + describe(buffer));
  if (access == Access::kWrite && !buffer.writeable())
    throw py::value_error(what + ": expected a writable buffer, got a read-only one");
  return memory_of(buffer);
}

std::vector<std::byte*> check_model(const py::list& parts, const BoundLayout& bound, bool packed,
                                    std::ptrdiff_t source, Access access) {
  if (!packed) return check_parts(parts, bound, source, access);
  const std::string what = source == Place::kNoSource ? "source" : model_text(source);
  if (parts.size() != 1) throw py::value_error(what + ": expected one packed buffer");
  std::byte* const begin = check_packed(as_array(parts[0], what), bound, what, access);
  std::vector<std::byte*> starts;
  starts.reserve(bound.layout.slots().size());
  for (const Slot& slot : bound.layout.slots()) starts.push_back(begin + slot.offset);
  return starts;
}

std::vector<ReadPart> read_parts(const py::list& model, const BoundLayout& bound, bool packed,
                                 std::ptrdiff_t source) {
  const std::vector<std::byte*> memory = check_model(model, bound, packed, source, Access::kRead);
  check_environment();
  std::vector<ReadPart> parts;
  parts.reserve(memory.size());
  for (std::size_t i = 0; i < memory.size(); ++i) {
    const Slot& slot = bound.layout.slots()[i];
    parts.push_back(ReadPart{slot.dtype, slot.size, memory[i]});
  }
  return parts;
}

void check_overlap(const BoundLayout& bound, const std::vector<std::byte*>& out,
                   const std::vector<const std::byte*>& sources, std::size_t num_sources,
                   std::ptrdiff_t out_name, std::ptrdiff_t first_source) {
  const std::vector<Slot>& slots = bound.layout.slots();
  std::vector<std::size_t> order;  // slots with memory, by address in `out`
  for (std::size_t i = 0; i < slots.size(); ++i)
    if (slots[i].nbytes > 0) order.push_back(i);
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return out[a] < out[b]; });
  for (std::size_t j = 1; j < order.size(); ++j)
    if (out[order[j - 1]] + slots[order[j - 1]].nbytes > out[order[j]])
      throw py::value_error(Place{bound, order[j], out_name}.text() +
                            ": overlaps another part of " + model_text(out_name));
  for (const std::size_t i : order) {
    for (std::size_t k = 0; k < num_sources; ++k) {
      const std::byte* begin = sources[i * num_sources + k];
      if (begin == out[i]) continue;
      const std::byte* end = begin + slots[i].nbytes;
      // The first part of `out` that ends after this one begins.
      const auto found = std::partition_point(order.begin(), order.end(), [&](std::size_t j) {
        return out[j] + slots[j].nbytes <= begin;
      });
      if (found != order.end() && out[*found] < end)
        throw py::value_error(
            Place{bound, i, first_source + static_cast<std::ptrdiff_t>(k)}.text() + ": overlaps " +
            model_text(out_name) + "; only the very same array may be a source and the result");
    }
  }
}

}  // namespace flatweights::bind
