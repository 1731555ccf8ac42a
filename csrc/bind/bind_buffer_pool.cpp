#include <pybind11/pybind11.h>

#include "bindings.hpp"
#include "flatweights/buffer_pool.hpp"
#include "new_array.hpp"
#include "offered_segment.hpp"

namespace flatweights::bind {

namespace py = pybind11;

py::array_t<std::uint8_t> new_array(std::size_t nbytes) {
  if (std::shared_ptr<Segment> segment = take_offered_segment(nbytes))
    return array_over(std::move(segment), nbytes);
  auto* const buffer = new Buffer(take_buffer(nbytes));
  const py::capsule owner(buffer, kOwner, [](void* object) {
    auto* const given = static_cast<Buffer*>(object);
    give_buffer(*given);
    delete given;
  });
  return py::array_t<std::uint8_t>(static_cast<py::ssize_t>(nbytes),
                                   reinterpret_cast<std::uint8_t*>(buffer->memory), owner);
}

void bind_buffer_pool(py::module_& m) {
  m.def("empty", &new_array, py::arg("nbytes"));
  // Whether an array's base is a capsule that returns its memory to the pool, or a segment.
  m.def(
      "is_pooled", [](py::handle base) { return PyCapsule_IsValid(base.ptr(), kOwner) != 0; },
      py::arg("base"));
  m.def("clear_pool", &clear_buffers);
  m.def("get_pool_limit", &most_kept);
  m.def("pool_bytes", &kept_bytes);
}

}  // namespace flatweights::bind
