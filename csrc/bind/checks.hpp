// Python objects to checked memory. Every error that a caller can cause is
// raised here, with the GIL held, before a byte moves.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>
#include <vector>

#include "flatweights/layout.hpp"
#include "flatweights/parts.hpp"

namespace flatweights::bind {

namespace py = pybind11;

// A layout with the NumPy dtype of each slot.
struct BoundLayout {
  Layout layout;
  std::vector<py::dtype> dtypes;
};

enum class Access { kRead, kWrite };

// The origin of a part, for messages: "source 2, slot 3 'dense/bias'", "y". A layout of one
// nameless slot stands for a bare array and is not mentioned.
struct Place {
  const BoundLayout& bound;
  std::size_t slot;
  std::ptrdiff_t source = kNoSource;

  static constexpr std::ptrdiff_t kNoSource = -1;
  static constexpr std::ptrdiff_t kOut = -2;
  static constexpr std::ptrdiff_t kX = -3;
  static constexpr std::ptrdiff_t kY = -4;

  [[nodiscard]] std::string text() const;
};

// Raises for malformed environment variables before a byte moves: the core reads them when it
// first needs threads and loops.
void check_environment();

[[nodiscard]] DType classify(const py::dtype& dtype);

[[nodiscard]] bool same_dtype(const py::dtype& a, const py::dtype& b);

// Whether elements of `dtype` own other memory, as references to Python objects do: moved as bytes,
// it would be freed twice.
[[nodiscard]] bool has_objects(const py::dtype& dtype);

// Whether the kernels convert between two dtypes that differ: real numbers.
[[nodiscard]] constexpr bool can_convert(DType a, DType b) {
  return reals_per_element(a) == 1 && reals_per_element(b) == 1;
}

// "float32 (64,)"
[[nodiscard]] std::string describe(const py::array& array);
[[nodiscard]] std::string describe(const py::dtype& dtype, const std::vector<std::size_t>& shape);

[[nodiscard]] bool is_contiguous(const py::array& array);

[[nodiscard]] bool has_shape(const py::array& array, const std::vector<std::size_t>& shape);

// A contiguous array over the memory at `at`, which `owner` keeps alive.
[[nodiscard]] py::array view(const py::array& owner, const py::dtype& dtype,
                             std::vector<py::ssize_t> shape, const std::byte* at);

// Whether `object` is an array, and of no subclass.
[[nodiscard]] bool is_exact_array(py::handle object);

// `object` as an array without a conversion; `what` names it in the error. An array that masks
// elements is refused: kernels see what is masked.
[[nodiscard]] py::array as_array(py::handle object, const std::string& what);

// Raises unless `got`, the number of arrays, is `expected`.
void check_count(std::size_t got, std::size_t expected);

// The address of `object`: an array of the slot's dtype and shape, C-contiguous, and writable for
// Access::kWrite.
[[nodiscard]] std::byte* check_part(py::handle object, const Place& place, Access access);

// The addresses of all slots of `bound` in `parts`, one array each.
[[nodiscard]] std::vector<std::byte*> check_parts(const py::list& parts, const BoundLayout& bound,
                                                  std::ptrdiff_t source, Access access);

// The address of the one-dimensional uint8 `buffer` of `bound.layout.nbytes()` bytes.
[[nodiscard]] std::byte* check_packed(const py::array& buffer, const BoundLayout& bound,
                                      const std::string& what, Access access);

// The addresses of all slots of a model: of its parts, or of the one packed buffer that `parts`
// consists of.
[[nodiscard]] std::vector<std::byte*> check_model(const py::list& parts, const BoundLayout& bound,
                                                  bool packed, std::ptrdiff_t source,
                                                  Access access);

// The slots of a model that is only read.
[[nodiscard]] std::vector<ReadPart> read_parts(const py::list& model, const BoundLayout& bound,
                                               bool packed, std::ptrdiff_t source);

// Raises unless every slot of `out` is disjoint from every other slot of `out` and of the sources.
// It may be exactly the same memory as that slot of a source. The
// row of slot i in `sources` is `[i * num_sources, (i + 1) * num_sources)`. Messages
// call the models `out` and `first_source`, `first_source + 1`, ...
void check_overlap(const BoundLayout& bound, const std::vector<std::byte*>& out,
                   const std::vector<const std::byte*>& sources, std::size_t num_sources,
                   std::ptrdiff_t out_name = Place::kOut, std::ptrdiff_t first_source = 0);

[[nodiscard]] inline bool ranges_overlap(const std::byte* a, std::size_t a_size, const std::byte* b,
                                         std::size_t b_size) {
  return a_size > 0 && b_size > 0 && a < b + b_size && b < a + a_size;
}

}  // namespace flatweights::bind
