// Threads for work that waits: as many as the most jobs that there were at one time.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace flatweights {

class WaitingThreads {
 public:
  // Never freed, since its threads live as long as the process.
  static WaitingThreads& instance() {
    static auto* const threads = new WaitingThreads;
    return *threads;
  }

  // Has a thread run `work`, which must not throw, at once: none waits for another to end. If the
  // system has no more threads, that is the calling one.
  void run(std::function<void()> work) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (work_.size() >= idle_) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        lock.unlock();
        return work();
      }
    }
    work_.push_back(std::move(work));
    lock.unlock();
    came_.notify_one();
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      came_.wait(lock, [this] { return !work_.empty(); });
      --idle_;
      const std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      work();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<std::function<void()>> work_;  // that no thread has begun
  std::size_t idle_ = 0;
};

}  // namespace flatweights
