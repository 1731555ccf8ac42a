// Stresses a publication: one writer and many readers, as threads under ThreadSanitizer, and as
// processes that are stopped and killed at random moments, including the writer.
//
// A slot is filled with numbers that are computed from the number of its publication. They show
// whether a read is torn, mixed, older than the last one, or not the announced publication. If a
// process waits for another one, the time limit of .ci/stress ends the program.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "flatweights/publication.hpp"

namespace {

using flatweights::Publication;

constexpr std::size_t kNumbers = 512;  // of a slot

std::atomic<bool> failed{false};

void expect(bool is_so, const char* what) {
  if (is_so) return;
  std::fprintf(stderr, "stress_publication: %s\n", what);
  failed = true;
}

struct Shared {
  Publication publication;
  alignas(64) std::atomic<bool> is_over;
  std::atomic<std::uint64_t> reads;
  std::uint64_t slots[Publication::kSlots][kNumbers];
};

std::uint64_t mixed(std::uint64_t value) { return value * 0x9e3779b97f4a7c15U + 1; }

Shared* make_shared_memory() {
  void* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return new (memory) Shared;
}

void publish(Shared& shared) {
  const std::uint32_t slot = shared.publication.begin();
  const std::uint64_t number = shared.publication.newest() + 1;
  for (std::size_t i = 0; i < kNumbers; ++i) shared.slots[slot][i] = mixed(number + i);
  shared.publication.commit(slot, number, static_cast<std::int64_t>(number));
}

// Reads a publication that is newer than `seen`; returns its number, or `seen`.
std::uint64_t read(Shared& shared, std::uint32_t reader, std::uint64_t seen) {
  const std::uint64_t announced = shared.publication.newest();
  const Publication::News news = shared.publication.hold(reader, seen);
  if (news.number == 0) {
    expect(announced <= seen, "a publication was there, and is not found");
    return seen;
  }
  expect(news.number >= announced && news.number > seen, "an older publication is read");
  expect(news.time == static_cast<std::int64_t>(news.number), "the time of another publication");
  const std::uint64_t* const numbers = shared.slots[news.slot];
  for (std::size_t i = 0; i < kNumbers; ++i)
    if (numbers[i] != mixed(news.number + i)) {
      expect(false, "a read is torn");
      break;
    }
  shared.publication.release(reader);
  shared.reads.fetch_add(1, std::memory_order_relaxed);
  return news.number;
}

// Waits in the only thread of a reader.
bool wait(Shared& shared, std::uint32_t reader, std::uint64_t seen, std::int64_t nanoseconds) {
  const bool is_there = shared.publication.wait(reader, seen, nanoseconds);
  shared.publication.note_awake(reader);
  return is_there;
}

void read_until_over(Shared& shared, std::uint32_t reader, bool sleeps) {
  std::uint64_t seen = 0;
  while (!shared.is_over) {
    if (sleeps)
      wait(shared, reader, seen, 10'000'000);
    else
      std::this_thread::yield();
    seen = read(shared, reader, seen);
  }
}

// Every `awake`-th reader polls all the time, the others sleep until there is news.
std::uint64_t as_threads(std::uint32_t readers, std::uint64_t publications, std::uint32_t awake) {
  Shared& shared = *make_shared_memory();
  std::vector<std::thread> threads;
  for (std::uint32_t k = 0; k < readers; ++k)
    threads.emplace_back([&shared, k, awake] { read_until_over(shared, k, k % awake != 0); });
  for (std::uint64_t k = 0; k < publications; ++k) publish(shared);
  shared.is_over = true;
  for (std::thread& thread : threads) thread.join();
  return shared.reads;
}

// A publication wakes a reader that sleeps; otherwise the end of its wait would end the program.
void wakes() {
  Shared& shared = *make_shared_memory();
  std::thread reader([&shared] {
    for (std::uint64_t seen = 0; seen < 2000;) {
      expect(wait(shared, 0, seen, 60'000'000'000), "a sleeper was not woken");
      seen = read(shared, 0, seen);
      shared.reads = seen;
    }
  });
  for (std::uint64_t number = 1; number <= 2000; ++number) {
    publish(shared);
    while (shared.reads < number && !failed) std::this_thread::yield();
  }
  reader.join();
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

pid_t start(Shared& shared, std::uint32_t k) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child != 0) return child;
  if (k == 0)
    for (;;) publish(shared);
  read_until_over(shared, k - 1, k % 2 == 0);
  _exit(failed ? 1 : 0);
}

// Process 0 writes, all others read; each is stopped for a while or killed at random, and started
// again. The hold of a dead reader is cleared, as at the end of its socket.
std::uint64_t as_processes(std::uint32_t readers, std::uint64_t reads, unsigned seed) {
  Random random(seed);
  Shared& shared = *make_shared_memory();
  publish(shared);
  std::vector<pid_t> children;
  std::vector<bool> is_stopped(readers + 1, false);
  for (std::uint32_t k = 0; k <= readers; ++k) children.push_back(start(shared, k));
  while (shared.reads < reads && !failed) {
    usleep(static_cast<useconds_t>(random.below(2000)));
    const auto k = static_cast<std::uint32_t>(random.below(readers + 1));
    if (is_stopped[k]) {
      kill(children[k], SIGCONT);
      is_stopped[k] = false;
    } else if (random.below(2) == 0) {
      kill(children[k], SIGSTOP);
      is_stopped[k] = true;
    } else {
      kill(children[k], SIGKILL);
      int status = 0;
      waitpid(children[k], &status, 0);
      expect(WIFSIGNALED(status), "a process failed");
      if (k > 0) shared.publication.clear(k - 1);
      // No process waits for a stopped or killed one: here, this process waits for none.
      if (k == 0) publish(shared);
      children[k] = start(shared, k);
    }
  }
  shared.is_over = true;
  for (std::uint32_t k = 0; k <= readers; ++k) {
    kill(children[k], k == 0 ? SIGKILL : SIGCONT);
    int status = 0;
    waitpid(children[k], &status, 0);
    expect(k == 0 || (WIFEXITED(status) && WEXITSTATUS(status) == 0), "a reader failed");
  }
  return shared.reads;
}

}  // namespace

// The argument is the least number of reads by processes.
int main(int count, char** arguments) {
  const std::uint64_t reads = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 20'000;
  const std::uint64_t by_processes = as_processes(6, reads, 3);  // before there are threads
  wakes();
  const std::uint64_t by_threads = as_threads(6, 10'000, 2);
  as_threads(Publication::kReaders, 300, Publication::kReaders);
  std::printf(
      "stress_publication: %llu reads by processes that were stopped and killed, %llu by"
      " threads\n",
      static_cast<unsigned long long>(by_processes), static_cast<unsigned long long>(by_threads));
  return failed ? 1 : 0;
}
