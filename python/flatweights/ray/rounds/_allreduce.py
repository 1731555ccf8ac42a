"""One average between nodes: the driver names the ranks to average, and agents exchange shards.

The driver takes part as the agent of its own node, and of all ranks without an agent. Nodes send
each other shards over streams. An exchange has succeeded once the driver has the average; an agent
that lacks it gets it later. If the exchange fails, nodes that do not answer are left out, and the
others exchange again, with the values that they still have. If all nodes answer, two of them may be
unable to reach each other by streams. Then the agents hand their values to the driver, which
averages them.
"""

from __future__ import annotations

import functools
import secrets
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from flatweights import _core
from flatweights._average import NONE_FINITE, read_weights
from flatweights._sources import Kind, Template
from flatweights._weights import frozen
from flatweights.ray import _clock
from flatweights.ray.core._deadline import Deadline
from flatweights.ray.nodes._address import Address
from flatweights.ray.nodes._connections import StreamError
from flatweights.ray.nodes._node_reducer import PATIENCE, Endpoints, Traffic
from flatweights.ray.nodes._plan import Plan
from flatweights.ray.peers._by_agent import ANSWER, AgentClient, Agents, find_lost, silent
from flatweights.ray.peers._result_metadata import Exchanged, ReadOptions, ResultMetadata, read_into
from flatweights.ray.peers._wait import Arrivals, RoundSpec
from flatweights.ray.results._result import copied
from flatweights.ray.results._round import Round
from flatweights.ray.rounds._cleanup import forget_values
from flatweights.ray.rounds._codec import PLAIN, Codec
from flatweights.ray.rounds._local_reduce import DriverAverage
from flatweights.ray.support._errors import late_error

_GRACE = 0.5  # seconds for which an exchange may go on when the time of a round is up
_LEAST = 0.05  # least seconds of each wait
_SHARE = 3  # a wait takes at most this part of the remaining time
_START = 30.0  # seconds in which a new agent has to listen
_ROOM = 1.25  # times the last exchange's duration: the time that waiting leaves for the next

Node = AgentClient | None
"""A node in an exchange: its agent, or None for the driver's own node."""


class NodesAverage:
    """One average that nodes add up.

    Attributes:
        reading: The way in which nodes read their results.
    """

    def __init__(
        self,
        agents: Agents,
        arrivals: Arrivals,
        spec: RoundSpec,
        out: Any = None,
        codec: Codec = PLAIN,
    ) -> None:
        """Prepare the average.

        Args:
            agents: The agents of the group.
            arrivals: The answers to wait for: of ranks on this node, and of ranks that agents call.
            spec: The arguments of the round.
            out: The model to write to; a new one, if None.
            codec: The encoding of weights; agents average encoded weights directly.
        """
        self.reading = ReadOptions(
            screen=spec.nonfinite != "propagate",
            weigh=spec.weights if callable(spec.weights) else None,
            is_encoded=codec.is_encoded,
        )
        self._codec = codec
        self._agents = agents
        self._platform = agents.platform
        self._arrivals = arrivals
        self._spec = spec
        self._out = out
        self._metadata: dict[int, ResultMetadata] = {}
        self._nodes: dict[int, Node] = {}
        self._traffic: dict[str, Traffic] = {}  # by node
        self._timeout, self._end = arrivals.deadline
        if self._timeout is not None and self._end is not None:
            # The exchange must be over in time, too.
            left = self._end - _clock.now()
            room = min(_ROOM * agents.seconds or left / 4, left / 2)
            arrivals.deadline = Deadline(self._timeout - room, self._end - room)

    def run(self) -> Round:
        """Wait, exchange, and let go of all values, even after an error."""
        outer = sys.exc_info()[1]
        try:
            return self._run()
        except BaseException as error:
            forget_values(error, outer)
            raise
        finally:
            self._agents.end.models.clear()
            self._arrivals.release()

    def _run(self) -> Round:
        arrivals = self._arrivals
        for rank in sorted(arrivals.arrived):
            self._receive(rank)
        while (came := arrivals.wait(all_at_once=True)) is not None:
            for rank in came:
                self._receive(rank)
            arrivals.check(self._spec)
        begin = _clock.now()
        exchanged = self._exchange()
        if isinstance(exchanged, str):
            return self._through_driver(exchanged)
        plan, took, seconds = exchanged
        used = sorted(rank for group in plan.groups for rank in group)
        metadata = {rank: self._metadata[rank] for rank in used}
        template = plan.template
        self._agents.nbytes = template.layout.nbytes
        self._agents.seconds = seconds
        mean = self._agents.end.weights(plan.number)
        difference = mean if plan.coding is not None else None
        if self._codec.is_encoded:
            mean = frozen(self._codec.finish(self._codec.decode(mean)))
            template = Template.of(mean)
        if self._out is not None:
            target = template.read_out(self._out)
            template.match(self._out, "out")
            template.check_apart(target)
            _core.move_parts(target, template.read(mean, "the average"))
            mean = self._out
        elif template.kind in (Kind.MAPPING, Kind.TREE):
            containers = metadata[used[0]].containers
            assert containers is not None
            mean = frozen(containers.build(containers.leaves(mean, "the average")))
        traffic = self._traffic.items()
        result = Round(
            mean,
            used,
            failed=dict(sorted(arrivals.failed.items())),
            quarantined=sorted(arrivals.quarantined),
            late=arrivals.late,
            extras={k: copied(s.extras) for k, s in metadata.items() if s.extras is not None},
            seconds={"wait": arrivals.seconds_waited, "average": _clock.now() - begin},
            nbytes=sum(one.nbytes for one in metadata.values()),
            transports=dict.fromkeys(self._far(), "agent: streams"),
            groups=plan.merged_groups(),
            links={node: {"in": t.received, "out": t.sent} for node, t in traffic},
        )
        if self._out is None and template.kind in (Kind.FLAT_WEIGHTS, Kind.ARRAY):
            result._exchanged = Exchanged(plan.number, frozenset(took), difference)
        return result

    def _through_driver(self, why: str) -> Round:
        """Average here, since nodes cannot exchange; agents still have all values."""
        arrivals = self._arrivals
        if self._end is not None:
            arrivals.deadline = Deadline(self._timeout, self._end + _GRACE)
        arrivals.find_lost = functools.partial(find_lost, self._platform)
        arrivals.fetch()
        result = DriverAverage(arrivals, self._spec, self._out, self._codec).average()
        result.transports = dict.fromkeys(self._far(), f"store: {why}")
        return result

    def _far(self) -> list[int]:
        """Return the ranks whose results agents have."""
        return [rank for rank, node in self._nodes.items() if node is not None]

    def _receive(self, rank: int) -> None:
        """Read the result of a rank on this node, or the metadata of another rank's result."""
        answer = self._arrivals.answers[rank]
        value = self._arrivals.result(rank)
        if rank in self._arrivals.failed:
            return
        self._nodes[rank] = answer.agent
        if answer.agent is not None:
            self._metadata[rank] = value
        else:
            models = self._agents.end.models
            self._metadata[rank] = read_into(models, rank, value, self.reading)

    def _exchange(self) -> tuple[Plan, set[str], float] | str:
        """Exchange, without lost nodes.

        Returns:
            The plan, the agents that have the average, and the seconds of the last attempt; or the
            reason for which nodes cannot exchange although all answer.
        """
        why = ""
        while True:
            self._check_time()
            used, weights, template = self._models()
            nodes = list(dict.fromkeys(self._nodes[rank] for rank in used))
            nodes += [] if None in nodes else [None]  # the driver takes part even without ranks
            groups = tuple(tuple(k for k in used if self._nodes[k] is node) for node in nodes)
            number = self._agents.next_number()
            reduce_dtype, coding = self._agents.reduce_dtype, self._metadata[used[0]].coding
            settled = tuple((node or self._agents).settled for node in nodes)
            plan = Plan(
                number, template, groups, weights, reduce_dtype, coding=coding, settled=settled
            )
            agents = [node for node in nodes if node is not None]
            if not agents:
                return why or "no other node has a result"
            for agent in agents:
                agent.begin_exchange()
            begin = _clock.now()
            try:
                took = self._by_stream(plan, nodes)
            except _BrokenError as error:
                why = str(error)
                if self._is_time_up():
                    continue
                lost = silent(self._platform, agents, max(_LEAST, self._within(ANSWER)))
                if not lost:
                    self._agents.streams.note(why, may_pass=True)
                    return why
                for agent in lost:
                    reason = TimeoutError(f"its node could not be reached: {error}")
                    ranks = [rank for rank in used if self._nodes[rank] is agent]
                    self._arrivals.lose(dict.fromkeys(ranks, reason))
                continue
            for agent in took:
                agent.averages.add(number)
            for node in nodes:
                (node or self._agents).settled = number
            return plan, {agent.token for agent in took}, _clock.now() - begin

    def _models(self) -> tuple[list[int], dict[int, float], Template]:
        """Return the ranks that are averaged, their weights, and their template."""
        arrivals, spec = self._arrivals, self._spec
        arrivals.check(spec)
        template: Template | None = None
        whole: Template | None = None  # before the models were encoded
        first = 0
        not_finite: dict[int, Exception] = {}
        for rank in sorted(self._metadata.keys() - arrivals.failed.keys()):
            metadata = self._metadata[rank]
            if metadata.error is not None:
                raise metadata.error
            assert metadata.template is not None
            this, coding = metadata.template, metadata.coding
            this = this if coding is None else Template(Kind.FLAT_WEIGHTS, coding.layout)
            if template is None or whole is None:
                template, whole, first = metadata.template, this, rank
                self._codec.accept(_stand_in(template), f"rank {rank}")
            _match(whole, this, rank, first)
            if metadata.not_finite is not None:
                not_finite[rank] = metadata.not_finite
        assert template is not None
        by_result = callable(spec.weights)
        ranks = sorted(self._metadata.keys() - arrivals.failed.keys())
        values = [
            self._metadata[k].weight or 0.0 if by_result else spec.number_of(k) for k in ranks
        ]
        weights = dict(zip(ranks, read_weights(values, len(ranks)), strict=True))
        if not_finite and spec.nonfinite == "raise":
            raise next(iter(not_finite.values()))
        arrivals.quarantine(not_finite)
        arrivals.check(spec)
        used = {k: weight for k, weight in weights.items() if k not in arrivals.failed}
        if not any(used.values()):
            raise ValueError(NONE_FINITE)
        return [*used], used, template

    def _check_time(self) -> None:
        """Count the ranks of all agents as lost once the time of the round is up."""
        if self._is_time_up():
            self._arrivals.lose(dict.fromkeys(self._far(), late_error(self._timeout)))

    def _left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end + _GRACE - _clock.now())

    def _is_time_up(self) -> bool:
        return self._left() == 0.0

    def _within(self, seconds: float) -> float:
        """Return the part of ``seconds`` to wait, so that time for another attempt is left."""
        left = self._left()
        return seconds if left is None else min(seconds, left / _SHARE)

    def _address(self, node: Node) -> Address:
        """Return the address of a node for streams.

        Raises:
            _BrokenError: If it has none, or does not answer in time.
        """
        if node is not None:
            left = self._left()
            address = node.address(_START if left is None else min(left, _START))
            if isinstance(address, str):
                raise _BrokenError(address)
            return address
        try:
            return self._agents.end.address
        except OSError as error:
            raise _BrokenError(str(error)) from error

    def _by_stream(self, plan: Plan, nodes: Sequence[Node]) -> list[AgentClient]:
        """Exchange over streams; return the agents that have the average.

        Raises:
            _BrokenError: If the driver does not have it.
        """
        addresses = tuple(map(self._address, nodes))
        tokens = tuple("" if node is None else node.token for node in nodes)
        last, epoch = self._agents.epoch
        self._agents.epoch = (), b""  # until all connections are known to work
        if last != tokens:
            epoch = secrets.token_bytes(16)
        endpoints = Endpoints(addresses, epoch, self._left())
        calls: dict[AgentClient, Future[Traffic | Exception]] = {}
        for me, node in enumerate(nodes):
            if node is not None:
                calls[node] = node.stream(plan, me, endpoints)
        try:
            own = self._agents.end.stream(plan, nodes.index(None), endpoints)
        except (StreamError, ValueError) as error:  # the second, if connections have ended
            raise _BrokenError(f"{type(error).__name__}: {error}") from error
        # They are as far as the driver, unless they hang.
        there = self._platform.wait_for_all(calls.values(), self._within(PATIENCE))
        outcomes: dict[AgentClient, Any] = {
            agent: call.exception() or call.result()
            for agent, call in calls.items()
            if call in there
        }
        took = [agent for agent, outcome in outcomes.items() if isinstance(outcome, Traffic)]
        here = self._platform.node()
        self._traffic = {here: own} | {agent.node: outcomes[agent] for agent in took}
        if len(took) == len(calls):
            self._agents.epoch = tokens, epoch
        return took


class _BrokenError(Exception):
    """An exchange has failed; nodes still have their values."""


def _match(template: Template, other: Template, rank: int, first: int) -> None:
    """Raise unless the result of ``rank`` is a model like that of rank ``first``."""
    if template == other:
        return
    where = f"rank {rank}"
    try:
        if template.kind is not other.kind:
            raise TypeError(f"{where}: expected {template.kind.value}, got {other.kind.value}")
        if template.packed:
            template.check_layout(other.layout, where)
            return
        template.match(_stand_in(other), where)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error} (rank {first} gave what is expected)") from None


def _stand_in(template: Template) -> Any:
    """Return a model with the names, shapes and dtypes of ``template``, but without memory."""
    if template.packed:
        return template.layout
    slots = template.layout.slots
    return template.build([np.broadcast_to(np.zeros((), s.dtype), s.shape) for s in slots])
