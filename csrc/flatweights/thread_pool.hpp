// Threads that wait, asleep, for ranges of memory-bound work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace flatweights {

// Runs one job at a time. The calling thread and the helpers that wake up in time take its
// chunks in turn. Helpers are started when first needed and never end.
class ThreadPool {
 public:
  using Body = void (*)(void* context, std::size_t begin, std::size_t end);

  // The pool of this process. A forked child gets a new one, since its parent's threads do
  // not exist there.
  static ThreadPool& instance();

  // Calls `body` for chunks that cover `[0, size)` and returns when all have been done.
  // If another thread's job is running, the caller does all of its own.
  void run(std::size_t size, std::size_t chunk, unsigned threads, Body body, void* context);

 private:
  struct Job {
    std::size_t size;
    std::size_t chunk;
    Body body;
    void* context;
    std::atomic<std::size_t> next{0};

    void work() noexcept;
  };

  void start_helpers(unsigned count);
  void help();

  std::mutex one_job_;
  std::atomic<unsigned> jobs_{0};  // begun so far
  std::mutex mutex_;               // guards all below
  std::condition_variable wake_;
  std::condition_variable idle_;
  Job* job_ = nullptr;                // null once no helper may join
  unsigned wanted_ = 0;               // helpers that may still join
  std::atomic<unsigned> working_{0};  // also read without the mutex
  unsigned started_ = 0;
  unsigned awake_ = 0;  // helpers that spin for a job and need not be woken
};

}  // namespace flatweights
