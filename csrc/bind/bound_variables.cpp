#include "bound_variables.hpp"

#include <memory>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>

#include "device_segments.hpp"
#include "flatweights/cuda_driver.hpp"
#include "flatweights/device_copies.hpp"
#include "flatweights/device_segments.hpp"
#include "flatweights/flatten.hpp"
#include "flatweights/rooms.hpp"
#include "memory_files.hpp"
#include "new_array.hpp"
#include "released_owners.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {
namespace {

// The object that must live as long as a variable aliases its memory; None if none will.
py::object owner_if(bool share, const py::object& owner) { return share ? owner : py::none(); }

// Calls `body`. Turns an exception into a null pointer with Python's error set, as pybind11 does
// for its own functions.
template <class F>
PyObject* with_python_errors(F&& body) noexcept {
  try {
    return body();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

BoundVariables& variables_of(PyObject* self) { return py::cast<BoundVariables&>(py::handle(self)); }

// Calls `move` with `argument`; returns None or False, with nothing done, if the variables are not
// ready.
template <auto move>
PyObject* call_move(PyObject* self, PyObject* argument) {
  using Result = std::invoke_result_t<decltype(move), BoundVariables&, const py::object&>;
  return with_python_errors([&]() -> PyObject* {
    Result result{};
    try {
      result = (variables_of(self).*move)(py::reinterpret_borrow<py::object>(argument));
    } catch (const UnreadyError&) {
    }
    if constexpr (std::is_same_v<Result, bool>)
      return Py_NewRef(result ? Py_True : Py_False);
    else
      return result ? result.release().ptr() : Py_NewRef(Py_None);
  });
}

PyMethodDef get_definition{"try_get", &call_move<&BoundVariables::try_get>, METH_O, nullptr};
PyMethodDef set_definition{"try_set", &call_move<&BoundVariables::try_set>, METH_O, nullptr};
PyMethodDef get_packed_definition{"try_get_packed", &call_move<&BoundVariables::try_get_packed>,
                                  METH_O, nullptr};
PyMethodDef set_packed_definition{"try_set_packed", &call_move<&BoundVariables::try_set_packed>,
                                  METH_O, nullptr};

py::object function_of(PyMethodDef& definition, const py::object& self) {
  PyObject* const function = PyCFunction_New(&definition, self.ptr());
  if (function == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(function);
}

py::array new_part(const Slot& slot, const py::dtype& dtype) {
  return py::array(dtype, std::vector<py::ssize_t>(slot.shape.begin(), slot.shape.end()));
}

// The address of `array`. The callers in Python have checked that a vector has the right shape, is
// contiguous, and is writable if it is written.
std::byte* begin_of(const py::array& array) {
  return static_cast<std::byte*>(const_cast<void*>(array.data()));
}

}  // namespace

BoundVariables::BoundVariables(const VariablesLibrary& library, const BoundLayout& bound,
                               std::vector<std::size_t> positions,
                               const std::vector<std::int64_t>& ids, const std::vector<int>& dtypes,
                               const py::object& context)
    : api_(library.api()), bound_(bound), positions_(std::move(positions)) {
  const std::vector<Slot>& slots = bound.layout.slots();
  if (ids.size() != positions_.size() || dtypes.size() != positions_.size())
    throw py::value_error("expected an id and a dtype for each position");
  std::vector<std::vector<std::int64_t>> shapes;
  std::vector<WantedVariable> wanted;
  variable_at_.assign(slots.size(), kNone);
  for (std::size_t i = 0; i < positions_.size(); ++i) {
    if (positions_[i] >= slots.size()) throw py::index_error("no such slot");
    variable_at_[positions_[i]] = i;
    const Slot& slot = slots[positions_[i]];
    shapes.emplace_back(slot.shape.begin(), slot.shape.end());
    wanted.push_back({ids[i], dtypes[i], static_cast<int>(slot.shape.size()), nullptr});
    if (is_averaged(slot.dtype)) averaged_.push_back(i);
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i].dims = shapes[i].data();
  uniform_ = !slots.empty() && positions_.size() == slots.size();
  for (const py::dtype& dtype : bound.dtypes)
    uniform_ = uniform_ && same_dtype(dtype, bound.dtypes[0]);
  if (!context.is_none()) {
    context_object_ = context;
    thread_ = context.attr("_thread_local_data");
    tells_eager_mode_ = tells_eager_mode();
    handle_ = context.attr("_context_handle");
    context_ = PyCapsule_GetPointer(handle_.ptr(), nullptr);
    if (context_ == nullptr) throw py::error_already_set();
  }
  VariableFailure failure{};
  variables_ = api_.make(wanted.data(), wanted.size(), &failure);
  if (variables_ == nullptr) raise(failure);
}

BoundVariables::~BoundVariables() {
  if (variables_ != nullptr) api_.destroy(variables_);
}

py::object BoundVariables::getter(const py::object& self) {
  return function_of(get_definition, self);
}

py::object BoundVariables::setter(const py::object& self) {
  return function_of(set_definition, self);
}

py::object BoundVariables::packed_getter(const py::object& self) {
  return function_of(get_packed_definition, self);
}

py::object BoundVariables::packed_setter(const py::object& self) {
  return function_of(set_packed_definition, self);
}

py::object BoundVariables::try_get(const py::object& out) {
  api_.prefetch(variables_);
  if (!uniform_ || !is_ready()) return py::none();
  if (out.is_none()) {
    const std::size_t nbytes = bound_.layout.size() * slot_of(0).itemsize;
    py::array_t<std::uint8_t> bytes = new_array(nbytes);
    py::array made(bound_.dtypes[0], {bound_.layout.size()}, bytes.data(), bytes);
    gather(uniform_parts(made));
    return made;
  }
  if (!is_uniform_vector(out) || !py::reinterpret_borrow<py::array>(out).writeable())
    return py::none();
  gather(uniform_parts(out));
  return out;
}

bool BoundVariables::try_set(const py::object& flat) {
  api_.prefetch(variables_);
  if (!uniform_ || !is_uniform_vector(flat) || !is_ready()) return false;
  scatter(uniform_parts(flat), nullptr, py::none());
  return true;
}

bool BoundVariables::try_get_packed(const py::object& buffer) {
  if (!is_exact_array(buffer)) return false;
  get_packed(py::reinterpret_borrow<py::array>(buffer));
  return true;
}

bool BoundVariables::try_set_packed(const py::object& buffer) {
  if (!is_exact_array(buffer)) return false;
  set_packed(py::reinterpret_borrow<py::array>(buffer), false);
  return true;
}

void BoundVariables::get_vector(const py::array& out) {
  check_ready();
  Casts casts;
  gather(vector_parts(out, Access::kWrite, casts));
  cast_all(casts);
}

void BoundVariables::get_packed(const py::array& buffer) {
  check_ready();
  gather(packed_parts(buffer, Access::kWrite));
}

void BoundVariables::get_parts(const py::list& targets) {
  api_.prefetch(variables_);
  check_count(targets.size(), positions_.size());
  Casts casts;
  std::vector<ArrayPart> parts;
  parts.reserve(positions_.size());
  for (std::size_t i = 0; i < positions_.size(); ++i)
    parts.push_back(array_part(i, as_array(targets[i], "array"), Access::kWrite, casts));
  gather(parts);
  cast_all(casts);
}

void BoundVariables::set_vector(const py::array& flat, bool share) {
  check_ready();
  Casts casts;
  scatter(vector_parts(flat, Access::kRead, casts), nullptr, owner_if(share, flat));
}

void BoundVariables::set_packed(const py::array& buffer, bool share) {
  check_ready();
  scatter(packed_parts(buffer, Access::kRead), nullptr, owner_if(share, buffer));
}

void BoundVariables::set_parts(const std::vector<std::size_t>& positions, const py::list& sources,
                               bool share) {
  api_.prefetch(variables_);
  check_count(sources.size(), positions.size());
  Casts casts;
  std::vector<std::size_t> chosen;
  std::vector<ArrayPart> parts(positions_.size());
  for (std::size_t j = 0; j < positions.size(); ++j) {
    chosen.push_back(variable_of(positions[j]));
    parts[chosen.back()] =
        array_part(chosen.back(), as_array(sources[j], "array"), Access::kRead, casts);
  }
  scatter(parts, &chosen, owner_if(share, sources));
}

std::vector<bool> BoundVariables::get_shared() const {
  const auto aliased = std::make_unique<bool[]>(positions_.size());
  {
    const WithoutGil nogil;
    api_.find_aliased(variables_, aliased.get());
  }
  return std::vector<bool>(aliased.get(), aliased.get() + positions_.size());
}

const Slot& BoundVariables::slot_of(std::size_t variable) const {
  return bound_.layout.slots()[positions_[variable]];
}

std::size_t BoundVariables::variable_of(std::size_t position) const {
  const std::size_t variable = position < variable_at_.size() ? variable_at_[position] : kNone;
  if (variable == kNone) throw py::index_error("slot " + std::to_string(position) + ": unbound");
  return variable;
}

// Whether the op library reads the same as TensorFlow's attribute `is_eager`, tried with both
// values: it relies on a declaration that no public header promises.
//
// TensorFlow exports no such function to extensions, only a mangled name. It is looked up because
// the attribute takes 0.16 us, and `get_flat(out)` of two small variables 0.8 us.
bool BoundVariables::tells_eager_mode() const {
  if (api_.eager_mode == nullptr) return false;
  const py::object before = thread_.attr("is_eager");
  bool agrees = true;
  for (const bool value : {false, true}) {
    thread_.attr("is_eager") = py::bool_(value);
    agrees = agrees && *api_.eager_mode(context_object_.ptr()) == value;
  }
  thread_.attr("is_eager") = before;
  return agrees;
}

bool BoundVariables::is_eager() const {
  if (tells_eager_mode_) return *api_.eager_mode(context_object_.ptr());
  static PyObject* const is_eager = PyUnicode_InternFromString("is_eager");
  PyObject* const eager = PyObject_GetAttr(thread_.ptr(), is_eager);
  if (eager == nullptr) throw py::error_already_set();
  Py_DECREF(eager);
  return eager == Py_True;
}

// Whether values may be moved now: not while a function is traced, and not before operations
// that were dispatched asynchronously have run.
bool BoundVariables::is_ready() const {
  if (!thread_) return true;
  return is_eager() && api_.is_async != nullptr && !api_.is_async(context_);
}

void BoundVariables::check_ready() const {
  api_.prefetch(variables_);
  if (!is_ready()) throw UnreadyError("eager execution is tracing a function, or asynchronous");
}

// Whether `object` is a vector of the model's only dtype.
bool BoundVariables::is_uniform_vector(const py::object& object) const {
  if (!is_exact_array(object)) return false;
  const auto array = py::reinterpret_borrow<py::array>(object);
  return array.ndim() == 1 && static_cast<std::size_t>(array.size()) == bound_.layout.size() &&
         is_contiguous(array) && same_dtype(array.dtype(), bound_.dtypes[0]);
}

std::vector<BoundVariables::ArrayPart> BoundVariables::uniform_parts(const py::object& flat) const {
  std::byte* const begin = begin_of(py::reinterpret_borrow<py::array>(flat));
  std::vector<ArrayPart> parts;
  parts.reserve(positions_.size());
  for (const Slot& slot : bound_.layout.slots())
    parts.push_back({begin + slot.start * slot.itemsize, slot.dtype, slot.itemsize});
  return parts;
}

// Whether the kernels move values between a variable and parts of `dtype`.
bool BoundVariables::can_move(std::size_t variable, const py::dtype& dtype,
                              DType dtype_class) const {
  const py::dtype& own = bound_.dtypes[positions_[variable]];
  return same_dtype(own, dtype) || can_convert(slot_of(variable).dtype, dtype_class);
}

// The memory of `array`, if the kernels move values from or to it. Else that of a temporary
// array of the variable's dtype, which `casts` keeps alive: it has the values of `array`, or, where
// values are read from the variable, `casts` will cast it to `array` afterwards.
BoundVariables::ArrayPart BoundVariables::array_part(std::size_t variable, const py::array& array,
                                                     Access access, Casts& casts) const {
  const Place place{bound_, positions_[variable]};
  const Slot& slot = slot_of(variable);
  const py::dtype& dtype = bound_.dtypes[place.slot];
  py::array own = array;
  if (access == Access::kRead)
    own = cast_for_slot(array, dtype, place);
  else if (!has_shape(array, slot.shape) || !array.writeable())
    throw py::value_error(place.text() + ": expected a writable array, got " + describe(array));
  const auto class_of = [&](const py::dtype& other) {
    return same_dtype(other, dtype) ? slot.dtype : classify(other);
  };
  if (!is_contiguous(own) || !can_move(variable, own.dtype(), class_of(own.dtype())))
    own = access == Access::kRead ? cast(own, dtype) : new_part(slot, dtype);
  if (!own.is(array)) casts.emplace_back(array, own);
  return {begin_of(own), class_of(own.dtype()), static_cast<std::size_t>(own.itemsize()),
          own.is(array)};
}

// The parts of a vector that belong to bound variables.
std::vector<BoundVariables::ArrayPart> BoundVariables::vector_parts(const py::array& flat,
                                                                    Access access,
                                                                    Casts& casts) const {
  std::byte* const begin = begin_of(flat);
  const py::dtype dtype = flat.dtype();
  const DType dtype_class = classify(dtype);
  const auto itemsize = static_cast<std::size_t>(dtype.itemsize());
  std::vector<ArrayPart> parts;
  parts.reserve(positions_.size());
  for (std::size_t i = 0; i < positions_.size(); ++i) {
    const Slot& slot = slot_of(i);
    std::byte* const data = begin + slot.start * itemsize;
    parts.push_back(
        can_move(i, dtype, dtype_class)
            ? ArrayPart{data, dtype_class, itemsize}
            : array_part(i, view(flat, dtype, {slot.shape.begin(), slot.shape.end()}, data), access,
                         casts));
  }
  return parts;
}

// The parts of a vector that an update reads; integers, which it does not change, have none.
std::vector<BoundVariables::ArrayPart> BoundVariables::averaged_parts(const py::array& x) const {
  std::byte* const begin = begin_of(x);
  const py::dtype dtype = x.dtype();
  std::vector<ArrayPart> parts(positions_.size());
  for (const std::size_t i : averaged_) {
    const Slot& slot = slot_of(i);
    if (!same_dtype(dtype, bound_.dtypes[positions_[i]]))
      throw py::type_error(Place{bound_, positions_[i]}.text() + ": expected its own dtype");
    parts[i] = {begin + slot.start * slot.itemsize, slot.dtype, slot.itemsize};
  }
  return parts;
}

std::vector<BoundVariables::ArrayPart> BoundVariables::packed_parts(const py::array& buffer,
                                                                    Access access) const {
  std::byte* const begin = check_packed(buffer, bound_, "buffer", access);
  std::vector<ArrayPart> parts;
  parts.reserve(positions_.size());
  for (std::size_t i = 0; i < positions_.size(); ++i)
    parts.push_back({begin + slot_of(i).offset, slot_of(i).dtype, slot_of(i).itemsize});
  return parts;
}

// Runs `body(memory, lock)` with the chosen variables locked, without the GIL.
template <class F>
void BoundVariables::with_locked(VariableAccess access, const std::vector<std::size_t>* chosen,
                                 const VariableAlias* alias, F&& body) {
  std::vector<VariableMemory> memory(positions_.size());
  VariableFailure failure{};
  {
    const WithoutGil nogil;
    VariablesLock lock(api_, variables_, access, chosen, alias, memory.data(), failure);
    if (lock) body(memory, lock);
  }
  if (failure.trouble != VariableTrouble::kNone) raise(failure);
}

void BoundVariables::gather(const std::vector<ArrayPart>& parts) {
  check_environment();
  std::vector<Copy> copies;
  std::vector<DeviceCopy> device_copies;
  copies.reserve(parts.size());
  with_locked(
      VariableAccess::kRead, nullptr, nullptr,
      [&](const std::vector<VariableMemory>& memory, const VariablesLock&) {
        for (std::size_t i = 0; i < parts.size(); ++i) {
          if (memory[i].data == nullptr) continue;
          if (memory[i].stream != nullptr)
            device_copies.push_back(device_copy(i, memory[i].stream, memory[i].data, parts[i]));
          else
            copies.push_back({parts[i].data, static_cast<const std::byte*>(memory[i].data),
                              slot_of(i).size, parts[i].itemsize, parts[i].dtype,
                              slot_of(i).dtype});
        }
        copy_all(copies);
        if (!device_copies.empty()) copy_from_devices(std::move(device_copies));
      });
}

py::object BoundVariables::gpu() {
  if (gpu_) return *gpu_;
  std::set<DeviceUuid> found;
  with_locked(VariableAccess::kRead, nullptr, nullptr,
              [&](const std::vector<VariableMemory>& memory, const VariablesLock&) {
                std::set<void*> streams;
                for (const VariableMemory& place : memory)
                  if (place.stream != nullptr && streams.insert(place.stream).second)
                    found.insert(device_uuid(context_of_stream(place.stream)));
              });
  gpu_ = found.size() == 1 ? py::object(as_bytes(*found.begin())) : py::none();
  return *gpu_;
}

void BoundVariables::get_segment(const py::object& segment) {
  check_ready();
  std::byte* const begin = segment_of(segment, bound_.layout.nbytes(), true).data();
  move_segment(VariableAccess::kRead, nullptr, begin);
}

void BoundVariables::set_segment(const py::object& segment,
                                 const std::vector<std::size_t>& positions) {
  std::vector<std::size_t> chosen;
  for (const std::size_t position : positions) chosen.push_back(variable_of(position));
  check_ready();
  std::byte* const begin = segment_of(segment, bound_.layout.nbytes(), false).data();
  move_segment(VariableAccess::kOverwrite, &chosen, begin);
}

// Variables on the host go through memory that the GPU reaches, in the order of the others' stream.
void BoundVariables::move_segment(VariableAccess access, const std::vector<std::size_t>* chosen,
                                  std::byte* segment) {
  check_environment();
  std::vector<DeviceCopy> within;
  std::vector<DeviceCopy> between;  // where the segment is the end on a GPU
  const bool is_read = access == VariableAccess::kRead;
  with_locked(
      access, chosen, nullptr, [&](const std::vector<VariableMemory>& memory, VariablesLock& lock) {
        for (std::size_t i = 0; i < memory.size(); ++i) {
          if (memory[i].data == nullptr) continue;
          const Slot& slot = slot_of(i);
          std::byte* const there = segment + slot.offset;
          if (memory[i].stream != nullptr)
            within.push_back(device_copy(i, memory[i].stream, memory[i].data,
                                         {there, slot.dtype, slot.itemsize}));
          else
            between.push_back(
                device_copy(i, nullptr, there,
                            {static_cast<std::byte*>(memory[i].data), slot.dtype, slot.itemsize}));
        }
        if (within.empty()) throw CudaError("the variables are on the GPU no more");
        for (DeviceCopy& copy : between) copy.stream = within[0].stream;
        // Later copies in the order of the same stream, which are waited for, come after these.
        if (!between.empty()) {
          if (is_read)
            copy_to_devices(std::move(between));
          else
            copy_from_devices(std::move(between));
        }
        copy_within_devices(std::move(within), is_read ? Direction::kToHost : Direction::kToDevice);
        lock.commit();
      });
}

DeviceCopy BoundVariables::device_copy(std::size_t variable, void* stream, void* memory,
                                       const ArrayPart& part) const {
  const Slot& slot = slot_of(variable);
  DeviceCopy copy{};
  copy.stream = stream;
  copy.device = static_cast<std::byte*>(memory);
  copy.host = part.data;
  copy.size = slot.size;
  copy.device_itemsize = slot.itemsize;
  copy.host_itemsize = part.itemsize;
  copy.device_dtype = slot.dtype;
  copy.host_dtype = part.dtype;
  return copy;
}

void BoundVariables::scatter(const std::vector<ArrayPart>& parts,
                             const std::vector<std::size_t>* chosen, const py::object& owner) {
  check_environment();
  std::vector<Copy> copies;
  std::vector<DeviceCopy> device_copies;
  copies.reserve(parts.size());
  std::vector<const void*> aliased;
  VariableAlias alias{};
  if (!owner.is_none()) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const bool aligned = reinterpret_cast<std::uintptr_t>(parts[i].data) % kAlignment == 0;
      const bool converted = parts[i].dtype != slot_of(i).dtype;
      aliased.push_back(aligned && parts[i].is_callers && !converted ? parts[i].data : nullptr);
    }
    drop_released();
    alias = {aliased.data(), hold_owner(owner), &release_owner, &wake_sweep};
  }
  with_locked(
      VariableAccess::kOverwrite, chosen, owner.is_none() ? nullptr : &alias,
      [&](const std::vector<VariableMemory>& memory, VariablesLock& lock) {
        for (std::size_t i = 0; i < parts.size(); ++i) {
          if (memory[i].data == nullptr) continue;
          if (memory[i].stream != nullptr)
            device_copies.push_back(device_copy(i, memory[i].stream, memory[i].data, parts[i]));
          else
            copies.push_back({static_cast<std::byte*>(memory[i].data), parts[i].data,
                              slot_of(i).size, slot_of(i).itemsize, slot_of(i).dtype,
                              parts[i].dtype});
        }
        if (!device_copies.empty())
          copy_to_devices(std::move(device_copies));  // first: it can fail
        copy_all(copies);
        lock.commit();
      });
}

void BoundVariables::update(Update operation, const py::array& x, bool packed, double a) {
  packed ? api_.prefetch(variables_) : check_ready();
  const std::vector<ArrayPart> values = packed ? packed_parts(x, Access::kRead) : averaged_parts(x);
  check_environment();
  std::vector<Copy> copies;
  std::vector<InPlacePart> parts;
  std::vector<DeviceCopy> reads;
  std::vector<DeviceCopy> writes;
  std::optional<Rooms> room;  // for the values of variables on GPUs, which the processor computes
  std::byte* packed_values = nullptr;
  copies.reserve(averaged_.size());
  parts.reserve(averaged_.size());
  with_locked(
      VariableAccess::kUpdate, &averaged_, nullptr,
      [&](const std::vector<VariableMemory>& memory, VariablesLock& lock) {
        for (const std::size_t i : averaged_) {
          const VariableMemory& place = memory[i];
          if (place.data == nullptr) continue;
          const Slot& slot = slot_of(i);
          auto* y = static_cast<std::byte*>(place.data);
          auto* const before = static_cast<std::byte*>(const_cast<void*>(place.before));
          if (place.stream != nullptr) {
            if (!room) packed_values = room.emplace(bound_.layout.nbytes(), 1).enter();
            const ArrayPart value{packed_values + slot.offset, slot.dtype, slot.itemsize};
            reads.push_back(device_copy(i, place.stream, before == nullptr ? y : before, value));
            writes.push_back(device_copy(i, place.stream, y, value));
            y = value.data;
          } else if (before != nullptr) {
            copies.push_back({y, before, slot.size, slot.itemsize});
          }
          parts.push_back({slot.dtype, slot.size, y, values[i].data});
        }
        if (!reads.empty()) copy_from_devices(std::move(reads));
        copy_all(copies);
        operation(parts, a);
        if (!writes.empty()) copy_to_devices(std::move(writes));
        lock.commit();
      });
}

void BoundVariables::raise(const VariableFailure& failure) const {
  switch (failure.trouble) {
    case VariableTrouble::kGone:
      throw UnreadyError("a variable is gone");
    case VariableTrouble::kUninitialized:
      throw UnreadyError("a variable is uninitialized");
    case VariableTrouble::kNoMemory:
      throw std::bad_alloc();
    default:
      break;
  }
  const std::size_t position = positions_[failure.index];
  throw py::value_error(Place{bound_, position}.text() + ": expected " +
                        describe(bound_.dtypes[position], slot_of(failure.index).shape) + ", got " +
                        failure.text);
}

}  // namespace flatweights::bind
