#include "python_calls.hpp"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "device_segments.hpp"
#include "eager_tensors.hpp"
#include "flatweights/cuda_driver.hpp"
#include "flatweights/device_copies.hpp"
#include "flatweights/device_segments.hpp"
#include "flatweights/flatten.hpp"
#include "memory_files.hpp"
#include "new_array.hpp"
#include "with_gil.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {

namespace py = pybind11;

namespace {

constexpr char kGone[] = "the function of this graph is gone, or in another process";

// Looked up and changed with the GIL. Never freed, since ops outlive static objects.
std::map<std::int64_t, const PythonCall*>& calls() {
  static auto* const calls = new std::map<std::int64_t, const PythonCall*>;
  return *calls;
}

std::int64_t next_id() {
  static std::int64_t last = 0;
  return ++last;
}

// A function may keep the tensors, or its traceback may.
struct ExpireAtEnd {
  CalledTensors& tensors;

  ~ExpireAtEnd() { tensors.expire(); }
};

// A function may raise before it goes on with what its step has asked.
struct EndStepAtEnd {
  MemberTurn* turn;

  ~EndStepAtEnd() {
    if (turn != nullptr) turn->end_step();
  }
};

std::byte* bytes_of(const void* memory) {
  return static_cast<std::byte*>(const_cast<void*>(memory));
}

// A copy between a tensor on a GPU and the part of a packed buffer that `slot` tells of.
DeviceCopy device_copy(void* stream, std::byte* tensor, std::byte* part, const Slot& slot) {
  DeviceCopy copy{};
  copy.stream = stream;
  copy.device = tensor;
  copy.host = part;
  copy.size = slot.size;
  copy.device_itemsize = copy.host_itemsize = slot.itemsize;
  return copy;
}

}  // namespace

CalledTensors::CalledTensors(std::int64_t op, const CalledTensor* tensors, std::size_t count,
                             const std::vector<py::dtype>& dtypes)
    : op_(op), dtypes_(dtypes) {
  for (std::size_t i = 0; i < count; ++i)
    tensors_.push_back({bytes_of(tensors[i].input), bytes_of(tensors[i].output), tensors[i].size,
                        tensors[i].stream, tensors[i].stream != nullptr});
}

CalledTensors::CalledTensors(const py::list& inputs, const py::list& outputs) {
  check_count(outputs.size(), inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const py::array input = as_array(inputs[i], "input " + std::to_string(i));
    const py::array output = as_array(outputs[i], "output " + std::to_string(i));
    if (!same_dtype(input.dtype(), output.dtype()) || input.size() != output.size() ||
        has_objects(input.dtype()) || !is_contiguous(input) || !is_contiguous(output) ||
        !output.writeable())
      throw py::value_error("output " + std::to_string(i) + ": expected a writable array like " +
                            describe(input) + ", got " + describe(output));
    tensors_.push_back({bytes_of(input.data()), bytes_of(output.data()),
                        static_cast<std::size_t>(input.size()), nullptr, false});
    dtypes_.push_back(input.dtype());
  }
}

py::object CalledTensors::on_gpu(const py::list& inputs, const py::list& outputs,
                                 const BoundLayout& bound) {
  const EagerTensors* const tensors = EagerTensors::found();
  const std::vector<Slot>& slots = bound.layout.slots();
  check_count(inputs.size(), slots.size());
  check_count(outputs.size(), slots.size());
  if (tensors == nullptr) return py::none();
  std::vector<std::pair<void*, void*>> handles;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    handles.emplace_back(tensors->handle_of(inputs[i].ptr()), tensors->handle_of(outputs[i].ptr()));
    if (handles[i].first == nullptr || handles[i].second == nullptr) return py::none();
  }
  CalledTensors called;
  {
    const WithoutGil nogil;
    EagerReader reader(*tensors);
    DeviceMemory memory;
    const auto on_gpu = [&](void* handle, const Slot& slot) -> std::byte* {
      std::byte* const found = reader.memory(handle, slot.dtype, slot.size);
      if (found == nullptr || slot.size == 0) return found;
      return memory.context_of(found) == nullptr ? nullptr : found;
    };
    for (std::size_t i = 0; i < slots.size(); ++i) {
      std::byte* const input = on_gpu(handles[i].first, slots[i]);
      std::byte* const output = on_gpu(handles[i].second, slots[i]);
      if (slots[i].size > 0 && (input == nullptr || output == nullptr)) break;
      called.tensors_.push_back({input, output, slots[i].size, nullptr, true});
    }
  }
  if (called.tensors_.size() < slots.size()) return py::none();
  called.dtypes_ = bound.dtypes;
  return py::cast(std::move(called));
}

std::vector<std::size_t> CalledTensors::sizes() const {
  std::vector<std::size_t> sizes;
  for (const Tensor& tensor : tensors_) sizes.push_back(tensor.size);
  return sizes;
}

void CalledTensors::check(const BoundLayout& bound) const {
  if (is_expired_) throw std::runtime_error("the tensors belong to TensorFlow again");
  const std::vector<Slot>& slots = bound.layout.slots();
  check_count(tensors_.size(), slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i)
    if (tensors_[i].size != slots[i].size || !same_dtype(dtypes_[i], bound.dtypes[i]))
      throw py::value_error(Place{bound, i}.text() + ": expected " +
                            describe(bound.dtypes[i], {slots[i].size}) + ", got " +
                            describe(dtypes_[i], {tensors_[i].size}));
}

CalledTensors::Moves CalledTensors::moves(const BoundLayout& bound, std::byte* packed,
                                          Direction direction) const {
  const bool is_read = direction == Direction::kToHost;
  Moves moves;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const Tensor& tensor = tensors_[i];
    const Slot& slot = bound.layout.slots()[i];
    std::byte* const memory = is_read ? tensor.input : tensor.output;
    std::byte* const part = packed + slot.offset;
    if (slot.size == 0) continue;
    if (tensor.is_on_gpu)
      moves.between_gpu.push_back(device_copy(tensor.stream, memory, part, slot));
    else
      moves.on_host.push_back(
          {is_read ? part : memory, is_read ? memory : part, slot.size, slot.itemsize});
  }
  return moves;
}

void CalledTensors::gather_into(const BoundLayout& bound, const py::array& buffer) const {
  check(bound);
  std::byte* const packed = check_packed(buffer, bound, "buffer", Access::kWrite);
  check_environment();
  const WithoutGil nogil;
  Moves moves = this->moves(bound, packed, Direction::kToHost);
  copy_all(moves.on_host);
  if (!moves.between_gpu.empty()) copy_from_devices(std::move(moves.between_gpu));
}

void CalledTensors::scatter(const BoundLayout& bound, const py::array& buffer) const {
  check(bound);
  std::byte* const packed = check_packed(buffer, bound, "buffer", Access::kRead);
  check_environment();
  const WithoutGil nogil;
  Moves moves = this->moves(bound, packed, Direction::kToDevice);
  if (!moves.between_gpu.empty()) copy_to_devices(std::move(moves.between_gpu));
  copy_all(moves.on_host);
}

py::object CalledTensors::gpu() const {
  std::set<void*> contexts;
  std::set<void*> streams;
  DeviceMemory memory;
  for (const Tensor& tensor : tensors_) {
    if (!tensor.is_on_gpu) return py::none();
    if (tensor.stream == nullptr && tensor.size > 0)
      contexts.insert(memory.context_of(tensor.input));
    if (tensor.stream != nullptr && streams.insert(tensor.stream).second)
      contexts.insert(context_of_stream(tensor.stream));
  }
  // The memory of a tensor may have no context.
  if (contexts.size() != 1 || *contexts.begin() == nullptr) return py::none();
  return as_bytes(device_uuid(*contexts.begin()));
}

void CalledTensors::gather_into_segment(const BoundLayout& bound, const py::object& segment) const {
  move_segment(bound, segment_of(segment, bound.layout.nbytes(), true).data(), Direction::kToHost);
}

void CalledTensors::scatter_segment(const BoundLayout& bound, const py::object& segment) const {
  move_segment(bound, segment_of(segment, bound.layout.nbytes(), false).data(),
               Direction::kToDevice);
}

void CalledTensors::move_segment(const BoundLayout& bound, std::byte* segment,
                                 Direction direction) const {
  check(bound);
  Moves moves = this->moves(bound, segment, direction);
  if (!moves.on_host.empty()) throw std::runtime_error("expected tensors on a GPU");
  const WithoutGil nogil;
  copy_within_devices(std::move(moves.between_gpu), direction);
}

void CalledTensors::pass_on(const BoundLayout& bound) const {
  check(bound);
  const auto is_there = [](const Tensor& tensor) { return tensor.input == tensor.output; };
  if (std::ranges::all_of(tensors_, is_there)) return;
  const py::array buffer = new_array(bound.layout.nbytes());
  gather_into(bound, buffer);
  scatter(bound, buffer);
}

void CalledTensors::let_repeat(const BoundLayout& bound, const BoundRepeatedRequest& request,
                               MemberTurn& turn, double weight, double seconds) const {
  check(bound);
  const bool on_host = std::ranges::none_of(tensors_, &Tensor::is_on_gpu);
  if (op_ == 0 || !on_host) return;
  if (auto step = request.step(bound, weight, seconds)) turn.allow(op_, std::move(step));
}

PythonCall::PythonCall(const py::function& function, std::vector<py::dtype> dtypes)
    : function_(function, py::handle()), dtypes_(std::move(dtypes)), id_(next_id()) {
  calls().emplace(id_, this);
}

PythonCall::~PythonCall() {
  calls().erase(id_);
  MemberTurn::forget(id_);
}

void PythonCall::operator()(const CalledTensor* tensors, std::size_t count) const {
  if (count != dtypes_.size())
    throw std::invalid_argument("expected " + std::to_string(dtypes_.size()) + " tensors, got " +
                                std::to_string(count));
  const py::object function = function_();
  if (function.is_none()) throw std::runtime_error(kGone);
  const py::object called = py::cast(CalledTensors(id_, tensors, count, dtypes_));
  const ExpireAtEnd expire{called.cast<CalledTensors&>()};
  function(called);
}

StepStart start_step(std::int64_t id, const CalledTensor* tensors, std::size_t count) noexcept {
  const std::shared_ptr<MemberTurn> turn = MemberTurn::of(id);
  return turn == nullptr ? StepStart::kNot : turn->start(id, tensors, count);
}

bool call_python(std::int64_t id, const CalledTensor* tensors, std::size_t count, char* text,
                 std::size_t room) noexcept {
  const std::shared_ptr<MemberTurn> turn = MemberTurn::of(id);
  if (turn != nullptr && turn->finish(id, tensors, count)) return true;
  const WithGil gil;
  const EndStepAtEnd end{turn.get()};
  std::string reason;
  try {
    const auto found = calls().find(id);
    if (found == calls().end()) throw std::runtime_error(kGone);
    (*found->second)(tensors, count);
    return true;
  } catch (py::error_already_set& error) {
    try {
      reason = py::str(error.type().attr("__name__")).cast<std::string>() + ": " +
               py::str(error.value()).cast<std::string>();
    } catch (const std::exception&) {
      reason = "an error without a text";
    }
  } catch (const std::exception& error) {
    reason = error.what();
  }
  std::snprintf(text, room, "%s", reason.c_str());
  return false;
}

}  // namespace flatweights::bind
