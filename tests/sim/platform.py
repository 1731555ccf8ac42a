"""Ray, channels and threads as coordinators and members need them, in a simulated world."""

from __future__ import annotations

import inspect
import pickle
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import ray
from numpy.typing import NDArray
from tests.sim.copies import copied
from tests.sim.nodes import Exchange, SimulatedQueue, SimulatedReducer, SimulatedThread
from tests.sim.oracle import Oracle
from tests.sim.repeating import SimulatedCalls
from tests.sim.world import Bell, Changing, Process, SimulatedLock, World

from flatweights.ray.channels._end import ChannelError
from flatweights.ray.channels._member_channel import CoordinatorDiedError, Shortcut
from flatweights.ray.channels._message import _EXTENT, _HEADER, buffer_message
from flatweights.ray.channels._protocol import (
    ASKED_AGAIN,
    COMMAND,
    REPEAT,
    REPEATED,
    REQUEST,
    TOLD_AGAIN,
)
from flatweights.ray.channels._segments import Extent
from flatweights.ray.members._client import _GRACE
from flatweights.ray.members._platform import ActorPlace, MemberPlatform
from flatweights.ray.members._process_group import ProcessGroup

_AWAKE = 0.25  # seconds after which a member looks at its mailbox without being woken


class Simulated(MemberPlatform):
    """What coordinators and members use, in one world.

    Attributes:
        actors: By name, the coordinator that processes find.
        coordinators: The number of coordinators so far.
        links: All connections by channels so far.
        listeners: By address, the channels of a coordinator or an agent.
        expected: By epoch, the process that expects a link, and what it does with that.
        ports: The number of addresses for links.
        exchanges: By epoch and number, the exchanges between nodes so far.
    """

    def __init__(self, world: World, oracle: Oracle, plan: dict[str, Any]) -> None:
        self.world, self.oracle, self.plan = world, oracle, plan
        self.actors: dict[str, Handle] = {}
        self.coordinators = 0
        self.links: list[Link] = []
        self.listeners: dict[bytes, SimulatedChannels] = {}
        self.expected: dict[bytes, tuple[Process, Callable[[Any], object]]] = {}
        self.ports = 0
        self.exchanges: dict[tuple[bytes, int], Exchange] = {}
        if plan["exchanges"]:
            self.least_exchanged = 1
        self._coordinator_faults = plan["coordinator_faults"]

        class Watched(ProcessGroup):
            """A process group that shows the oracle what it posts, and to whom, before it does."""

            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                channels: Any = self._channels
                channels.shows = self.shows
                responses: Any = self._responses
                send = responses.send

                def shown(
                    number: int, body: bytes, weights: Any, sessions: Any, *more: Any
                ) -> None:
                    oracle.posting(self, number, body, weights, sessions)
                    send(number, body, weights, sessions, *more)

                responses.send = shown

            def shows(self, call: int, number: int, position: int, seconds: Any) -> None:
                """Show a response that `RepeatedCalls` is about to post."""
                response, weights = self._repetitions.response_of(call, number, position, seconds)
                sessions = [*self.rendezvous.present.values()]
                oracle.posting(self, number, pickle.dumps(response.fields), weights, sessions)

            def _take_handed(self, handed: Any) -> None:
                for token, body, _ in handed:
                    if body is not None:
                        oracle.handed(token, body)
                super()._take_handed(handed)

        self._group = Watched

    # Of a coordinator, or the agent of a node.

    def begin_coordinator(self) -> ActorPlace:
        notes = self.world.process().notes
        return ActorPlace(notes["node"], notes["handle"])

    def channels(self) -> Any:
        return SimulatedChannels(self)

    def lock(self) -> Any:
        return SimulatedLock(self.world)

    def start_thread(self, run: Callable[..., object], args: tuple[Any, ...], name: str) -> Any:
        return SimulatedThread(self.world, lambda: run(*args), name)

    def queue(self) -> Any:
        return SimulatedQueue(self.world)

    def later(self, seconds: float, call: Callable[..., object], *args: Any) -> None:
        world, process = self.world, self.world.process()

        def begin() -> None:
            world.spawn(process, lambda: call(*args), f"{process.name}.timer")

        world.after(seconds, begin, process)

    def when_done(self, ref: Any, look: Callable[[Future[Any]], object]) -> None:
        world, process = self.world, self.world.process()

        def begin() -> None:
            if not process.is_dead:
                world.spawn(process, lambda: look(self.future_of(ref)), f"{process.name}.callback")

        ref.when(begin)

    def future_of(self, ref: Any) -> Future[Any]:
        done: Future[Any] = Future()

        def set_it() -> None:
            try:
                done.set_result(ref.result())
            except Exception as error:
                done.set_exception(error)

        ref.when(set_it)
        return done

    def wait_for_all(self, futures: Iterable[Future[Any]], seconds: float) -> set[Future[Any]]:
        waited, over = [*futures], Changing(self.world)
        for one in waited:
            one.add_done_callback(over.changed)
        self.world.point("waiting for nodes")
        self.world.block(lambda: all(one.done() for one in waited), over, seconds)
        return {one for one in waited if one.done()}

    def wait(self, refs: Sequence[Any], timeout: float | None = 0, enough: int = 1) -> list[Any]:
        over = Changing(self.world)
        for ref in refs:
            ref.when(over.changed)
        self.world.point("wait")

        def is_enough() -> bool:
            return sum(bool(ref.is_there()) for ref in refs) >= enough

        if timeout is None or timeout > 0:
            self.world.block(is_enough, over, timeout)
        return [ref for ref in refs if ref.is_there()]

    def result_of(self, done: Future[Any]) -> Any:
        over = Changing(self.world)
        done.add_done_callback(over.changed)
        self.world.block(done.done, over)
        return done.result()

    def start_agent(self, node: str, cls: type, args: Sequence[Any], calls: int) -> Any:
        world, number = self.world, len(self.oracle.agents) + 1
        process = Process(world, f"agent{number}", self.plan["agent_faults"].get(number))
        process.notes["node"] = node
        handle = AgentHandle(self, process)
        process.notes["handle"] = handle
        process.at_death.append(handle.die)
        self.oracle.agents.append(handle)

        def start() -> None:
            handle.object = cls(*args, self)
            handle.beginning.changed()

        # Ray ends an actor whose owner has died.
        owner = world.process()
        owner.at_death.append(lambda: world.after(self.delay(), process.kill))
        process.at_death.append(lambda: self.oracle.agent_died(handle))
        world.spawn(process, start, f"{process.name}.init")
        return handle

    def node_reducer(self, offer: Callable[[int], None]) -> Any:
        return SimulatedReducer(self, offer)

    def link_socket(self, connection: Any) -> Any:
        return connection

    def kill(self, handle: Any) -> None:
        handle.process.kill()

    def end(self, handle: Any) -> None:
        self.kill(handle)

    def has_agent_broken(self, node: str) -> bool:
        """Whether an agent of a node has been killed, rather than ended by its coordinator."""
        return any(
            agent.process.notes.get("broke") and agent.process.notes["node"] == node
            for agent in self.oracle.agents
        )

    def was_agent_stopped(self, node: str | None) -> bool:
        """Whether an agent of a node, or of any, was stopped for longer than members wait."""
        return any(
            until - begin > _GRACE
            for agent in self.oracle.agents
            if node in (None, agent.process.notes["node"])
            for begin, until in agent.process.stops
        )

    def start(self, coroutine: Coroutine[Any, Any, None]) -> Any:
        return LoopTask(self.world, coroutine)

    async def until(self, done: Future[Any]) -> Any:
        current = self.world.current
        assert current is not None
        current.leave_loop()
        if not done.done():
            over = Changing(self.world)
            done.add_done_callback(over.changed)
            self.world.block(done.done, over)
        self.world.point("until")
        return done.result()

    def put(self, buffer: NDArray[np.uint8]) -> Any:
        process = self.world.process()
        self.world.point("put")
        if self.world.chance("full"):
            self.world.note("the store is full")
            self.oracle.losses += 1
            raise ray.exceptions.ObjectStoreFullError("no room")
        copy = buffer.copy()
        copy.flags.writeable = False
        ref = Ref(self.world, process)
        ref.set(copy)
        return ref

    def end_coordinator(self, actor: Any) -> None:
        actor.process.kill()

    # `staticmethod` in the base class, so these are, too.
    @staticmethod
    def mark_end(name: str, lost: Sequence[tuple[str, str]]) -> None:
        """Tell nobody."""

    @staticmethod
    def last_end(name: str) -> None:
        """Know of no end."""

    @staticmethod
    def has_coordinator(name: str) -> bool:
        """Know of none: nobody asks."""
        return False

    @staticmethod
    def other_jobs_with(name: str) -> list[str]:
        """Know of no other jobs."""
        return []

    def check_connected(self, session: str | None = None) -> None:
        """Ray is never shut down, but a finalizer may run in a process that is dead."""
        current = self.world.current
        if current is None or current.process.is_dead:
            raise RuntimeError("its process is dead")

    # Of a member.

    def node(self) -> str:
        node: str = self.world.process().notes["node"]
        return node

    def setting(self) -> str:
        way: str = self.world.process().notes["way"]
        return "store" if way == "store" else ""

    def find_coordinator(
        self, cls: type, name: str, node: str, concurrency: int, *args: object
    ) -> Any:
        world = self.world
        world.process()
        world.point("finding the coordinator")
        actor = self.actors.get(name)
        if actor is None or actor.process.is_dead:
            self.coordinators += 1
            process = Process(
                world,
                f"coordinator{self.coordinators}",
                self._coordinator_faults.get(self.coordinators),
            )
            actor = self.actors[name] = Handle(self, process)
            process.notes["handle"], process.notes["node"] = actor, node
            process.at_death.append(actor.die)
            self.oracle.started(actor)
            started = actor

            def start() -> None:
                started.object = cls(*args, self, self._group)
                started.beginning.changed()

            world.spawn(process, start, f"{process.name}.init")
        return actor

    def introduce(self) -> tuple[bytes, str]:
        return self.world.rng.randbytes(16), self.who()

    def who(self) -> str:
        return f"process {self.world.process().name}"

    def task(self) -> None:
        """A simulated process is in no task of Ray."""

    def member_channel(self, address: bytes, token: bytes, peer: str) -> Any:
        return SimulatedMemberChannel(self, address, token, peer)

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        self.world.process()
        self.world.point("get")
        if not self.world.block(ref.is_there, ref, timeout):
            raise ray.exceptions.GetTimeoutError("time is up")
        return ref.result()

    def get_shared(self, ref: Any) -> Any:
        return self.get(ref)

    # What a simulated message takes.

    def delay(self) -> float:
        """Return the seconds that a message of Ray takes."""
        kind = self.world.draw()
        if kind < 0.3:
            return 0.0
        return self.world.draw() * (0.003 if kind < 0.93 else 0.3)

    def process_has_died(self, process: Process) -> None:
        """Let others learn that a process has died, from the results that it owns."""
        # With a channel, the coordinator need not wait for Ray's report.
        latest = 8.0 if process.notes.get("attached") else 2.0
        late = self.world.rng.choice((0.0, 0.01, 0.2, latest))
        for ref in process.notes.get("refs", ()):
            self.world.after(late, ref.lose_owner)


class Ref(Changing):
    """The result of a call of an actor, or an object in the store."""

    def __init__(self, world: World, owner: Process) -> None:
        super().__init__(world)
        self.owner = owner
        self._is_there = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._acts: list[Callable[[], None]] = []  # once it is there

    def is_there(self) -> bool:
        return self._is_there

    def set(self, value: Any = None, error: BaseException | None = None) -> None:
        """Be there, unless it is already."""
        if not self._is_there:
            self._value, self._error, self._is_there = value, error, True
            self.changed()
            for act in self._acts:
                act()

    def when(self, act: Callable[[], None]) -> None:
        """Call ``act`` once it is there."""
        if self._is_there:
            act()
        else:
            self._acts.append(act)

    def lose_owner(self) -> None:
        """Fail, unless it is there: the process that owns it has died."""
        self.set(error=ray.exceptions.OwnerDiedError("00", b"", ""))

    def lose_actor(self) -> None:
        """Fail, unless it is there: the actor that makes it has died."""
        self.set(error=ray.exceptions.ActorDiedError())

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def __await__(self) -> Any:
        current = self._world.current
        assert current is not None
        current.leave_loop()
        self._world.block(self.is_there, self)
        yield from ()  # `await` needs a generator
        return self.result()


_OF_ACTORS = "receive", "lose", "forget"  # calls that coordinators and agents make of each other


class Handle:
    """The handle of a coordinator, whose calls may begin in any order until one was answered."""

    has_loop = True  # in which its calls run, as coroutines

    def __init__(self, platform: Simulated, process: Process) -> None:
        self.platform, self.process = platform, process
        self.object: Any = None
        self.beginning = Changing(platform.world)
        self.pending: list[Ref] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._call(name, args))

    def die(self) -> None:
        """Let callers learn that the actor has died."""
        platform = self.platform
        for ref in self.pending:
            platform.world.after(platform.delay(), ref.lose_actor)
        self.pending.clear()

    def _passed(self, caller: Process, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a call as the actor gets them, and tell the oracle of it."""
        if name == "receive":
            passed: tuple[Any, ...] = copied(args, Ref, Handle)
            return passed
        args = tuple(arg.copy() if isinstance(arg, np.ndarray) else arg for arg in args)
        self.platform.oracle.called(caller, name, args)
        return args

    def _returns(self, name: str, args: tuple[Any, ...], value: Any) -> None:
        """Tell the oracle what a call returns."""
        if name == "enter" and value is not None:
            self.platform.oracle.entered(args[0], value, self.object._group)

    def _call(self, name: str, args: tuple[Any, ...]) -> Ref:
        platform, world = self.platform, self.platform.world
        caller = world.process()
        world.point(f"call of {name}")
        ref = Ref(world, caller)
        caller.notes.setdefault("refs", []).append(ref)
        if name == "enter":
            caller.notes["attached"] = False  # perhaps it was, in a group that has ended
        if name in _OF_ACTORS and "handle" in caller.notes and world.chance("out of reach"):
            error = ray.exceptions.ActorUnavailableError("it does not answer", b"0" * 16)
            world.after(platform.delay(), lambda: ref.set(error=error))
            return ref
        args = self._passed(caller, name, args)
        arrives = world.now + platform.delay()
        if name not in ("stay", "enter"):
            line = "line", id(self)
            arrives = max(arrives, caller.notes.get(line, 0.0))
            caller.notes[line] = arrives

        def arrive() -> None:
            if self.process.is_dead:
                world.after(platform.delay(), ref.lose_actor)
                return
            self.pending.append(ref)
            task = world.spawn(self.process, run, f"{self.process.name}.{name}")
            task.is_in_loop = self.has_loop

        def run() -> None:
            value, error = None, None
            try:
                while self.object is None:
                    current = world.current
                    assert current is not None
                    current.leave_loop()
                    world.block(lambda: self.object is not None, self.beginning)
                value = getattr(self.object, name)(*args)
                if inspect.iscoroutine(value):
                    value = _run_through(value)
            except Exception as raised:
                task_error = ray.exceptions.RayTaskError(name, str(raised), raised)
                value, error = None, task_error.as_instanceof_cause()
            self._returns(name, args, value)
            if ref in self.pending:
                self.pending.remove(ref)
            if caller.is_dead:
                error = ray.exceptions.OwnerDiedError("00", b"", "")
            world.after(platform.delay(), lambda: ref.set(value, error))

        world.after(arrives - world.now, arrive)
        return ref


class AgentHandle(Handle):
    """The handle of a node agent, whose calls threads run."""

    has_loop = False

    def _passed(self, caller: Process, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "deliver":
            self.platform.oracle.asking(caller, *args[:2])
        passed: tuple[Any, ...] = copied(args, Ref, Handle)
        return passed

    def _returns(self, name: str, args: tuple[Any, ...], value: Any) -> None:
        """Tell nothing: the coordinator decides."""


def _run_through(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine, which blocks where others await; return its result."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a coroutine of an actor was suspended")


class LoopTask:
    """A task of an event loop."""

    def __init__(self, world: World, coroutine: Coroutine[Any, Any, None]) -> None:
        process = world.process()
        self._acts: list[Callable[[Any], object]] = []

        def run() -> None:
            _run_through(coroutine)
            for act in self._acts:
                act(self)

        task = world.spawn(process, run, f"{process.name}.task")
        task.is_in_loop = True
        task.abandon = coroutine.close

    def add_done_callback(self, act: Callable[[Any], object]) -> None:
        self._acts.append(act)


class Link(Changing):
    """A mailbox, its socket, and what both ends know of it.

    Attributes:
        member: The process of the member.
        token: Its token.
        is_answered: Whether the last command was answered.
        request: The answer, until the coordinator reads it: its kind, its body and its buffers.
        command: The response, until the member reads it: its kind, its body, its buffer, and the
            bytes of that when it was posted.
        is_woken: Whether the member looks at the mailbox.
        packets: Those to the coordinator that it has not received.
        is_coordinator_gone: Whether the coordinator has closed its end.
        views: The buffers of the last request, as long as the coordinator has them.
    """

    def __init__(self, world: World, member: Process, token: bytes) -> None:
        super().__init__(world)
        self.member, self.token = member, token
        self.is_answered = True
        self.request: tuple[int, bytes, list[Any]] | None = None
        self.command: tuple[int, bytes, Any, bytes | None] | None = None
        self.is_woken = False
        self.packets: list[str] = []
        self.is_coordinator_gone = False
        self.views: list[weakref.ref[Any]] = []
        self.channels: SimulatedChannels | None = None
        self.coordinator: CoordinatorChannel | None = None

    def wake(self) -> None:
        self.is_woken = True
        self.changed()

    def lose_coordinator(self) -> None:
        self.is_coordinator_gone = True
        self.changed()

    def send(self, packet: str) -> None:
        self.packets.append(packet)
        if self.channels is not None:
            self.channels.changed()


class HeldExtent(Extent):
    """The position of a buffer in a segment; it holds the buffer."""

    buffer: Any


class SimulatedSegments:
    """Segments, in which every buffer lies, unless memory is short."""

    def __init__(self, world: World) -> None:
        self._world = world

    def offer(self, nbytes: int, **_: Any) -> None:
        """Offer nothing: every buffer lies in a segment anyway."""

    def clear(self) -> None:
        """Forget nothing."""

    def find(self, buffer: NDArray[np.uint8]) -> Extent | None:
        if self._world.chance("no segment"):
            self._world.note("there is no segment")
            return None
        extent = HeldExtent(0, 1, 0, buffer.nbytes)
        extent.buffer = buffer
        return extent

    def copy_in(self, buffers: Any) -> None:
        """Find no free segment."""


def _opened(message: Any) -> tuple[bytes, Any]:
    """Return the body of a message, and its buffer."""
    body = message.content[_HEADER.size + len(message.extents) * _EXTENT.size :]
    return body, message.extents[0].buffer if message.extents else None


class CoordinatorChannel:
    """The end of a channel at the coordinator, or at the agent of a node."""

    def __init__(self, platform: Simulated, link: Link) -> None:
        self._world, self._oracle, self.link = platform.world, platform.oracle, link
        link.coordinator = self
        self.is_closed = self.is_given_up = False
        self.last_words = ""
        self.is_read = True

    @property
    def is_answered(self) -> bool:
        return self.link.is_answered

    def receive(self) -> None:
        packets = self.link.packets
        while packets and not self.is_closed:
            packet = packets.pop(0)
            if packet:
                self.last_words = packet
            else:
                self.is_closed = True

    def take(self) -> tuple[int, Any]:
        self.is_read = True
        kind, body, buffers = self.link.request or (REQUEST, b"", [])
        self.link.request = None
        return kind, (body, buffers)

    def order(self, kind: int) -> None:
        self.put(kind, b"", None)
        self.link.wake()

    def share(self, *_: Any) -> None:
        if self._world.chance("unsent"):
            self._world.note("a segment was not sent")
            raise OSError("the socket is full")

    def release(self, *_: Any) -> None:
        """Hold nothing."""

    def was_posted(self, _: Any) -> None:
        self.is_read = False

    def post(self, message: Any, segments: Any, asleep: list[Link]) -> None:
        link, world = self.link, self._world
        if not link.is_answered:
            if not link.member.is_dead:
                world.fail("a response was posted to a member that has not asked")
            raise ChannelError("the last command was not answered")
        body, buffer = _opened(message)
        try:
            if not self.is_read:
                world.fail("a response was posted to a member whose request was not read")
            world.point("shared")
            if buffer is not None:
                is_gone = self.is_closed or link.member.is_dead
                if is_gone and world.draw() < 0.3:  # a new segment cannot be sent
                    raise BrokenPipeError("the member is dead")
                if world.chance("unsent"):
                    world.note("a segment was not sent")
                    self._oracle.losses += 1
                    raise OSError("the socket is full")
        except BaseException:
            self.is_given_up = True
            raise
        self._oracle.answered(link)
        self.put(COMMAND, body, buffer)
        asleep.append(link)
        world.point("posted")

    def put(self, kind: int, body: bytes, buffer: Any) -> None:
        """Put a command into the mailbox."""
        link, world = self.link, self._world
        self.is_read = False
        link.is_answered = False
        link.command = kind, body, buffer, None if buffer is None else buffer.tobytes()
        link.is_woken = False
        if world.draw() < 0.5:  # it is still awake
            link.wake()
        world.after(_AWAKE, link.wake)

    def forget_handles(self, owner: int) -> None:
        """Forget the segments of GPUs of a member: there are none."""

    def send_forget(self, owner: int) -> None:
        """Have the member do so."""

    def close(self) -> None:
        self.is_closed = True
        self.link.lose_coordinator()


class SimulatedChannels(Bell):
    """The ends of channels at a coordinator, or at the agent of a node."""

    def __init__(self, platform: Simulated) -> None:
        super().__init__(platform.world)
        self.platform = platform
        process = platform.world.process()
        self.is_of_agent = isinstance(process.notes["handle"], AgentHandle)
        self.segments = SimulatedSegments(platform.world)
        self.address = b"address %d" % len(platform.listeners)
        platform.listeners[self.address] = self
        self.met: dict[bytes, Link | None] = {}
        self.links: list[Link] = []
        self.has_news = False  # whether the coordinator itself has rung
        self.shows: Callable[..., None] | None = None
        self.is_closed = self.is_over = False
        process.at_death.append(self._die)

    def _die(self) -> None:
        self.is_closed = True
        for link in self._all():
            link.lose_coordinator()

    def _all(self) -> list[Link]:
        return [*self.links, *[link for link in self.met.values() if link is not None]]

    def expect(self, token: bytes) -> None:
        self.met[token] = None

    def forget(self, token: bytes) -> None:
        link = self.met.pop(token, None)
        if link is not None:
            link.lose_coordinator()

    def connect(self, token: bytes, nonce: bytes) -> CoordinatorChannel:
        self._world.point("connecting")
        link = self.met.pop(token, None)
        if link is None:
            raise ChannelError("the worker has not connected")
        if link.member.is_dead and self._world.draw() < 0.5:
            link.lose_coordinator()
            raise BrokenPipeError("it is already dead")
        self.links.append(link)
        link.channels = self
        link.member.notes["attached"] = True
        return CoordinatorChannel(self.platform, link)

    def ring(self) -> None:
        self.has_news = True
        self.ring_bell()

    def repeated_calls(self, channels: Sequence[CoordinatorChannel]) -> SimulatedCalls:
        return SimulatedCalls(self, channels, self.platform.plan["repeats"])

    def run_repeated(
        self, calls: SimulatedCalls, number: int, seconds: float, seen: list[float]
    ) -> Any:
        ended = calls.run(number, seconds, seen)
        self._look()
        return ended

    def sleep(self, missing: int, is_there: Callable[[], bool], seconds: float | None) -> None:
        """Sleep until the bell rings or a packet comes, unless ``is_there`` already."""
        self._missing = missing
        self._world.point("armed")
        if not is_there():
            self._world.block(self.is_due, self, seconds)
            self._is_rung = False

    def wake(self, posted: list[Link]) -> None:
        self._world.point("wake")
        for link in posted:
            link.wake()

    def is_due(self) -> bool:
        return self._is_rung or self.has_packets()

    def has_packets(self) -> bool:
        return any(link.packets for link in self.links)

    def wait(self, channels: Any, seconds: float | None, enough: int = 1) -> float:
        world = self._world
        begin = world.now
        if self.finds(channels, enough):
            return 0.0
        self.sleep(enough, lambda: any(channel.is_answered for channel in channels), seconds)
        if not any(channel.is_answered for channel in channels):
            self._look()
        return world.now - begin

    def _look(self) -> None:
        for link in [*self.links]:
            if link.packets:
                assert link.coordinator is not None
                link.coordinator.receive()
                if link.coordinator.is_closed:
                    self._drop(link)

    def _drop(self, link: Link) -> None:
        if link in self.links:
            self.links.remove(link)
        assert link.coordinator is not None
        link.coordinator.close()

    def give_up(self, channel: CoordinatorChannel) -> None:
        channel.is_given_up = True
        link = channel.link
        if link.command is not None:  # it is withdrawn
            link.command, link.is_answered, channel.is_read = None, True, True
        self._drop(link)

    def close(self) -> None:
        self.is_closed = self.is_over = True
        for link in self._all():
            if link in self.links:
                self._drop(link)
            link.lose_coordinator()

    def let_go(self) -> None:
        """Let go of the world: the package closes these channels once their owner is garbage."""
        vars(self).clear()
        self.links, self.met = [], {}


class _Asks:
    """A `_core.RepeatedRequest`; the coordinator may still hold its segment."""

    def __init__(self, world: World, exchange: Callable[[float, float], Any]) -> None:
        self._world, self.exchange = world, exchange

    @property
    def may_ask(self) -> bool:
        return self._world.draw() < 0.9


class SimulatedMemberChannel:
    """A member's end of a channel."""

    def __init__(self, platform: Simulated, address: bytes, token: bytes, peer: str) -> None:
        world = self._world = platform.world
        self._oracle = platform.oracle
        self._peer = peer
        process = world.process()
        world.point("connecting")
        channels = platform.listeners.get(address)
        if world.chance("no channel"):
            world.note("no channel can be made")
            raise OSError("too many open files")
        if channels is None or channels.is_closed:
            raise ConnectionRefusedError("nobody listens")
        if world.draw() < 0.2:
            world.sleep(world.draw() * 0.05)
        if channels.is_closed:
            raise ConnectionRefusedError("nobody listens")
        if channels.met.get(token, token) is not None:
            raise ChannelError("the driver does not expect this worker any more")
        self.link = link = Link(world, process, token)
        platform.links.append(link)
        channels.met[token] = link
        self._is_far = channels.is_of_agent
        self.mailbox = SimpleNamespace(nonce=b"nonce")
        self.is_closed = False
        self.pending: bool | None = None
        self._segments = SimulatedSegments(world)
        process.at_death.append(self._end)

    def _end(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.link.send("")

    def count_holds(self, index: int) -> int:
        return 0

    def offer(self, nbytes: int) -> None:
        """Offer nothing: every buffer lies in a segment anyway."""

    def send_last_words(self, words: str) -> None:
        self._world.process()
        self.link.send(words)

    def close(self) -> None:
        if not self.link.member.is_dead:
            self._oracle.parted(self.link.token)
            self._end()

    def request(self, body: bytes, buffer: Any, *, is_urgent: bool, kind: int = REQUEST) -> bool:
        world, link = self._world, self.link
        world.process()
        if self.is_closed or (link.is_coordinator_gone and world.draw() < 0.3):
            self.is_closed = True
            raise CoordinatorDiedError(f"{self._peer} has closed its end")
        segments: Any = self._segments
        message = buffer_message(kind, body, buffer, segments)
        if message is None:
            return False
        buffers = []
        if message.extents:
            # An array of its own, since the coordinator is to drop it.
            sent = buffer.copy()
            sent.flags.writeable = False
            link.views.append(weakref.ref(sent))
            buffers = [sent]
            del sent
        del message
        world.point("asking")
        link.request, link.is_answered = (kind, body, buffers), True
        del buffers
        if body and self._is_far:
            self._oracle.asking(link.member, link.token, body)
        elif body:
            self._oracle.asked(link.member, link.token, body, kind)
        world.point("answered")
        channels = link.channels
        if channels is not None and not channels.is_closed:
            (channels.ring_bell if is_urgent else channels.count_down)()
        world.point("asked")
        return True

    def _is_told(self) -> bool:
        link = self.link
        return (
            (link.command is not None and link.is_woken)
            or link.is_coordinator_gone
            or self.is_closed
        )

    def shortcut(self, call: int, size: int, buffer: Any) -> Shortcut | None:
        world = self._world
        memory = None if buffer is None else buffer.copy()

        def exchange(weight: float, seconds: float) -> Any:
            body = ASKED_AGAIN.pack(call, weight)
            if not self.request(body, memory, is_urgent=False, kind=REPEAT):
                return None
            self._oracle.counts["asks again in C++"] += 1
            if not world.block(self._is_told, self.link, seconds) or self.link.command is None:
                return False
            if self.link.command[0] != REPEATED:
                return True
            told, (buffer,), _ = self.response(0.0)
            return (*TOLD_AGAIN.unpack(told), buffer)

        segments: Any = SimpleNamespace(changes=0)
        return Shortcut(cast("Any", _Asks(world, exchange)), memory, segments, 0)

    def response(self, seconds: float | None) -> tuple[bytes, list[Any], int]:
        world, link = self._world, self.link
        world.process()
        self.pending = None
        if not world.block(self._is_told, link, seconds):
            raise TimeoutError(f"no answer of {self._peer} within {seconds} s")
        if link.command is None:
            self.is_closed = True
            raise CoordinatorDiedError(f"{self._peer} has ended")
        kind, body, buffer, posted = link.command
        link.command = None
        world.point("told")
        if buffer is not None and buffer.tobytes() != posted:
            world.fail("the weights of a response changed after they were posted")
        return body, [] if buffer is None else [buffer.copy()], kind
