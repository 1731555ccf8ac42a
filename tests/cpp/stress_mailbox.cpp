// Stresses mailboxes: one driver and several workers, as threads under ThreadSanitizer, and as
// processes, some of which are killed.
//
// Each command is a number, and bytes that are computed from it; so is an answer. Segments are read
// while the protocol allows it. The bytes show whether a message is torn, lost or taken twice. The
// driver sleeps until the doorbell rings, so lost rings are found, too.
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "flatweights/doorbell.hpp"
#include "flatweights/mailbox.hpp"
#include "flatweights/message.hpp"

namespace {

using flatweights::Doorbell;
using flatweights::Extent;
using flatweights::Mailbox;
using flatweights::Message;

constexpr unsigned kWorkers = 3;
constexpr std::uint32_t kCommands = 20000;
constexpr std::uint32_t kCommandsToProcesses = 5000;
constexpr std::size_t kSegment = 2048;
constexpr std::uint64_t kLast = ~std::uint64_t{0};

std::atomic<bool> failed{false};

void expect(bool is_so, const char* what) {
  if (is_so) return;
  std::fprintf(stderr, "stress_mailbox: %s\n", what);
  failed = true;
}

// The driver's doorbell, in memory that all share.
struct Bell {
  Doorbell door;
  int descriptor;

  void count_down() {
    const std::uint64_t one = 1;
    if (door.count_down()) expect(write(descriptor, &one, sizeof one) > 0, "cannot ring");
  }

  // Sleeps until it rings.
  void wait() const {
    pollfd polled{descriptor, POLLIN, 0};
    expect(poll(&polled, 1, 20'000) == 1, "a ring is lost");
    std::uint64_t count = 0;
    if (read(descriptor, &count, sizeof count) < 0) return;
  }
};

// The memory that both sides share, with stand-ins for Ray: `calls` is the number of calls of the
// worker, `dismissed` the last call that must not take commands any more.
struct Shared {
  Mailbox mailbox;
  Bell* bell;
  alignas(64) std::atomic<std::uint32_t> calls;
  std::atomic<std::uint32_t> dismissed;
  alignas(64) std::uint64_t segment[kSegment];  // written by the worker, between take and answer
};

std::uint64_t mixed(std::uint64_t value) { return value * 0x9e3779b97f4a7c15U + 1; }

// A message in the format of channels/_message.py: its extent and its body contain the number.
struct Letter {
  std::uint32_t kind = 7, count = 1;
  Extent extent;
  std::uint64_t number;

  explicit Letter(std::uint64_t given) : extent{1, 2, given, mixed(given)}, number(given) {}
  [[nodiscard]] std::span<const std::byte> bytes() const {
    return std::as_bytes(std::span(this, 1));
  }
};

// The number of the message that the peer of `reader` has put into a mailbox.
std::uint64_t read_number(const Mailbox& box, Mailbox::Side reader) {
  const Message message(box, reader);
  std::uint64_t number = 0;
  expect(message.kind() == 7 && message.extents().size() == 1 &&
             message.body().size() == sizeof number,
         "a message of another form");
  std::memcpy(&number, message.body().data(), sizeof number);
  const Extent& extent = message.extents()[0];
  expect(extent.segment == 1 && extent.generation == 2 && extent.offset == number &&
             extent.nbytes == mixed(number),
         "a message is torn");
  return number;
}

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  std::size_t below(std::size_t end) {
    return std::uniform_int_distribution<std::size_t>(0, end - 1)(engine_);
  }

 private:
  std::mt19937 engine_;
};

// Serves until the last command; returns the number of commands.
void serve(Shared& shared, unsigned seed) {
  Random random(seed);
  std::uint64_t before = 0;
  for (std::uint32_t call = 1;; ++call) {
    // A Ray call.
    while (shared.calls.load() < call) std::this_thread::yield();
    const std::size_t stay = random.below(50);
    shared.mailbox.enter(call);
    for (std::size_t k = 0;; ++k) {
      const std::chrono::microseconds linger(random.below(2) == 0 ? 0 : 200);
      const Mailbox::Awaited outcome =
          shared.mailbox.await(std::chrono::steady_clock::now() + linger, call);
      if (outcome == Mailbox::Awaited::kInterrupted) continue;
      if (outcome == Mailbox::Awaited::kLeft) break;
      expect(call > shared.dismissed.load(), "a call that was dismissed takes a command");
      const std::uint64_t number = read_number(shared.mailbox, Mailbox::Side::kWorker);
      if (number != kLast) {
        expect(number > before, "a command was taken twice, or out of order");
        before = number;
        for (std::size_t i = 0; i < kSegment; ++i) shared.segment[i] = mixed(number + i);
      }
      const bool stays = k < stay && number != kLast;
      const Letter answer(mixed(number));
      if (stays)
        shared.mailbox.answer_and_stay(answer.bytes());
      else
        shared.mailbox.answer_and_leave(answer.bytes(), call);
      shared.bell->count_down();
      if (number == kLast) return;
      if (!stays) break;
    }
  }
}

bool is_answered(const Shared& shared) { return shared.mailbox.is_answered(); }

void check_answer(const Shared& shared, std::uint64_t number) {
  const std::uint64_t answer = read_number(shared.mailbox, Mailbox::Side::kDriver);
  expect(answer == mixed(number), "an answer to another command");
  if (number == kLast) return;
  for (std::size_t i = 0; i < kSegment; ++i)
    if (shared.segment[i] != mixed(number + i)) return expect(false, "a segment is torn");
}

void post(Shared& shared, std::uint64_t number) {
  switch (shared.mailbox.post(Letter(number).bytes(), shared.calls.load())) {
    case Mailbox::Posted::kNeedsCall:
      shared.calls.fetch_add(1);
      break;
    case Mailbox::Posted::kRefused:
      expect(false, "a settled mailbox refuses a command");
      break;
    case Mailbox::Posted::kExpected:
      break;
  }
}

// Sleeps until all have answered, by the protocol in doorbell.hpp.
void wait(const std::vector<Shared*>& workers) {
  const auto missing = [&workers] {
    return static_cast<std::uint32_t>(std::count_if(
        workers.begin(), workers.end(), [](const Shared* one) { return !is_answered(*one); }));
  };
  while (const std::uint32_t before = missing()) {
    workers[0]->bell->door.arm(before);
    if (missing() == before) workers[0]->bell->wait();
  }
}

// Posts `commands` to all workers; withdraws some, dismisses some workers, calls some ahead of
// time.
void drive(const std::vector<Shared*>& workers, std::uint32_t commands, unsigned seed) {
  Random random(seed);
  std::vector<std::uint64_t> posted(workers.size(), 0);
  for (std::uint64_t number = 1; number <= commands; ++number) {
    for (std::size_t k = 0; k < workers.size(); ++k) {
      Shared& shared = *workers[k];
      if (random.below(64) == 0) {
        shared.dismissed = shared.calls.load();
        shared.mailbox.dismiss(shared.calls.load());
      }
      if (random.below(64) == 0) shared.calls.fetch_add(1);
      post(shared, number);
      posted[k] = number;
      if (random.below(64) == 0 && shared.mailbox.withdraw()) posted[k] = 0;
    }
    wait(workers);
    for (std::size_t k = 0; k < workers.size(); ++k)
      if (posted[k] != 0) check_answer(*workers[k], number);
    if (random.below(256) == 0) usleep(300);
  }
  for (Shared* shared : workers) post(*shared, kLast);
  wait(workers);
  for (const Shared* shared : workers) check_answer(*shared, kLast);
}

template <class T>
T* make_shared_memory() {
  void* const memory =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return new (memory) T;
}

std::vector<Shared*> make(unsigned count) {
  static Bell* const bell = make_shared_memory<Bell>();
  bell->descriptor = eventfd(0, EFD_NONBLOCK);
  std::vector<Shared*> made;
  for (unsigned k = 0; k < count; ++k) {
    made.push_back(make_shared_memory<Shared>());
    made.back()->bell = bell;
  }
  return made;
}

void as_threads() {
  const std::vector<Shared*> workers = make(kWorkers);
  std::vector<std::thread> threads;
  for (unsigned k = 0; k < kWorkers; ++k) threads.emplace_back([&, k] { serve(*workers[k], k); });
  drive(workers, kCommands, 99);
  for (std::thread& thread : threads) thread.join();
}

void as_processes() {
  const std::vector<Shared*> workers = make(kWorkers);
  std::vector<pid_t> children;
  for (unsigned k = 0; k < kWorkers; ++k) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      serve(*workers[k], k);
      _exit(failed ? 1 : 0);
    }
    children.push_back(child);
  }
  drive(workers, kCommandsToProcesses, 7);
  for (const pid_t child : children) {
    int status = -1;
    expect(waitpid(child, &status, 0) == child && status == 0, "a worker failed");
  }
}

// A worker that dies at any moment leaves a word from which the driver can tell whether the
// segment is whole: it is, unless the word says COMMAND or BUSY.
unsigned with_deaths() {
  Random random(5);
  unsigned busy = 0;
  for (int round = 0; round < 100; ++round) {
    const std::vector<Shared*> workers = make(1);
    Shared& shared = *workers[0];
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      serve(shared, 1);
      _exit(0);
    }
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::microseconds(500 + random.below(3000));
    std::uint64_t number = 0;
    while (std::chrono::steady_clock::now() < end) {
      if (!is_answered(shared)) continue;
      if (number > 0) check_answer(shared, number);
      post(shared, ++number);
    }
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    if (is_answered(shared) && number > 0) check_answer(shared, number);
    busy += shared.mailbox.state() == Mailbox::State::kBusy ? 1 : 0;
    munmap(&shared, sizeof shared);
  }
  return busy;
}

}  // namespace

int main() {
  as_processes();  // before there are threads
  const unsigned busy = with_deaths();
  as_threads();
  std::printf("stress_mailbox: %u workers, %u commands each; 100 killed, %u of them busy\n",
              kWorkers, kCommands, busy);
  return failed ? 1 : 0;
}
