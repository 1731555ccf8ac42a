"""Links between processes of different nodes."""

import time

from flatweights.ray.nodes._link import Link

PATIENCE = 60.0


def wait_for_socket(link: Link) -> None:
    """Wait until the listener's thread has given a link its socket."""
    end = time.monotonic() + PATIENCE
    while not link.has_socket and time.monotonic() < end:
        time.sleep(0.001)
