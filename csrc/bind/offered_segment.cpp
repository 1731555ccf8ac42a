#include "offered_segment.hpp"

#include <unistd.h>

#include <utility>

#include "new_array.hpp"

namespace flatweights::bind {

namespace py = pybind11;

namespace {

struct Offer {
  std::shared_ptr<Segment> segment;
  std::size_t nbytes = 0;
  pid_t process = 0;  // a forked process has a copy, and ignores it
};

thread_local Offer offered;

}  // namespace

void offer_segment(std::shared_ptr<Segment> segment, std::size_t nbytes) {
  offered = Offer{std::move(segment), nbytes, getpid()};
}

std::shared_ptr<Segment> take_offered_segment(std::size_t nbytes) {
  if (offered.segment == nullptr || offered.nbytes != nbytes) return {};
  if (offered.process != getpid() || !offered.segment->take()) return {};
  return std::exchange(offered, Offer{}).segment;
}

py::array_t<std::uint8_t> array_over(std::shared_ptr<Segment> segment, std::size_t nbytes) {
  auto* const memory = reinterpret_cast<std::uint8_t*>(segment->file().data());
  auto* const kept = new std::shared_ptr<Segment>(std::move(segment));
  const py::capsule owner(kept, kOwner, [](void* object) {
    auto* const given = static_cast<std::shared_ptr<Segment>*>(object);
    (*given)->give();
    delete given;
  });
  return py::array_t<std::uint8_t>(static_cast<py::ssize_t>(nbytes), memory, owner);
}

}  // namespace flatweights::bind
