// The window in which the next large result of this thread is made.
//
// Workers and drivers offer a window before they call the function that makes the result. The
// first request for a new array of exactly that many bytes gets the window's memory. Afterwards the
// result is recognised by its address. So no code in between has to know about windows.
#pragma once

#include <pybind11/numpy.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "flatweights/window.hpp"

namespace flatweights::bind {

// Replaces what this thread has offered before; a null pointer offers nothing.
void offer_window(std::shared_ptr<Window> window, std::size_t nbytes);

// The offered window, now taken, if `nbytes` were offered; else a null pointer.
[[nodiscard]] std::shared_ptr<Window> take_offered_window(std::size_t nbytes);

// An array over the first bytes of a window that has been taken; it is given back when the
// array is gone.
[[nodiscard]] pybind11::array_t<std::uint8_t> array_over(std::shared_ptr<Window> window,
                                                         std::size_t nbytes);

}  // namespace flatweights::bind
