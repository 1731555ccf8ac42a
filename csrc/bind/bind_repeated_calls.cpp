// The two ends of calls that the members of a process group repeat, for Python.
//
// The protocol is in repeated_calls.hpp. Both ends run without the GIL; what keeps their memory
// alive is here.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "channels.hpp"
#include "checks.hpp"
#include "flatweights/message.hpp"
#include "flatweights/repeated_calls.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {

namespace py = pybind11;

namespace {

// A member's end of a call that it repeats.
class BoundRepeatedRequest {
 public:
  // Segment, generation, offset and bytes of a model.
  using Position = std::tuple<std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t>;

  // `segments`: as in `read_message`. `extent`: where the member's model is, in a segment of its
  // own; none, if it sends none.
  BoundRepeatedRequest(BoundMailbox mailbox, std::shared_ptr<BoundDoorbell> bell, py::dict segments,
                       std::uint64_t call, const std::optional<Position>& extent)
      : mailbox_(std::move(mailbox)),
        bell_(std::move(bell)),
        segments_(std::move(segments)),
        call_(call) {
    if (!extent) return;
    const auto [segment, generation, offset, nbytes] = *extent;
    check_index(segment);
    extent_ = Extent{segment, generation, offset, nbytes};
  }

  // Asks, and waits for at most `seconds`. Returns number and seconds of the response, and its
  // weights; None, if nothing was sent, since the coordinator still holds the segment; True, if the
  // coordinator has told something else, which is to be read; False, if it has told nothing.
  [[nodiscard]] py::object exchange(double weight, double seconds) const {
    Mailbox& box = mailbox_.box();
    if (box.state() != Mailbox::State::kBusy) throw std::runtime_error("mailbox: no command");
    if (extent_ && box.holds(Side::kDriver, extent_->segment) != 0) return py::none();
    send(weight);
    box.enter(kStay);
    if (!mailbox_.await(seconds, kStay)) return py::bool_(false);
    try {
      const Message message(box, Side::kWorker);
      const auto view = view_of(message);
      if (!view) return py::bool_(true);
      Repeated told;
      std::memcpy(&told, message.body().data(), sizeof told);
      return py::make_tuple(told.number, told.waited, told.averaged, *view);
    } catch (const std::invalid_argument&) {  // it is malformed, which its reader says
      return py::bool_(true);
    }
  }

 private:
  static constexpr std::uint32_t kStay = 1;  // a member is in one call of the protocol for ever

  void send(double weight) const {
    struct {
      std::uint32_t kind = kRepeat, count = 0;
      std::array<std::byte, sizeof(Extent) + sizeof(Repeat)> rest;
    } message;
    std::size_t size = 2 * sizeof(std::uint32_t);
    const auto add = [&](const auto& part) {
      std::memcpy(reinterpret_cast<std::byte*>(&message) + size, &part, sizeof part);
      size += sizeof part;
    };
    if (extent_) {
      message.count = 1;
      add(*extent_);
      mailbox_.box().add_hold(Side::kDriver, extent_->segment);
    }
    add(Repeat{call_, weight});
    mailbox_.box().answer_and_stay(std::as_bytes(std::span(&message, 1)).first(size));
    if (bell_->door().count_down()) bell_->ring_bell();
  }

  // The weights of a response; nothing, if it is of another kind, or its segment is not known yet.
  [[nodiscard]] std::optional<py::array> view_of(const Message& message) const {
    const bool is_response = message.kind() == kRepeated && message.extents().size() == 1 &&
                             message.body().size() == sizeof(Repeated);
    if (!is_response) return {};
    const Extent& extent = message.extents().front();
    const py::int_ index(extent.segment);
    if (!segments_.contains(index)) return {};
    const auto [generation, segment] =
        py::cast<std::pair<std::uint32_t, PeerSegment>>(segments_[index]);
    if (generation != extent.generation) return {};
    return segment.view(mailbox_, true, extent.segment, extent.offset, extent.nbytes);
  }

  BoundMailbox mailbox_;
  std::shared_ptr<BoundDoorbell> bell_;
  py::dict segments_;
  std::uint64_t call_;
  std::optional<Extent> extent_;
};

// Calls that the members of a process group repeat, with what keeps their memory alive.
class BoundRepeatedCalls {
 public:
  // `segments`: by member, generation and `PeerSegment` by index, as in `read_message`.
  BoundRepeatedCalls(const py::list& mailboxes, py::list segments)
      : calls_(BoundMailbox::boxes_of(mailboxes)), mailboxes_(mailboxes), segments_(segments) {
    if (mailboxes.empty() || mailboxes.size() != segments.size())
      throw py::value_error("expected the segments of at least one mailbox");
  }

  // `results`: two tuples of index and generation of a segment, offset in it, and array over it.
  void prepare(std::uint64_t call, const BoundLayout& bound, const py::list& results,
               std::optional<std::size_t> root, bool takes_nonfinite,
               const std::vector<std::optional<double>>& timeouts) {
    check_environment();
    RepeatedCalls::Prepared prepared{call, bound.layout, root, takes_nonfinite, {}, {}};
    for (const std::optional<double>& timeout : timeouts)
      prepared.timeouts.push_back(timeout.value_or(std::numeric_limits<double>::infinity()));
    if (results.size() != 2) throw py::value_error("results: expected two");
    py::list arrays;
    for (std::size_t k = 0; k < 2; ++k) {
      using Item = std::tuple<std::uint32_t, std::uint32_t, std::uint64_t, py::array>;
      const auto [segment, generation, offset, array] = py::cast<Item>(results[k]);
      check_index(segment);
      std::byte* const memory = check_packed(array, bound, "result", Access::kWrite);
      prepared.results[k] = {memory, {segment, generation, offset, bound.layout.nbytes()}};
      arrays.append(array);
    }
    calls_.prepare(std::move(prepared));
    arrays_[py::int_(call)] = arrays;
  }

  void forget(std::uint64_t call) {
    calls_.forget(call);
    if (arrays_.contains(py::int_(call))) PyDict_DelItem(arrays_.ptr(), py::int_(call).ptr());
  }

  // Returns the reason for the end; the number of calls; the seconds waited for the next, and the
  // times at which messages of that one were seen; and what has come of each call that was made:
  // its number as prepared, the number of its last response and the position of that, how often it
  // was made, the seconds waited and averaged the last time, and these in all.
  py::tuple run(std::int64_t number, double seconds, const BoundDoorbell& bell, int poll,
                std::vector<double> seen_before) {
    know_segments();
    const Sleep sleep{&bell.door(), bell.bell.number(), poll};
    RepeatedCalls::Ended ended;
    {
      const WithoutGil nogil;
      ended = calls_.run(number, seconds, sleep, *bell.queued, std::move(seen_before));
    }
    if (ended == RepeatedCalls::Ended::kQueue) bell.queued->store(false);
    py::list made;
    for (const RepeatedCalls::Prepared& call : calls_.prepared())
      if (call.count != 0)
        made.append(py::make_tuple(call.call, call.told.number, call.last, call.count,
                                   call.told.waited, call.told.averaged, call.waited,
                                   call.averaged));
    const auto seen = calls_.seen();
    return py::make_tuple(static_cast<int>(ended), calls_.count(), calls_.pending(),
                          std::vector<double>(seen.begin(), seen.end()), made);
  }

 private:
  // A member's segments are few, and seldom new.
  void know_segments() {
    for (std::size_t k = 0; k < segments_.size(); ++k)
      calls_.know(k, known_segments(segments_[k].cast<py::dict>()));
  }

  RepeatedCalls calls_;
  py::list mailboxes_, segments_;
  py::dict arrays_;
};

}  // namespace

void bind_repeated_calls(py::module_& m) {
  py::class_<BoundRepeatedRequest>(m, "RepeatedRequest")
      .def(py::init<BoundMailbox, std::shared_ptr<BoundDoorbell>, py::dict, std::uint64_t,
                    const std::optional<BoundRepeatedRequest::Position>&>(),
           py::arg("mailbox"), py::arg("doorbell"), py::arg("segments"), py::arg("call"),
           py::arg("extent"))
      .def("exchange", &BoundRepeatedRequest::exchange, py::arg("weight"), py::arg("seconds"));

  py::class_<BoundRepeatedCalls>(m, "RepeatedCalls")
      .def(py::init<const py::list&, py::list>(), py::arg("mailboxes"), py::arg("segments"))
      .def("prepare", &BoundRepeatedCalls::prepare, py::arg("call"), py::arg("layout"),
           py::arg("results"), py::arg("root"), py::arg("takes_nonfinite"), py::arg("timeouts"))
      .def("forget", &BoundRepeatedCalls::forget, py::arg("call"))
      .def("run", &BoundRepeatedCalls::run, py::arg("number"), py::arg("seconds"),
           py::arg("doorbell"), py::arg("poll"), py::arg("seen"));
}

}  // namespace flatweights::bind
