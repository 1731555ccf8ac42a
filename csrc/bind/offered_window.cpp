#include "offered_window.hpp"

#include <unistd.h>

#include <utility>

#include "new_array.hpp"

namespace flatweights::bind {

namespace py = pybind11;

namespace {

struct Offer {
  std::shared_ptr<Window> window;
  std::size_t nbytes = 0;
  pid_t process = 0;  // a forked process has a copy, and ignores it
};

thread_local Offer offered;

}  // namespace

void offer_window(std::shared_ptr<Window> window, std::size_t nbytes) {
  offered = Offer{std::move(window), nbytes, getpid()};
}

std::shared_ptr<Window> take_offered_window(std::size_t nbytes) {
  if (offered.window == nullptr || offered.nbytes != nbytes) return {};
  if (offered.process != getpid() || !offered.window->take()) return {};
  return std::exchange(offered, Offer{}).window;
}

py::array_t<std::uint8_t> array_over(std::shared_ptr<Window> window, std::size_t nbytes) {
  auto* const memory = reinterpret_cast<std::uint8_t*>(window->file().data());
  auto* const kept = new std::shared_ptr<Window>(std::move(window));
  const py::capsule owner(kept, kOwner, [](void* object) {
    auto* const given = static_cast<std::shared_ptr<Window>*>(object);
    (*given)->give();
    delete given;
  });
  return py::array_t<std::uint8_t>(static_cast<py::ssize_t>(nbytes), memory, owner);
}

}  // namespace flatweights::bind
