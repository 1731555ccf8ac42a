// Packets with file descriptors, which belong to an object from the moment they have come: an
// interrupt in Python, between two calls, leaves none of them open.
#include <pybind11/pybind11.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "bindings.hpp"
#include "memory_files.hpp"

namespace flatweights::bind {

namespace py = pybind11;

namespace {

// Descriptors of this process, which are closed with this object, or by `close`: the traceback of
// an error may keep the object.
class Descriptors {
 public:
  Descriptors() = default;
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;
  ~Descriptors() { close(); }

  void close() noexcept {
    for (const int number : numbers_) ::close(number);
    numbers_.clear();
  }

  void reserve(std::size_t count) { numbers_.reserve(count); }
  void add(int descriptor) { numbers_.push_back(descriptor); }

  [[nodiscard]] const std::vector<int>& numbers() const { return numbers_; }

 private:
  std::vector<int> numbers_;
};

constexpr std::size_t kMostDescriptors = 4;

// Returns the next packet of a socket, of at most `most` bytes; its descriptors; and whether this
// process had too few for all of them. None if there is no packet.
py::object receive_packet(int socket, std::size_t most) {
  auto descriptors = std::make_unique<Descriptors>();
  descriptors->reserve(kMostDescriptors);  // no error may come between a descriptor and its owner
  std::string body(most, '\0');
  iovec part{body.data(), body.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t count = 0;
  do {
    count = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (count < 0 && errno == EINTR);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return py::none();
  if (count < 0) throw std::system_error(errno, std::generic_category(), "a packet");
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr;
       head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t there = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t k = 0; k < there; ++k) {
      int number = 0;
      std::memcpy(&number, CMSG_DATA(head) + k * sizeof(int), sizeof number);
      descriptors->add(number);
    }
  }
  body.resize(static_cast<std::size_t>(count));
  const bool are_short = (message.msg_flags & MSG_CTRUNC) != 0;
  return py::make_tuple(py::bytes(body), std::move(descriptors), are_short);
}

}  // namespace

void bind_packets(py::module_& m) {
  py::class_<Descriptors>(m, "Descriptors")
      .def(py::init<>())
      .def_property_readonly("numbers",
                             [](const Descriptors& s) {
                               py::list numbers;
                               for (const int number : s.numbers()) numbers.append(number);
                               return numbers;
                             })
      .def("close", &Descriptors::close);
  m.def(
      "receive_packet",
      [](int socket, std::size_t most) {
        return with_os_errors([&] { return receive_packet(socket, most); });
      },
      py::arg("socket"), py::arg("most"));
}

}  // namespace flatweights::bind
