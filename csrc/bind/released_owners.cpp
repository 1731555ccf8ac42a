// Owners are released on TensorFlow's threads, which must not wait for the GIL: they may hold
// locks that the thread with the GIL waits for. So they push what they release onto a list, and
// post a semaphore for the thread that takes the GIL and drops what is on the list. (A pending call
// of Python would have to wait until the main thread runs Python again: in actors that
// work in other threads it never does.)
//
// The thread may wait for the GIL only while Python lives: when Python ends, it terminates threads
// that ask for the GIL, wherever they are. So the thread asks only in the state kDropping, and
// atexit waits until that state is left before it sets kEnded.
//
// A forked child has no such thread; the next owner that it holds starts its own.
#include "released_owners.hpp"

#include <pthread.h>
#include <semaphore.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <ctime>

#include "without_gil.hpp"

namespace flatweights::bind {

namespace py = pybind11;

namespace {

struct Owner {
  PyObject* object;
  Owner* next;
};

enum class State { kNoThread, kIdle, kDropping, kEnded };

std::atomic<Owner*> released{nullptr};
std::atomic<State> state{State::kNoThread};
std::atomic<bool (*)()> sweep{nullptr};
sem_t wake;  // something was released, or lingers

constexpr long kFirstPause = 1'000'000;  // nanoseconds until the next sweep
constexpr long kLongestPause = 512'000'000;

// Waits for `wake`, but no longer than `pause` unless that is 0.
void wait_for_work(long pause) {
  if (pause == 0) {
    while (sem_wait(&wake) != 0 && errno == EINTR) {
    }
    return;
  }
  timespec until{};
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_nsec += pause;
  until.tv_sec += until.tv_nsec / 1'000'000'000;
  until.tv_nsec %= 1'000'000'000;
  sem_timedwait(&wake, &until);
}

void drop_with_gil() {
  State expected = State::kIdle;
  if (!state.compare_exchange_strong(expected, State::kDropping)) return;
  const PyGILState_STATE gil = PyGILState_Ensure();
  drop_released();
  PyGILState_Release(gil);
  state.store(State::kIdle);
}

void* run(void*) {
  long pause = 0;
  while (state.load() != State::kEnded) {
    wait_for_work(pause);
    const auto sweep_now = sweep.load();
    if (sweep_now == nullptr || !sweep_now())
      pause = 0;
    else
      pause = pause == 0 ? kFirstPause : pause < kLongestPause ? 2 * pause : pause;
    if (released.load() != nullptr) drop_with_gil();
  }
  return nullptr;
}

// Called by atexit, with the GIL.
void end() {
  const WithoutGil nogil;
  State expected = State::kIdle;
  while (!state.compare_exchange_weak(expected, State::kEnded)) {
    if (expected == State::kNoThread) return;
    expected = State::kIdle;
    sched_yield();
  }
}

void start() {
  State expected = State::kNoThread;
  if (!state.compare_exchange_strong(expected, State::kIdle)) return;
  // This thread handles no signals.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread{};
  if (pthread_create(&thread, nullptr, &run, nullptr) == 0)
    pthread_detach(thread);
  else
    state.store(State::kNoThread);  // the next owner tries again; until then drop_released works
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void bind_released_owners() {
  sem_init(&wake, 0, 0);
  pthread_atfork(nullptr, nullptr, [] { state.store(State::kNoThread); });
  py::module_::import("atexit").attr("register")(py::cpp_function(&end));
}

void* hold_owner(py::handle object) {
  start();
  auto* const owner = new Owner{object.ptr(), nullptr};
  Py_INCREF(owner->object);
  return owner;
}

void release_owner(void* owner) {
  auto* const node = static_cast<Owner*>(owner);
  node->next = released.load(std::memory_order_relaxed);
  while (!released.compare_exchange_weak(node->next, node, std::memory_order_release,
                                         std::memory_order_relaxed)) {
  }
  // From here on another thread may have freed `node`.
  wake_sweep();
}

void sweep_owners(bool (*function)()) { sweep.store(function); }

void wake_sweep() { sem_post(&wake); }

void drop_released() {
  Owner* node = released.exchange(nullptr, std::memory_order_acquire);
  while (node != nullptr) {
    Owner* const next = node->next;
    Py_DECREF(node->object);
    delete node;
    node = next;
  }
}

}  // namespace flatweights::bind
