// The segment in which the next large result of this thread is made.
//
// Workers and drivers offer a segment before they call the function that makes the result. The
// first request for a new array of exactly that many bytes gets the segment's memory. Afterwards
// the result is recognised by its address. So no code in between has to know about segments.
#pragma once

#include <pybind11/numpy.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "flatweights/segment.hpp"

namespace flatweights::bind {

// Replaces what this thread has offered before; a null pointer offers nothing.
void offer_segment(std::shared_ptr<Segment> segment, std::size_t nbytes);

// The offered segment, now taken, if `nbytes` were offered; else a null pointer.
[[nodiscard]] std::shared_ptr<Segment> take_offered_segment(std::size_t nbytes);

// An array over the first bytes of a segment that has been taken; it is given back when the
// array is gone.
[[nodiscard]] pybind11::array_t<std::uint8_t> array_over(std::shared_ptr<Segment> segment,
                                                         std::size_t nbytes);

}  // namespace flatweights::bind
