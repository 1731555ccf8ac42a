"""The clock of `flatweights.ray` and `flatweights.keras`: no other file in them has one.

All times at which something is due are times of `now`. A simulator puts functions of its own clock
here, for all modules at once; so call `_clock.now()`, and do not import `now` by its name.
"""

import time
from collections.abc import Callable

now: Callable[[], float] = time.monotonic
"""Return the seconds of a clock that never goes back."""

wall: Callable[[], float] = time.time
"""Return the seconds since 1970, which processes of several machines can compare."""

sleep: Callable[[float], None] = time.sleep
"""Sleep for a number of seconds."""
