// Stresses the thread pool; .ci/stress runs it under ThreadSanitizer.
//
// Several threads ask for ranges of all sizes at the same time, while thread counts change and the
// main thread forks children that do the same. Every element is counted in plain memory: if one is
// covered twice, or read before its write is visible, this is a race and a wrong number. Exits with
// 0 if every element was covered once.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <latch>
#include <random>
#include <thread>
#include <vector>

#include "flatweights/parallel.hpp"
#include "flatweights/thread_pool.hpp"

namespace {

constexpr std::size_t kMostElements = 40'000;
constexpr unsigned kMostThreads = 6;
constexpr unsigned kCallers = 4;
constexpr unsigned kForks = 60;
constexpr unsigned kJobsOfChild = 20;

std::atomic<bool> failed{false};

void expect(bool right, const char* what) {
  if (right) return;
  if (!failed.exchange(true)) std::fprintf(stderr, "stress_thread_pool: %s\n", what);
}

class Caller {
 public:
  explicit Caller(unsigned seed) : random_(seed) {}

  void call() {
    counts_.assign(below(4) == 0 ? below(10) : below(kMostElements), 0);
    const std::size_t size = counts_.size();
    if (below(2) == 0) {
      flatweights::set_num_threads(static_cast<unsigned>(1 + below(kMostThreads)));
      flatweights::parallel_for(size, 1 + below(4096),
                                [this](std::size_t begin, std::size_t end) { count(begin, end); });
    } else {
      // Small chunks: many turns, and helpers that come too late for any.
      const auto threads = static_cast<unsigned>(1 + below(kMostThreads));
      flatweights::ThreadPool::instance().run(
          size, 1 + below(below(2) == 0 ? 64 : 8192), threads,
          [](void* self, std::size_t begin, std::size_t end) {
            static_cast<Caller*>(self)->count(begin, end);
          },
          this);
    }
    expect(std::all_of(counts_.begin(), counts_.end(), [](std::uint8_t n) { return n == 1; }),
           "an element was not covered exactly once");
    // Longer or shorter than helpers stay awake: both ways to get the next job.
    if (below(8) == 0) usleep(static_cast<useconds_t>(below(200)));
  }

 private:
  std::size_t below(std::size_t end) {
    return std::uniform_int_distribution<std::size_t>(0, end - 1)(random_);
  }

  void count(std::size_t begin, std::size_t end) {
    expect(begin <= end && end <= counts_.size(), "a range is not within the whole");
    for (std::size_t i = begin; i < end; ++i) ++counts_[i];
  }

  std::mt19937 random_;
  std::vector<std::uint8_t> counts_;
};

// ThreadSanitizer ends a child that starts a thread on the stack of a parent's thread. Larger
// stacks are always new.
void use_new_stacks() {
  pthread_attr_t attributes;
  std::size_t size = 0;
  pthread_attr_init(&attributes);
  pthread_attr_getstacksize(&attributes, &size);
  pthread_attr_setstacksize(&attributes, 2 * size);
  pthread_setattr_default_np(&attributes);
  pthread_attr_destroy(&attributes);
}

// The parent's pool may be in any state, and its threads do not exist in the child.
int run_child(unsigned seed) {
  use_new_stacks();
  std::latch end(2);  // no stack becomes free before
  const auto run = [&end](unsigned own_seed) {
    Caller caller(own_seed);
    for (unsigned i = 0; i < kJobsOfChild; ++i) caller.call();
    end.arrive_and_wait();
  };
  std::thread other(run, seed + 1);
  run(seed);
  other.join();
  return failed ? 1 : 0;
}

void fork_child(unsigned seed) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) _exit(run_child(seed));
  expect(child > 0, "fork failed");
  int status = -1;
  expect(child < 0 || (waitpid(child, &status, 0) == child && status == 0), "a child failed");
}

}  // namespace

int main() {
  std::atomic<bool> done{false};
  std::atomic<unsigned long> calls{0};
  std::vector<std::thread> callers;
  for (unsigned k = 0; k < kCallers; ++k)
    callers.emplace_back([&, k] {
      Caller caller(k);
      while (!done) {
        caller.call();
        ++calls;
      }
    });
  for (unsigned i = 0; i < kForks; ++i) {
    fork_child(1000 + 2 * i);
    Caller(i).call();
  }
  done = true;
  for (std::thread& caller : callers) caller.join();
  // There are no other callers: now helpers join each job.
  Caller caller(99);
  for (unsigned i = 0; i < 2000; ++i) caller.call();
  std::printf("stress_thread_pool: %lu calls beside %u forks\n", calls.load(), kForks);
  return failed ? 1 : 0;
}
