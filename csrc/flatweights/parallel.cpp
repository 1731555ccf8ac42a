#include "flatweights/parallel.hpp"

#include <sched.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "flatweights/control_groups.hpp"
#include "flatweights/float_environment.hpp"
#include "flatweights/thread_pool.hpp"

namespace flatweights {
namespace {

constexpr std::size_t kBorder = 4096;
constexpr std::size_t kChunksPerThread = 8;
constexpr long kMostThreads = 1024;

std::atomic<unsigned> chosen{0};

// Returns the number that `text` begins with, at most kMostThreads, or 0 if it begins with no
// positive number. `rest` points behind it, for the caller to check.
unsigned parse_count(const char* text, const char*& rest) {
  errno = 0;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  rest = end;
  if (end == text || errno != 0 || value < 1) return 0;
  return static_cast<unsigned>(std::min(value, kMostThreads));
}

unsigned usable_processors() {
  unsigned count = std::max(1u, std::thread::hardware_concurrency());
  cpu_set_t affinity;
  if (sched_getaffinity(0, sizeof(affinity), &affinity) == 0)
    count = static_cast<unsigned>(std::max(1, CPU_COUNT(&affinity)));
  const unsigned limit = processor_limit();
  return limit == 0 ? count : std::min(count, limit);
}

unsigned decide_num_threads() {
  if (const char* text = std::getenv("FLATWEIGHTS_NUM_THREADS"); text != nullptr && *text != '\0') {
    const char* rest = nullptr;
    const unsigned count = parse_count(text, rest);
    if (count == 0 || *rest != '\0')
      throw std::invalid_argument("FLATWEIGHTS_NUM_THREADS: expected a positive number, got '" +
                                  std::string(text) + "'");
    return count;
  }
  if (const char* text = std::getenv("OMP_NUM_THREADS"); text != nullptr) {
    const char* inner_levels = nullptr;  // "4,2": the outermost level counts
    if (const unsigned count = parse_count(text, inner_levels); count != 0) return count;
  }
  return usable_processors();
}

}  // namespace

unsigned num_threads() {
  unsigned count = chosen.load(std::memory_order_relaxed);
  if (count == 0) {
    unsigned undecided = 0;
    count = decide_num_threads();
    // A concurrent set_num_threads wins.
    if (!chosen.compare_exchange_strong(undecided, count)) count = undecided;
  }
  return count;
}

void set_num_threads(unsigned count) noexcept { chosen.store(count, std::memory_order_relaxed); }

void detail::run(std::size_t size, std::size_t grain, Body body, void* context) {
  if (size == 0) return;
  const std::size_t shares = size / std::max<std::size_t>(grain, 1);
  const auto threads = static_cast<unsigned>(std::min<std::size_t>(num_threads(), shares));
  if (threads <= 1) {
    const DefaultFloatEnvironment standard;
    body(context, 0, size);
    return;
  }
  // Several chunks for each thread: when one thread is delayed, the others take its chunks.
  const std::size_t even = size / (threads * kChunksPerThread) + 1;
  const std::size_t chunk = (std::max(even, grain) + kBorder - 1) / kBorder * kBorder;
  ThreadPool::instance().run(size, chunk, threads, body, context);
}

}  // namespace flatweights
