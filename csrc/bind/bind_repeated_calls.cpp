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
#include "flatweights/repeated_calls.hpp"
#include "member_turn.hpp"
#include "repeated_request.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {

namespace py = pybind11;

namespace {

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
  py::class_<MemberTurn, std::shared_ptr<MemberTurn>>(m, "MemberTurn")
      .def(py::init<>())
      .def("__enter__", &MemberTurn::take)
      .def("__exit__", [](MemberTurn& turn, const py::args&) { turn.give_back(); })
      .def_property_readonly("is_taken", &MemberTurn::is_taken)
      .def_property_readonly("is_own", &MemberTurn::is_own)
      .def_property_readonly("is_left", &MemberTurn::is_left)
      .def("resume", &MemberTurn::resume)
      .def("give_back", &MemberTurn::give_back)
      .def("forget_steps", &MemberTurn::forget_steps);

  py::class_<BoundRepeatedRequest>(m, "RepeatedRequest")
      .def(py::init<BoundMailbox, std::shared_ptr<BoundDoorbell>, py::dict, std::uint64_t,
                    std::size_t, const std::optional<BoundRepeatedRequest::Position>&,
                    std::shared_ptr<Segment>>(),
           py::arg("mailbox"), py::arg("doorbell"), py::arg("segments"), py::arg("call"),
           py::arg("size"), py::arg("extent"), py::arg("segment"))
      .def_property_readonly("may_ask", &BoundRepeatedRequest::may_ask)
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
