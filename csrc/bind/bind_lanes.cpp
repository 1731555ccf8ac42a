// Mailboxes, doorbells and windows for Python: each in a memory file of its own.
//
// The protocols are in mailbox.hpp, doorbell.hpp and window.hpp. This file adds Python's part: a
// thread releases the GIL while it sleeps, and signals wake it. A view of a peer's window holds
// that window, by the count in the mailbox, for exactly as long as any array over it lives. A
// forked process releases none of its parent's views. System errors are OSError with their number.
#include <fcntl.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#ifdef __linux__
#include <sys/eventfd.h>
#endif

#include <cerrno>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "flatweights/doorbell.hpp"
#include "flatweights/mailbox.hpp"
#include "flatweights/memory_file.hpp"
#include "flatweights/message.hpp"
#include "flatweights/window.hpp"
#include "memory_files.hpp"
#include "new_array.hpp"
#include "offered_window.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {

namespace py = pybind11;

namespace {

using Side = Mailbox::Side;

Side side_of(bool of_worker) { return of_worker ? Side::kWorker : Side::kDriver; }

void check_index(std::size_t index) {
  if (index >= Mailbox::kWindows)
    throw py::value_error("window: expected less than " + std::to_string(Mailbox::kWindows) +
                          ", got " + std::to_string(index));
}

// A file descriptor that its destructor closes.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {
    if (number < 0) with_os_errors([] { throw std::system_error(errno, std::system_category()); });
  }
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  [[nodiscard]] int number() const noexcept { return number_; }

 private:
  int number_;
};

// A doorbell in a memory file of its own, and the eventfd that it rings.
struct BoundDoorbell {
  std::shared_ptr<MemoryFile> file;
  Descriptor bell;

  [[nodiscard]] Doorbell& door() const { return *reinterpret_cast<Doorbell*>(file->data()); }

  static BoundDoorbell create() {
#ifdef __linux__
    const int bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
#else
    const int bell = -1;
    errno = ENOSYS;
#endif
    return {create_file(sizeof(Doorbell)), Descriptor(bell)};
  }

  static BoundDoorbell open(int descriptor, int bell, const py::bytes& nonce) {
    return {open_shared<Doorbell>(descriptor, nonce, "doorbell"),
            Descriptor(fcntl(bell, F_DUPFD_CLOEXEC, 0))};
  }

  // A write fails only if the driver is gone, or the eventfd is full: then the bell has rung.
  void ring() const {
    const std::uint64_t one = 1;
    if (write(bell.number(), &one, sizeof one) < 0) return;
  }

  // Returns whether it has rung since the last `hear`.
  [[nodiscard]] bool hear() const {
    std::uint64_t count = 0;
    return read(bell.number(), &count, sizeof count) > 0;
  }
};

// A mailbox in a memory file of its own.
struct BoundMailbox {
  std::shared_ptr<MemoryFile> file;

  [[nodiscard]] Mailbox& box() const { return *reinterpret_cast<Mailbox*>(file->data()); }

  static BoundMailbox create() { return {create_file(sizeof(Mailbox))}; }

  static BoundMailbox open(int descriptor, const py::bytes& nonce) {
    return {open_shared<Mailbox>(descriptor, nonce, "mailbox")};
  }

  [[nodiscard]] bool post(const py::bytes& command, std::uint32_t calls, bool wakes) const {
    switch (box().post(as_span(command), calls, wakes)) {
      case Mailbox::Posted::kExpected:
        return true;
      case Mailbox::Posted::kNeedsCall:
        return false;
      default:
        throw std::runtime_error("mailbox: not ready for a command of " +
                                 std::to_string(as_span(command).size()) + " bytes");
    }
  }

  static std::vector<Mailbox*> boxes_of(const py::list& mailboxes) {
    std::vector<Mailbox*> boxes;
    for (const py::handle mailbox : mailboxes)
      boxes.push_back(&py::cast<const BoundMailbox&>(mailbox).box());
    return boxes;
  }

  static void wake(const py::list& mailboxes) { Mailbox::wake(boxes_of(mailboxes)); }

  static bool watch(const py::list& mailboxes, std::size_t enough, double seconds) {
    const std::vector<Mailbox*> boxes = boxes_of(mailboxes);
    const WithoutGil nogil;  // the caller's list keeps the mailboxes alive
    return Mailbox::watch(boxes, enough, static_cast<std::int64_t>(seconds * 1e9));
  }

  [[nodiscard]] bool await(double seconds, std::uint32_t call) const {
    const auto nanoseconds = static_cast<std::int64_t>(seconds * 1e9);
    for (;;) {
      Mailbox::Awaited outcome;
      {
        const WithoutGil nogil;
        outcome = box().await(nanoseconds, call);
      }
      if (outcome != Mailbox::Awaited::kInterrupted) return outcome == Mailbox::Awaited::kTaken;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  }

  // `ends`: the call of Ray's that this answer ends; 0, if the worker stays.
  void answer_with(const py::bytes& answer, std::uint32_t ends) const {
    if (box().state() != Mailbox::State::kBusy) throw std::runtime_error("mailbox: no command");
    if (as_span(answer).size() > Mailbox::kBytes)
      throw py::value_error("answer: expected at most " + std::to_string(Mailbox::kBytes) +
                            " bytes, got " + std::to_string(as_span(answer).size()));
    if (ends == 0)
      box().answer_and_stay(as_span(answer));
    else
      box().answer_and_leave(as_span(answer), ends);
  }
};

// One view of a peer's window: counted in the mailbox until it is gone.
struct Hold {
  std::shared_ptr<MemoryFile> window;
  std::shared_ptr<MemoryFile> mailbox;
  Side holder;
  std::size_t index;
  pid_t process;  // a forked child has copies of its parent's views, which count once

  ~Hold() {
    if (process == getpid()) reinterpret_cast<Mailbox*>(mailbox->data())->drop_hold(holder, index);
  }
};

struct PeerWindow {
  std::shared_ptr<MemoryFile> file;

  static PeerWindow open(int descriptor, const py::bytes& nonce) {
    return {open_file(descriptor, nonce, MemoryFile::Access::kRead)};
  }

  [[nodiscard]] py::array view(const BoundMailbox& mailbox, bool of_worker, std::size_t index,
                               std::size_t offset, std::size_t nbytes) const {
    if (offset > file->size() || nbytes > file->size() - offset)
      throw py::value_error("window " + std::to_string(index) + ": expected at most " +
                            std::to_string(file->size()) + " bytes, got " + std::to_string(offset) +
                            " + " + std::to_string(nbytes));
    auto* const hold = new Hold{file, mailbox.file, side_of(of_worker), index, getpid()};
    const py::capsule owner(hold, kOwner, [](void* object) { delete static_cast<Hold*>(object); });
    py::array array(py::dtype::of<std::uint8_t>(), {static_cast<py::ssize_t>(nbytes)},
                    {py::ssize_t{1}}, reinterpret_cast<const std::uint8_t*>(file->data()) + offset,
                    owner);
    py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    return array;
  }
};

void release(const BoundMailbox& mailbox, Side holder, std::span<const Extent> extents) {
  for (const Extent& extent : extents) mailbox.box().drop_hold(holder, extent.window);
}

// Returns a message's kind, views of its buffers, and its body. `windows` has generation and
// `PeerWindow` by index. An IndexError names a window of the message that is not among them; then
// the message's extents stay held, since it may be read again. If a view cannot be made, nothing is
// held.
py::tuple read_message(const BoundMailbox& mailbox, bool of_worker, const py::dict& windows) {
  const Side reader = side_of(of_worker);
  const Message message(mailbox.box(), reader);
  const std::span<const Extent> extents = message.extents();
  std::vector<PeerWindow> memory;
  for (const Extent& extent : extents) {
    const py::int_ index(extent.window);
    std::pair<std::uint32_t, py::object> known;
    if (windows.contains(index)) known = py::cast<decltype(known)>(windows[index]);
    if (!known.second || known.first != extent.generation)
      throw py::index_error("window " + std::to_string(extent.window) + ": expected generation " +
                            std::to_string(extent.generation) + ", got " +
                            (known.second ? std::to_string(known.first) : "none"));
    memory.push_back(py::cast<const PeerWindow&>(known.second));
  }
  py::list views(extents.size());
  for (std::size_t k = 0; k < extents.size(); ++k) {
    const Extent& extent = extents[k];
    try {
      views[k] = memory[k].view(mailbox, of_worker, extent.window, extent.offset, extent.nbytes);
    } catch (...) {
      release(mailbox, reader, extents.subspan(k));
      throw;
    }
  }
  return py::make_tuple(message.kind(), views, as_bytes(message.body()));
}

// The offset of `buffer` in the window; -1 if it lies elsewhere.
py::ssize_t offset_of(const Window& window, const py::buffer& buffer) {
  const py::buffer_info info = buffer.request();
  const auto begin = reinterpret_cast<std::uintptr_t>(window.file().data());
  const auto at = reinterpret_cast<std::uintptr_t>(info.ptr);
  if (at < begin || at >= begin + window.file().size()) return -1;
  return static_cast<py::ssize_t>(at - begin);
}

}  // namespace

void bind_lanes(py::module_& m) {
  py::class_<BoundMailbox>(m, "Mailbox")
      .def(py::init(&BoundMailbox::create))
      .def_static("open", &BoundMailbox::open, py::arg("descriptor"), py::arg("nonce"))
      .def_property_readonly("nonce",
                             [](const BoundMailbox& s) { return as_bytes(s.file->nonce()); })
      .def_property_readonly("descriptor",
                             [](const BoundMailbox& s) { return s.file->descriptor(); })
      .def("close_descriptor", [](const BoundMailbox& s) { s.file->close_descriptor(); })
      .def_property_readonly("is_answered",
                             [](const BoundMailbox& s) { return s.box().is_answered(); })
      .def_static("watch", &BoundMailbox::watch, py::arg("mailboxes"), py::arg("enough"),
                  py::arg("seconds"))
      .def("post", &BoundMailbox::post, py::arg("command"), py::arg("calls"),
           py::arg("wakes") = true)
      .def_static("wake", &BoundMailbox::wake, py::arg("mailboxes"))
      .def("withdraw", [](const BoundMailbox& s) { return s.box().withdraw(); })
      .def(
          "dismiss", [](const BoundMailbox& s, std::uint32_t calls) { s.box().dismiss(calls); },
          py::arg("calls"))
      .def(
          "enter", [](const BoundMailbox& s, std::uint32_t call) { s.box().enter(call); },
          py::arg("call"))
      .def("wait", &BoundMailbox::await, py::arg("seconds"), py::arg("call"))
      .def("read_message", &read_message, py::arg("of_worker"), py::arg("windows"))
      .def(
          "release_message",
          [](const BoundMailbox& s, bool of_worker) {
            const Side reader = side_of(of_worker);
            release(s, reader, Message(s.box(), reader).extents());
          },
          py::arg("of_worker"))
      .def("answer_with", &BoundMailbox::answer_with, py::arg("answer"), py::arg("ends"))
      .def(
          "holds",
          [](const BoundMailbox& s, bool of_worker, std::size_t index) {
            check_index(index);
            return s.box().holds(side_of(of_worker), index);
          },
          py::arg("of_worker"), py::arg("index"))
      .def(
          "add_hold",
          [](const BoundMailbox& s, bool of_worker, std::size_t index) {
            check_index(index);
            s.box().add_hold(side_of(of_worker), index);
          },
          py::arg("of_worker"), py::arg("index"))
      .def(
          "drop_hold",
          [](const BoundMailbox& s, bool of_worker, std::size_t index) {
            check_index(index);
            s.box().drop_hold(side_of(of_worker), index);
          },
          py::arg("of_worker"), py::arg("index"));

  py::class_<BoundDoorbell>(m, "Doorbell")
      .def(py::init(&BoundDoorbell::create))
      .def_static("open", &BoundDoorbell::open, py::arg("descriptor"), py::arg("bell"),
                  py::arg("nonce"))
      .def_property_readonly("nonce",
                             [](const BoundDoorbell& s) { return as_bytes(s.file->nonce()); })
      .def_property_readonly("descriptor",
                             [](const BoundDoorbell& s) { return s.file->descriptor(); })
      .def("fileno", [](const BoundDoorbell& s) { return s.bell.number(); })
      .def(
          "arm", [](const BoundDoorbell& s, std::uint32_t missing) { s.door().arm(missing); },
          py::arg("missing"))
      .def("count_down",
           [](const BoundDoorbell& s) {
             if (s.door().count_down()) s.ring();
           })
      .def("ring", &BoundDoorbell::ring)
      .def("hear", &BoundDoorbell::hear);

  py::class_<Window, std::shared_ptr<Window>>(m, "Window")
      .def(py::init([](std::size_t nbytes) {
             return with_os_errors([nbytes] {
               const WithoutGil nogil;
               return std::make_shared<Window>(nbytes);
             });
           }),
           py::arg("nbytes"))
      .def_property_readonly("nbytes", [](const Window& s) { return s.file().size(); })
      .def_property_readonly("nonce", [](const Window& s) { return as_bytes(s.file().nonce()); })
      .def_property_readonly("descriptor", [](const Window& s) { return s.file().descriptor(); })
      .def("close_descriptor", [](const Window& s) { s.file().close_descriptor(); })
      .def_property_readonly("is_taken", &Window::is_taken)
      .def(
          "offer",
          [](const std::shared_ptr<Window>& self, std::size_t nbytes) {
            if (nbytes > self->file().size())
              throw py::value_error("offer: expected at most " +
                                    std::to_string(self->file().size()) + " bytes, got " +
                                    std::to_string(nbytes));
            offer_window(self, nbytes);
          },
          py::arg("nbytes"))
      // Leaves the window free: for copies into a free window, and out of one that is taken.
      .def("memory",
           [](const std::shared_ptr<Window>& self) {
             auto* const kept = new std::shared_ptr<Window>(self);
             const py::capsule owner(
                 kept, [](void* object) { delete static_cast<std::shared_ptr<Window>*>(object); });
             return py::array_t<std::uint8_t>(static_cast<py::ssize_t>(self->file().size()),
                                              reinterpret_cast<std::uint8_t*>(self->file().data()),
                                              owner);
           })
      .def("offset_of", &offset_of, py::arg("buffer"));
  m.def("withdraw_offer", [] { offer_window(nullptr, 0); });

  py::class_<PeerWindow>(m, "PeerWindow")
      .def(py::init(&PeerWindow::open), py::arg("descriptor"), py::arg("nonce"))
      .def_property_readonly("nbytes", [](const PeerWindow& s) { return s.file->size(); });

  m.attr("MAILBOX_BYTES") = Mailbox::kBytes;
}

}  // namespace flatweights::bind
