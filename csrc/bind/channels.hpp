// Mailboxes, doorbells and segments for Python: each in a memory file of its own.
//
// The protocols are in mailbox.hpp, doorbell.hpp and segment.hpp. This file adds Python's part: a
// thread releases the GIL while it sleeps, and signals wake it. A view of a peer's segment holds
// that segment, by the count in the mailbox, for exactly as long as any array over it lives. A
// forked process releases none of its parent's views. System errors are OSError with their number.
#pragma once

#include <fcntl.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "checks.hpp"
#include "flatweights/answers.hpp"
#include "flatweights/doorbell.hpp"
#include "flatweights/mailbox.hpp"
#include "flatweights/memory_file.hpp"
#include "memory_files.hpp"
#include "new_array.hpp"
#include "owning_capsule.hpp"
#include "seconds.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {

namespace py = pybind11;

using Side = Mailbox::Side;

inline Side side_of(bool of_worker) { return of_worker ? Side::kWorker : Side::kDriver; }

inline void check_index(std::size_t index) {
  if (index >= Mailbox::kSegments)
    throw py::value_error("segment: expected less than " + std::to_string(Mailbox::kSegments) +
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
  // Whether a thread of this process has rung since `RepeatedCalls.run` last ended for that.
  std::shared_ptr<std::atomic<bool>> queued = std::make_shared<std::atomic<bool>>(false);

  [[nodiscard]] Doorbell& door() const { return *reinterpret_cast<Doorbell*>(file->data()); }

  static BoundDoorbell create() {
    Descriptor bell(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));  // first: `errno` is of this call
    return {create_file(sizeof(Doorbell)), std::move(bell)};
  }

  static BoundDoorbell open(int descriptor, int bell, const py::bytes& nonce) {
    return {open_shared<Doorbell>(descriptor, nonce, "doorbell"),
            Descriptor(fcntl(bell, F_DUPFD_CLOEXEC, 0))};
  }

  // A write fails only if the driver is gone, or the eventfd is full: then the bell has rung.
  void ring() const {
    queued->store(true);
    ring_bell();
  }

  void ring_bell() const {
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
    return Mailbox::watch(boxes, enough, nanoseconds_of(seconds).count());
  }

  // Polls for the first `watch` seconds; see `Mailbox::await`.
  [[nodiscard]] bool await(double seconds, std::uint32_t call, double watch = 0.0) const {
    const auto end = in_seconds(seconds);
    const auto watched = in_seconds(watch);
    for (;;) {
      Mailbox::Awaited outcome;
      {
        const WithoutGil nogil;
        outcome = box().await(end, call, watched);
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

// One view of a peer's segment: counted in the mailbox until it is gone.
struct Hold {
  std::shared_ptr<MemoryFile> segment;
  std::shared_ptr<MemoryFile> mailbox;
  Side holder;
  std::size_t index;
  pid_t process;  // a forked child has copies of its parent's views, which count once

  ~Hold() {
    if (process == getpid()) reinterpret_cast<Mailbox*>(mailbox->data())->drop_hold(holder, index);
  }
};

struct PeerSegment {
  std::shared_ptr<MemoryFile> file;

  static PeerSegment open(int descriptor, const py::bytes& nonce) {
    return {open_file(descriptor, nonce, MemoryFile::Access::kRead)};
  }

  // Takes over the hold of the segment that a message brought: it ends with the view, or with the
  // error if there is none.
  [[nodiscard]] py::array view(const BoundMailbox& mailbox, bool of_worker, std::size_t index,
                               std::size_t offset, std::size_t nbytes) const {
    std::unique_ptr<Hold> hold(new Hold{file, mailbox.file, side_of(of_worker), index, getpid()});
    if (offset > file->size() || nbytes > file->size() - offset)
      throw py::value_error("segment " + std::to_string(index) + ": expected at most " +
                            std::to_string(file->size()) + " bytes, got " + std::to_string(offset) +
                            " + " + std::to_string(nbytes));
    py::array array(py::dtype::of<std::uint8_t>(), {static_cast<py::ssize_t>(nbytes)},
                    {py::ssize_t{1}}, reinterpret_cast<const std::uint8_t*>(file->data()) + offset,
                    owning_capsule(std::move(hold), kOwner));
    py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    return array;
  }
};

// The segments of `known`: generation and `PeerSegment` by index, as in `read_message`.
std::vector<KnownSegment> known_segments(const py::dict& known);

}  // namespace flatweights::bind
