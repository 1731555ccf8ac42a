// Python objects that are released by code without the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace flatweights::bind {

// For the module's initialization.
void bind_released_owners();

// Takes a reference to `object`, to be given back by release_owner. The GIL is held.
[[nodiscard]] void* hold_owner(pybind11::handle object);

// Gives back what hold_owner returned, from any thread, with or without the GIL, under any
// locks. A dedicated thread drops the object soon, unless Python has ended.
void release_owner(void* owner);

// Makes that thread call `sweep` now and then, as long as it returns true. `sweep` needs no GIL
// and is the same function each time.
void sweep_owners(bool (*sweep)());
void wake_sweep();  // from any thread: `sweep` would return true

// Drops all objects that were released. The GIL is held.
void drop_released();

}  // namespace flatweights::bind
