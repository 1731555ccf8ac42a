#include "flatweights/thread_pool.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#include "flatweights/float_environment.hpp"

namespace flatweights {
namespace {

std::atomic<ThreadPool*> current{nullptr};

// In a forked child, threads that do not exist there may hold the old pool's locks, so the child
// abandons that pool. Registered when the library is loaded: the guard of a local static would
// be a lock, too.
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });

// Waking a thread takes longer than averaging a model that fits the caches, and a loop asks for
// its next job within microseconds. So a helper stays awake for this long, and so does a caller
// that waits for a helper's last chunk.
constexpr std::chrono::microseconds kAwake{50};

// Returns once `done` returns true, or after a while.
template <class Done>
void wait_awake(const Done& done) {
  const auto end = std::chrono::steady_clock::now() + kAwake;
  while (!done() && std::chrono::steady_clock::now() < end) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
  }
}

// Moves the calling thread to another processor, if it may use another. A new thread starts on
// its creator's processor and shares it for tens of milliseconds, until the system balances its
// load. During that time, two threads take longer than one.
void leave_processor(int processor) noexcept {
  cpu_set_t allowed;
  if (processor < 0 || processor >= CPU_SETSIZE) return;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  cpu_set_t others = allowed;
  CPU_CLR(processor, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
  sched_setaffinity(0, sizeof allowed, &allowed);
}

}  // namespace

ThreadPool& ThreadPool::instance() {
  ThreadPool* pool = current.load();
  if (pool == nullptr) {
    // Never deleted: helpers sleep in it until the process ends.
    auto* const made = new ThreadPool;
    if (current.compare_exchange_strong(pool, made))
      pool = made;
    else
      delete made;  // it has no threads yet
  }
  return *pool;
}

void ThreadPool::Job::work() noexcept {
  const DefaultFloatEnvironment standard;
  for (;;) {
    const std::size_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
    if (begin >= size) return;
    body(context, begin, std::min(begin + chunk, size));
  }
}

void ThreadPool::run(std::size_t size, std::size_t chunk, unsigned threads, Body body,
                     void* context) {
  const std::unique_lock<std::mutex> only(one_job_, std::try_to_lock);
  if (!only.owns_lock()) {
    const DefaultFloatEnvironment standard;
    body(context, 0, size);
    return;
  }
  Job job{size, chunk, body, context};
  unsigned asleep = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    start_helpers(threads - 1);
    job_ = &job;
    jobs_.fetch_add(1, std::memory_order_relaxed);
    wanted_ = std::min(threads - 1, started_);
    asleep = wanted_ - std::min(wanted_, awake_);
  }
  for (unsigned i = 0; i < asleep; ++i) wake_.notify_one();
  job.work();
  const auto is_idle = [this] { return working_.load() == 0; };
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    job_ = nullptr;
    wanted_ = 0;
  }
  wait_awake(is_idle);
  if (is_idle()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, is_idle);
}

void ThreadPool::start_helpers(unsigned count) {
  while (started_ < count) {
    try {
      std::thread([this, creator = sched_getcpu()] {
        leave_processor(creator);
        help();
      }).detach();
    } catch (const std::system_error&) {
      return;  // no more threads are available: the existing ones do the work
    }
    ++started_;
  }
}

void ThreadPool::help() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (wanted_ > 0) {
      --wanted_;
      ++working_;
      Job* const job = job_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--working_ == 0) idle_.notify_one();
    }
    // A helper that missed this job keeps spinning for the next one: asleep, it would miss every
    // one.
    const unsigned seen = jobs_.load(std::memory_order_relaxed);
    const auto is_another = [this, seen] { return jobs_.load(std::memory_order_relaxed) != seen; };
    ++awake_;
    lock.unlock();
    wait_awake(is_another);
    lock.lock();
    --awake_;
    wake_.wait(lock, is_another);
  }
}

}  // namespace flatweights
