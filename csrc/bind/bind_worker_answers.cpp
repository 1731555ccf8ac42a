// The answers of a group's workers, for Python; see worker_answers.hpp.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "channels.hpp"
#include "checks.hpp"
#include "flatweights/worker_answers.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {

namespace py = pybind11;

namespace {

// The answers of workers, with what keeps their mailboxes alive.
class BoundWorkerAnswers {
 public:
  // `segments`: by worker, generation and `PeerSegment` by index, as in `read_message`.
  BoundWorkerAnswers(const py::list& mailboxes, py::list segments, const BoundLayout& bound,
                     const py::bytes& digest)
      : answers_(BoundMailbox::boxes_of(mailboxes), bound.layout, std::string(digest)),
        mailboxes_(mailboxes),
        segments_(std::move(segments)),
        bound_(bound) {
    if (mailboxes.empty() || mailboxes.size() != segments_.size())
      throw py::value_error("expected the segments of at least one mailbox");
  }

  // The content of a command, and its extents.
  using Command = std::pair<
      py::bytes,
      std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t>>>;

  // Returns the positions of the workers whose command needs a Ray call; None, unless all commands
  // were posted. By worker: the command, and the number of Ray calls.
  py::object post(const std::vector<Command>& commands, const std::vector<std::uint32_t>& calls) {
    if (calls.size() != commands.size())
      throw py::value_error("expected a command for each worker");
    std::vector<WorkerAnswers::Command> all;
    all.reserve(commands.size());
    for (std::size_t k = 0; k < commands.size(); ++k) {
      const auto& [content, extents] = commands[k];
      std::vector<std::uint32_t> held;
      for (const auto& extent : extents) {
        held.push_back(std::get<0>(extent));
        check_index(held.back());
      }
      all.push_back({as_span(content), std::move(held), calls[k]});
    }
    const auto uncalled = answers_.post(all);
    if (!uncalled) return py::none();
    return py::cast(*uncalled);
  }

  // Returns the seconds of the wait and of the average once the mean is in `out`; None if the
  // answers, of which none is read then, are to be waited for and read one by one.
  py::object mean(const py::array& out, const std::vector<double>& weights, bool takes_nonfinite,
                  double watch, double seconds, const BoundDoorbell& bell, int poll) {
    std::byte* const memory = check_packed(out, bound_, "out", Access::kWrite);
    check_environment();
    for (std::size_t k = 0; k < segments_.size(); ++k)
      answers_.know(k, known_segments(segments_[k].cast<py::dict>()));
    const bool is_made = wait(bell, poll, [&](const Sleep& sleep) {
      return answers_.mean(weights, takes_nonfinite, {watch, seconds}, sleep, memory);
    });
    if (!is_made) return py::none();
    return py::make_tuple(answers_.waited(), answers_.averaged());
  }

  // Returns the seconds of the wait once all have answered `value`; None as `mean`.
  py::object values(const py::bytes& value, double watch, double seconds, const BoundDoorbell& bell,
                    int poll) {
    const std::string expected(value);
    const bool are_there = wait(bell, poll, [&](const Sleep& sleep) {
      return answers_.values(expected, {watch, seconds}, sleep);
    });
    if (!are_there) return py::none();
    return py::float_(answers_.waited());
  }

  bool were_read() const { return answers_.were_read(); }
  std::uint64_t posts() const { return answers_.posts(); }
  void note_read() { answers_.note_read(); }

 private:
  // Returns whether all have answered; signals end the wait.
  template <class Wait>
  bool wait(const BoundDoorbell& bell, int poll, Wait wait_at) {
    const Sleep sleep{&bell.door(), bell.bell.number(), poll};
    WorkerAnswers::Ended ended;
    {
      const WithoutGil nogil;
      ended = wait_at(sleep);
    }
    if (ended == WorkerAnswers::Ended::kInterrupted && PyErr_CheckSignals() != 0)
      throw py::error_already_set();
    return ended == WorkerAnswers::Ended::kAll;
  }

  WorkerAnswers answers_;
  py::list mailboxes_, segments_;
  BoundLayout bound_;
};

}  // namespace

void bind_worker_answers(py::module_& m) {
  py::class_<BoundWorkerAnswers>(m, "WorkerAnswers")
      .def(py::init<const py::list&, py::list, const BoundLayout&, const py::bytes&>(),
           py::arg("mailboxes"), py::arg("segments"), py::arg("layout"), py::arg("digest"))
      .def_property_readonly("were_read", &BoundWorkerAnswers::were_read)
      .def_property_readonly("posts", &BoundWorkerAnswers::posts)
      .def("note_read", &BoundWorkerAnswers::note_read)
      .def("post", &BoundWorkerAnswers::post, py::arg("commands"), py::arg("calls"))
      .def("mean", &BoundWorkerAnswers::mean, py::arg("out"), py::arg("weights"),
           py::arg("takes_nonfinite"), py::arg("watch"), py::arg("seconds"), py::arg("doorbell"),
           py::arg("poll"))
      .def("values", &BoundWorkerAnswers::values, py::arg("value"), py::arg("watch"),
           py::arg("seconds"), py::arg("doorbell"), py::arg("poll"));
}

}  // namespace flatweights::bind
