// What a round on one node could take: processes copy a vector into shared memory, average it
// there, and copy the mean out, with futexes alone. There is no Python, no Ray and no driver,
// nobody may be missing, and the average is a plain loop.
//
//   bare_rounds PROCESSES ELEMENTS WAY SECONDS
//
// WAY is "coordinator": one more process averages, as ours does; or "slices": each process averages
// its share. Prints the seconds of each round in the first process, as a JSON list.

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kMostProcesses = 64;
constexpr std::size_t kMostRounds = 1 << 20;
constexpr std::size_t kBlock = 2048;  // sums that stay in a cache

// A number that processes wait for, in a cache line of its own.
struct alignas(64) Word {
  std::atomic<std::uint32_t> value;

  void set(std::uint32_t next) {
    value.store(next);
    wake();
  }

  void wake() { syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

  void wait_while(std::uint32_t last) {
    while (value.load() == last) syscall(SYS_futex, &value, FUTEX_WAIT, last, nullptr, nullptr, 0);
  }
};

// The last of all processes to come lets the others go on.
struct Barrier {
  Word count, turn;

  void pass(std::uint32_t all) {
    const std::uint32_t now = turn.value.load();
    if (count.value.fetch_add(1) + 1 < all) return turn.wait_while(now);
    count.value.store(0);
    turn.set(now + 1);
  }
};

struct Shared {
  Barrier written, averaged;
  Word asked;  // how often any process has asked the coordinator
  Word answered;
  std::atomic<std::uint32_t> last;  // the last round, once it is known
  std::array<double, kMostRounds> seconds;
  std::size_t rounds;
};

struct Task {
  std::uint32_t processes;
  std::size_t elements;
  bool has_coordinator;
  double seconds;
  Shared* shared;
  float* models;   // one after the other
  float* results;  // two, in turns

  float* result_of(std::uint32_t round) const { return results + (round & 1) * elements; }
};

template <typename T>
T* map(std::size_t count) {
  void* const at =
      mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) std::abort();
  return static_cast<T*>(at);
}

void average(const Task& task, std::size_t begin, std::size_t end, float* out) {
  std::array<double, kBlock> sums;
  for (; begin < end; begin += kBlock) {
    const std::size_t size = std::min(kBlock, end - begin);
    std::copy_n(task.models + begin, size, sums.begin());
    for (std::uint32_t k = 1; k < task.processes; ++k) {
      const float* const model = task.models + k * task.elements + begin;
      for (std::size_t i = 0; i < size; ++i) sums[i] += model[i];
    }
    for (std::size_t i = 0; i < size; ++i)
      out[begin + i] = static_cast<float>(sums[i] / task.processes);
  }
}

void coordinate(const Task& task) {
  for (std::uint32_t round = 1;; ++round) {
    std::uint32_t asked = task.shared->asked.value.load();
    for (; asked < round * task.processes; asked = task.shared->asked.value.load())
      task.shared->asked.wait_while(asked);
    average(task, 0, task.elements, task.result_of(round));
    const bool is_last = task.shared->last.load() == round;
    task.shared->answered.set(round);
    if (is_last) return;
  }
}

// One round of a process, whose `own` vector then has the mean.
void take_part(const Task& task, std::uint32_t rank, std::uint32_t round, std::vector<float>& own) {
  std::copy(own.begin(), own.end(), task.models + rank * task.elements);
  Shared& shared = *task.shared;
  if (task.has_coordinator) {
    if (shared.asked.value.fetch_add(1) + 1 == round * task.processes) shared.asked.wake();
    shared.answered.wait_while(round - 1);
  } else {
    shared.written.pass(task.processes);
    average(task, task.elements * rank / task.processes,
            task.elements * (rank + 1) / task.processes, task.result_of(round));
    shared.averaged.pass(task.processes);
  }
  std::copy_n(task.result_of(round), task.elements, own.begin());
}

void run(const Task& task, std::uint32_t rank) {
  using Clock = std::chrono::steady_clock;
  std::vector<float> own(task.elements, static_cast<float>(rank));
  const float mean = static_cast<float>(task.processes - 1) / 2;
  const auto begin = Clock::now();
  for (std::uint32_t round = 1;; ++round) {
    const auto start = Clock::now();
    // All make the same number of rounds: one says before a round that it is the last.
    const std::chrono::duration<double> since = start - begin;
    if (rank == 0 && (since.count() > task.seconds || round == kMostRounds))
      task.shared->last.store(round);
    take_part(task, rank, round, own);
    const std::chrono::duration<double> took = Clock::now() - start;
    if (own.front() != mean || own.back() != mean) std::abort();
    if (rank == 0) task.shared->seconds[round - 1] = took.count(), task.shared->rounds = round;
    if (task.shared->last.load() == round) return;
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) return 2;
  Task task{};
  task.processes = static_cast<std::uint32_t>(std::stoul(arguments[1]));
  task.elements = std::stoul(arguments[2]);
  task.has_coordinator = std::string(arguments[3]) == "coordinator";
  task.seconds = std::stod(arguments[4]);
  if (task.processes == 0 || task.processes > kMostProcesses || task.elements == 0) return 2;
  task.shared = map<Shared>(1);
  task.models = map<float>(task.processes * task.elements);
  task.results = map<float>(2 * task.elements);
  const std::uint32_t all = task.processes + (task.has_coordinator ? 1 : 0);
  for (std::uint32_t rank = 0; rank < all; ++rank) {
    if (fork() != 0) continue;
    rank < task.processes ? run(task, rank) : coordinate(task);
    _exit(0);
  }
  int failed = 0;
  for (int status = 0; wait(&status) > 0;) failed |= status;
  if (failed != 0) return 1;
  std::cout << '[';
  for (std::size_t k = 0; k < task.shared->rounds; ++k)
    std::cout << (k != 0 ? ", " : "") << task.shared->seconds[k];
  std::cout << "]\n";
}
