"""What must hold: checked when a process group posts a response, when calls return, and at the end.

The truth is what members have sent. Each request is noted when the coordinator can see it, with the
model, the weight and the state that its process had then. All models are small integers, and
weights are small powers of two, so exactly one average is right, bit by bit. In particular:

- an average consists of the models that its ranks had sent for that call, each with its weight, and
  no member takes part whose model is older than the last average of this kind of call;
- members that get responses of one number get equal bytes and facts;
- a healed member gets the state of the donor before the step, and equal steps give equal states;
- late, failed, quarantined and healed ranks are what they are called, and a rank that is alive and
  on time is none of these;
- a call ends within its timeout, unless the coordinator or the member was stopped;
- nobody waits if nothing is going to answer;
- at the end the process group is over, and no weights of members are held.

Of members on other nodes, a request counts from its arrival at the coordinator on, and an answer
until it is sent there. Their agents may hold weights for longer.
"""

from __future__ import annotations

import gc
import math
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.sim.world import Process, World

from flatweights.ray.channels._protocol import ASKED_AGAIN, REPEAT, REQUEST
from flatweights.ray.core._requests import (
    CallsDifferError,
    LacksStateError,
    OutOfSyncError,
    Request,
    Response,
)
from flatweights.ray.results._result import Packed
from flatweights.ray.results._round import Round
from flatweights.ray.support._errors import WorkerError

if TYPE_CHECKING:
    from tests.sim.platform import Handle, Link

_SLACK = 0.7  # seconds of messages
_REACHED = 10.0  # seconds until an actor that is out of reach now and then has got a message
_STUCK = 3.0  # seconds, without an answer, in which all members wait
_SILENT = 7.0  # more seconds, if links may fall silent: until what was sent goes through Ray
_EXCHANGED = 6.0  # seconds that exchanges between nodes may take, if some break off
_REACHED = 15.0  # seconds after which an agent that was stopped has answered a ping
_PINGED = 22.0  # seconds after which a coordinator has no more patience for an agent
_BELIEVED = 9.0  # seconds after which a coordinator may believe the report of a death
_KNOWN = 3.0  # seconds after which a coordinator knows of a death, unless it was stopped
_REPORTED = 9.0  # seconds after which Ray has reported every death
_SLICE = 1.0  # seconds between two looks of a coordinator that nothing wakes
_CALLS = ("average", "broadcast", "all_gather")


class Call:
    """A call of a program, until it returns.

    Attributes:
        vector: The model that it sends.
        weight: The weight of the model.
        state: The bytes of the state that the process has; None without a state.
        model: Which of two models of one layout it is about.
        value: The object that it gathers.
        place: Its place in a `fit`, if the process has a state of it; and the number of its steps.
        answers: The responses that the member was told.
    """

    def __init__(self, process: Process, vector: Any, weight: float, state: Any) -> None:
        self.process, self.vector, self.weight = process, vector, weight
        self.state = None if state is None else state.bytes()
        self.model = 0
        self.value: Any = None
        self.place: Any = None
        self.steps = 0.0
        self.is_finite = vector is None or bool(np.isfinite(vector).all())
        self.answers: list[tuple[int, Response]] = []


class Sent:
    """A request, from the moment at which the coordinator can see it."""

    def __init__(self, member: Noted, request: Request, call: Any, now: float) -> None:
        self.member, self.request, self.call, self.at = member, request, call, now
        self.late_for = 0  # the number of a response that it is to be told of


class Noted:
    """A process as a member of one coordinator.

    Attributes:
        number: The number of its session.
        open: Its ask that was not answered.
        has: The number of the last response that it was told.
        prepared: By number, the requests that it may repeat.
        got: By kind of call, the number of the last response without an error.
        of_state: The number of the last such response of a call with a state.
        passed_by: The number of the last call that sent it away, since it waited for another one.
        told_at: The time at which it was told its first response.
        counts: Whether the others miss it if it dies.
        is_told: Whether it was told its first response.
        is_gone: Whether it has left, or has dropped its member.
        agent: The agent of its node; None, if that is the coordinator's, or unknown.
        has_left: Whether it has left.
        leave_came: Whether that has come to the coordinator, or is in the channel to it.
        may_have_left: Whether it has left, perhaps after it had dropped its member.
    """

    def __init__(self, process: Process, token: bytes) -> None:
        self.process, self.token = process, token
        self.rank: int | None = None
        self.number = self.has = self.of_state = 0
        self.agent: Any = None
        self.open: Sent | None = None
        self.prepared: dict[int, Request] = {}
        self.got: dict[Any, int] = {}
        self.is_gone = self.is_told = self.has_joined = self.counts = False
        self.has_left = self.may_have_left = self.leave_came = False
        self.last_operation = ""
        self.passed_by = 0
        self.told_at = float("inf")

    @property
    def is_cut_off(self) -> bool:
        """Whether the agent of its node is dead, and with it the weights that stayed there."""
        return self.agent is not None and self.agent.process.is_dead

    @property
    def is_silent(self) -> bool:
        """Whether the agent of its node was stopped for longer than a death's report waits."""
        stops = [] if self.agent is None else self.agent.process.stops
        return any(end - begin > _BELIEVED for begin, end in stops)

    @property
    def is_there(self) -> bool:
        return not (self.is_gone or self.process.is_dead or self.is_cut_off)


class Known:
    """A response of a call: what it is, its bytes, and the state of its donor."""

    def __init__(self, response: Response, content: bytes | None, kind: Any) -> None:
        self.response, self.content, self.kind = response, content, kind
        self.state: Any = None
        self.is_given = False  # whether the donor has sent its state
        self.model = 0


class Record:
    """What is known of one process group."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.is_open = False
        self.last = 0
        self.known: dict[int, Known] = {}
        self.by_kind: dict[Any, int] = {}
        self.by_state: dict[str, list[Any]] = defaultdict(list)
        self.by_session: dict[int, Noted] = {}
        self.newest: dict[int, Noted] = {}
        self.entered: dict[int, list[Noted]] = defaultdict(list)
        self.lost_states = self.twins = 0

    def newest_joined(self, rank: int) -> Noted | None:
        """Return the newest process of a rank that has joined."""
        return next((one for one in reversed(self.entered.get(rank, ())) if one.has_joined), None)

    def missed(self) -> set[int]:
        """Return the ranks that have joined and not left; a leave may still be on its way."""
        newest = {rank: self.newest_joined(rank) for rank in [*self.entered]}
        return {
            rank
            for rank, one in newest.items()
            if one is not None and not (one.has_left and one.leave_came and one.process.is_dead)
        }

    def lost(self, is_dead: Callable[[Process], bool]) -> list[int]:
        """Return the ranks whose last process has joined and died, and not left."""
        lost = []
        for rank, entered in self.entered.items():
            # Those that have died, or given up, while they joined, leave no trace.
            stayed = [one for one in entered if one.has_joined or one.is_there]
            stayed = [one for one in entered if one in stayed or not is_dead(one.process)]
            last = stayed[-1] if stayed else None
            if (
                last is not None
                and last.counts
                and not last.may_have_left
                and is_dead(last.process)
            ):
                lost.append(rank)
        return lost

    def is_unsure(self) -> bool:
        """Whether a process is about to join, or has died when its leave may not have arrived."""
        joined = [self.newest_joined(rank) for rank in [*self.entered]]
        return any(
            one.is_there and not one.has_joined
            for entered in self.entered.values()
            for one in entered[-1:]
        ) or any(one and one.has_left and one.process.notes.get("broke") for one in joined)


class Oracle:
    """The notes, and the checks.

    Attributes:
        counts: How often things have happened, by name.
        losses: How often something was lost because memory was short.
        coordinators: All coordinators so far.
        agents: All agents of other nodes so far.
    """

    def __init__(self, world: World, plan: dict[str, Any], state_layout: Any) -> None:
        self._world, self._plan, self._state_layout = world, plan, state_layout
        self.members: dict[bytes, Noted] = {}
        rates = plan["rates"]
        is_calm = not (plan["agent_faults"] or rates.get("broken") or rates.get("silent"))
        self._exchanged = _EXCHANGED if plan["exchanges"] and not is_calm else 0.0
        self._exchanged += _REACHED if plan["rates"].get("out of reach") else 0.0
        self.coordinators: list[Handle] = []
        self.agents: list[Handle] = []
        self.mains: list[Process] = []
        self.counts: Counter[str] = Counter()
        self.losses = 0
        self._records: dict[int, Record] = {}
        self._states: dict[Any, Any] = {}
        self._waiting_since: float | None = None
        # By token, requests that an agent has not handed on, and the call that each is of.
        self._on_their_way: dict[bytes, list[tuple[bytes, Any]]] = defaultdict(list)
        self._entering: set[bytes] = set()  # tokens of processes that wait for a join reply

    def _fail(self, text: str) -> None:
        self._world.fail(text)

    # What the simulated platform tells.

    def started(self, coordinator: Handle) -> None:
        """Note a new coordinator."""
        self.coordinators.append(coordinator)

    def parted(self, token: bytes) -> None:
        """Note that a process has closed its end."""
        self.members[token].is_gone = True

    def called(self, process: Process, name: str, args: tuple[Any, ...]) -> None:
        """Note a call of a coordinator through Ray."""
        if name == "stay":
            self.members[args[0]] = Noted(process, args[0])
        elif name == "enter":
            self._entering.add(args[0])
        elif name == "exchange" and len(args) == 1:  # it has no channel, nor an agent
            self.members[args[0]].agent = None
        elif name in ("exchange", "deliver") and len(args) > 1 and args[1]:
            self.asked(process, args[0], args[1])
        elif name == "lose" and self.members[args[0]].process is process:
            self.members[args[0]].is_gone = True

    def entered(self, token: bytes, join_reply: Any, group: Any) -> None:
        """Note that a process gets a join reply."""
        member = self.members[token]
        self._entering.discard(token)
        member.rank, member.number = join_reply.rank, join_reply.session
        member.agent = join_reply.node_agent
        self._record(group).entered[join_reply.rank].append(member)

    def agent_died(self, agent: Any) -> None:
        """Note the end of the agent of a node: a leave may not have arrived."""
        for member in self.members.values():
            is_under_way = member.agent is agent and not member.leave_came
            if is_under_way and agent.process.notes.get("broke"):
                member.process.notes["broke"] = True

    def asking(self, process: Process, token: bytes, body: bytes) -> None:
        """Note a request that goes to the agent of a node; what ends a member counts at once."""
        self._on_their_way[token].append((body, process.notes.get("call")))
        if Request(*pickle.loads(body)[0]).operation == "leave":
            self._leaves(self.members[token])

    def handed(self, token: bytes, body: bytes) -> None:
        """Note that the coordinator gets a request from the agent of a node."""
        while self._on_their_way[token]:
            sent, call = self._on_their_way[token].pop(0)
            if sent == body:
                self.asked(self.members[token].process, token, body, call=call)
                return

    def asked(
        self, process: Process, token: bytes, body: bytes, kind: int = REQUEST, call: Any = None
    ) -> None:
        """Note a request, which the coordinator can see from now on."""
        member = self.members[token]
        if kind == REPEAT:
            number, weight = ASKED_AGAIN.unpack(body)
            request = member.prepared[number]._replace(weight=weight)
            self.counts["asks again"] += 1
        else:
            request = Request(*pickle.loads(body)[0])
        if request.operation == "leave":
            member.leave_came = True
            if not member.may_have_left:
                self._leaves(member)
            return
        if member.open is not None:
            self._fail(f"{process.name} asks twice")
        member.last_operation = request.operation
        call = call or process.notes.get("call")
        member.open = Sent(member, request, call, self._world.now)
        self.counts["asks that lack the state"] += request.lacks
        self._waiting_since = None
        if self._world.transcript is not None:
            weight = f", weight={request.weight:g}" if request.operation == "average" else ""
            lacks = ", and lacks the state" if request.lacks else ""
            self._world.note(f"asks {request}{weight}, timeout={request.timeout}{lacks}")

    def _leaves(self, member: Noted) -> None:
        member.may_have_left = True
        member.has_left = member.has_left or not member.is_gone  # not if it was dropped before
        member.is_gone = True
        self._world.note("leaves")

    def answered(self, link: Link) -> None:
        """Check that the coordinator has dropped the weights of the request that it answers."""
        member = self.members[link.token]
        # A state is copied after the answer; a link keeps what was not confirmed.
        is_far = link.channels is not None and link.channels.is_of_agent
        may_be_held = is_far or member.last_operation == "give"
        if not may_be_held and any(view() is not None for view in link.views):
            self._fail(f"the weights of an answered request of {link.member.name} are still held")
        link.views = []

    # Responses.

    def posting(
        self, group: Any, number: int, body: bytes, weights: Any, sessions: Sequence[Any]
    ) -> None:
        """Check a response that a process group is about to post to some sessions."""
        record = self._record(group)
        response = Response(*pickle.loads(body))
        buffer = weights.buffer if isinstance(weights, Packed) else None
        content = None if buffer is None else buffer.tobytes()
        self._waiting_since = None
        told = [(session, self.members[session.token]) for session in sessions]
        if self._world.transcript is not None and told:
            names = ", ".join(member.process.name for _, member in told)
            self._world.note(f"tells {names}: {_text_of(number, response)}")
        for session, member in told:
            record.by_session[session.number] = member
            member.number, member.rank = session.number, session.rank
            newest = record.newest.get(session.rank)
            if newest is None or newest.number < session.number:
                record.newest[session.rank] = member
        is_first = bool(told) and number == 0 and told[0][1].open is None
        is_opening = is_first and not record.is_open
        if is_opening:
            record.is_open = True
            self._check_opening(record, len(told))
        is_call = bool(response.sessions) and number > 0
        if is_call and number not in record.known:
            self._check_call(record, response, buffer, content)
        elif is_call:
            known = record.known[number]
            same = repr(response.arguments) == repr(known.response.arguments)
            same = same and response.values == known.response.values
            if content != known.content or not same:
                self._fail(f"response {number} differs from what others got")
        for session, member in told:
            self._check_told(
                record, number, response, content, session, member, is_call, is_opening=is_opening
            )

    def _check_opening(self, record: Record, count: int) -> None:
        size, grace = self._plan["size"], self._plan["grace"]
        least = self._plan["min_size"] or size
        waited = self._world.now - record.began + 1e-6
        if count < least or (count < size and waited < grace):
            self._fail(f"a process group opens with {count} members after {waited:.3f} s")

    def _check_told(
        self,
        record: Record,
        number: int,
        response: Response,
        content: bytes | None,
        session: Any,
        member: Noted,
        is_call: bool,
        *,
        is_opening: bool,
    ) -> None:
        """Check what one member is told."""
        name = member.process.name
        sent, member.open = member.open, None
        if response.prepared and sent is not None and session.number in response.sessions:
            member.prepared[response.prepared] = sent.request
        # After the opening, a process counts from its first call on.
        member.counts = member.counts or sent is not None or is_opening
        if not member.is_told:
            member.told_at = self._world.now
        member.is_told = True
        record.twins += bool(sent is not None and sent.request.twins)
        if sent is None:
            if number != 0 or response.error is not None:
                self._fail(f"{name} was told response {number} without a request")
            member.has_joined, member.has = True, 0
            return
        self._check_seconds(member, sent)
        if sent.request.operation == "heal" and number < 0:
            self._check_healed(record, number, content, member)
        elif not is_call:
            self._check_other_answer(record, response.error, member, sent)
        else:
            if session.number not in (*response.sessions, *response.recovering):
                self._check_late(record, number, member, sent)
            member.has = max(member.has, number)
            if response.error is None:
                member.got[sent.request.kind] = number
                if sent.request.state is not None:
                    member.of_state = number
            if sent.call is not None:
                sent.call.answers.append((number, response))

    def _check_seconds(self, member: Noted, sent: Sent) -> None:
        """Check that a member is told an answer within its timeout."""
        request, took = sent.request, self._world.now - sent.at
        if request.timeout is not None and request.operation in _CALLS and not request.lacks:
            own = [member.process, *([] if member.agent is None else [member.agent.process])]
            stopped = self._seconds_stopped(sent.at, *own, of_others=_PINGED)
            if took > request.timeout + _SLACK + stopped + self._exchanged:
                name = member.process.name
                self._fail(f"{name} waited {took:.2f} s with timeout {request.timeout}")

    def _check_healed(
        self, record: Record, number: int, content: bytes | None, member: Noted
    ) -> None:
        """Check the state before a step that a member gets, since it has lacked it."""
        name, known = member.process.name, record.known.get(-number)
        if known is None:
            self._fail(f"{name} was healed by no response")
        elif known.state != self._state_in(content):
            self._fail(f"{name} was healed with another state than the donor's")
        self.counts["healed"] += 1

    def _check_other_answer(
        self, record: Record, error: Exception | None, member: Noted, sent: Sent
    ) -> None:
        """Check an answer that is no response of a call: an error, or thanks for a state."""
        name, request = member.process.name, sent.request
        if isinstance(error, OutOfSyncError):
            member.passed_by = record.last + 1
        if error is None and request.operation != "give":
            self._fail(f"{name} got an empty answer to {request}")
        elif error is not None and request.operation == "give":
            self._fail(f"{name} got {error!r} for its state")
        elif error is not None and not self._is_fair(record, error, sent):
            self._fail(f"{name} got {error!r} to {request}")
        elif request.operation == "give" and member.has in record.known:
            record.known[member.has].is_given = True

    def _check_late(self, record: Record, number: int, member: Noted, sent: Sent) -> None:
        """Check a response of a call in which a member took no part."""
        name, request, known = member.process.name, sent.request, record.known[number]
        self.counts["late"] += 1
        if request.kind != known.kind:
            self._fail(f"{name} asked {request} and got response {number} of another call")
        if record.by_kind.get(request.kind) != number:
            self._fail(f"{name} got {number}, which is not the latest")
        if sent.call is not None and sent.call.model != known.model and record.twins:
            self._fail(f"{name} got the average of the other twin")
        if number <= member.got.get(request.kind, 0):
            self._fail(f"{name} got {number} again")

    def _is_fair(self, record: Record, error: Exception, sent: Sent) -> bool:
        """Whether this error may answer the request of one member."""
        request, text = sent.request, str(error)
        if isinstance(error, OutOfSyncError):
            return request.lacks or (request.only_next and sent.member.has < record.last)
        if isinstance(error, LacksStateError):
            if request.operation == "heal":
                known = record.known.get(sent.member.has)
                return known is None or not known.is_given or "is gone" not in text
            made = record.by_state.get(request.state or "", [])
            missed = [kind for number, kind in made if number > sent.member.of_state]
            # One call is missed, and another was made meanwhile: it is healed, too.
            has_passed = bool(made) and sent.member.has > made[-1][0]
            return len(missed) > 1 or any(
                kind != request.kind or self._plan["keeps_few"] or has_passed for kind in missed
            )
        if isinstance(error, WorkerError) and "no member is left that has the state" in text:
            record.lost_states += 1
            record.by_state.pop(request.state or "", None)
            for kind in [kind for kind in record.by_kind if kind[-1] == request.state]:
                del record.by_kind[kind]
            have = [
                one
                for entered in record.entered.values()
                for one in entered[-1:]
                if one.has_joined
                and one.is_there
                and not (one.open is not None and one.open.request.lacks)
                and one.rank not in error.failed
            ]
            # A member whose response was not sent, as memory was short, is lost.
            return request.lacks and (not have or self.losses > 0)
        if isinstance(error, WorkerError):  # its time is up
            is_up = request.timeout is not None and self._world.now >= sent.at + request.timeout
            return is_up and not self._is_as_new(record, sent)
        if "take turns" in text:
            return bool(self._plan["program"] == "twins")
        return request.operation == "heal" and isinstance(error, RuntimeError)

    def _check_call(
        self, record: Record, response: Response, buffer: Any, content: bytes | None
    ) -> None:
        """Check a new response of a call."""
        number = response.number
        self.counts["responses"] += 1
        if number != record.last + 1:
            self._fail(f"response {number} after {record.last}")
        record.last = number
        parts = self._parts(record, response)
        if parts is None:
            return
        first = parts[min(parts)]
        kind = first.request.kind
        alike = all(sent.request.agrees_with(first.request) for sent in parts.values())
        known = record.known[number] = Known(response, content, kind)
        if not alike or isinstance(response.error, CallsDifferError):
            self.counts["differ"] += 1
            if alike or not isinstance(response.error, CallsDifferError):
                made = "agree" if alike else "differ"
                self._fail(f"{number}: the calls {made}, and all got {response.error!r}")
            return
        self._check_time(record, number, parts)
        self._check_patience(record, number, parts)
        self._check_order(record, number, kind, parts)
        self._check_left_out(record, response, kind)
        if response.error is not None:
            self.counts["errors"] += 1
            self._check_error(record, number, response.error, parts, first)
            return
        result = Round(None, *response.arguments)
        if result.number != number:
            self._fail(f"response {number} says it is {result.number}")
        if first.request.operation == "average":
            self._check_average(record, number, result, parts, buffer)
        elif first.request.operation == "all_gather":
            self._check_gathered(number, result, parts, response)
        else:
            self._check_broadcast(number, result, parts, first, content)
        self._check_ranks(record, number, result, parts)
        record.by_kind[kind] = number
        if first.request.state is not None:
            record.by_state[first.request.state].append((number, kind))
        if response.donor:
            self._check_healing(record, response, result, parts, known)
        elif result.healed or response.recovering:
            self._fail(f"{number}: healed without a donor")

    def _parts(self, record: Record, response: Response) -> dict[int, Sent] | None:
        """Return the requests that a response says it is of, by rank; None after a violation."""
        parts: dict[int, Sent] = {}
        for session_number in response.sessions:
            member = record.by_session.get(session_number)
            if member is None or member.open is None or member.open.request.operation not in _CALLS:
                self._fail(
                    f"session {session_number} took part in {response.number} without a request"
                )
                return None
            assert member.rank is not None
            if member.rank in parts:
                self._fail(f"two sessions of rank {member.rank} took part in {response.number}")
            if record.newest[member.rank] is not member:
                self._fail(f"a predecessor of rank {member.rank} took part in {response.number}")
            if member.open.request.lacks:
                self._fail(f"rank {member.rank} took part in {response.number} without the state")
            parts[member.rank] = member.open
        return parts

    def _check_time(self, record: Record, number: int, parts: dict[int, Sent]) -> None:
        """Check that a call is not closed while it could wait for somebody who is on time."""
        if self.losses or self._is_time_up(parts):
            return
        for entered in record.entered.values():
            for member in entered[-1:]:
                is_on_time = member.is_told and member.open is None and member.has == number - 1
                if is_on_time and member.is_there and member.passed_by != number:
                    self._fail(f"{number}: made without {member.process.name}, who is on time")

    def _is_time_up(self, parts: dict[int, Sent]) -> bool:
        """Whether the time of a request may be up, after which others are late."""
        ends = [
            sent.at + sent.request.timeout
            for sent in parts.values()
            if sent.request.timeout is not None
        ]
        return bool(ends) and min(ends) <= self._world.now

    def _check_patience(self, record: Record, number: int, parts: dict[int, Sent]) -> None:
        """Check that a call has waited for nobody that it does not need."""
        need = parts[min(parts)].request.min_results
        if self.losses or need is None or need > len(parts):
            return
        last = max(sent.at for sent in parts.values())
        for rank, entered in record.entered.items():
            one = entered[-1]
            is_late = one.told_at < last and one.open is None and one.has < number - 1
            is_long_dead = one.process.died_at + _REPORTED < last
            if rank not in parts and not (is_long_dead or (one.is_there and is_late)):
                return  # it may have been waited for
        waited = self._world.now - last
        # A request that does not fit into a channel is complete only once its member goes on.
        stopped = max(self._seconds_stopped(last, sent.member.process) for sent in parts.values())
        if waited > _SLACK + _SLICE + stopped + self._exchanged:
            self._fail(f"{number}: has waited {waited:.2f} s for members that are late")

    def _check_order(self, record: Record, number: int, kind: Any, parts: dict[int, Sent]) -> None:
        """Check that nobody takes part who has missed a call like this one."""
        last = record.by_kind.get(kind, 0)
        # If its response is no longer kept, late members may make the call alone.
        are_alone = self._plan["keeps_few"] and all(
            sent.member.got.get(kind, 0) < last for sent in parts.values()
        )
        if are_alone:
            return
        for rank, sent in parts.items():
            got = sent.member.got.get(kind, 0)
            has_weights = sent.request.state is None and kind[0] == "average"
            if got < last and has_weights and not self._is_as_new(record, sent):
                self._fail(
                    f"rank {rank} has never got {last}, the last call like {number}, and its "
                    "weights from before it are averaged"
                )
            if sent.member.has < last and rank != sent.request.root:
                self._fail(
                    f"rank {rank} took part in {number} with a request from before {last}: "
                    f"it has {sent.member.has}"
                )

    def _is_as_new(self, record: Record, sent: Sent) -> bool:
        """Whether a member brings what is as new as that of the others, whatever it has missed."""
        last = max((made[-1][0] for made in record.by_state.values() if made), default=0)
        is_before = record.by_kind.get(sent.request.kind, 0) < last
        return sent.request.from_state and is_before and sent.member.of_state >= last

    def _check_left_out(self, record: Record, response: Response, kind: Any) -> None:
        """Check that nobody is left out who has asked in time."""
        for entered in record.entered.values():
            for member in entered[-1:]:
                sent = member.open
                if sent is None or not member.is_there:
                    continue
                patience = 1.3 + self._seconds_stopped(sent.at, member.process) + self._exchanged
                if self._world.now - sent.at < patience or member.number in response.sessions:
                    continue
                name = member.process.name
                if sent.late_for:
                    self._fail(f"{name} is not told of {sent.late_for}, for which it was late")
                if sent.request.kind != kind:
                    if sent.request.lacks and sent.request.state == kind[-1]:
                        self._fail(f"{response.number}: {name} is not told of another call")
                    continue
                # Such a member gets the response, and takes no part.
                is_behind = (
                    sent.request.state is None
                    and kind[0] == "average"
                    and member.got.get(kind, 0) < record.by_kind.get(kind, 0)
                )
                if not (sent.request.lacks or self._plan["keeps_few"] or is_behind):
                    self._fail(f"{response.number}: {name} has asked, and is left out")
                if is_behind and response.error is None:
                    sent.late_for = response.number
                is_healed = response.error is not None or member.number in response.recovering
                if sent.request.lacks and not is_healed:
                    self._fail(f"{response.number}: {name} is not healed")

    def _check_error(
        self,
        record: Record,
        number: int,
        error: Exception,
        parts: dict[int, Sent],
        first: Sent,
    ) -> None:
        """Check an error that all members of a call get."""
        finite = {rank for rank, sent in parts.items() if sent.call.is_finite}
        finite -= {rank for rank in parts if self._is_out_of_reach(rank, parts)}
        need = first.request.min_results
        if isinstance(error, WorkerError):
            if first.request.operation == "broadcast":
                root = first.request.root
                if root in parts and not self._is_out_of_reach(root, parts):
                    self._fail(f"{number}: the root took part, and all got {error!r}")
            elif need is not None and len(finite) >= need:
                self._fail(f"{number}: {finite} are enough for {need}, and all got {error!r}")
            elif need is None and record.missed() <= finite and not record.is_unsure():
                self._fail(f"{number}: nobody is missing, and all got {error!r}")
            for rank, why in error.failed.items():
                self._check_why(record, number, rank, why, parts)
                is_early = need is None or len(parts) < need
                is_late = isinstance(why, TimeoutError) and not self._is_out_of_reach(rank, parts)
                if is_late and is_early and not self._is_time_up(parts):
                    self._fail(f"{number}: failed for rank {rank}, which is late, before time")
        elif isinstance(error, ValueError) and "NaN" in str(error):
            is_right = first.request.nonfinite == "raise" and len(finite) < len(parts)
            if not (is_right or (first.request.nonfinite == "skip" and not finite)):
                self._fail(f"{number}: nobody sent NaN, and all got {error!r}")
        else:
            self._fail(f"{number}: {error!r}")

    def _check_why(
        self, record: Record, number: int, rank: int, why: Exception, parts: dict[int, Sent]
    ) -> None:
        """Check the reason for which a rank has no part in a response."""
        member, joined, text = record.newest.get(rank), record.newest_joined(rank), str(why)
        if self._is_out_of_reach(rank, parts):
            pass
        elif isinstance(why, TimeoutError):
            if rank in parts:
                self._fail(f"{number}: rank {rank} took part and is late")
        elif "NaN" in text:
            if rank not in parts or parts[rank].call.is_finite:
                self._fail(f"{number}: rank {rank} has sent no NaN")
        elif rank in parts and not text.startswith("it "):
            self._fail(f"{number}: rank {rank} took part and has failed: {why!r}")
        elif text in ("it has left", "it has not joined the process group") and (
            joined is None or joined.has_left
        ):
            pass  # a root that is not there
        elif "waits for the others" in text:
            kind = parts[min(parts)].request.kind
            if member is None or member.open is None or member.open.request.kind == kind:
                self._fail(f"{number}: rank {rank} does not wait for others: {why!r}")
        elif self._is_replaced(record, rank, joined):
            pass  # a successor has waited for its leave
        elif joined is not None and joined.has_left and joined.is_silent:
            pass  # its leave has not come in the time for which a report of its death waits
        elif joined is None or (joined.has_left and not joined.process.notes.get("broke")):
            self._fail(f"{number}: rank {rank} died while it joined, and others see {why!r}")
        elif member is not None and member.is_there and not self.losses:
            self._fail(f"{number}: rank {rank} is alive and has failed: {why!r}")

    @staticmethod
    def _is_replaced(record: Record, rank: int, joined: Noted | None) -> bool:
        """Whether a member whose leave is still on its way has a successor."""
        if joined is None or not joined.has_left or joined.leave_came:
            return False
        return record.entered[rank][-1] is not joined

    def _check_average(
        self, record: Record, number: int, result: Round, parts: dict[int, Sent], buffer: Any
    ) -> None:
        lost = self._lost_weights(result, parts)
        sent = [rank for rank in sorted(parts) if rank not in lost]
        finite = tuple(rank for rank in sent if parts[rank].call.is_finite)
        not_finite = tuple(rank for rank in sent if not parts[rank].call.is_finite)
        if result.used != finite:
            self._fail(f"{number}: used {result.used}, and requests of {finite}")
            return
        if result.quarantined != not_finite:
            self._fail(f"{number}: quarantined {result.quarantined}, and NaN of {not_finite}")
        self.counts["quarantined"] += len(not_finite)
        need = parts[min(parts)].request.min_results
        if need is not None and len(finite) < need:
            self._fail(f"{number}: averaged {finite} with min_results={need}")
        total: Any = sum(parts[rank].call.weight * parts[rank].call.vector for rank in finite)
        mean = total / sum(parts[rank].call.weight for rank in finite)
        models = {parts[rank].call.model for rank in finite}
        record.known[number].model = min(models)
        told = record.twins + sum(bool(sent.request.twins) for sent in parts.values())
        if len(models) > 1 and told:
            self._fail(f"{number}: twins are mixed, after {told} asks that told of them")
        if buffer.view(np.float64)[: mean.size].tobytes() != mean.tobytes():
            got = buffer.view(np.float64)
            self._fail(f"{number}: wrong average of {finite}: got {got}, expected {mean}")

    def _lost_weights(self, result: Round, parts: dict[int, Sent]) -> set[int]:
        """Return the ranks whose weights were on a node that has died, or is out of reach."""
        lost = set()
        for rank in result.failed:
            if rank not in result.quarantined and self._is_out_of_reach(rank, parts):
                lost.add(rank)
        return lost

    def _is_out_of_reach(self, rank: int, parts: dict[int, Sent]) -> bool:
        """Whether the agent of a rank that took part has died, with its weights, or was stopped."""
        agent = parts[rank].member.agent if rank in parts else None
        if agent is None:
            return False
        since = self._world.now - _REACHED
        return agent.process.is_dead or any(end > since for _, end in agent.process.stops)

    def _check_gathered(
        self, number: int, result: Round, parts: dict[int, Sent], response: Response
    ) -> None:
        self.counts["gathered"] += 1
        if result.used != tuple(sorted(parts)):
            self._fail(f"{number}: used {result.used}, and requests of {sorted(parts)}")
        got = {rank: pickle.loads(value) for rank, value in response.values.items()}
        expected = {rank: sent.call.value for rank, sent in parts.items()}
        if got != expected:
            self._fail(f"{number}: gathered {got}, expected {expected}")

    def _check_broadcast(
        self,
        number: int,
        result: Round,
        parts: dict[int, Sent],
        first: Sent,
        content: bytes | None,
    ) -> None:
        root = first.request.root
        if root is None or result.used != (root,) or root not in parts:
            self._fail(f"{number}: broadcast of {root} used {result.used}")
            return
        call = parts[root].call
        if call.state is not None and call.state != self._state_in(content):
            self._fail(f"{number}: not the state of the root")
        own = None if call.vector is None else call.vector.tobytes()
        if own is not None and content is not None and content[: len(own)] != own:
            self._fail(f"{number}: not the weights of the root")

    def _check_ranks(
        self, record: Record, number: int, result: Round, parts: dict[int, Sent]
    ) -> None:
        is_broadcast = parts[min(parts)].request.operation == "broadcast"
        for rank in result.late:
            if rank in parts:
                self._fail(f"{number}: rank {rank} took part and is late")
            entered = record.entered.get(rank, [])
            if not any(one.counts or one.open is not None for one in entered):
                self._fail(f"{number}: rank {rank} is late, and has not joined")
        for rank, why in result.failed.items():
            if rank in result.used and not is_broadcast:
                self._fail(f"{number}: rank {rank} is used and has failed")
            if rank not in result.quarantined:
                self._check_why(record, number, rank, why, parts)
        for rank, entered in record.entered.items():
            one = entered[-1]
            has_state = one.open is None or not one.open.request.lacks
            is_missed = one.counts and one.is_there and has_state and not self.losses
            if is_missed and rank not in parts and rank not in (*result.late, *result.failed):
                self._fail(f"{number}: rank {rank} took no part, and is not in {result.late}")
        # The coordinator knows of a successor before that gets its join reply.
        is_entering = any(self.members[token].is_there for token in self._entering)
        for rank in record.lost(self._is_known_dead):
            if rank not in result.failed and not (rank in result.late and is_entering):
                self._fail(f"{number}: rank {rank} is dead, and not in {result.failed}")
        if {*result.healed} & {*result.used}:
            self._fail(f"{number}: {result.healed} are healed and used")

    def _check_healing(
        self,
        record: Record,
        response: Response,
        result: Round,
        parts: dict[int, Sent],
        known: Known,
    ) -> None:
        number = response.number
        donor = record.by_session[response.donor]
        if donor.rank != min(result.used):
            self._fail(f"{number}: the donor is rank {donor.rank} of {result.used}")
        assert donor.rank is not None
        known.state = parts[donor.rank].call.state
        ranks = []
        for session_number in response.recovering:
            recovering = record.by_session.get(session_number)
            if recovering is None or recovering.rank is None:
                continue
            ranks.append(recovering.rank)
            if recovering.open is None or not recovering.open.request.lacks:
                self._fail(f"{number}: {recovering.process.name} is to be healed without a request")
            elif recovering.open.request.kind != known.kind:
                self._fail(f"{number}: {recovering.process.name} has asked for another call")
        if tuple(sorted(ranks)) != result.healed:
            self._fail(f"{number}: healed {result.healed}, and sessions of {ranks}")

    # Time.

    def _seconds_stopped(self, since: float, *own: Process, of_others: float = math.inf) -> float:
        """Return the seconds for which processes were stopped since then.

        Args:
            since: The time.
            own: The processes; those of coordinators count, too.
            of_others: Of the agents of other nodes, at most so many for each time that one was
                stopped: then a coordinator no longer waits for it.
        """
        total = 0.0
        counted = {*own, *(actor.process for actor in self.coordinators)}
        for process in {*counted, *(actor.process for actor in self.agents)}:
            for begin, end in process.stops:
                seconds = max(0.0, min(end, self._world.now) - max(begin, since))
                total += seconds if process in counted else min(seconds, of_others)
        return total

    def _is_known_dead(self, process: Process) -> bool:
        """Whether a process has been dead for so long that coordinators know it."""
        stopped = self._seconds_stopped(process.died_at, process) if process.is_dead else 0.0
        return process.died_at + _KNOWN + stopped < self._world.now

    def at_rest(self) -> None:
        """Check that something answers, if all members wait: called before the clock moves."""
        now = self._world.now
        since = self._waiting_since
        patience = _STUCK + (_SILENT if self._plan["rates"].get("silent") else 0.0)
        is_soon = since is not None and now - since < patience
        actors = [actor.process for actor in (*self.coordinators, *self.agents)]
        if is_soon and all(process.stopped_until < now for process in actors):
            return
        mains = [process for process in self.mains if not process.is_dead]
        live = {one.process: one for one in self.members.values() if not one.is_gone}
        everyone = [*mains, *actors]
        are_waiting = bool(mains) and all(
            process in live and live[process].open is not None for process in mains
        )
        if not are_waiting or any(process.stopped_until >= now for process in everyone):
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        else:
            requests = {
                one.process.name: str(one.open.request) for one in live.values() if one.open
            }
            self._fail(f"all members wait, and nobody is answered: {requests}")

    # What programs tell.

    def returned(self, call: Call, member: Any, result: Round, weights: Any) -> None:
        """Check what a call returns."""
        self.counts["calls"] += 1
        name = call.process.name
        noted = self.of(member)
        if not call.answers:
            self._fail(f"{name} got a result without a response")
            return
        number, response = call.answers[-1]
        if result.number != number:
            self._fail(f"{name} got {result.number}, and was told {number}")
        told = Round(None, *response.arguments)
        if result.used != told.used or result.quarantined != told.quarantined:
            self._fail(f"{name}: used {result.used}, and was told {told.used}")
        took_part = noted.number in (*response.sessions, *response.recovering)
        if took_part == (member.rank in result.late):
            part = "took part" if took_part else "took no part"
            self._fail(f"{name} {part} in {number}, whose late ranks are {result.late}")
        if noted.number in response.recovering and member.rank not in result.healed:
            self._fail(f"{name} is healed, and not in {result.healed}")
        known = self._record_of(noted).known[number]
        content = known.content
        if weights is not None and content is not None:
            is_same = content[: weights.nbytes] == weights.tobytes()
            if not is_same:
                self._fail(f"{name} has other weights than response {number}")

    def gathered(self, member: Any, result: Round) -> None:
        """Check the objects that a call returns."""
        known = self._record_of(self.of(member)).known[result.number or 0]
        values = {rank: pickle.loads(value) for rank, value in known.response.values.items()}
        if result.weights != values:
            self._fail(f"{self.of(member).process.name} gathered {result.weights}, not {values}")

    def made_step(self, member: Any, state: Any) -> None:
        """Check that all members have the same state after the same step."""
        noted = self.of(member)
        key = id(self._record_of(noted)), float(state.began[0]), float(state.step[0])
        if self._states.setdefault(key, state.bytes()) != state.bytes():
            step = f"step {state.step[0]:g}"
            self._fail(f"{noted.process.name} has another state than others after {step}")

    def of(self, member: Any) -> Noted:
        """Return what is known of a `Member`."""
        return self.members[member._coordinator._identity.token]

    def lost_states_of(self, member: Any) -> tuple[int, int]:
        """Return how often the state was lost in a `Member`'s group, and its last response."""
        record = self._record_of(self.of(member))
        return record.lost_states, record.last

    def _record(self, group: Any) -> Record:
        record = self._records.get(id(group))
        if record is None:
            record = self._records[id(group)] = Record(self._world.now)
        return record

    def _record_of(self, member: Noted) -> Record:
        return next(
            record
            for record in self._records.values()
            if record.by_session.get(member.number) is member
        )

    def _state_in(self, content: bytes | None) -> Any:
        """Return the state in a packed buffer, as `State.bytes` does."""
        assert content is not None
        views = self._state_layout.packed_views(np.frombuffer(content, np.uint8).copy())
        return tuple(view.tobytes() for view in views)

    # The end.

    def at_end(self, links: Sequence[Link]) -> None:
        """Check that nothing is left."""
        for coordinator in self.coordinators:
            if not coordinator.process.is_dead and coordinator.object is not None:
                present = [
                    session.who for session in coordinator.object._group.rendezvous.present.values()
                ]
                self._fail(f"a process group has not ended: {present}")
        for agent in self.agents:
            if not agent.process.is_dead:
                self._fail(f"{agent.process.name} has not ended")
        if any(map(_is_held, links)):
            gc.collect()
            for link in filter(_is_held, links):
                self._fail(f"weights of {link.member.name} are held at the end")


def _is_held(link: Link) -> bool:
    """Whether a coordinator that has closed its channels still has weights of a member."""
    is_over = link.channels is not None and link.channels.is_over
    return is_over and any(view() is not None for view in link.views)


def _text_of(number: int, response: Response) -> str:
    """Return a response as a transcript shows it."""
    if response.error is not None:
        where = f"#{number}, " if response.sessions else ""
        return f"{where}{type(response.error).__name__}: {str(response.error).splitlines()[0]}"
    if number < 0:
        return f"the state before #{-number}"
    if not response.arguments:
        return "go on" if number else f"ranks {response.ranks} take part"
    result = Round(None, *response.arguments)
    words = [f"#{number}, used {result.used}"]
    for name in ("failed", "late", "quarantined", "healed"):
        ranks = getattr(result, name)
        if ranks:
            words.append(f"{name} {tuple(ranks)}")
    return ", ".join(words)
