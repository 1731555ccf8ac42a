"""A process group: it averages for members as a driver does for workers, but members call it.

One thread (`ProcessGroup.run`) owns all state; other threads send it calls to make
(`ProcessGroup.queue`). It waits for members' requests, and tells `Calls`, which decides what each
member gets. It averages, as in every round (`DriverAverage`), and posts one response for all. The
process group ends when no member is left. Its `Rendezvous` lets members in.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, cast

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import _core
from flatweights._average import Nonfinite
from flatweights._sources import first_difference
from flatweights._weights import FlatWeights
from flatweights.ray import _clock
from flatweights.ray.channels._end import ChannelError
from flatweights.ray.channels._member_channel import CoordinatorDiedError
from flatweights.ray.channels._protocol import RESEND
from flatweights.ray.channels._segments import new_buffer
from flatweights.ray.core._calls import Calls
from flatweights.ray.core._events import (
    Action,
    CopyState,
    Detach,
    Ended,
    Event,
    Gave,
    Keep,
    Log,
    LogDeath,
    NobodyHas,
    Reduce,
    Reduced,
    Refused,
    Release,
    Repeated,
    RequestAgain,
    Requested,
    Respond,
    Send,
    SendAgain,
    SendKept,
    SendState,
    StateCopied,
    Tick,
    TimeIsUp,
)
from flatweights.ray.core._peer import Peer, PeerState, ranks_of
from flatweights.ray.core._requests import (
    CallsDifferError,
    MemberDiedError,
    Request,
    Response,
)
from flatweights.ray.core._response_cache import CacheChanges
from flatweights.ray.members._call_queue import CallQueue
from flatweights.ray.members._config import GroupConfig
from flatweights.ray.members._gpu_rounds import GpuRounds, OnDevice, RequestAgainError
from flatweights.ray.members._node_agent import NodeAgentActor, Streamed
from flatweights.ray.members._platform import PLATFORM, MemberPlatform
from flatweights.ray.members._rendezvous import Rendezvous
from flatweights.ray.members._repetitions import Ending, Repetitions
from flatweights.ray.members._responses import ResponseSender
from flatweights.ray.members._sessions import (
    Handed,
    Reply,
    Session,
    StoreRequest,
    fetched,
    wait_for,
)
from flatweights.ray.peers._by_agent import AgentClient, call_while_alive, find_lost
from flatweights.ray.peers._wait import Arrivals, RoundSpec
from flatweights.ray.results._report import METRICS, SENT, report
from flatweights.ray.results._result import Packed
from flatweights.ray.results._round import Round, arguments_of
from flatweights.ray.rounds._allreduce import NodesAverage
from flatweights.ray.rounds._local_reduce import DriverAverage
from flatweights.ray.support._errors import (
    WorkerError,
    error_of_rank,
    late_error,
    portable,
    reason_in_a_line,
)
from flatweights.ray.support._failpoints import reach
from flatweights.robust import Rule

_CALLS = 16  # calls that an agent runs at a time, without waiting for each other
_SMALL_RULE = 1 << 14  # bytes; a larger one holds a model, perhaps another one in each call

_log = logging.getLogger("flatweights")


class _Encoded(NamedTuple):
    """A response that members may yet get: its body, and its weights."""

    body: bytes
    weights: Packed | OnDevice | None


class ProcessGroup:
    """The members, by rank, and their calls.

    Attributes:
        queue: The calls that other threads want the process group's thread to make.
        rendezvous: The members, and those that come in.
        calls: The core, which decides about their calls.
    """

    def __init__(
        self,
        name: str,
        config: GroupConfig,
        node: str,
        coordinator: ray.actor.ActorHandle,
        platform: MemberPlatform = PLATFORM,
    ) -> None:
        """Prepare; `run` runs the process group.

        Args:
            name: The name.
            config: The configuration: the number of members, and others.
            node: This node.
            coordinator: The actor of this process.
            platform: What it uses of Ray and channels.

        Raises:
            OSError: If there can be no channels on this system.
        """
        self._name = name
        self._config = config
        self._size = config.size
        self._channels = platform.channels()
        offer = self._channels.segments.offer
        self._agents = platform.agents(
            offer, config.reduce_dtype, NodeAgentActor, (coordinator,), _CALLS, self._take
        )
        self._gpu = GpuRounds(self._channels)
        self._repetitions = Repetitions(name, self._channels)
        self._seconds_waited = 0.0  # for the open call
        self._kept: dict[int, _Encoded] = {}  # responses for members that are late, by number
        self._given: Packed | None = None  # a state that has just come
        self._states: dict[int, Packed] = {}  # states that heal members, by number of the response
        self.queue = CallQueue(self._channels, platform)
        self.rendezvous = Rendezvous(
            name, config, node, self._channels, self._agents, self.queue, self._on_event, self._lose
        )
        self.calls = Calls(name, self.rendezvous.peers)
        self._responses = ResponseSender(self._channels, platform.put, self._lose)

    def run(self) -> None:
        """Run the process group until no member is left."""
        try:
            while self.rendezvous.is_in_use:
                self._step()
        except Exception as error:
            _log.exception("the coordinator of process group %r has failed", self._name)
            self._tell_failure(error)
        self._agents.shut_down()
        self.rendezvous.close()
        self._channels.close()

    def _step(self) -> None:
        """Do everything that is due, or wait until something happens."""
        before = len(self.rendezvous.present)
        self.rendezvous.believe_reports()
        is_any_lost = len(self.rendezvous.present) < before
        self.rendezvous.admit()
        present = len(self.rendezvous.present)
        self._welcome()
        if self._receive(Tick()) or is_any_lost or len(self.rendezvous.present) < present:
            return  # without a member that has died meanwhile, something else may be due
        may_repeat = self.calls.may_repeat and self._repetitions.are_ready(self.rendezvous.present)
        if may_repeat and self._repeat() in (Ending.QUEUE, Ending.PAUSE):
            self.queue.read()
            return
        begin = _clock.now()
        awaited = self.calls.awaited()
        patience = self._patience(awaited.end)
        heard = wait_for(
            [*self.rendezvous.present.values()], self.queue, patience, awaited.requests
        )
        self._seconds_waited += _clock.now() - begin
        for session in heard:
            self._on_event(session)
        self.queue.read()

    def _patience(self, end: float | None) -> float | None:
        """Return the seconds until something is due in the rendezvous, or by ``end``, or None."""
        ends = [*self.rendezvous.ends(), *([] if end is None else [end])]
        return max(0.0, min(ends) - _clock.now()) if ends else None

    def _repeat(self) -> Ending:
        """Make the calls that all members repeat; return why they have ended."""
        patience = self._patience(self.calls.awaited().end)
        series = self._repetitions.run(self.calls.number, patience)
        self._seconds_waited = series.seconds_waited
        for number, (response, weights) in series.responses.items():
            self._kept[number] = _Encoded(pickle.dumps(response.fields), weights)
        if series.calls:
            self._receive(Repeated(series.calls, series.made))
        return series.ending

    def _receive(self, event: Event) -> bool:
        """Tell the core what has happened, and do what it says; return whether it closed a call."""
        self.calls.receive(event, _clock.now())
        has_closed = False
        while self.calls.has_actions:
            for action in self.calls.actions():
                has_closed = self._do(action) or has_closed
        return has_closed

    def _do(self, action: Action) -> bool:
        """Do what the core says; return whether a call was closed, or its members asked again."""
        if isinstance(action, Reduce):
            self._close_call(action)
            return True
        if isinstance(action, Keep):
            self._keep(action.changes)
        elif isinstance(action, SendKept):
            kept = self._kept[action.number]
            self._responses.send(action.number, kept.body, kept.weights, _sessions(action.peers))
        elif isinstance(action, Respond):
            self._answer(action.peers, action.error)
        elif isinstance(action, TimeIsUp):
            why: dict[int, Exception] = dict.fromkeys(action.others, late_error(action.timeout))
            self._answer(action.peers, portable(WorkerError(why)))
        elif isinstance(action, NobodyHas):
            lost = RuntimeError("no member is left that has the state: go on from a checkpoint")
            error = WorkerError({peer.rank: lost for peer in action.peers})
            self._answer(action.peers, portable(error))
        elif isinstance(action, SendAgain):
            self._request_again(_sessions(action.peers))
        elif isinstance(action, CopyState):
            self._copy_state(action.number)
        elif isinstance(action, SendState):
            response = Response(action.number, self._size, self.rendezvous.peers.ranks())
            state = self._states[action.number]
            self._responses.send(
                -action.number, pickle.dumps(response.fields), state, _sessions(action.peers)
            )
        elif isinstance(action, Release):
            self._states.pop(action.number, None)
        elif isinstance(action, Detach):
            self._forget(*_sessions([action.peer]))
        elif isinstance(action, LogDeath):
            assert action.peer.why is not None
            text = error_of_rank(action.peer.rank, action.peer.why)
            _log.warning("process group %r: %s", self._name, text)
        elif isinstance(action, Log):
            _log.log(action.level, action.text, *action.args)
        return False

    def _tell_failure(self, error: Exception) -> None:
        """Tell members that wait why the process group ends; others see that it has."""
        asking = [
            session for session in self.rendezvous.present.values() if session.answer is not None
        ]
        with contextlib.suppress(Exception):  # memory may be short
            self._answer(
                asking,
                CoordinatorDiedError(f"the coordinator has failed: {reason_in_a_line(error)}"),
            )

    def _on_event(self, session: Session) -> None:
        """Handle a member's request, or its end."""
        if session.fault is not None:
            self._receive(Ended(session, session.fault))
            return
        request = session.request
        if request.operation not in ("give", "heal"):  # with these, it has yet to read the average
            self._gpu.note_request(session)
        if request.operation == "leave":
            self._receive(Ended(session))
        elif request.operation == "give":
            self._on_state(session)
        else:
            self._receive(Requested(session))

    def _on_state(self, session: Session) -> None:
        """Take the state from a donor; from the agent of its node, once that has handed it over.

        An agent may be stopped, and the calls of others must not wait for it.
        """
        answer = session.answer
        assert answer is not None
        if not answer.fetch():
            self._take_state(session, answer.result())
            return
        assert session.agent is not None

        def take(state: Future[NDArray[np.uint8]]) -> None:
            if session.answer is not answer:  # it has died meanwhile
                return
            try:
                weights = FlatWeights.wrap(state.result(), answer.layout)
            except Exception as error:  # its node or the agent there has died, or lost the state
                why = f"{session.who}: its state could not be read: {reason_in_a_line(error)}"
                self._lose(session, MemberDiedError(why))
                return
            self._take_state(session, weights)

        when_done = session.agent.platform.when_done
        when_done(answer.ref, lambda state: self.queue.post(take, state))

    def _take_state(self, session: Session, state: FlatWeights) -> None:
        """Tell the core that a donor has given its state."""
        self._given = Packed(state.buffer, state.layout)
        try:
            self._receive(Gave(session))
        finally:
            self._given = None

    def _copy_state(self, number: int) -> None:
        """Copy the state that has just come, for the members that lack it."""
        assert self._given is not None
        why: Exception | None = None
        try:
            self._states[number] = self._copied(self._given)
        except Exception as error:  # memory is short; only those that wait need it
            why = RuntimeError(f"the state could not be copied: {reason_in_a_line(error)}")
        self.calls.receive(StateCopied(number, why), _clock.now())

    def _answer(self, peers: Sequence[Peer], error: Exception | None = None) -> None:
        """Answer requests that are part of no call."""
        for session in _sessions(peers):
            response = Response(session.has, self._size, self.rendezvous.peers.ranks(), error=error)
            self._responses.send(
                session.has, ray.cloudpickle.dumps(response.fields), None, [session]
            )

    def _keep(self, changes: CacheChanges) -> None:
        """Change which responses are kept, and where."""
        for number in changes.moved:
            kept = self._kept[number]
            if isinstance(kept.weights, Packed):
                own = Packed(kept.weights.buffer.copy(), kept.weights.layout)
                self._kept[number] = kept._replace(weights=own)
        for number in changes.released:
            self._kept.pop(number, None)

    def _close_call(self, call: Reduce) -> None:
        """Average, relay or gather, and post the response to all members that have asked."""
        requests, first = call.requests, call.first
        arrivals = Arrivals.over(
            {
                session.rank: session.answer
                for session in _sessions(call.peers)
                if session.answer is not None
            },
            failed=call.lost,
            late=call.late,
            recovering=ranks_of(call.others),
            timeout=call.timeout,
            seconds_waited=self._seconds_waited,
        )
        arrivals.find_lost = functools.partial(find_lost, self._agents.platform)
        is_average = first.operation == "average"
        weights: Packed | OnDevice | None = None
        result: Round | None = None
        error: Exception | None = None
        try:
            self._check_agree(requests, arrivals)
            if first.operation == "all_gather":
                result = self._gather(requests, arrivals)
            elif any(request.is_in_segment for request in requests.values()):
                result, weights = self._stay_on_gpu(call, arrivals)
            else:
                average = self._average if is_average else self._relay
                result = average(requests, arrivals)
                weights = Packed(result.weights.buffer, result.weights.layout)
        except RequestAgainError as why:
            _log.info("process group %r: weights leave the GPU to be averaged: %s", self._name, why)
            self._receive(RequestAgain())
            return
        except Exception as raised:  # all members raise it; a rule may raise anything
            error = portable(raised)
        finally:
            _core.withdraw_offer()
        arrivals.release()
        self._seconds_waited = 0.0
        stayed = weights if isinstance(weights, OnDevice) else None
        if result is None:
            self.calls.receive(Refused(), _clock.now())
        else:
            nbytes = result.nbytes if weights is None else weights.layout.nbytes
            gpu = None if stayed is None else stayed.handle.uuid
            self.calls.receive(Reduced(result.used, nbytes, gpu), _clock.now())
        for action in self.calls.actions():
            if isinstance(action, Send):
                self._send(action, call, result, weights, error)
            else:
                self._do(action)

    def _send(
        self,
        send: Send,
        call: Reduce,
        result: Round | None,
        weights: Packed | OnDevice | None,
        error: Exception | None,
    ) -> None:
        """Post the response of a call, and keep it.

        Args:
            send: The members that get it.
            call: The call.
            result: The round; None, if there was an error.
            weights: The weights; None, if there are none.
            error: The error.
        """
        first, requests = call.first, call.requests
        is_average = first.operation == "average"
        arguments: tuple[Any, ...] = ()
        layout: bytes | None = None
        pickler: Any = pickle if error is None else ray.cloudpickle
        if result is not None:
            layout = weights.layout.pickled if weights and not is_average else None
            result.number = send.number
            result.transports = self._transports(requests) | result.transports
            result.healed = tuple(ranks_of(send.recovering))
            result.late = send.late
            if result.failed:
                result.failed = {rank: portable(why) for rank, why in result.failed.items()}
                pickler = ray.cloudpickle
            arguments = arguments_of(result)
        stayed = weights if isinstance(weights, OnDevice) else None
        sessions = _sessions(call.peers)
        prepared = self._repetitions.prepare(call, send, result, weights, sessions)
        response = Response(
            send.number,
            self._size,
            self.rendezvous.peers.ranks(),
            send.took_part,
            send.donor,
            tuple(peer.number for peer in send.recovering),
            error,
            layout,
            arguments,
            prepared,
            None if stayed is None else stayed.handle.placed,
            self._gpu.may_stay(first, send.readers),
            result.weights if result is not None and first.operation == "all_gather" else {},
        )
        if prepared and prepared != send.number and isinstance(weights, Packed):
            self._repetitions.make_ready(response, weights.layout, sessions)
        body = pickler.dumps(response.fields)
        if result is not None:
            self._kept[send.number] = _Encoded(body, weights)
        reach("sending")
        exchanged = None if result is None else result._exchanged
        self._responses.send(send.number, body, weights, _sessions(send.peers), exchanged)
        self._gpu.release(self._is_kept, self.rendezvous.present.values())
        if result is not None and first.operation != "broadcast":
            report(result, already_named=send.named)
            nbytes = self._agents.nbytes if is_average else result.nbytes
            METRICS.add({SENT: nbytes * len(requests)})

    def _check_agree(self, requests: dict[int, Request], arrivals: Arrivals) -> None:
        """Raise `CallsDifferError`, naming all ranks, unless all ask for the same call."""
        alike: list[tuple[Request, list[int]]] = []
        for rank, request in sorted(requests.items()):
            for other, ranks in alike:
                if request is other or request.agrees_with(other):
                    ranks.append(rank)
                    break
            else:
                alike.append((request, [rank]))
        if len(alike) > 1:
            calls = "; ".join(f"{_named(ranks)}: {request}" for request, ranks in alike)
            (request, ranks), (other, others) = alike[:2]
            difference: str | None = None
            if request.operation == other.operation and None not in (request.digest, other.digest):
                answers: dict[int, Any] = arrivals.answers
                layouts = answers[ranks[0]].layout, answers[others[0]].layout
                difference = first_difference(*layouts)
            where = "" if difference is None else f"; weights of {_named(others)}: {difference}"
            raise CallsDifferError(f"expected the same call of all members, got {calls}{where}")

    def _is_kept(self, stayed: OnDevice) -> bool:
        """Whether a response with these weights is kept for members that are late."""
        return any(kept.weights is stayed for kept in self._kept.values())

    def _stay_on_gpu(self, call: Reduce, arrivals: Arrivals) -> tuple[Round, OnDevice]:
        """Average, or relay, weights that are in segments of a GPU.

        Raises:
            RequestAgainError: If they have to come through memory of the host.
            WorkerError: If fewer ranks than needed take part.
        """
        requests, first = call.requests, call.first
        sessions = {session.rank: session for session in _sessions(call.peers)}
        layout = next(
            session.answer.layout
            for session in sessions.values()
            if session.answer and session.request.is_in_segment
        )
        others = _sessions(call.others)
        begin = _clock.now()
        if first.operation == "average":
            spec = self._spec(requests, arrivals)
            ranks = sorted(sessions)
            members, weights = [sessions[rank] for rank in ranks], spec.numbers_of(ranks)
            stayed = self._gpu.average(first, members, others, layout, weights)
        else:
            root = sessions.get(first.root or 0)
            if root is None:
                raise self._lost_root(first, arrivals)
            stayed = self._gpu.relay(first, root, [*sessions.values(), *others], layout)
            ranks = [root.rank]
        self._agents.nbytes = layout.nbytes
        result = Round(
            None,
            ranks,
            failed=dict(sorted(arrivals.failed.items())),
            late=arrivals.late,
            seconds={"wait": arrivals.seconds_waited, "average": _clock.now() - begin},
            nbytes=len(ranks) * layout.nbytes,
            transports=dict.fromkeys(sorted(sessions), "gpu"),
        )
        return result, stayed

    def _request_again(self, sessions: Sequence[Session]) -> None:
        """Have members whose weights are on a GPU send them through memory of the host."""
        for session in sessions:
            session.take_caller()
            assert session.channel is not None
            if session.channel.is_answered:  # one that still averages is asked once it has
                try:
                    session.channel.order(RESEND)
                except Exception as error:  # it died meanwhile
                    fault = reason_in_a_line(error)
                    self._lose(session, MemberDiedError(f"{session.who}: {fault}"))

    def _spec(self, requests: dict[int, Request], arrivals: Arrivals) -> RoundSpec:
        """Return the arguments of an average, after checking that enough ranks take part."""
        first = requests[min(requests)]
        weights = tuple(requests[k].weight if k in requests else 0.0 for k in range(self._size))
        if not any(weights):
            weighted = ", ".join(f"rank {rank}" for rank in sorted(requests))
            raise ValueError(f"expected a positive weight, got only zeros of {weighted}")
        spec = _spec_of(weights, first.min_results, first.nonfinite)
        if first.rule is not None:
            spec = spec._replace(rule=_rule_of(first.rule[1]))
        arrivals.check(spec)
        return spec

    def _average(self, requests: dict[int, Request], arrivals: Arrivals) -> Round:
        spec = self._spec(requests, arrivals)
        answers: dict[int, Any] = {rank: arrivals.answers[rank] for rank in requests}
        self._agents.nbytes = answers[min(requests)].layout.nbytes
        away = [rank for rank, answer in answers.items() if answer.away is not None]
        why = "a rule needs all results in one place" if spec.rule else self._agents.why_not()
        if away and why is None:
            return NodesAverage(self._agents, arrivals, spec).run()
        arrivals.fetch()
        self._channels.segments.offer(self._agents.nbytes)
        result = DriverAverage(arrivals, spec).run()
        result.transports = dict.fromkeys(away, f"store: {why}")
        return result

    def _gather(self, requests: dict[int, Request], arrivals: Arrivals) -> Round:
        """Return a round with the objects of the members, by rank, pickled."""
        self._spec(requests, arrivals)
        values = {rank: request.value for rank, request in sorted(requests.items())}
        return Round(
            values,
            [*values],
            failed=dict(sorted(arrivals.failed.items())),
            late=arrivals.late,
            seconds={"wait": arrivals.seconds_waited},
            nbytes=sum(map(len, values.values())),
        )

    def _relay(self, requests: dict[int, Request], arrivals: Arrivals) -> Round:
        """Return a round with a copy of the root's weights.

        Raises:
            WorkerError: If the root is dead or late.
        """
        first = requests[min(requests)]
        assert first.root is not None
        begin = _clock.now()
        arrivals.fetch()
        weights = arrivals.collect().get(first.root)
        if weights is None:
            raise self._lost_root(first, arrivals)
        copied = self._copied(Packed(weights.buffer, weights.layout))
        return Round(
            copied.weights(),
            (first.root,),
            failed=dict(sorted(arrivals.failed.items())),
            late=arrivals.late,
            seconds={"wait": arrivals.seconds_waited, "copy": _clock.now() - begin},
            nbytes=copied.buffer.nbytes,
        )

    def _lost_root(self, first: Request, arrivals: Arrivals) -> WorkerError:
        """Return the error about a root whose weights are not there."""
        assert first.root is not None
        why = arrivals.errors.get(first.root) or self._absence(first)
        return WorkerError({first.root: why})

    def _absence(self, first: Request) -> Exception:
        """Return the reason for which the root of a broadcast does not take part."""
        assert first.root is not None
        session = self.rendezvous.sessions.get(first.root)
        if session is None:
            return RuntimeError("it has not joined the process group")
        if session in self.calls.waiting.out_of_sync:
            return RuntimeError(f"it waits for the others to call {session.request}")
        # A process that is joining is late for nobody else.
        return late_error(first.timeout) if session.is_present else RuntimeError("it has left")

    def _copied(self, weights: Packed) -> Packed:
        """Return a copy, if possible in memory that all members of this node read."""
        copied = new_buffer(weights.layout, self._channels.segments.offer)
        _core.move_parts([copied], [weights.buffer])
        return Packed(copied, weights.layout)

    def _transports(self, requests: dict[int, Request]) -> dict[int, str]:
        """Return, by rank, the transport by which its request came."""
        return {
            k: "store" if self.rendezvous.sessions[k].channel is None else "shm"
            for k in sorted(requests)
        }

    def _welcome(self) -> None:
        """Give members that are ready their first response, once the process group is open."""
        if self.rendezvous.is_open and not self.rendezvous.peers.ready:
            return
        ready = [
            session
            for session in self.rendezvous.present.values()
            if session.state is PeerState.READY
        ]
        was_open = self.rendezvous.is_open
        self.rendezvous.open_for(len(ready))
        self.calls.is_open = self.rendezvous.is_open
        if ready and self.rendezvous.is_open:
            for session in ready:
                session.told(0)
                if not was_open:  # others join with their first request
                    session.join()
            first = Response(self.calls.number, self._size, self.rendezvous.peers.ranks())
            self._responses.send(0, pickle.dumps(first.fields), None, ready)

    def _lose(self, session: Session, why: MemberDiedError) -> None:
        """Count a member as dead."""
        self._receive(Ended(session, why))

    def _forget(self, session: Session) -> None:
        """Let go of a member that has left or is dead."""
        session.close()
        self.rendezvous.forget(session)
        if session.has_joined:  # calls in C++ name no dead member, so the next one is made here
            self._repetitions.clear()
        self._gpu.forget(session)
        self._forget_channel(session)

    def _forget_channel(self, session: Session) -> None:
        """Stop using a member's channel, or expecting one."""
        agent = session.agent
        if agent is not None:
            call_while_alive(agent.platform, agent.handle.forget.remote, session.token)
        if session.channel is not None:
            self._channels.give_up(session.channel)
        else:
            self._channels.forget(session.token)

    # The calls that other threads ask the process group's thread to make.

    def attach(self, token: bytes, nonce: bytes) -> None:
        """Make the channel to a member.

        Raises:
            ChannelError: If it has not connected.
        """
        session = self.rendezvous.present.get(token)
        if session is None or session.state is not PeerState.ENTERING:
            raise ChannelError("no such member")
        session.attach(self._channels.connect(token, nonce))

    def expect(self, token: bytes, caller: Future[Reply] | None) -> None:
        """Note that a member waits for its first response, in a call or at a node agent."""
        session = self.rendezvous.present.get(token)
        if session is not None:
            if caller is not None:  # it has made no channel
                self._forget_channel(session)
            session.expect(caller)
        elif caller is not None:
            caller.set_exception(_not_here())

    def put(self, token: bytes, store_request: StoreRequest) -> None:
        """Take a request that came through Ray."""
        session = self.rendezvous.present.get(token)
        if session is not None:
            session.receive(store_request)
        elif store_request.caller is not None:
            store_request.caller.set_exception(_not_here())

    def receive(self, token: str, number: int, message: list[Handed] | Streamed) -> None:
        """Take a message of an agent that comes through Ray, in any thread."""
        agent = self._agents.with_token(token)
        if agent is not None and agent.link is not None:
            agent.link.receive(number, message)

    def _take(self, agent: AgentClient, message: list[Handed] | Streamed) -> None:
        """Take a message of an agent, in any thread."""
        if isinstance(message, Streamed):
            agent.streamed(*message)
        else:
            self.queue.post(self._take_handed, message)

    def _take_handed(self, handed: Sequence[Handed]) -> None:
        """Take what the agent of a node hands on; a member without a body is ready."""
        for token, body, buffer in handed:
            if body is None:
                self.expect(token, None)
            else:
                self.put(token, StoreRequest(body, buffer, None))

    def lose(self, token: bytes, why: MemberDiedError) -> None:
        """Count a member as dead, or drop a process that no longer wants to be a member."""
        self.rendezvous.drop(token, why)
        session = self.rendezvous.present.get(token)
        if session is not None and session.poll():  # it may have left before
            self._on_event(session)
        if session is not None:
            self._lose(session, why)

    def note_death(self, token: bytes, why: MemberDiedError) -> None:
        """Take Ray's report that the process of a member has died.

        A member on another node may have left before that, and its leave be on its way from the
        agent of its node. The agent sees the end of a process at once, and tells of it. So it is
        waited for, unless it does not know the member yet.
        """
        session = self.rendezvous.present.get(token)
        agent = None if session is None else session.agent
        if session is None or agent is None or agent.is_dead or not session.is_attached:
            self.lose(token, why)
        else:
            self.rendezvous.doubt(session, why)

    def fetch(self, number: int) -> tuple[bytes, NDArray[np.uint8] | None]:
        """Return the body of a response that was announced by ``number``, and its weights.

        Raises:
            KeyError: If no member has to fetch it.
        """
        return fetched(self.rendezvous.present.values(), number)


def _sessions(peers: Sequence[Peer]) -> list[Session]:
    """Return ``peers`` of this process group, which its rendezvous has made."""
    return cast("list[Session]", [*peers])


def _not_here() -> MemberDiedError:
    return MemberDiedError("the coordinator has counted this member as dead")


@functools.lru_cache(maxsize=16)
def _spec_of(
    weights: tuple[float, ...],
    min_results: int | None,  # if None, all ranks of the arrivals, including dead and late ones
    nonfinite: Nonfinite,
) -> RoundSpec:
    """Return the arguments of an average by the mean; the same object for the same ones."""
    return RoundSpec(weights, None, min_results, nonfinite, len(weights))


def _rule_of(pickled: bytes) -> Rule:
    """Return a rule; the same object for the same bytes, if these are few."""
    if len(pickled) <= _SMALL_RULE:
        return _small_rule_of(pickled)
    rule: Rule = pickle.loads(pickled)
    return rule


@functools.lru_cache(maxsize=16)
def _small_rule_of(pickled: bytes) -> Rule:
    rule: Rule = pickle.loads(pickled)
    return rule


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
