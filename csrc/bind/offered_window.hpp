// A window that the next large result of this thread is made in.
//
// Workers and drivers offer one before they call what makes the result. Whatever asks for a
// new array of exactly those bytes gets the window's memory, once; the result is recognised
// by its address afterwards. So nothing between here and there has to know of windows.
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
