"""Named points of a round at which tests kill, stop, delay or interrupt the process.

Only tests set `hook`. Anything that a test does at a point may also happen there in production.
"""

from collections.abc import Callable

WORKER = ("called", "taken", "read", "run", "gathered", "answered", "rung", "waited")
"""Points of `WorkerChannel.serve`: in the Ray call, with a command, with its arguments, with its
result, with an answer in the segment, after the answer, after the bell, with its time up."""

DRIVER = ("shared", "posted", "calling", "called", "waiting", "averaging", "sending")
"""Points of a round of a `WorkerGroup`."""

COORDINATOR = ("shared", "posted", "waiting", "averaging", "sending")
"""The points of a round that the coordinator of a process group reaches, too."""

MEMBER = ("asking", "asked", "told")
"""Points of a `Member`'s call: weights in a segment, after the request, with the response."""

JOIN = ("entering", "entered", "attached")
"""Points of `join`: once it has asked for a join reply, with the join reply, with its channel."""

NODE = ("exchanging", "merging", "placing")
"""Points of an exchange between nodes, in each agent and in the driver: before anything is sent,
with the other nodes' parts of its own shard, with the average of that shard."""

hook: Callable[[str], None] | None = None


def reach(point: str) -> None:
    """Call the hook of a test, if there is one, at ``point``."""
    if hook is not None:
        hook(point)
