"""The driver's end of the agents: their calls, and the answers of workers through them."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import ray

from flatweights._settings import setting
from flatweights.ray import _clock
from flatweights.ray.channels._end import ChannelError
from flatweights.ray.nodes._address import Address, chosen_ports
from flatweights.ray.nodes._connections import StreamError
from flatweights.ray.nodes._link import Link
from flatweights.ray.nodes._node_reducer import Endpoints, NodeReducer, Traffic
from flatweights.ray.nodes._plan import Plan, ReduceDType, check_reduce_dtype
from flatweights.ray.peers._agent import Agent, AverageOf, Command, Failure, StreamOrder
from flatweights.ray.peers._backoff import Backoff
from flatweights.ray.peers._by_channel import Worker
from flatweights.ray.peers._call_log import CallLog
from flatweights.ray.peers._platform import PLATFORM, GroupPlatform
from flatweights.ray.peers._result_metadata import Exchanged, ReadOptions
from flatweights.ray.peers._store import argument_of
from flatweights.ray.peers._transport import Call, PendingResult
from flatweights.ray.peers._wait import seconds_left
from flatweights.ray.support._errors import DEAD, is_restarting

_VARIABLE = "FLATWEIGHTS_BETWEEN_NODES"
ANSWER = 10.0  # seconds in which an agent answers: it is blocked while its store spills
_CALLS = 4  # calls of an agent that may run at a time
_RECONNECT = 1.0  # seconds until a link gets another socket; twice as long after each failure
_LONGEST_RECONNECT = 60.0


def is_dead(error: BaseException | None) -> bool:
    """Whether the error of a call says that the actor is dead, and not only out of reach."""
    return isinstance(error, DEAD) and not is_restarting(error)


def call_while_alive(
    platform: GroupPlatform, call: Callable[..., ray.ObjectRef], *args: Any
) -> None:
    """Make a call of an actor; again, if the actor was out of reach, as long as it lives."""

    def again() -> None:
        with contextlib.suppress(Exception):  # this process has left Ray
            call_while_alive(platform, call, *args)

    def look(made: Future[Any]) -> None:
        if is_restarting(made.exception()):
            platform.later(_RECONNECT, again)

    platform.when_done(call(*args), look)


def silent(
    platform: GroupPlatform, agents: Collection[AgentClient], seconds: float
) -> list[AgentClient]:
    """Return those of ``agents`` that do not answer within ``seconds``, or have died."""
    pings: dict[AgentClient, Future[None]] = {
        agent: platform.future_of(agent.handle.ping.remote()) for agent in agents
    }
    there = platform.wait_for_all(pings.values(), seconds)
    found = [agent for agent, ping in pings.items() if ping not in there]
    for agent, ping in pings.items():
        error = ping.exception() if ping in there else None
        if isinstance(error, Exception):
            agent.note_failure(error)
            found.append(agent)
    return found


def find_lost(
    platform: GroupPlatform, pending: Mapping[int, PendingResult]
) -> dict[int, Exception]:
    """Return the ranks whose results are at an agent that does not answer, and why."""
    agents = {answer.agent for answer in pending.values() if answer.agent is not None}
    lost = silent(platform, agents, ANSWER)
    why = TimeoutError("its node could not be reached: the agent there does not answer")
    return {rank: why for rank, answer in pending.items() if answer.agent in lost}


class NodeCall:
    """One command to an agent, until all its answers have come.

    Attributes:
        ref: A reference to the agent's next result; None once it has failed.
        values: Its results so far, by rank.
        exchange: The number of the exchange whose average the call brings; 0, if it brings none.
    """

    def __init__(self, agent: AgentClient, command: Command) -> None:
        """Send the command."""
        self.agent = agent
        self.number = command.number
        self.values: dict[int, Any] = {}
        self._missing = {*command.ranks}
        self.exchange = command.weights.number if isinstance(command.weights, AverageOf) else 0
        self._is_finished = False
        self.ref: ray.ObjectRef = agent.handle.work.remote(command)

    def poll(self) -> None:
        """Take the agent's results, and ask for more."""
        try:
            news = ray.get(self.ref)
        except ray.exceptions.RayError as error:
            self.ref = None
            self.agent.note_failure(error)
            self.values |= dict.fromkeys(self._missing, Failure(error.with_traceback(None)))
            return
        if news and self.exchange:
            self.agent.sent = self.exchange
        self.values |= news
        self._missing -= news.keys()
        self.ref = self.agent.handle.more.remote(self.number) if self._missing else None

    def finish(self) -> None:
        """Tell the agent that the round is over."""
        if not self._is_finished:
            self._is_finished = True
            self.agent.handle.finish.remote(self.number)


class NodeAnswer(PendingResult):
    """The answer of a worker that an agent called: metadata or a small value, until brought."""

    agent: AgentClient

    def __init__(self, call: NodeCall, rank: int, handle: ray.actor.ActorHandle) -> None:
        """Wait for the agent's result for ``rank``."""
        self.call = call
        self.agent = call.agent
        self._rank = rank
        self._handle = handle
        self._value: ray.ObjectRef | None = None  # in the store, once it is brought
        self._after: ray.ObjectRef | None = None  # exists once the worker's last call is over

    @property
    def is_in_store(self) -> bool:
        """Whether the value was brought."""
        return self._value is not None

    @property
    def _own(self) -> ray.ObjectRef | None:
        """The reference to wait for instead of the command; None, to wait for the command."""
        return self._value if self._after is None else self._after

    @property
    def ref(self) -> ray.ObjectRef:
        """The reference to wait for."""
        return self.call.ref if self._own is None else self._own

    @property
    def _is_there(self) -> bool:
        return self._own is None and self._rank in self.call.values

    @classmethod
    def wait(
        cls, answers: Sequence[NodeAnswer], timeout: float | None, enough: int = 1
    ) -> list[PendingResult]:
        """Return the answers that have arrived."""
        end = None if timeout is None else _clock.now() + timeout
        while True:
            there: list[PendingResult] = [one for one in answers if one._is_there]
            refs = list({one.ref: None for one in answers if one.ref is not None})
            if there or not refs:
                return there
            ready, _ = ray.wait(refs, num_returns=1, timeout=seconds_left(end))
            there += [one for one in answers if one._own in ready]
            if there or not ready:
                return there
            for call in {one.call for one in answers}:
                if call.ref in ready:
                    call.poll()

    def result(self) -> Any:
        """Return the metadata or the value; of an answer that was given up, what ended its wait."""
        if self._after is not None:
            return ray.get(self._after)
        if self._value is not None:
            return ray.get(self._value)
        value = self.call.values[self._rank]
        if type(value) is Failure:
            raise value.error
        return value

    def fetch(self) -> bool:
        """Ask the agent for the value."""
        self._value = self.agent.handle.give.remote(self._rank)
        return True

    def overdue(self) -> PendingResult:
        """Return an answer that arrives once the worker is free again."""
        self.call.finish()
        self._value = None
        if self._after is None:
            self._after = self._handle.ping.remote()
        return self

    abandon = overdue

    def release(self) -> None:
        """Let the agent drop its values, including those of the other ranks."""
        self.call.finish()
        self._value = self._after = None


class AgentClient:
    """The driver's end of one agent.

    Attributes:
        node: The node.
        token: Its identity, which differs from those of all other agents, even on the same node.
        handle: The actor.
        is_dead: Whether it has failed.
        link: The link to it, if it has one.
        averages: The numbers of the exchanges whose averages it has.
        sent: The number of the exchange whose average its workers were sent last; 0 if unknown.
        settled: The number of the last exchange that succeeded with it.
        platform: What is used of Ray.
    """

    def __init__(
        self,
        node: str,
        actor: type[Agent],
        args: Sequence[Any],
        max_concurrency: int,
        take: Callable[[AgentClient, Any], object] | None = None,
        platform: GroupPlatform = PLATFORM,
    ) -> None:
        """Start an agent on ``node``.

        Args:
            node: The node.
            actor: The class.
            args: The arguments of its constructor.
            max_concurrency: The number of its calls that run at a time.
            take: See `Agents`.
            platform: See `Agents`.
        """
        self.node = node
        self.token = secrets.token_hex(8)
        self.platform = platform
        args = [*args, *([] if take is None else [self.token])]
        self.handle = handle = platform.start_agent(node, actor, args, max_concurrency)
        self.is_dead = False
        self.link: Link | None = None
        if take is not None:
            by_ray = functools.partial(call_while_alive, platform, handle.receive.remote)
            take = functools.partial(take, self)
            self.link = Link(
                take, by_ray, lambda why: platform.end(handle), self._link_ended, platform
            )
        self._reconnect: Callable[[], object] = lambda: None
        self._is_over = False
        self._exchange: tuple[int, Future[Traffic | Exception]] | None = None  # over the link
        self.averages: set[int] = set()
        self.sent = self.settled = 0
        self._address: ray.ObjectRef = self.handle.address.remote()

    def address(self, timeout: float) -> Address | str:
        """Return its address for streams, or the reason for which there is none."""
        if not isinstance(self._address, Address | str):
            try:
                self._address = self.platform.get(self._address, timeout)
            except ray.exceptions.RayError as error:
                return f"the agent of a node does not answer: {type(error).__name__}"
        address: Address | str = self._address
        return address

    def call(
        self,
        number: int,
        call: Call,
        workers: Mapping[int, Worker],
        by_rank: Mapping[int, Sequence[Any]],
        reading: ReadOptions | None,
    ) -> dict[int, NodeAnswer]:
        """Call workers of its node; return their answers.

        Args:
            number: The number of the command in the group.
            call: The call.
            workers: The workers by rank.
            by_rank: More arguments by rank.
            reading: The way in which it reads results; None, if it returns them.
        """
        payload = call.payload
        weights = None
        if payload is not None and payload.exchanged is not None and self.has(payload.exchanged):
            self.sent = 0  # until it has answered
            # For its workers it keeps one average, this one, beside that of the last exchange.
            self.averages &= {payload.exchanged.number, self.settled}
            weights = AverageOf(payload.exchanged.number, getattr(payload.value, "version", None))
        elif payload is not None:
            weights = argument_of(payload)
        fences = [fence for worker in workers.values() if (fence := self._fence(worker))]
        ranks = {rank: (w.handle, by_rank.get(rank, ())) for rank, w in workers.items()}
        command = Command(number, call._replace(payload=None), ranks, weights, fences, reading)
        made = NodeCall(self, command)
        return {rank: NodeAnswer(made, rank, worker.handle) for rank, worker in workers.items()}

    def stream(self, plan: Plan, me: int, endpoints: Endpoints) -> Future[Traffic | Exception]:
        """Have it take part in an exchange; see `Agent.stream`."""
        if self.link is None:
            return self.platform.future_of(self.handle.stream.remote(plan, me, endpoints))
        begun: Future[Traffic | Exception] = Future()
        self._exchange = plan.number, begun  # it ends the last one
        self.link.send(StreamOrder(plan, me, endpoints))
        return begun

    def streamed(self, number: int, outcome: Traffic | Exception) -> None:
        """Take the outcome of the exchange ``number``, which has come over the link."""
        exchange = self._exchange
        if exchange is not None and exchange[0] == number:
            with contextlib.suppress(InvalidStateError):
                exchange[1].set_result(outcome)

    def connect(self, end: NodeReducer, pause: float = _RECONNECT) -> None:
        """Have the agent make a socket for its link to ``end``; try again later if it cannot."""
        link = self.link
        if link is None or link.has_socket or self.is_dead or self._is_over:
            return
        self._reconnect = functools.partial(self.connect, end)

        def again() -> None:
            self._after(pause, self.connect, end, min(2 * pause, _LONGEST_RECONNECT))

        def look(made: Future[bool]) -> None:
            error = made.exception()
            if is_dead(error) if error is not None else made.result():
                return
            again()

        epoch = secrets.token_bytes(16)
        try:
            address = end.expect(epoch, link.attach)
        except OSError:
            again()
        else:
            self.platform.when_done(self.handle.connect.remote(address, epoch), look)

    def _link_ended(self) -> None:
        """Wait for no outcome that may not come any more, and connect again soon."""
        if self._exchange is not None:
            with contextlib.suppress(InvalidStateError):
                why = StreamError(-1, "the link to the agent has ended")
                self._exchange[1].set_exception(why)
        self._after(_RECONNECT, self._reconnect)

    def _after(self, seconds: float, call: Callable[..., object], *args: Any) -> None:
        """Make a call later, in another thread."""
        if not self._is_over:
            self.platform.later(seconds, call, *args)

    def close(self) -> None:
        """End the link."""
        self._is_over = True
        if self.link is not None:
            self.link.close()

    def give_up(self) -> None:
        """Count it as dead, and end its process, which may still run."""
        self.is_dead = True
        self.close()
        self.platform.end(self.handle)

    def has(self, one: Exchanged | None) -> bool:
        """Whether it has the average of an exchange."""
        return one is not None and self.token in one.tokens and one.number in self.averages

    def begin_exchange(self) -> None:
        """Note that it drops averages that its workers were not sent."""
        self.averages &= {self.sent}

    def _fence(self, worker: Worker) -> ray.ObjectRef | None:
        """Return a reference that exists after all calls of this process on the worker's handle.

        None, if this agent made the last call.
        """
        try:
            log = CallLog.of(worker.handle)
        except ChannelError:
            return worker.handle.ping.remote()
        if log.last == self.token:
            return None
        fence = worker.handle.ping.remote()
        log.last = self.token
        worker.log = log  # the only reference to it
        return fence

    def note_failure(self, error: Exception) -> None:
        """Note an error of a call: a dead agent is not called any more.

        One that was out of reach is replaced, unless it has a link, which outlasts that.
        """
        if is_dead(error) or (self.link is None and isinstance(error, DEAD)):
            self.is_dead = True


class Agents:
    """The agents of a group or a process group, by node, and this process's own part of exchanges.

    Attributes:
        reduce_dtype: The dtype in which sums travel.
        nbytes: Bytes of the last model; 0 before the first.
        seconds: The time of the last exchange.
        streams: The reason for which there are no streams at present.
        epoch: The nodes of the last exchange over streams, and the id of its connections.
        settled: The number of the last exchange that succeeded.
        platform: What is used of Ray.
    """

    def __init__(
        self,
        offer: Callable[[int], None],
        reduce_dtype: ReduceDType,
        actor: type[Agent],
        args: Sequence[Any],
        max_concurrency: int = _CALLS,
        take: Callable[[AgentClient, Any], object] | None = None,
        platform: GroupPlatform = PLATFORM,
    ) -> None:
        """Begin without agents.

        Args:
            offer: See `NodeReducer`.
            reduce_dtype: The dtype in which sums travel.
            actor: The class of agents.
            args: The arguments of its constructor.
            max_concurrency: The number of calls of an agent that run at a time.
            take: Called with an agent, and each message of it, by any thread; with it, agents have
                links.
            platform: What it uses of Ray.

        Raises:
            ValueError: If an environment variable or ``reduce_dtype`` is malformed.
        """
        check_reduce_dtype(reduce_dtype)
        self.reduce_dtype = reduce_dtype
        chosen_ports()
        self.choice = setting(_VARIABLE, "driver", "streams")
        self.nbytes = self.settled = 0
        self.seconds = 0.0
        self.streams = Backoff("other nodes are")
        self.epoch: tuple[tuple[str, ...], bytes] = (), b""
        self._offer = offer
        self._agents = actor, args, max_concurrency, take, platform
        self.platform = platform
        self._by_node: dict[str, AgentClient] = {}
        self._by_token: dict[str, AgentClient] = {}  # with links, even if dead
        self._gone: set[str] = set()  # dead nodes
        self._end: NodeReducer | None = None
        self._number = 0

    def next_number(self) -> int:
        """Return the number of the next command or exchange."""
        self._number += 1
        return self._number

    @property
    def end(self) -> NodeReducer:
        """This process's part of exchanges."""
        if self._end is None:
            self._end = self.platform.node_reducer(self._offer)
        return self._end

    def why_not(self) -> str | None:
        """Return the reason for which a round goes through the driver; None, if it does not."""
        if self.choice == "driver":
            return f"{_VARIABLE}=driver"
        if not self.nbytes:
            return "the size of the weights is not known yet"
        least = self.platform.least_exchanged
        if not self.choice and self.nbytes < least:
            return f"models of less than {least >> 10} KiB go through the driver"
        return None if self.streams.is_over else self.streams.reason

    def of(self, worker: Worker, *, starts: bool = False) -> AgentClient | None:
        """Return the agent of the node of ``worker``; None, if that is this node, or unknown.

        Args:
            worker: The worker.
            starts: Whether to start an agent if there is none.
        """
        node = worker.far_node
        if not node:  # the usual case within a node
            return None
        agent = self._by_node.get(node)
        if agent is not None and agent.is_dead and not _is_alive(node):
            del self._by_node[node]
            self._gone.add(node)
        if node in self._gone:
            worker.look_for_node()
            return None
        return self.at(node, starts=starts)

    def at(self, node: str, *, starts: bool) -> AgentClient | None:
        """Return the agent of ``node``; without one, start one if ``starts``, else return None."""
        agent = self._by_node.get(node)
        if agent is not None and agent.is_dead:
            agent = None
            del self._by_node[node]
        if agent is None and starts:
            agent = self._by_node[node] = AgentClient(node, *self._agents)
            if agent.link is not None:
                self._by_token[agent.token] = agent
                if self.choice != "driver":
                    agent.connect(self.end)
        return agent

    def with_token(self, token: str) -> AgentClient | None:
        """Return the agent with a link that has a token; any thread may ask."""
        return self._by_token.get(token)

    def keep(self, nodes: Collection[str]) -> None:
        """End the agents of all other nodes."""
        for node in self._by_node.keys() - {*nodes}:
            self.platform.kill(self._by_node.pop(node).handle)

    def shut_down(self) -> None:
        """End all agents."""
        for agent in self._by_token.values():
            agent.close()
        for agent in self._by_node.values():
            self.platform.end(agent.handle)
        self._by_node.clear()
        if self._end is not None:
            self._end.close()
            self._end = None


def _is_alive(node: str) -> bool:
    """Whether Ray counts a node as alive."""
    return any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())
