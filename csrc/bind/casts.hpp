// The casts by which values set a model: those of `np.copyto(casting="same_kind")`, so that the
// float64 vector of an optimizer sets a float32 model, and two more. Any real type converts to any
// floating one (bfloat16 to float16), and integer parts take rounded values, because a vector that
// is float64 because of a counter must be able to set that counter. Complex values set complex
// parts alone.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

#include "checks.hpp"

namespace flatweights::bind {

// Whether values of dtype `from` may set a part of dtype `to`.
[[nodiscard]] bool is_settable(const py::dtype& from, const py::dtype& to);

// `value`, after checking that it may set a part of `dtype` and of the shape of the slot at
// `place`; if that is an integer dtype other than its own, a rounded copy. Raises if a value does
// not fit it.
[[nodiscard]] py::array cast_for_slot(const py::array& value, const py::dtype& dtype,
                                      const Place& place);

// Targets and sources of casts that the kernels do not carry out: of other dtypes, or strided.
using Casts = std::vector<std::pair<py::array, py::array>>;

// Has NumPy carry out `casts`; values that are too large silently become infinity.
void cast_all(const Casts& casts);

// A contiguous copy of `array` in `dtype`.
[[nodiscard]] py::array cast(const py::array& array, const py::dtype& dtype);

}  // namespace flatweights::bind
