"""One average between nodes: agents are told who is averaged, and exchange pieces.

The driver takes part as the agent of its own node, and of all ranks that have no agent. The ways:

- Streams. An exchange has succeeded once the driver has the average; an agent that lacks it is sent
  it later. If it fails, nodes that do not answer are left out, and the others exchange again from
  the values that they still have; if all answer, these go on over objects.
- Objects of Ray's store, which it moves between nodes: about half as fast, but it always works.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from flatweights import _core
from flatweights._average import read_weights
from flatweights._sources import Kind, Template
from flatweights._weights import sealed
from flatweights.ray._errors import late_error, reason_of
from flatweights.ray._result import copied
from flatweights.ray._round import Round
from flatweights.ray.nodes._address import Address
from flatweights.ray.nodes._links import StreamError
from flatweights.ray.nodes._node import PATIENCE, Route, Traffic
from flatweights.ray.nodes._plan import Plan
from flatweights.ray.peers._by_agent import AgentEnd, Agents
from flatweights.ray.peers._summary import Exchanged, Reading, Summary, read_into
from flatweights.ray.peers._wait import Arrivals, Request
from flatweights.ray.rounds._codec import PLAIN, Codec
from flatweights.ray.rounds._letting_go import letting_go

_GRACE = 0.5  # seconds for which an exchange may go on when the time of a round is up
_ANSWER = 10.0  # seconds in which an agent answers: while its store spills, it does nothing else
_BEACON = 15.0  # seconds in which a small object passes a link, however busy it is
_LEAST = 0.05  # seconds that each wait is given
_SHARE = 3  # no wait takes more than this part of the time that is left
_START = 30.0  # seconds that a new agent is given to listen
_ROOM = 1.25  # times the duration of the last exchange that the wait for results leaves for it

Node = AgentEnd | None
"""A node in an exchange: by its agent, None for the driver's own."""


class NodesAverage:
    """One average that nodes add up.

    Attributes:
        reading: How results are read where they lie.
    """

    def __init__(
        self,
        agents: Agents,
        arrivals: Arrivals,
        request: Request,
        out: Any = None,
        codec: Codec = PLAIN,
    ) -> None:
        """Prepare the average.

        Args:
            agents: Those of the group.
            arrivals: The answers to wait for: of ranks here, and of those that agents call.
            request: The arguments of the round.
            out: Where to write.
            codec: How weights travel; agents average encoded ones as they are.
        """
        self.reading = Reading(
            screen=request.nonfinite != "propagate",
            weigh=request.weights if callable(request.weights) else None,
            is_encoded=codec.is_encoded,
        )
        self._codec = codec
        self._agents = agents
        self._arrivals = arrivals
        self._request = request
        self._out = out
        self._summaries: dict[int, Summary] = {}
        self._nodes: dict[int, Node] = {}
        self._traffic: dict[str, Traffic] = {}  # by node
        self._way = ""  # of the exchange
        self._end = arrivals.deadline.end
        if self._end is not None:
            # The exchange is to be over in time, too.
            left = self._end - time.monotonic()
            room = min(_ROOM * agents.seconds or left / 4, left / 2)
            arrivals.deadline = arrivals.deadline._replace(end=self._end - room)

    def run(self) -> Round:
        """Wait, exchange, and let go of all values, in an error too."""
        with letting_go(self._agents.end.models.clear, self._arrivals.let_go):
            return self._run()

    def _run(self) -> Round:
        arrivals = self._arrivals
        for rank in sorted(arrivals.arrived):
            self._receive(rank)
        while (came := arrivals.wait(all_at_once=True)) is not None:
            for rank in came:
                self._receive(rank)
            arrivals.check(self._request)
        begin = time.monotonic()
        plan, took, seconds = self._exchange()
        used = sorted(rank for group in plan.groups for rank in group)
        summaries = {rank: self._summaries[rank] for rank in used}
        template = plan.template
        self._agents.nbytes = template.layout.nbytes
        self._agents.seconds = seconds
        mean = self._agents.end.weights(plan.number)
        difference = mean if plan.coding is not None else None
        if self._codec.is_encoded:
            mean = sealed(self._codec.finish(self._codec.decode(mean)))
            template = Template.of(mean)
        if self._out is not None:
            target = template.read_out(self._out)
            template.match(self._out, "out")
            _core.move_parts(target, template.read(mean, "the average"))
            mean = self._out
        elif template.kind in (Kind.MAPPING, Kind.TREE):
            containers = summaries[used[0]].containers
            assert containers is not None
            mean = sealed(containers.build(containers.leaves(mean, "the average")))
        far = [rank for rank, node in self._nodes.items() if node is not None]
        traffic = self._traffic.items()
        result = Round(
            mean,
            used,
            failed=dict(sorted(arrivals.failed.items())),
            quarantined=sorted(arrivals.quarantined),
            late=arrivals.late,
            extras={k: copied(s.extras) for k, s in summaries.items() if s.extras is not None},
            seconds={"wait": arrivals.seconds_waited, "average": time.monotonic() - begin},
            nbytes=sum(summary.nbytes for summary in summaries.values()),
            ways=dict.fromkeys(far, f"agent: {self._way}"),
            groups=plan.merged_groups(),
            links={node: {"in": t.received, "out": t.sent} for node, t in traffic},
        )
        if self._out is None and template.kind in (Kind.FLAT_WEIGHTS, Kind.ARRAY):
            result._exchanged = Exchanged(plan.number, frozenset(took), difference)
        return result

    def _receive(self, rank: int) -> None:
        """Read the result of a rank here, or the summary of one elsewhere."""
        answer = self._arrivals.answers[rank]
        value = self._arrivals.take(rank)
        if rank in self._arrivals.failed:
            return
        self._nodes[rank] = answer.agent
        if answer.agent is not None:
            self._summaries[rank] = value
        else:
            models = self._agents.end.models
            self._summaries[rank] = read_into(models, rank, value, self.reading)

    def _exchange(self) -> tuple[Plan, set[str], float]:
        """Exchange, without lost nodes.

        Returns:
            The plan, which agents have the average, and how long the last attempt took.
        """
        why = self._why_no_streams()
        while True:
            self._check_time()
            used, weights, template = self._models()
            nodes = list(dict.fromkeys(self._nodes[rank] for rank in used))
            nodes += [] if None in nodes else [None]  # the driver takes part without ranks, too
            groups = tuple(tuple(k for k in used if self._nodes[k] is node) for node in nodes)
            number = self._agents.next_number()
            sums, coding = self._agents.sums, self._summaries[used[0]].coding
            settled = tuple((node or self._agents).settled for node in nodes)
            plan = Plan(number, template, groups, weights, sums, coding=coding, settled=settled)
            agents = [node for node in nodes if node is not None]
            for agent in agents:
                agent.begin_exchange()
            begin = time.monotonic()
            self._way = f"objects ({why})" if why else "streams"
            try:
                took = self._over_objects(plan, nodes) if why else self._by_stream(plan, nodes)
            except _BrokenError as error:
                if self._is_time_up():
                    continue
                lost = error.lost or self._unreachable(agents)
                if not lost and why:
                    raise RuntimeError(f"the exchange failed: {error}") from error.__cause__
                why = why if lost or why else str(error)
                if not lost:
                    self._agents.streams.note(why, may_pass=True)
                for agent in lost:
                    reason = TimeoutError(f"its node could not be reached: {error}")
                    ranks = [rank for rank in used if self._nodes[rank] is agent]
                    self._arrivals.lose(dict.fromkeys(ranks, reason))
                continue
            for agent in took:
                agent.averages.add(number)
            for node in nodes:
                (node or self._agents).settled = number
            return plan, {agent.token for agent in took}, time.monotonic() - begin

    def _models(self) -> tuple[list[int], dict[int, float], Template]:
        """Return the ranks that are averaged, their weights, and their template."""
        arrivals, request = self._arrivals, self._request
        arrivals.check(request)
        template: Template | None = None
        whole: Template | None = None  # before the models were encoded
        first = 0
        spoiled: dict[int, Exception] = {}
        for rank in sorted(self._summaries.keys() - arrivals.failed.keys()):
            summary = self._summaries[rank]
            if summary.error is not None:
                raise summary.error
            assert summary.template is not None
            this, coding = summary.template, summary.coding
            this = this if coding is None else Template(Kind.FLAT_WEIGHTS, coding.layout)
            if template is None or whole is None:
                template, whole, first = summary.template, this, rank
                self._codec.accept(_stand_in(template), f"rank {rank}")
            _match(whole, this, rank, first)
            if summary.spoiled is not None:
                spoiled[rank] = summary.spoiled
        assert template is not None
        if spoiled and request.nonfinite == "raise":
            raise next(iter(spoiled.values()))
        arrivals.quarantine(spoiled)
        arrivals.check(request)
        ranks = sorted(self._summaries.keys() - arrivals.failed.keys())
        by_result = callable(request.weights)
        values = [
            self._summaries[k].weight or 0.0 if by_result else request.number_of(k) for k in ranks
        ]
        weights = dict(zip(ranks, read_weights(values, len(ranks)), strict=True))
        return ranks, weights, template

    def _check_time(self) -> None:
        """Count the ranks of all agents as lost once the time of the round is up."""
        if self._is_time_up():
            ranks = [rank for rank, node in self._nodes.items() if node is not None]
            timeout = self._arrivals.deadline.timeout
            self._arrivals.lose(dict.fromkeys(ranks, late_error(timeout)))

    def _left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end + _GRACE - time.monotonic())

    def _is_time_up(self) -> bool:
        return self._left() == 0.0

    def _within(self, seconds: float) -> float:
        """Return how many of ``seconds`` to wait, such that time for another attempt is left."""
        left = self._left()
        return seconds if left is None else min(seconds, left / _SHARE)

    def _why_no_streams(self) -> str:
        """Return why there can be no streams; nothing if there can."""
        agents = self._agents
        if agents.choice == "objects":
            return "FLATWEIGHTS_BETWEEN_NODES=objects"
        if not agents.streams.is_over:
            return agents.streams.reason
        left = self._left()
        for node in {*self._nodes.values()}:
            address = self._address(node, _START if left is None else min(left, _START))
            if isinstance(address, str):
                agents.streams.note(address, may_pass=True)
                return address
        return ""

    def _address(self, node: Node, timeout: float = 0.0) -> Address | str:
        if node is not None:
            return node.address(timeout)
        try:
            return self._agents.end.address
        except OSError as error:
            return str(error)

    def _by_stream(self, plan: Plan, nodes: Sequence[Node]) -> list[AgentEnd]:
        """Exchange over streams; return the agents that have the average.

        Raises:
            _BrokenError: If the driver does not have it.
        """
        addresses = [self._address(node) for node in nodes]
        tokens = tuple("" if node is None else node.token for node in nodes)
        last, epoch = self._agents.epoch
        self._agents.epoch = (), b""  # until all links are known to be in order
        if last != tokens:
            epoch = secrets.token_bytes(16)
        route = Route(tuple(addresses), epoch, self._left())  # type: ignore[arg-type]
        calls: dict[AgentEnd, Any] = {}
        for me, node in enumerate(nodes):
            if node is not None:
                calls[node] = node.handle.stream.remote(plan, me, route)
        try:
            own = self._agents.end.stream(plan, nodes.index(None), route)
        except (StreamError, ValueError) as error:  # the latter, if links have ended
            raise _BrokenError(f"{type(error).__name__}: {error}") from error
        # They are as far as the driver, if they are not stuck.
        there = _there(list(calls.values()), self._within(PATIENCE))
        outcomes = {agent: _outcome(ref) for agent, ref in calls.items() if ref in there}
        took = [agent for agent, outcome in outcomes.items() if isinstance(outcome, Traffic)]
        self._traffic = {_id_of(None): own} | {agent.node: outcomes[agent] for agent in took}
        if len(took) == len(calls):
            self._agents.epoch = tokens, epoch
        return took

    def _over_objects(self, plan: Plan, nodes: Sequence[Node]) -> list[AgentEnd]:
        """Exchange over objects of Ray's; return the agents that have the average.

        Raises:
            _BrokenError: If something was lost, or a node does not answer.
        """
        end, me, count = self._agents.end, nodes.index(None), len(nodes)
        agents = {k: node for k, node in enumerate(nodes) if node is not None}
        parts: dict[int, Any] = {me: [ray.put(part) for part in end.cut(plan, me)]}
        for k, agent in agents.items():
            refs = agent.handle.cut.options(num_returns=count).remote(plan, k)
            parts[k] = [refs] if count == 1 else refs
        means: dict[int, Any] = {}
        for k, agent in agents.items():
            pieces = [parts[node][k] for node in range(count)]
            means[k] = agent.handle.merge.remote(plan, k, *pieces)
        mine = self._fetch([parts[node][me] for node in range(count)], nodes)
        means[me] = ray.put(end.merge(plan, me, mine))
        del mine
        all_means = [means[node] for node in range(count)]
        placed = [agent.handle.place.remote(plan, k, *all_means) for k, agent in agents.items()]
        end.place(plan, me, self._fetch(all_means, nodes))
        self._traffic = {_id_of(node): _counted(plan, k) for k, node in enumerate(nodes)}
        there = _there(placed, self._within(PATIENCE))
        done = zip(agents.values(), placed, strict=True)
        return [agent for agent, ref in done if ref in there and _outcome(ref) is None]

    def _fetch(self, refs: list[Any], nodes: Sequence[Node]) -> list[Any]:
        """Return the values of ``refs``, which agents make, while all nodes reach each other."""
        agents = [node for node in nodes if node is not None]
        came = 0
        while (count := len(_there(refs, max(_LEAST, self._within(PATIENCE))))) < len(refs):
            lost = self._unreachable(agents)
            if self._is_time_up() or lost:
                raise _BrokenError("an object did not come in time", lost)
            if count == came and (lost := self._cut_off(agents)):
                raise _BrokenError(
                    "another node cannot fetch objects from it, or it from that", lost
                )
            came = count
        try:
            return ray.get(refs)  # type: ignore[no-any-return]
        except ray.exceptions.RayError as error:
            raise _BrokenError(reason_of(error)) from error

    def _unreachable(self, agents: Sequence[AgentEnd]) -> list[AgentEnd]:
        """Return the agents that do not answer."""
        pings: dict[AgentEnd, Any] = {agent: agent.handle.ping.remote() for agent in agents}
        there = _there(list(pings.values()), max(_LEAST, self._within(_ANSWER)))
        silent = [agent for agent, ref in pings.items() if ref not in there]
        for agent, ref in pings.items():
            error = _outcome(ref) if ref in there else None
            if isinstance(error, Exception):
                agent.note_failure(error)
                silent.append(agent)
        return silent

    def _cut_off(self, agents: Sequence[AgentEnd]) -> list[AgentEnd]:
        """Return agents, with as few ranks as can be, without which all can fetch from each other.

        All answer, but Ray would go on fetching over a link between two of them that is cut.
        """
        timeout = self._within(_BEACON)
        beacons = {agent: agent.handle.beacon.remote() for agent in agents}
        shown = {agent: _outcome(ref, _ANSWER) for agent, ref in beacons.items()}
        lit = [agent for agent, found in shown.items() if isinstance(found, list)]
        refs = [shown[agent][0] for agent in lit]
        asked = [agent.handle.sees.remote(refs, timeout) for agent in lit]
        blind: list[tuple[AgentEnd, AgentEnd]] = []
        for agent, ref in zip(lit, asked, strict=True):
            sees = _outcome(ref, timeout + _ANSWER)
            if isinstance(sees, list):
                blind += [(agent, lit[k]) for k, is_seen in enumerate(sees) if not is_seen]
        nodes = [*self._nodes.values()]
        lost: list[AgentEnd] = []
        while blind:
            both = [agent for pair in blind for agent in pair]
            lost.append(max(both, key=lambda one: (both.count(one), -nodes.count(one))))
            blind = [pair for pair in blind if lost[-1] not in pair]
        return lost


class _BrokenError(Exception):
    """An exchange has failed; the values are still where they were.

    Attributes:
        lost: The agents that are to be left out, if they are known.
    """

    def __init__(self, text: str, lost: Sequence[AgentEnd] = ()) -> None:
        super().__init__(text)
        self.lost = lost


def _there(refs: list[Any], timeout: float) -> list[Any]:
    """Return those of ``refs`` that are there, once all are, or the time is up."""
    there: list[Any] = []
    if refs:
        there, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout)
    return there


def _id_of(node: Node) -> str:
    """Return the id by which Ray knows a node."""
    if node is not None:
        return node.node
    here: str = ray.get_runtime_context().get_node_id()
    return here


def _outcome(ref: Any, timeout: float | None = None) -> Any:
    """Return what a call returned or raised, which has ended or is to end in time."""
    try:
        return ray.get(ref, timeout=timeout)
    except ray.exceptions.RayError as error:
        return error


def _counted(plan: Plan, me: int) -> Traffic:
    """Return the bytes that an exchange moves from and to a node, as the plan has them."""
    nodes = [node for node in range(len(plan.groups)) if node != me]
    own = plan.bounds(me).stop - plan.bounds(me).start
    sent = sum(sum(plan.sizes(me, node)) + own for node in nodes)
    others = [plan.bounds(node) for node in nodes]
    received = sum(sum(plan.sizes(node, me)) for node in nodes)
    return Traffic(sent, received + sum(bounds.stop - bounds.start for bounds in others))


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
    """Return something with the names, shapes and dtypes of a model, but without its memory."""
    if template.packed:
        return template.layout
    slots = template.layout.slots
    return template.build([np.broadcast_to(np.zeros((), s.dtype), s.shape) for s in slots])
