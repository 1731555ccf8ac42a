// Processes, times and results of the probe.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace probe {

// Seconds; the same clock in all processes.
inline double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

inline void sleep_for(double seconds) {
  timespec time{
      static_cast<time_t>(seconds),
      static_cast<long>((seconds - static_cast<double>(static_cast<time_t>(seconds))) * 1e9)};
  while (nanosleep(&time, &time) != 0 && errno == EINTR) {
  }
}

// The value below which `share` of all lie.
inline double quantile(std::vector<double> values, double share) {
  if (values.empty()) return -1;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1,
                         static_cast<std::size_t>(share * static_cast<double>(values.size())))];
}
inline double median(const std::vector<double>& values) { return quantile(values, 0.5); }

// The median of the seconds that calls of `body` take.
template <class F>
double time_of(int calls, F&& body) {
  std::vector<double> times;
  for (int i = 0; i < calls; ++i) {
    const double begin = now();
    body();
    times.push_back(now() - begin);
  }
  return median(times);
}

inline std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));
inline std::string format(const char* text, ...) {
  char line[512];
  va_list args;
  va_start(args, text);
  std::vsnprintf(line, sizeof(line), text, args);
  va_end(args);
  return line;
}

// Writes the results of a section, one line each, to the process that prints them.
class Report {
 public:
  explicit Report(int fd) : fd_(fd) {}

  void add(const std::string& name, double value, const char* unit) const {
    write_line(name + "\t" + format("%.10g", value) + "\t" + unit + "\tnumber");
  }
  void text(const std::string& name, const std::string& value) const {
    write_line(name + "\t" + value + "\t\ttext");
  }

 private:
  void write_line(std::string line) const {
    std::replace(line.begin(), line.end(), '\n', ' ');
    line += '\n';
    if (::write(fd_, line.data(), line.size()) < 0) _exit(1);
  }
  int fd_;
};

// What processes of a section send each other.
struct Message {
  char what = 0;
  double value[6] = {};
  char text[160] = {};
};

// One end of a pair of connected sockets, which carry descriptors, too.
class Channel {
 public:
  explicit Channel(int fd = -1) : fd_(fd) {}

  static std::pair<Channel, Channel> pair() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) != 0) throw std::runtime_error("socketpair");
    return {Channel(ends[0]), Channel(ends[1])};
  }

  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  [[nodiscard]] int fd() const { return fd_; }

  void send(Message message, int descriptor = -1) const {
    iovec bytes{&message, sizeof(message)};
    msghdr header{};
    header.msg_iov = &bytes;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (descriptor >= 0) {
      header.msg_control = control;
      header.msg_controllen = sizeof(control);
      cmsghdr* const part = CMSG_FIRSTHDR(&header);
      part->cmsg_level = SOL_SOCKET;
      part->cmsg_type = SCM_RIGHTS;
      part->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(part), &descriptor, sizeof(int));
    }
    if (sendmsg(fd_, &header, MSG_NOSIGNAL) < 0)
      throw std::runtime_error(format("sendmsg: %s", std::strerror(errno)));
  }

  [[nodiscard]] bool has_message(double seconds) const {
    pollfd waiting{fd_, POLLIN, 0};
    return poll(&waiting, 1, static_cast<int>(seconds * 1e3)) > 0;
  }

  Message receive(double seconds, int* descriptor = nullptr) const {
    if (!has_message(seconds)) throw std::runtime_error("no answer in time");
    Message message;
    iovec bytes{&message, sizeof(message)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
    header.msg_iov = &bytes;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    if (recvmsg(fd_, &header, MSG_CMSG_CLOEXEC) != static_cast<ssize_t>(sizeof(message)))
      throw std::runtime_error("the other process has closed its socket");
    if (descriptor != nullptr) {
      *descriptor = -1;
      const cmsghdr* const part = CMSG_FIRSTHDR(&header);
      if (part != nullptr && part->cmsg_type == SCM_RIGHTS)
        std::memcpy(descriptor, CMSG_DATA(part), sizeof(int));
    }
    return message;
  }

 private:
  int fd_;
};

// Forks a process that runs `body` and exits; it dies with this one.
inline pid_t start(const std::function<void()>& body) {
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork");
  if (child > 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  try {
    body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "process %d: %s\n", static_cast<int>(getpid()), error.what());
    _exit(1);
  }
  _exit(0);
}

// Waits for a process to end; kills it after some seconds.
inline int finish(pid_t child, double seconds) {
  int status = 0;
  const double end = now() + seconds;
  bool killed = false;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (now() > end && !killed) {
      kill(child, SIGKILL);
      killed = true;
    }
    if (now() > end + 5) return -1;  // it hangs in the kernel
    sleep_for(1e-3);
  }
  return status;
}

template <class T>
T* shared_memory() {
  void* const memory =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("mmap");
  return new (memory) T;
}

using Word = std::atomic<std::uint32_t>;

inline void futex_wait(Word& word, std::uint32_t seen) {
  const timespec most{5, 0};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &most, nullptr, 0);
}
inline void futex_wake(Word& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace probe
