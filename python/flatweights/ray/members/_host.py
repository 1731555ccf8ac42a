"""The host of a meeting: an actor without CPUs, on the node of the first member.

Its methods, in threads of Ray's, hand what members send to the one thread of the meeting. The
meeting itself is a plain object: Ray wraps every method of an actor's class to trace its calls.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import ray

from flatweights.ray.members._meeting import Entry, Meeting, Ticket
from flatweights.ray.members._seats import SLICE, Letter
from flatweights.ray.nodes._plan import Sums

_LAST_REPLIES = 1.0  # seconds in which calls that have their result return it


class Host:
    """The actor. Members call `enter`, and then `attach`, or `watch` and `exchange`."""

    def __init__(self, name: str, size: int, sums: Sums) -> None:
        """Open the meeting ``name`` for ``size`` members, whose sums travel as ``sums``."""
        # An actor without CPUs is given one thread; but while it averages, its members wait.
        os.environ.pop("OMP_NUM_THREADS", None)
        context = ray.get_runtime_context()
        self._node = context.get_node_id()
        self._meeting = Meeting(name, size, sums, self._node, context.current_actor)
        self._running: list[bytes] = []  # the exchanges that have not returned, by token
        serve = functools.partial(_serve, self._meeting, self._running, context.current_actor)
        threading.Thread(target=serve, name="flatweights-meeting", daemon=True).start()

    def enter(
        self, rank: int | None, size: int, sums: Sums, who: str, node: str, wants_lane: bool
    ) -> Ticket:
        """Take a seat; wait while a process that may have ended has it.

        Raises:
            ValueError: If ``size`` or ``sums`` is not that of the meeting, or ``rank`` is taken or
                too large.
        """
        ticket: Future[Ticket] = Future()
        entry = Entry(rank, size, sums, who, node, wants_lane, time.monotonic(), ticket)
        self._meeting.news.tell(self._meeting.enter, entry)
        return ticket.result()

    def attach(self, token: bytes, nonce: bytes) -> None:
        """Make the lane to a member that has connected.

        Raises:
            LaneError: If it has not.
        """
        self._meeting.news.ask(self._meeting.attach, token, nonce)

    def stay(self, token: bytes) -> None:
        """Return when the member is gone: its process owns the result, so Ray says if it dies."""
        while self._meeting.has(token):
            time.sleep(SLICE)

    def watch(self, token: bytes, stays: Sequence[Any]) -> None:
        """Learn of the death of a member that calls through Ray, by the result of its `stay`."""
        self._meeting.news.watch(stays[0], functools.partial(self._meeting.lose, token))

    def exchange(self, token: bytes, body: bytes | None = None, buffer: Any = None) -> Any:
        """Ask for a call; return the body of the outcome, and references to the weights.

        Without a body, it is the first outcome.
        """
        outcome: Future[Any] = Future()
        self._running.append(token)
        try:
            letter = Letter(body, buffer, outcome)
            self._meeting.news.tell(self._meeting.put, token, letter)
            return outcome.result()
        finally:
            self._running.remove(token)

    def deliver(self, token: bytes, body: bytes, buffer: Any) -> None:
        """Take an ask that does not fit into a lane; the lane then says that it is here."""
        self._meeting.news.ask(self._meeting.put, token, Letter(body, buffer, None))

    def hand(self, token: bytes, body: bytes | None, buffer: Any) -> None:
        """Take an ask from the agent of a node; without a body, the member is ready."""
        self._meeting.news.tell(self._meeting.put, token, Letter(body, buffer, None))

    def fetch(self, number: int) -> tuple[bytes, Any]:
        """Return an outcome that did not fit into a lane: its body and its buffer.

        Raises:
            KeyError: If it is no longer kept.
        """
        return self._meeting.fetch(number)

    def lose(self, token: bytes, why: str = "it has ended without leave()") -> None:
        """Count a member as dead that has dropped its end."""
        self._meeting.news.tell(self._meeting.lose, token, why)

    def absent(self) -> list[int]:
        """Return the ranks that have not joined."""
        return self._meeting.absent()


def _serve(meeting: Meeting, running: list[bytes], handle: Any) -> None:
    """Run the meeting, then end the actor."""
    try:
        meeting.run()
    finally:
        end = time.monotonic() + _LAST_REPLIES
        while running and time.monotonic() < end:
            time.sleep(0.01)
        ray.kill(handle)
