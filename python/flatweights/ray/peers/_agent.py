"""An agent: it calls the workers of one node for a driver on another, and adds up their results.

It reaches them like a driver on their node: through channels. Their results stay here. The driver
gets metadata of each, and decides which are averaged, with which other nodes. A driver that gets
no answer in time announces that the round is over; then each wait here ends.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray

from flatweights.ray import _clock
from flatweights.ray.nodes._address import Address
from flatweights.ray.nodes._connections import StreamError
from flatweights.ray.nodes._node_reducer import Endpoints, Traffic
from flatweights.ray.nodes._plan import Plan
from flatweights.ray.peers._by_channel import GroupChannels, Worker
from flatweights.ray.peers._platform import PLATFORM, GroupPlatform
from flatweights.ray.peers._result_metadata import ReadOptions, read_into
from flatweights.ray.peers._store import payload_of
from flatweights.ray.peers._transport import Call, Payload, PendingResult, weights_of
from flatweights.ray.peers._wait import wait_any
from flatweights.ray.support._errors import portable

_SLICE = 0.1  # seconds after which answers are reported even if others are missing


class AverageOf(NamedTuple):
    """A placeholder for weights: the average of an exchange, which the agent has.

    Attributes:
        number: The number of the exchange.
        version: The version of the weights after it, for differences in 16 bits.
    """

    number: int
    version: int | None = None


class Failure(NamedTuple):
    """A placeholder for a value: the error of a worker's call."""

    error: Exception


class Command(NamedTuple):
    """One call, for all workers of a node.

    Attributes:
        number: The number of the command in the group.
        call: The call, without weights.
        ranks: By rank, the actor, and more arguments.
        weights: The weights that the calls bring: None, a result of `argument_of`, or `AverageOf`.
        fences: References to results that exist once the driver's own calls have run.
        reading: The way to read the results, which stay here; None, if the driver gets them.
    """

    number: int
    call: Call
    ranks: Mapping[int, tuple[ray.actor.ActorHandle, Sequence[Any]]]
    weights: Any
    fences: Sequence[ray.ObjectRef]
    reading: ReadOptions | None


class StreamOrder(NamedTuple):
    """The arguments of `Agent.stream`, for an agent with a link.

    Attributes:
        plan: The exchange.
        me: The place of the agent's node among all.
        endpoints: The way to the others.
    """

    plan: Plan
    me: int
    endpoints: Endpoints


class Agent:
    """The actor, whose calls several threads run.

    Attributes:
        channels: The channels to workers of this node.
        end: This node's part of exchanges.
        turn: The lock that a thread holds while it uses ``end``.
    """

    def __init__(self, platform: GroupPlatform = PLATFORM) -> None:
        """Prepare for workers of a group."""
        # An actor without CPUs gets one thread. But its workers wait while it adds up.
        os.environ.pop("OMP_NUM_THREADS", None)
        self.channels = GroupChannels(platform)
        self.end = platform.node_reducer(self.channels.offer)
        self.turn = platform.lock()
        self._workers: dict[int, Worker] = {}
        self._current = 0  # the number of the command whose results it has
        self._over = 0  # the number of the last command whose round is over
        self._latest = 0  # the number of the latest command or exchange
        self._streaming: tuple[int, bytes] | None = None  # the exchange that is under way
        self._reading: ReadOptions | None = None
        self._answers: dict[int, PendingResult] = {}
        self._pending: dict[PendingResult, int] = {}
        # By rank, answers to commands that are over.
        self._in_flight: dict[int, PendingResult] = {}
        self._exchanged: tuple[AverageOf, Payload] | None = None

    def address(self) -> Address | str:
        """Return the address for other nodes, or the reason for which there is none."""
        try:
            return self.end.address
        except (OSError, ValueError) as error:
            return str(error)

    def work(self, command: Command) -> dict[int, Any]:
        """Call workers; return the result of `more`."""
        self._supersede(command.number)
        with self.turn:
            if self._is_on(command.number):  # a slow thread may run this after the next command
                self._close_round()
                self._current = command.number
                self._begin(command)
            return self._news(command.number)

    def more(self, number: int) -> dict[int, Any]:
        """Wait for metadata, values or failures; return them by rank, or none if it is over."""
        with self.turn:
            return self._news(number)

    def finish(self, number: int) -> None:
        """Drop the results of the command ``number``, and wait for no more of them."""
        self._over = max(self._over, number)
        with self.turn:
            if self._current <= number:  # a slow thread may call this after the next command
                self._close_round()

    def stream(self, plan: Plan, me: int, endpoints: Endpoints) -> Traffic | Exception:
        """Exchange with other nodes; see `NodeReducer.stream`."""
        self._supersede(plan.number)
        with self.turn:
            if plan.number < self._latest:
                return StreamError(-1, "the exchange is over")
            self._streaming = plan.number, endpoints.epoch
            try:
                return self.end.stream(plan, me, endpoints)
            except (StreamError, ValueError) as error:  # the second, if connections have ended
                return error.with_traceback(None)
            finally:
                self._streaming = None

    def give(self, rank: int) -> Any:
        """Return the result of a rank to the driver, which averages it: no exchange continues."""
        self._break_off()
        with self.turn:
            return self._result(rank)

    def ping(self) -> None:
        """Return, to show that the agent can be reached."""

    def _supersede(self, number: int) -> None:
        """End waits of older commands: for late results, or in an exchange over streams."""
        self._latest = max(self._latest, number)
        self._break_off(number)

    def _break_off(self, number: float = math.inf) -> None:
        """End an exchange over streams, if it is older than a ``number``."""
        streaming = self._streaming
        if streaming is not None and streaming[0] < number:
            self.end.break_off(streaming[1])

    def _result(self, rank: int) -> Any:
        return self._answers[rank].result()

    def _is_on(self, number: int) -> bool:
        """Whether the driver still waits for results of a command."""
        return number > self._over and number >= self._latest

    def _begin(self, command: Command) -> None:
        ranks = command.ranks
        in_flight = {self._in_flight[rank]: rank for rank in ranks if rank in self._in_flight}
        while in_flight and self._is_on(command.number):
            for answer in wait_any(in_flight, _clock.now() + _SLICE):
                answer.release()
                # The next command does not wait for it.
                del self._in_flight[in_flight.pop(answer)]
        fences = list(command.fences)
        while fences and self._is_on(command.number):
            _, fences = ray.wait(fences, num_returns=len(fences), timeout=_SLICE)
        if not self._is_on(command.number):
            return
        payload = self._payload(command.weights)
        call = command.call._replace(payload=payload)
        self._reading = command.reading
        for rank, (handle, _) in ranks.items():
            worker = self._workers.get(rank)
            if worker is None or worker.handle != handle:
                worker = self._workers[rank] = Worker(handle, rank, self.channels)
            if payload is not None:
                worker.prepare(payload)
        for rank, (_, more) in ranks.items():
            answer = self._workers[rank].call(call.with_more(more))
            self._answers[rank] = answer
            self._pending[answer] = rank

    def _payload(self, weights: Any) -> Payload | None:
        if weights is None:
            return None
        if isinstance(weights, AverageOf):
            if self._exchanged is None or self._exchanged[0] != weights:
                self._exchanged = weights, payload_of(self.end.weights(*weights))
            return self._exchanged[1]
        value = ray.get(weights) if isinstance(weights, ray.ObjectRef) else weights
        return payload_of(weights_of(value))

    def _news(self, number: int) -> dict[int, Any]:
        while self._pending and self._is_on(number):
            there = wait_any(self._pending, _clock.now() + _SLICE, len(self._pending))
            if there:
                ranks = sorted(self._pending.pop(answer) for answer in there)
                return {rank: self._read(rank) for rank in ranks}
        return {}

    def _read(self, rank: int) -> Any:
        try:
            value = self._answers[rank].result()
        except Exception as error:
            return Failure(portable(error))
        if self._reading is None:
            return value
        return read_into(self.end.models, rank, value, self._reading)

    def _close_round(self) -> None:
        self.channels.done()
        self.end.models.clear()
        for rank, answer in self._answers.items():
            if answer in self._pending:
                self._in_flight[rank] = answer
            else:
                answer.release()
        self._answers.clear()
        self._pending.clear()
