#include "casts.hpp"

#include <cfloat>
#include <cmath>
#include <string>

#include "numpy_types.hpp"

namespace flatweights::bind {
namespace {

bool is_of_user(const py::dtype& dtype) { return dtype.num() >= kNumPyFirstUser; }

// Whether `dtype` is one of ml_dtypes with `text` in its name; those of other libraries have
// neither "int" nor "float" in theirs.
bool has_in_name(const py::dtype& dtype, const char* text) {
  return is_of_user(dtype) &&
         dtype.attr("name").cast<std::string>().find(text) != std::string::npos;
}

bool is_integer(const py::dtype& dtype) {
  return dtype.num() <= kNumPyLastInteger || has_in_name(dtype, "int");
}

bool is_floating(const py::dtype& dtype) {
  const int number = dtype.num();
  return (number >= kNumPyFloat32 && number <= kNumPyLongDouble) || number == kNumPyFloat16 ||
         has_in_name(dtype, "float");
}

bool can_cast(const py::dtype& from, const py::dtype& to, const char* casting) {
  const py::object can_cast = py::module_::import("numpy").attr("can_cast");
  return can_cast(from, to, py::arg("casting") = casting).cast<bool>();
}

// NumPy's warnings of overflows, turned off until the end of a scope.
class Silence {
 public:
  Silence() : state_(py::module_::import("numpy").attr("errstate")(py::arg("all") = "ignore")) {
    state_.attr("__enter__")();
  }
  Silence(const Silence&) = delete;
  Silence& operator=(const Silence&) = delete;
  ~Silence() {
    try {
      state_.attr("__exit__")(py::none(), py::none(), py::none());
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("numpy.errstate");
    }
  }

 private:
  py::object state_;
};

void cast_into(const py::array& target, py::array source) {
  const bool may_lack = is_of_user(source.dtype()) || is_of_user(target.dtype());
  // Some pairs with types of ml_dtypes have no conversion; float64 holds each of those exactly.
  if (may_lack && !can_cast(source.dtype(), target.dtype(), "unsafe"))
    source = cast(source, py::dtype::of<double>());
  if (py::detail::npy_api::get().PyArray_CopyInto_(target.ptr(), source.ptr()) != 0)
    throw py::error_already_set();
}

// The least integer of `dtype`, and the least one above all of its integers.
std::pair<long double, long double> range_of(const py::dtype& dtype) {
  const auto name = dtype.attr("name").cast<std::string>();
  const bool is_signed = name.starts_with("int");
  const int bits = name == "bool" ? 1 : std::stoi(name.substr(name.find("int") + 3));
  return {is_signed ? -std::ldexp(1.0L, bits - 1) : 0.0L,
          std::ldexp(1.0L, is_signed ? bits - 1 : bits)};
}

py::array rounded(const py::array& array, const py::dtype& dtype, const Place& place) {
  static_assert(LDBL_MANT_DIG >= 64, "long double holds all integers of 64 bits");
  // Without elements, an array may have dimensions that none of long double can have.
  if (array.size() == 0) return cast(array, dtype);
  const auto [least, beyond] = range_of(dtype);
  py::array exact = cast(array, py::dtype::of<long double>());
  auto* const values = static_cast<long double*>(exact.mutable_data());
  for (py::ssize_t i = 0; i < exact.size(); ++i) {
    values[i] = std::rint(values[i]);
    if (!(values[i] >= least && values[i] < beyond))
      throw py::value_error(place.text() + ": expected values that fit " +
                            py::str(dtype).cast<std::string>() + ", got some that do not");
  }
  return cast(exact, dtype);
}

}  // namespace

bool is_settable(const py::dtype& from, const py::dtype& to) {
  if (same_dtype(from, to)) return true;
  const auto is_real = [](const py::dtype& dtype) {
    return is_integer(dtype) || is_floating(dtype);
  };
  // Not by NumPy: for it, complex numbers are of the same kind as the types of ml_dtypes, which
  // would take their real parts.
  return is_real(to) ? is_real(from) : can_cast(from, to, "same_kind");
}

py::array cast_for_slot(const py::array& value, const py::dtype& dtype, const Place& place) {
  const std::vector<std::size_t>& shape = place.bound.layout.slots()[place.slot].shape;
  const bool shape_agrees = has_shape(value, shape);
  if (!shape_agrees || !is_settable(value.dtype(), dtype)) {
    const std::string message =
        place.text() + ": expected " + describe(dtype, shape) + ", got " + describe(value);
    if (shape_agrees) throw py::type_error(message);
    throw py::value_error(message);
  }
  const bool rounds = is_integer(dtype) && !same_dtype(value.dtype(), dtype);
  return rounds ? rounded(value, dtype, place) : value;
}

void cast_all(const Casts& casts) {
  if (casts.empty()) return;
  const Silence silence;
  for (const auto& [target, source] : casts) cast_into(target, source);
}

py::array cast(const py::array& array, const py::dtype& dtype) {
  py::array copy(dtype, std::vector<py::ssize_t>(array.shape(), array.shape() + array.ndim()));
  cast_all({{copy, array}});
  return copy;
}

}  // namespace flatweights::bind
