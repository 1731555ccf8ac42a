// Publications for Python: the writer's side, and a reader's.
//
// The protocol is in publication.hpp. This file adds Python's part: a slot is held for exactly as
// long as an array over it lives, so memory that Python still uses is never written. A forked
// process releases none of its parent's holds.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings.hpp"
#include "flatweights/publication.hpp"
#include "memory_files.hpp"
#include "owning_capsule.hpp"
#include "seconds.hpp"
#include "without_gil.hpp"

namespace flatweights::bind {

namespace py = pybind11;

namespace {

constexpr std::size_t kPage = 4096;

// The distance between two slots: each begins at a page, so that no two share a page.
std::size_t stride_of(std::size_t nbytes) {
  if (nbytes > (std::size_t{1} << 48))
    throw py::value_error("nbytes: expected at most 2**48, got " + std::to_string(nbytes));
  return std::max<std::size_t>(1, (nbytes + kPage - 1) / kPage) * kPage;
}

// The clock of Python's time.monotonic, the same in all processes of a machine.
std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

py::array array_over(std::byte* memory, std::size_t nbytes, const py::capsule& owner) {
  return py::array_t<std::uint8_t>(static_cast<py::ssize_t>(nbytes),
                                   reinterpret_cast<const std::uint8_t*>(memory), owner);
}

// A publication in a memory file of its own, its slots in another. Pages of a slot are allocated
// when it is used first: usually two slots suffice.
class BoundPublication {
 public:
  explicit BoundPublication(std::size_t nbytes) : nbytes_(nbytes) {
    const std::size_t stride = stride_of(nbytes);
    with_os_errors([stride] { check_free_memory(kAhead * stride); });
    control_ = create_file(sizeof(Publication));
    data_ = create_file(stride * Publication::kSlots, MemoryFile::Pages::kLater);
    with_os_errors([this] {
      const WithoutGil nogil;
      for (std::uint32_t slot = 0; slot < kAhead; ++slot) reserve(*data_, slot);
    });
  }

  [[nodiscard]] Publication& word() const {
    return *reinterpret_cast<Publication*>(control_->data());
  }
  [[nodiscard]] const MemoryFile& control() const { return *control_; }
  [[nodiscard]] const std::shared_ptr<MemoryFile>& data() const {
    if (!data_) throw std::runtime_error("publication: it was closed");
    return data_;
  }
  [[nodiscard]] std::size_t slots() const { return reserved_.count(); }

  // A new slot to write to, in place of one that was not committed.
  [[nodiscard]] py::array begin() {
    check_writing();
    const std::shared_ptr<MemoryFile> file = data();  // `close` may come meanwhile
    auto kept = std::make_unique<Kept>(file, std::make_shared<int>());
    writing_ = kept->token;  // before another thread may begin, while the GIL is released
    const std::uint32_t slot = word().begin();
    if (!reserved_[slot]) {
      with_os_errors([&] {
        const WithoutGil nogil;
        check_free_memory(stride_of(nbytes_));
        reserve(*file, slot);
      });
    }
    begun_ = slot;
    return array_over(file->data() + slot * stride_of(nbytes_), nbytes_,
                      owning_capsule(std::move(kept)));
  }

  // A view of the slot may be alive, in the traceback of an error: it is not committed.
  void abandon() {
    begun_.reset();
    writing_.reset();
  }

  // Gives the slots back, except to arrays over one, and to readers.
  void close() { data_.reset(); }

  // `age`: the seconds since its first publication, on another machine.
  void commit(std::uint64_t number, double age) {
    check_writing();
    if (!begun_) throw std::runtime_error("commit: expected a slot that was begun");
    if (number <= word().newest() || number >> 56 != 0)
      throw py::value_error("number: expected more than " + std::to_string(word().newest()) +
                            ", got " + std::to_string(number));
    const std::uint32_t slot = *std::exchange(begun_, std::nullopt);
    word().commit(slot, number, now() - nanoseconds_of(age).count());
  }

 private:
  static constexpr std::uint32_t kAhead = 3;  // the newest, the next, and one that is held

  struct Kept {
    std::shared_ptr<MemoryFile> data;
    std::shared_ptr<int> token;
  };

  void check_writing() const {
    if (!writing_.expired())
      throw std::runtime_error(
          "publication: a view of the slot that was written last still exists, and could change "
          "the published weights");
  }

  void reserve(MemoryFile& data, std::uint32_t slot) {
    data.reserve(slot * stride_of(nbytes_), stride_of(nbytes_));
    reserved_.set(slot);
  }

  std::size_t nbytes_;
  std::shared_ptr<MemoryFile> control_;
  std::shared_ptr<MemoryFile> data_;
  std::bitset<Publication::kSlots> reserved_;
  std::optional<std::uint32_t> begun_;
  std::weak_ptr<int> writing_;  // alive while an array over the slot that was begun last is
};

// A reader's end.
class BoundReader {
 public:
  BoundReader(int control, const py::bytes& control_nonce, int data, const py::bytes& data_nonce,
              std::size_t nbytes, std::uint32_t reader)
      : nbytes_(nbytes),
        reader_(reader),
        control_(open_shared<Publication>(control, control_nonce, "publication")),
        data_(open_file(data, data_nonce, MemoryFile::Access::kRead, MemoryFile::Pages::kLater)) {
    if (reader >= Publication::kReaders)
      throw py::value_error("reader: expected less than " + std::to_string(Publication::kReaders) +
                            ", got " + std::to_string(reader));
    const std::size_t expected = stride_of(nbytes) * Publication::kSlots;
    if (data_->size() != expected)
      throw py::value_error("slots: expected " + std::to_string(expected) + " bytes, got " +
                            std::to_string(data_->size()));
  }

  [[nodiscard]] Publication& word() const {
    return *reinterpret_cast<Publication*>(control_->data());
  }

  // Number, time and bytes of the newest publication, if its number is above `seen`.
  [[nodiscard]] py::object take(std::uint64_t seen) {
    if (!data_) throw std::runtime_error("publication: its reader was closed");
    if (word().newest() <= seen) return py::none();
    if (word().is_holding(reader_))
      throw std::runtime_error(
          "publication: a view of the weights that were read last still exists: copy weights that "
          "you keep");
    const Publication::News news = word().hold(reader_, seen);
    if (news.number == 0) return py::none();
    const std::shared_ptr<Hold> hold(new Hold{control_, data_, reader_, getpid()});
    hold_ = hold;
    py::array array = array_over(data_->data() + news.slot * stride_of(nbytes_), nbytes_,
                                 owning_capsule(std::make_unique<std::shared_ptr<Hold>>(hold)));
    py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    return py::make_tuple(news.number, 1e-9 * static_cast<double>(news.time), array);
  }

  // Ends the hold, although an array may still be alive, in the traceback of an error.
  void drop() const {
    if (const std::shared_ptr<Hold> hold = hold_.lock()) hold->drop();
  }

  // Reads no more: gives the slots back, except to an array over one.
  void close() {
    drop();
    data_.reset();
  }

  [[nodiscard]] bool wait(std::uint64_t seen, double seconds) {
    const auto end = in_seconds(seconds);
    const Waiter waiter(*this);
    for (;;) {
      const std::chrono::nanoseconds left = end - std::chrono::steady_clock::now();
      bool is_there = false;
      {
        const WithoutGil nogil;
        is_there = word().wait(reader_, seen, left.count());
      }
      if (is_there || left.count() <= 0) return is_there;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  }

 private:
  struct Hold {
    std::shared_ptr<MemoryFile> control;
    std::shared_ptr<MemoryFile> data;
    std::uint32_t reader;
    pid_t process;

    void drop() {
      if (std::exchange(process, 0) == getpid())
        reinterpret_cast<Publication*>(control->data())->release(reader);
    }
    ~Hold() { drop(); }
  };

  // One of the threads that wait; made and destroyed with the GIL. The last one tells the writer
  // that it need wake nobody.
  class Waiter {
   public:
    explicit Waiter(BoundReader& reader) : reader_(reader) { ++reader_.waiters_; }
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;
    ~Waiter() {
      if (--reader_.waiters_ == 0) reader_.word().note_awake(reader_.reader_);
    }

   private:
    BoundReader& reader_;
  };

  std::size_t nbytes_;
  std::uint32_t reader_;
  std::size_t waiters_ = 0;
  std::shared_ptr<MemoryFile> control_;
  std::shared_ptr<MemoryFile> data_;
  std::weak_ptr<Hold> hold_;
};

}  // namespace

void bind_publication(py::module_& m) {
  py::class_<BoundPublication>(m, "Publication")
      .def(py::init<std::size_t>(), py::arg("nbytes"))
      .def_property_readonly("control",
                             [](const BoundPublication& s) {
                               return py::make_tuple(s.control().descriptor(),
                                                     as_bytes(s.control().nonce()));
                             })
      .def_property_readonly("data",
                             [](const BoundPublication& s) {
                               return py::make_tuple(s.data()->descriptor(),
                                                     as_bytes(s.data()->nonce()));
                             })
      .def_property_readonly("newest", [](const BoundPublication& s) { return s.word().newest(); })
      .def_property_readonly("slots", &BoundPublication::slots)
      .def("begin", &BoundPublication::begin)
      .def("abandon", &BoundPublication::abandon)
      .def("close", &BoundPublication::close)
      .def("commit", &BoundPublication::commit, py::arg("number"), py::arg("age") = 0.0)
      .def(
          "clear",
          [](const BoundPublication& s, std::uint32_t reader) {
            if (reader >= Publication::kReaders)
              throw py::value_error("reader: got " + std::to_string(reader));
            s.word().clear(reader);
          },
          py::arg("reader"));

  py::class_<BoundReader>(m, "PublicationReader")
      .def(py::init<int, const py::bytes&, int, const py::bytes&, std::size_t, std::uint32_t>(),
           py::arg("control"), py::arg("control_nonce"), py::arg("data"), py::arg("data_nonce"),
           py::arg("nbytes"), py::arg("reader"))
      .def_property_readonly("newest", [](const BoundReader& s) { return s.word().newest(); })
      .def("take", &BoundReader::take, py::arg("seen"))
      .def("drop", &BoundReader::drop)
      .def("close", &BoundReader::close)
      .def("wait", &BoundReader::wait, py::arg("seen"), py::arg("seconds"));

  m.attr("PUBLICATION_READERS") = Publication::kReaders;
}

}  // namespace flatweights::bind
