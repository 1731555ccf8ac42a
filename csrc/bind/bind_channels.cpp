// The parts of channels for Python; see channels.hpp.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "channels.hpp"
#include "flatweights/message.hpp"
#include "flatweights/segment.hpp"
#include "offered_segment.hpp"
#include "owning_capsule.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {

namespace py = pybind11;

std::vector<KnownSegment> known_segments(const py::dict& known) {
  std::vector<KnownSegment> segments;
  for (const auto& [index, item] : known) {
    const auto [generation, segment] = py::cast<std::pair<std::uint32_t, PeerSegment>>(item);
    segments.push_back({py::cast<std::uint32_t>(index), generation, segment.file});
  }
  return segments;
}

namespace {

void release(const BoundMailbox& mailbox, Side holder, std::span<const Extent> extents) {
  for (const Extent& extent : extents) mailbox.box().drop_hold(holder, extent.segment);
}

// Returns a message's kind, views of its buffers, and its body. `segments` has generation and
// `PeerSegment` by index. An IndexError names a segment of the message that is not among them; then
// the message's extents stay held, since it may be read again. If a view cannot be made, nothing is
// held.
py::tuple read_message(const BoundMailbox& mailbox, bool of_worker, const py::dict& segments) {
  const Side reader = side_of(of_worker);
  const Message message(mailbox.box(), reader);
  const std::span<const Extent> extents = message.extents();
  std::vector<PeerSegment> memory;
  for (const Extent& extent : extents) {
    const py::int_ index(extent.segment);
    std::pair<std::uint32_t, py::object> known;
    if (segments.contains(index)) known = py::cast<decltype(known)>(segments[index]);
    if (!known.second || known.first != extent.generation)
      throw py::index_error("segment " + std::to_string(extent.segment) + ": expected generation " +
                            std::to_string(extent.generation) + ", got " +
                            (known.second ? std::to_string(known.first) : "none"));
    memory.push_back(py::cast<const PeerSegment&>(known.second));
  }
  py::list views(extents.size());
  for (std::size_t k = 0; k < extents.size(); ++k) {
    const Extent& extent = extents[k];
    try {
      views[k] = memory[k].view(mailbox, of_worker, extent.segment, extent.offset, extent.nbytes);
    } catch (...) {
      release(mailbox, reader, extents.subspan(k + 1));
      throw;
    }
  }
  return py::make_tuple(message.kind(), views, as_bytes(message.body()));
}

// The offset of `buffer` in the segment; -1 if it lies elsewhere.
py::ssize_t offset_of(const Segment& segment, const py::buffer& buffer) {
  const py::buffer_info info = buffer.request();
  const auto begin = reinterpret_cast<std::uintptr_t>(segment.file().data());
  const auto at = reinterpret_cast<std::uintptr_t>(info.ptr);
  if (at < begin || at >= begin + segment.file().size()) return -1;
  return static_cast<py::ssize_t>(at - begin);
}

}  // namespace

void bind_channels(py::module_& m) {
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
      .def(
          "wait",
          [](const BoundMailbox& s, double seconds, std::uint32_t call) {
            return s.await(seconds, call);
          },
          py::arg("seconds"), py::arg("call"))
      .def("read_message", &read_message, py::arg("of_worker"), py::arg("segments"))
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

  py::class_<BoundDoorbell, std::shared_ptr<BoundDoorbell>>(m, "Doorbell")
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
             if (s.door().count_down()) s.ring_bell();
           })
      .def("ring", &BoundDoorbell::ring)
      .def("hear", &BoundDoorbell::hear);

  py::class_<Segment, std::shared_ptr<Segment>>(m, "Segment")
      .def(py::init([](std::size_t nbytes) {
             return with_os_errors([nbytes] {
               const WithoutGil nogil;
               return std::make_shared<Segment>(nbytes);
             });
           }),
           py::arg("nbytes"))
      .def_property_readonly("nbytes", [](const Segment& s) { return s.file().size(); })
      .def_property_readonly("nonce", [](const Segment& s) { return as_bytes(s.file().nonce()); })
      .def_property_readonly("descriptor", [](const Segment& s) { return s.file().descriptor(); })
      .def("close_descriptor", [](const Segment& s) { s.file().close_descriptor(); })
      .def_property_readonly("is_taken", &Segment::is_taken)
      .def(
          "offer",
          [](const std::shared_ptr<Segment>& self, std::size_t nbytes) {
            if (nbytes > self->file().size())
              throw py::value_error("offer: expected at most " +
                                    std::to_string(self->file().size()) + " bytes, got " +
                                    std::to_string(nbytes));
            offer_segment(self, nbytes);
          },
          py::arg("nbytes"))
      // Leaves the segment free: for copies into a free segment, and out of one that is taken.
      .def("memory",
           [](const std::shared_ptr<Segment>& self) {
             return py::array_t<std::uint8_t>(
                 static_cast<py::ssize_t>(self->file().size()),
                 reinterpret_cast<std::uint8_t*>(self->file().data()),
                 owning_capsule(std::make_unique<std::shared_ptr<Segment>>(self)));
           })
      .def("offset_of", &offset_of, py::arg("buffer"));
  m.def("withdraw_offer", [] { offer_segment(nullptr, 0); });

  py::class_<PeerSegment>(m, "PeerSegment")
      .def(py::init(&PeerSegment::open), py::arg("descriptor"), py::arg("nonce"))
      .def_property_readonly("nbytes", [](const PeerSegment& s) { return s.file->size(); });

  m.attr("MAILBOX_BYTES") = Mailbox::kBytes;
}

}  // namespace flatweights::bind
