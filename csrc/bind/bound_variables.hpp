// TensorFlow variables bound by the op library: read and written in their own memory.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

#include "casts.hpp"
#include "checks.hpp"
#include "flatweights/device_copies.hpp"
#include "flatweights/inplace.hpp"
#include "variables_library.hpp"

namespace flatweights::bind {

// The variables cannot be moved now: the caller has to bind them again, or wait, first.
struct UnreadyError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The bound variables of one model. Every function that moves them checks all arguments
// with the GIL held, then locks, checks and moves without it, and raises UnreadyError if variables
// have to be bound again. Functions that move vectors and packed buffers raise it, too, if eager
// TensorFlow is not ready; callers of functions that move single parts have already checked that.
class BoundVariables {
 public:
  // Binds the slots at `positions` of `bound`, ascending, by their ids; `context` is that of
  // eager TensorFlow, or None for the variables of a session.
  BoundVariables(const VariablesLibrary& library, const BoundLayout& bound,
                 std::vector<std::size_t> positions, const std::vector<std::int64_t>& ids,
                 const std::vector<int>& dtypes, const py::object& context);
  BoundVariables(const BoundVariables&) = delete;
  BoundVariables& operator=(const BoundVariables&) = delete;
  ~BoundVariables();

  // The fast path, for hot loops over a model of one dtype: reads into `out`, or into a new
  // vector if it is None. Returns None, and does nothing, if that takes more than moving bytes.
  py::object try_get(const py::object& out);

  // The same for writing; returns false if that takes more than moving bytes.
  bool try_set(const py::object& flat);

  // The same for packed buffers, of any model; they throw as get_packed and set_packed do. For
  // other objects than arrays, they return false.
  bool try_get_packed(const py::object& buffer);
  bool try_set_packed(const py::object& buffer);

  // Python functions that call these four for `self`, the object that holds this. With cold
  // caches, a call through a pybind11 class takes longer than reading a small model.
  static py::object getter(const py::object& self);
  static py::object setter(const py::object& self);
  static py::object packed_getter(const py::object& self);
  static py::object packed_setter(const py::object& self);

  // Where dtypes differ, a get casts as `cast_all` does, and a set as `cast_for_slot` and
  // `cast_all` do.
  void get_vector(const py::array& out);
  void set_vector(const py::array& flat, bool share);

  void get_packed(const py::array& buffer);
  void set_packed(const py::array& buffer, bool share);

  // The UUID of the GPU whose memory some of the variables are in; None if there is none, or more
  // than one.
  py::object gpu();

  // The same as for packed buffers, but in the memory of that GPU. The bytes are complete on
  // return.
  void get_segment(const py::object& segment);
  void set_segment(const py::object& segment, const std::vector<std::size_t>& positions);

  // One array for each bound slot; for the slots at `positions`, all of them bound.
  void get_parts(const py::list& targets);
  void set_parts(const std::vector<std::size_t>& positions, const py::list& sources, bool share);

  // For each bound slot, whether its variable aliases memory that was shared with it.
  [[nodiscard]] std::vector<bool> get_shared() const;

  // Changes the averaged variables by `operation`, `axpy` or `lerp`, with `x` in their dtypes: a
  // vector or, if the caller has already checked that TensorFlow is ready, a packed buffer.
  using Update = void (*)(std::span<const InPlacePart> parts, double a);
  void update(Update operation, const py::array& x, bool packed, double a);

 private:
  // The part of an array that is copied from or to one variable.
  struct ArrayPart {
    std::byte* data = nullptr;
    DType dtype = DType::kOther;
    std::size_t itemsize = 0;
    bool is_callers = true;  // else it is a temporary array's
  };

  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  [[nodiscard]] const Slot& slot_of(std::size_t variable) const;
  [[nodiscard]] std::size_t variable_of(std::size_t position) const;
  [[nodiscard]] bool tells_eager_mode() const;
  [[nodiscard]] bool is_eager() const;
  [[nodiscard]] bool is_ready() const;
  void check_ready() const;
  [[nodiscard]] bool is_uniform_vector(const py::object& object) const;

  [[nodiscard]] bool can_move(std::size_t variable, const py::dtype& dtype,
                              DType dtype_class) const;
  [[nodiscard]] ArrayPart array_part(std::size_t variable, const py::array& array, Access access,
                                     Casts& casts) const;
  [[nodiscard]] std::vector<ArrayPart> uniform_parts(const py::object& flat) const;
  [[nodiscard]] std::vector<ArrayPart> vector_parts(const py::array& flat, Access access,
                                                    Casts& casts) const;
  [[nodiscard]] std::vector<ArrayPart> averaged_parts(const py::array& x) const;
  [[nodiscard]] std::vector<ArrayPart> packed_parts(const py::array& buffer, Access access) const;

  [[nodiscard]] DeviceCopy device_copy(std::size_t variable, void* stream, void* memory,
                                       const ArrayPart& part) const;

  template <class F>
  void with_locked(VariableAccess access, const std::vector<std::size_t>* chosen,
                   const VariableAlias* alias, F&& body);
  void move_segment(VariableAccess access, const std::vector<std::size_t>* chosen,
                    std::byte* segment);
  void gather(const std::vector<ArrayPart>& parts);
  void scatter(const std::vector<ArrayPart>& parts, const std::vector<std::size_t>* chosen,
               const py::object& owner);
  [[noreturn]] void raise(const VariableFailure& failure) const;

  const VariablesApi& api_;
  const BoundLayout& bound_;  // kept alive by Python
  std::vector<std::size_t> positions_;
  std::vector<std::size_t> variable_at_;  // by position; kNone where it is not bound
  std::vector<std::size_t> averaged_;     // variables of a dtype that is averaged
  bool uniform_ = false;                  // all slots are bound and of one dtype
  Variables* variables_ = nullptr;
  py::object context_object_;  // of eager TensorFlow; null for a session
  py::object thread_;
  py::object handle_;  // keeps `context_` alive
  void* context_ = nullptr;
  std::optional<py::object> gpu_;  // once it is known
  bool tells_eager_mode_ = false;  // whether the op library does, without Python
};

}  // namespace flatweights::bind
