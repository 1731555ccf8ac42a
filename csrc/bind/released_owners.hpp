// Python objects that code without the GIL lets go of.
#pragma once

#include <pybind11/pybind11.h>

namespace flatweights::bind {

// Takes a reference to `object`, to be given back by release_owner.
[[nodiscard]] void* hold_owner(pybind11::handle object);

// Gives back what hold_owner returned, from any thread, with or without the GIL. The object
// is let go by the main thread, as soon as it runs Python again, or by drop_released.
void release_owner(void* owner);

// Lets go of all objects that were released. The GIL is held.
void drop_released();

}  // namespace flatweights::bind
