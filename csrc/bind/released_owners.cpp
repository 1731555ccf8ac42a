#include "released_owners.hpp"

#include <atomic>

namespace flatweights::bind {
namespace {

struct Owner {
  PyObject* object;
  Owner* next;
};

std::atomic<Owner*> released{nullptr};

}  // namespace

void* hold_owner(pybind11::handle object) {
  auto* const owner = new Owner{object.ptr(), nullptr};
  Py_INCREF(owner->object);
  return owner;
}

void release_owner(void* owner) {
  auto* const node = static_cast<Owner*>(owner);
  Owner* first = released.load(std::memory_order_relaxed);
  do {
    node->next = first;
  } while (!released.compare_exchange_weak(first, node, std::memory_order_release,
                                           std::memory_order_relaxed));
  // From here on another thread may have let `node` go. A list that was not empty has its
  // call on the way. After Python has ended, and where the queue of calls is full, the next
  // drop_released has to do.
  if (first == nullptr && Py_IsInitialized() != 0)
    Py_AddPendingCall(
        [](void*) {
          drop_released();
          return 0;
        },
        nullptr);
}

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
