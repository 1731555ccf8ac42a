"""Ray and channels as a group and its workers need them, in a simulated world.

Actors, references and channels are simulated; what both ends of a channel do is the package's own
code, on a mailbox that follows `mailbox.cpp` step by step.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
from tests.sim.copies import copied
from tests.sim.platform import HeldExtent
from tests.sim.world import Bell, Changing, Fault, Process, SimulatedLock, World

from flatweights import _core
from flatweights.ray.channels._driver_channel import _NOTHING, DriverChannel
from flatweights.ray.channels._end import ChannelEnd, ChannelError
from flatweights.ray.channels._message import _EXTENT, _HEADER, Message
from flatweights.ray.channels._protocol import BY_CALL, VALUE, WEIGHTS
from flatweights.ray.channels._segments import Extent
from flatweights.ray.channels._worker_channel import PATIENCE, WorkerChannel
from flatweights.ray.peers import _call_log
from flatweights.ray.peers._platform import GroupPlatform

_NODE = "here"


class SimulatedWorkers(GroupPlatform):
    """What a group and its workers use, in one world.

    Attributes:
        objects: Changes when any reference is there.
        refs: All references that exist.
        listeners: By address, the channels of a driver.
        actors: All actors.
        mailboxes: All mailboxes that still exist.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.objects = Changing(world)
        self.refs: weakref.WeakSet[Ref] = weakref.WeakSet()
        self.listeners: dict[bytes, SimulatedChannels] = {}
        self.actors: list[Actor] = []
        self.mailboxes: list[SimulatedMailbox] = []
        self.is_calm = False  # whether nothing goes wrong any more
        self.in_one_step = 0.0  # the share of averages that `_core.WorkerAnswers` makes
        self.averages = 0  # how many it has made
        self.posts = 0  # how many commands it has posted to all workers
        self.losses = 0  # how often memory was short
        self.ids = itertools.count(1)  # of actors and references

    # `staticmethod` in the base class, so these are, too.
    @staticmethod
    def session() -> str:
        """Ray is never shut down."""
        return "session"

    @staticmethod
    def check_connected(session: str | None = None) -> None:
        """Ray is never shut down."""

    def thread(self) -> int:
        """Return a number of the current task."""
        return id(self.world.current)

    def lock(self) -> Any:
        return SimulatedLock(self.world)

    def channels(self) -> Any:
        return SimulatedChannels(self)

    def wait(self, refs: Sequence[Any], timeout: float | None = 0, enough: int = 1) -> list[Any]:
        world = self.world
        world.process()
        world.point("wait")

        def is_enough() -> bool:
            return sum([bool(ref.is_there) for ref in refs]) >= enough

        if timeout is None or timeout > 0:
            world.block(is_enough, self.objects, timeout)
        return [ref for ref in refs if ref.is_there][:enough]

    def put(self, value: Any) -> Any:
        process = self.world.process()
        self.world.point("put")
        if self.world.chance("full"):
            self.world.note("the store is full")
            self.losses += 1
            raise ray.exceptions.ObjectStoreFullError("no room")
        ref = Ref.of(self, process)
        ref.set(copied(value, Ref, Actor))
        return ref

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        self.world.process()
        self.world.point("get")
        if not ref.is_there and (
            timeout == 0 or not self.world.block(lambda: ref.is_there, self.objects, timeout)
        ):
            raise ray.exceptions.GetTimeoutError("time is up")
        return ref.result()

    def kill(self, handle: Any) -> None:
        self.world.process()
        handle.end()

    def end(self, handle: Any) -> None:
        if handle.process.notes.get("busy") and not handle.process.is_dead:
            self.world.fail(f"{handle.name} is ended in the middle of a call")
        self.kill(handle)

    def node(self) -> str:
        return _NODE

    def worker_channel(self, address: bytes, token: bytes) -> Any:
        return SimulatedWorkerChannel(self, address, token)

    def was_restarted(self) -> bool:
        lives: int = self.world.process().notes["life"]
        return lives > 0

    def close(self) -> None:
        """Forget the calls of all actors: those of the next schedule have the same ids."""
        for actor in self.actors:
            _call_log._logs.pop(actor._actor_id, None)

    @staticmethod
    def collect() -> None:
        """Drop garbage that is in cycles."""
        gc.collect()

    def delay(self) -> float:
        """Return the seconds that a message of Ray takes."""
        kind = self.world.draw()
        if kind < 0.5:
            return 0.0
        return self.world.draw() * (0.003 if kind < 0.95 else 0.2)


class Ref(ray.ObjectRef):  # type: ignore[misc]
    """A reference: the result of a call of an actor, or an object in the store."""

    is_there: bool
    _platform: SimulatedWorkers
    _value: Any
    _error: BaseException | None

    @classmethod
    def of(cls, platform: SimulatedWorkers, owner: Process) -> Ref:
        """Return a reference to nothing yet."""
        ref: Ref = cls(next(platform.ids).to_bytes(28, "big"), skip_adding_local_ref=True)
        ref._platform, ref.is_there, ref._value, ref._error = platform, False, None, None
        platform.refs.add(ref)
        return ref

    def set(self, value: Any = None, error: BaseException | None = None) -> None:
        """Be there, unless it is already."""
        if not self.is_there:
            self._value, self._error, self.is_there = value, error, True
            self._platform.objects.changed()

    def result(self) -> Any:
        """Return the value, or raise an error of its own, as Ray does."""
        error = self._error
        if isinstance(error, ray.exceptions.RayTaskError):
            raise error.as_instanceof_cause()
        if error is not None:
            raise copy.copy(error)
        return self._value


class _Call:
    """One call of an actor."""

    def __init__(self, name: str, args: Any, ref: Ref) -> None:
        self.name, self.args = name, args
        self.ref: weakref.ref[Ref] = weakref.ref(ref)

    def returns(self, value: Any = None, error: BaseException | None = None) -> None:
        """Set the reference, if anybody has it."""
        ref = self.ref()
        if ref is not None:
            ref.set(value, error)


class Actor(ray.actor.ActorHandle):  # type: ignore[misc]
    """An actor and its handle: it runs calls in the order in which its callers made them.

    Attributes:
        process: Its process; the next one, if it was started again.
        object: The object of its class, once it is built.
        is_over: Whether Ray will not start it again.
        built: The times at which it was built.
    """

    def __init__(
        self,
        platform: SimulatedWorkers,
        name: str,
        make: Callable[[Process], Any],
        lives: list[dict[str, Any]],
        *,
        retries: bool,
    ) -> None:
        """Start it.

        Args:
            platform: The platform.
            name: Its name in transcripts.
            make: A function that builds the object.
            lives: Its processes, one after the other: ``delay`` and ``faults`` of each, and
                whether its constructor ``raises``.
            retries: Whether Ray repeats calls that were broken off by a death.
        """
        keep = self.__dict__
        keep["_ray_actor_id"] = ray.ActorID(next(platform.ids).to_bytes(16, "big"))
        keep["_ray_weak_ref"] = True
        keep["_ray_actor_creation_function_descriptor"] = SimpleNamespace(
            module_name="tests.sim", class_name="Worker"
        )
        self._platform, self._world = platform, platform.world
        self.name, self._make, self._lives, self._retries = name, make, lives, retries
        self.life = -1
        self.object: Any = None
        self.is_over = False
        self._is_starting = True
        self._pending: list[_Call] = []
        self._arriving = 0.0  # the time at which the last call arrives
        self._changing = Changing(platform.world)
        platform.actors.append(self)
        self._start()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("hex", "remote"):
            raise AttributeError(name)
        return SimpleNamespace(remote=lambda *args, **kwargs: self._call(name, args, kwargs))

    @property
    def is_alive(self) -> bool:
        """Whether it is built, and runs."""
        return self.object is not None and not self.process.is_dead

    @property
    def may_come_back(self) -> bool:
        """Whether it is alive, or Ray is about to start it (again)."""
        return not self.is_over

    def end(self) -> None:
        """End it for ever."""
        if not self.is_over:
            self.is_over = True
            if self.process.is_dead:
                self._lose_all()
            self.process.kill()

    def _start(self) -> None:
        self.life += 1
        life = self._lives[self.life]
        planned = {} if self._platform.is_calm else life["faults"]
        faults = {int(point): Fault(**fault) for point, fault in planned.items()}
        name = f"{self.name}.{self.life}" if self.life else self.name
        self.process = process = Process(self._world, name, faults)
        process.notes["life"], process.notes["actor"] = self.life, self
        process.at_death.append(self._die)

        def begin() -> None:
            if not process.is_dead:
                self._world.spawn(process, lambda: self._main(process), name)

        self._world.after(life["delay"], begin)

    def _die(self) -> None:
        world = self._world
        self.object = None
        is_last = self.is_over or self.life + 1 == len(self._lives)
        self.is_over = self.is_over or is_last
        self._is_starting = not is_last
        if not is_last:
            world.after(0.2 + world.draw(), lambda: None if self.is_over else self._start())
        if is_last or not self._retries:
            self._lose_all()

    def _lose_all(self) -> None:
        pending, self._pending = self._pending, []
        late = self._world.rng.choice((0.0, 0.01, 0.2, 2.0))
        for call in pending:
            self._world.after(late, functools.partial(call.returns, error=self._death()))

    def _death(self) -> Any:
        if self.is_over:
            return ray.exceptions.ActorDiedError()
        return ray.exceptions.ActorUnavailableError("it is starting", self._actor_id.binary())

    def _call(self, name: str, args: Any, kwargs: Any) -> Ref:
        world, platform = self._world, self._platform
        caller = world.process()
        owes = self.process.notes.get("busy")
        if name == "call_version" and owes and owes.is_late and not self.process.is_dead:
            world.fail(f"{self.name} is sent a call, and owes an answer")
        log = _call_log._logs.get(self._actor_id)
        if name == "serve_channel" and log is not None:
            log.last = args[0]
        try:
            world.point(f"call of {name}")
            ref = Ref.of(platform, caller)
            call = _Call(name, copied((args, kwargs), Ref, Actor), ref)
        finally:
            if name != "serve_channel" and log is not None:
                log.last = name
        self._arriving = max(self._arriving, world.now + platform.delay())

        def arrive() -> None:
            if self.is_over or (self.process.is_dead and not self._retries):
                error = self._death()
                world.after(platform.delay(), lambda: call.returns(error=error))
                return
            self._pending.append(call)
            self._changing.changed()

        world.after(self._arriving - world.now, arrive)
        return ref

    def _main(self, process: Process) -> None:
        """Build the object, then run calls."""
        world, platform = self._world, self._platform
        if self._lives[self.life].get("raises"):
            world.note("its constructor raises")
            self._is_starting, self.is_over = False, True
            process.kill()
            return
        self.object = self._make(process)
        self._is_starting = False
        while True:
            world.block(lambda: bool(self._pending), self._changing)
            call = self._pending[0]
            value, error = None, None
            try:
                args, kwargs = call.args
                args = [platform.get(arg) if isinstance(arg, Ref) else arg for arg in args]
                value = copied(getattr(self.object, call.name)(*args, **kwargs), Ref, Actor)
                del args, kwargs
                if call.name in ("call_version", "serve_channel") and value is not None:
                    self._check_room()
            except ray.exceptions.RayError as raised:
                value, error = None, raised
            except Exception as raised:
                cause = copied(raised, Ref, Actor)  # without its frames
                error = ray.exceptions.RayTaskError(call.name, str(raised), cause)
                value = None
            world.point("returning")
            self._pending.remove(call)
            world.after(platform.delay(), functools.partial(call.returns, value, error))
            del call, value, error

    def _check_room(self) -> None:
        """Raise if the store is full."""
        if self._world.chance("full"):
            self._world.note("the store is full")
            self._platform.losses += 1
            raise ray.exceptions.ObjectStoreFullError("no room for a result")


class SimulatedMailbox(Changing):
    """A mailbox as `mailbox.cpp` has it, and the sockets of its channel.

    Attributes:
        worker: The process of the worker.
        views: By end (True for the worker's), the buffers that it has read and not dropped.
    """

    nonce = b"nonce"

    def __init__(self, world: World, worker: Process) -> None:
        super().__init__(world)
        self.worker = worker
        self._state = "AWAY"
        self._ended = self._dismissed = 0
        self._is_woken = True
        self._content: dict[bool, bytes] = {False: b"", True: b""}  # by reader
        self._shared: dict[bool, list[Any]] = {False: [], True: []}  # by reader
        self.views: dict[bool, list[weakref.ref[Any]]] = {False: [], True: []}
        self.to_driver: list[bytes] = []
        self.to_worker: list[bytes] = []
        self.channels: SimulatedChannels | None = None

    def close_descriptor(self) -> None:
        """Keep the memory."""

    @property
    def is_answered(self) -> bool:
        return self._state in ("AWAY", "WAITING")

    # The driver's end.

    def post(self, command: bytes, calls: int, wakes: bool = True) -> bool:
        if not self.is_answered:
            raise RuntimeError("mailbox: not ready for a command")
        self._content[True] = command
        waits, self._state = self._state == "WAITING", "COMMAND"
        self._is_woken = wakes
        if wakes:
            self.changed()
        return self._dismissed < calls and (waits or self._ended != calls)

    def wake(self) -> None:
        self._is_woken = True
        self.changed()

    def withdraw(self) -> bool:
        if self._state == "COMMAND":
            self._state = "AWAY"
            return True
        return False

    def dismiss(self, calls: int) -> None:
        self._dismissed = calls
        if self._state == "WAITING":
            self._state = "AWAY"
        self.changed()

    # The worker's end.

    def enter(self, call: int) -> None:
        if self._state == "AWAY" and call > self._dismissed:
            self._state = "WAITING"

    def wait(self, seconds: float, call: int) -> bool:
        world = self._world
        world.point("at the mailbox")
        end = world.now + seconds
        while True:
            if self._state == "COMMAND":
                if call <= self._dismissed:
                    self._note_end(call)
                    return False
                self._state = "BUSY"
                return True
            if self._state != "WAITING":
                self._note_end(call)
                return False
            if world.now >= end or call <= self._dismissed:
                self._note_end(call)
                self._state = "AWAY"
                return False
            world.block(lambda: self._may_look(call), self, end - world.now)

    def _may_look(self, call: int) -> bool:
        return call <= self._dismissed or (self._state != "WAITING" and self._is_woken)

    def answer_with(self, answer: bytes, ends: int) -> None:
        self._world.process()  # raises in a process that has just died
        if self._state != "BUSY":
            self._world.fail("a worker answered a command that it has not taken")
        kind, _ = _HEADER.unpack_from(answer)
        if kind != BY_CALL and self.holds(True, 0):  # the frames of an error hold its arguments
            self._world.fail("a worker answered while it holds the weights of the command")
        self._content[False] = answer
        if ends:
            self._note_end(ends)
        self._state = "AWAY" if ends else "WAITING"

    def _note_end(self, call: int) -> None:
        self._ended = max(self._ended, call)

    # Both ends.

    def share(self, of_worker: bool, extents: list[Any]) -> None:
        """Note the buffers of the next message of one end."""
        self._shared[not of_worker] = [extent.buffer for extent in extents]

    def kind_of_answer(self) -> tuple[int, bytes]:
        """Return kind and body of the answer."""
        kind, count = _HEADER.unpack_from(self._content[False])
        return kind, self._content[False][_HEADER.size + count * _EXTENT.size :]

    def read_message(self, of_worker: bool, _: Any) -> tuple[int, list[Any], bytes]:
        content = self._content[of_worker]
        kind, count = _HEADER.unpack_from(content)
        body = content[_HEADER.size + count * _EXTENT.size :]
        buffers = []
        for buffer, snapshot, is_same in self._shared[of_worker][:count]:
            if not is_same():
                self._world.fail("weights changed after they were sent")
            view = np.array(buffer)
            if view.tobytes() != snapshot:
                self._world.fail("weights changed in a segment")
            view.flags.writeable = False
            self.views[of_worker].append(weakref.ref(view))
            buffers.append(view)
        return kind, buffers, body

    def release_message(self, of_worker: bool) -> None:
        """Hold nothing of a message that cannot be read."""

    def holds(self, of_worker: bool, index: int) -> int:
        self.views[of_worker] = [view for view in self.views[of_worker] if view() is not None]
        return len(self.views[of_worker]) if index == 0 else 0

    def add_hold(self, of_worker: bool, index: int) -> None:
        """Count nothing before it is read."""

    def drop_hold(self, of_worker: bool, index: int) -> None:
        """Count nothing before it is read."""


class _Connection:
    """A socket of a channel."""

    def __init__(self, closes: Callable[[], None]) -> None:
        self._closes = closes

    def setblocking(self, is_blocking: bool) -> None:
        """Never block."""

    def send(self, packet: bytes) -> None:
        """Lose the last words."""

    def close(self) -> None:
        self._closes()


class SimulatedSegments:
    """Segments, in which every buffer lies, unless memory is short."""

    def __init__(self, platform: SimulatedWorkers) -> None:
        self._platform = platform

    def offer(self, nbytes: int, **_: Any) -> None:
        """Offer nothing: every buffer lies in a segment anyway."""

    def clear(self) -> None:
        """Forget nothing."""

    def find(self, buffer: Any) -> Extent | None:
        world = self._platform.world
        if world.chance("no segment"):
            world.note("there is no segment")
            return None
        memory = np.frombuffer(buffer, np.uint8)
        content = memory.tobytes()
        origin = weakref.ref(memory)

        def is_same() -> bool:
            there = origin()
            return there is None or there.tobytes() == content

        extent = HeldExtent(0, 1, 0, memory.nbytes)
        extent.buffer = np.frombuffer(content, np.uint8), content, is_same
        return extent

    def is_taken(self, extent: Extent) -> bool:
        return False

    def copy_of(self, extent: Any) -> Any:
        return np.array(extent.buffer[0])

    def copy_in(self, buffers: Any, **_: Any) -> None:
        """Find no free segment."""


class _Shares(ChannelEnd):
    """What both ends do in another way than through sockets."""

    mailbox: Any
    _platform: SimulatedWorkers

    def share(self, segments: Any, extents: list[Extent]) -> None:
        if extents and self._platform.world.chance("unsent"):
            self._platform.world.note("a segment was not sent")
            self._platform.losses += 1
            raise OSError("the socket is full")
        self.mailbox.share(self._is_worker, extents)

    def receive(self) -> None:
        mailbox = self.mailbox
        packets = mailbox.to_worker if self._is_worker else mailbox.to_driver
        while packets and not self.is_closed:
            packet = packets.pop(0)
            if packet:
                self._take(packet[:1], packet[1:], _core.Descriptors())
            else:
                self.is_closed = True


class SimulatedDriverChannel(_Shares, DriverChannel):
    """The driver's end of a channel."""

    def __init__(self, platform: SimulatedWorkers, mailbox: SimulatedMailbox) -> None:
        connection: Any = _Connection(lambda: mailbox.to_worker.append(b""))
        box: Any = mailbox
        super().__init__(connection, box)
        self._platform = platform
        self.peer_segments: Any = {0: None}  # of which views are counted
        self._peer_has = {0: 1}


class SimulatedChannels(Bell):
    """A driver's ends of channels."""

    def __init__(self, platform: SimulatedWorkers) -> None:
        super().__init__(platform.world)
        self._platform = platform
        self.process = platform.world.process()
        self.segments = SimulatedSegments(platform)
        self.address = b"address %d" % len(platform.listeners)
        platform.listeners[self.address] = self
        self.met: dict[bytes, SimulatedDriverChannel | None] = {}
        self._channels: list[SimulatedDriverChannel] = []
        self._tokens = 0
        self.is_closed = False

    def new_token(self) -> bytes:
        self._tokens += 1
        token = self.address + b" token %d" % self._tokens
        self.met[token] = None
        return token

    def forget(self, token: bytes) -> None:
        channel = self.met.pop(token, None)
        if channel is not None:
            channel.close()

    def connect(self, token: bytes, nonce: bytes) -> SimulatedDriverChannel:
        self._world.point("connecting")
        self._drop_given_up()
        channel = self.met.pop(token, None)
        if channel is None:
            raise ChannelError("the worker has not connected")
        mailbox: Any = channel.mailbox
        if mailbox.worker.is_dead and self._world.draw() < 0.5:
            channel.close()
            raise BrokenPipeError("it is already dead")
        mailbox.to_worker.append(b"D")
        mailbox.channels = self
        self._channels.append(channel)
        return channel

    def ring(self) -> None:
        self.ring_bell()

    def wake(self, mailboxes: list[SimulatedMailbox]) -> None:
        for mailbox in mailboxes:
            mailbox.wake()
        self._world.point("woken")

    def _is_due(self) -> bool:
        return self._is_rung or any(self._has_news(channel) for channel in self._channels)

    @staticmethod
    def _has_news(channel: SimulatedDriverChannel) -> bool:
        mailbox: Any = channel.mailbox
        return bool(mailbox.to_driver)

    def wait(self, channels: Any, seconds: float | None, enough: int = 1) -> float:
        world = self._world
        begin = world.now
        if self.finds(channels, enough):
            return world.now - begin
        self._missing = enough
        world.point("waiting")
        if not any(channel.is_answered for channel in channels):
            world.block(self._is_due, self, seconds)
            self.poll()
        return world.now - begin

    def answers_of(self, channels: list[SimulatedDriverChannel], layout: Any) -> Any:
        """Do what `_core.WorkerAnswers` does, for a share of the calls."""

        def note_read() -> None:
            made.were_read = True

        made = SimpleNamespace(
            channels=channels, layout=layout, were_read=True, posts=0, note_read=note_read
        )
        return made

    def post_at_once(
        self, answers: Any, channels: list[SimulatedDriverChannel], commands: Sequence[Message]
    ) -> list[int] | None:
        """Do what `Channels` does, without a point at which anything else could happen."""
        world, share = self._world, self._platform.in_one_step
        world.point("posting at once")
        if share == 0 or (share < 1 and world.draw() >= share) or world.chance("unsent"):
            return None
        each = [*zip(channels, commands, strict=True)]
        if not all(channel.may_be_posted(command.extents) for channel, command in each):
            return None
        answers.note_read()
        calls = [channel.expect(answers, command.extents) for channel, command in each]
        world.point("expecting")
        if not all(channel.is_answered for channel in channels):
            return None
        answers.were_read, answers.posts = False, answers.posts + 1
        self._platform.posts += 1
        uncalled = []
        for k, (channel, command) in enumerate(each):
            mailbox: Any = channel.mailbox
            mailbox.share(False, command.extents)
            if not mailbox.post(command.content, calls[k]):
                uncalled.append(k)
        world.point("posted at once")
        return uncalled

    def mean_of(
        self,
        answers: Any,
        out: Any,
        weights: list[float],
        seconds: float,
        *,
        takes_nonfinite: bool,
    ) -> tuple[float, float] | None:
        begin, layout = self._world.now, answers.layout
        if not self._have_answered(answers.channels, (WEIGHTS, layout.digest.encode()), seconds):
            return None
        models = [channel.mailbox.read_message(False, None)[1] for channel in answers.channels]
        is_finite = _core.average_into(layout.core, True, [out], models, weights)
        if not (is_finite or takes_nonfinite):
            return None
        self._platform.averages += 1
        answers.were_read = True
        self._world.point("read at once")
        return self._world.now - begin, 0.0

    def are_done(self, answers: Any, count: int, seconds: float) -> bool:
        are_done = self._have_answered(answers.channels, (VALUE, _NOTHING), seconds)
        if are_done:
            answers.were_read = True
            self._world.point("read at once")
        return are_done

    def _have_answered(
        self, channels: list[SimulatedDriverChannel], answer: tuple[int, bytes], seconds: float
    ) -> bool:
        """Wait for an ``answer``, kind and body, of all; return whether nothing else happened."""
        world = self._world
        end = world.now + seconds
        while True:
            there = [one for one in channels if one.is_answered]
            if any(one.mailbox.kind_of_answer() != answer for one in there):
                return False
            missing = [one for one in channels if one not in there]
            if not missing or world.now >= end:
                return not missing
            self._missing = len(missing)
            world.point("waiting")
            if not any(one.is_answered for one in missing):
                world.block(self._is_due, self, end - world.now)
                self._is_rung = False
            if any(map(self._has_news, self._channels)):
                return False

    def poll(self) -> None:
        self._is_rung = False
        for channel in [*self._channels]:
            if self._has_news(channel):
                channel.receive()
                if channel.is_closed:
                    self._drop(channel)

    def give_up(self, channel: SimulatedDriverChannel) -> None:
        channel.is_given_up = True
        channel.withdraw()
        self._drop_given_up()

    def _drop_given_up(self) -> None:
        for channel in [*self._channels]:
            if channel.is_given_up and not channel.is_holding(0):
                self._drop(channel)

    def _drop(self, channel: SimulatedDriverChannel) -> None:
        if channel in self._channels:
            self._channels.remove(channel)
        channel.close()

    def close(self) -> None:
        self.is_closed = True
        for channel in [
            *self._channels,
            *[channel for channel in self.met.values() if channel is not None],
        ]:
            self._drop(channel)
            channel.forget_segments()


class SimulatedWorkerChannel(_Shares, WorkerChannel):
    """A worker's end of a channel."""

    def __init__(self, platform: SimulatedWorkers, address: bytes, token: bytes) -> None:
        world = platform.world
        process = world.process()
        world.point("connecting")
        channels = platform.listeners[address]
        if world.chance("no channel"):
            world.note("no channel can be made")
            raise OSError("too many open files")
        stopped = channels.process.stopped_until - world.now
        if stopped > 0:
            world.sleep(min(stopped, PATIENCE))
        if stopped > PATIENCE:
            raise TimeoutError("the driver has not taken the connection")
        if channels.is_closed:
            raise ConnectionRefusedError("nobody listens")
        if channels.met.get(token, token) is not None:
            raise ChannelError("the driver does not expect this worker any more")
        mailbox: Any = SimulatedMailbox(world, process)
        platform.mailboxes.append(mailbox)
        channels.met[token] = SimulatedDriverChannel(platform, mailbox)
        connection: Any = _Connection(self._leave)
        ChannelEnd.__init__(self, connection, mailbox, is_worker=True)
        self._platform, self._listener = platform, channels
        segments: Any = SimulatedSegments(platform)
        self._segments = segments
        process.at_death.append(self._leave)

    def _leave(self) -> None:
        mailbox: Any = self.mailbox
        mailbox.to_driver.append(b"")
        self._listener.changed()

    def _take(self, kind: bytes, body: bytes, descriptors: _core.Descriptors) -> None:
        bell: Any = self._listener
        self._doorbell = bell
