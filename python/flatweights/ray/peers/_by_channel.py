"""Calls to workers: through channels if driver and worker share a machine, else through Ray.

The first call of a group goes through Ray, and asks the worker to attach. From then on, commands
go into the worker's mailbox. If the worker is in no call of `FlatWorker.serve_channel`, the driver
makes one, through Ray, so that the command is taken. That call also returns errors, and results
that are too large for the channel or refer to objects of Ray. References, messages of the wire
and large arguments go through Ray's calls from the start. A worker that died counts as having
answered: its Ray call raises the error that describes the death. For an actor that Ray restarts,
that takes a second or more, and the error says no more than what the channel shows at once; so
nobody waits for it longer than for the death of any other actor.
"""

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray

from flatweights import _core
from flatweights._flatten import new_vector
from flatweights._layout import Layout
from flatweights._settings import RAY, ray_setting
from flatweights._weights import FlatWeights, frozen
from flatweights.ray import _clock
from flatweights.ray.channels._driver_channel import Channels, DriverChannel
from flatweights.ray.channels._end import ChannelError, is_shortage
from flatweights.ray.channels._message import Message, buffer_message, make_message
from flatweights.ray.channels._protocol import BROKEN, BY_CALL, CALL, COMMAND, VALUE, WEIGHTS
from flatweights.ray.channels._worker_channel import NoChannel
from flatweights.ray.peers._backoff import Backoff
from flatweights.ray.peers._call_log import CallLog
from flatweights.ray.peers._platform import PLATFORM, GroupPlatform
from flatweights.ray.peers._store import RayResult, argument_of, call_actor, sent_weights
from flatweights.ray.peers._transport import (
    Call,
    Payload,
    PendingResult,
    plain_call,
    plain_weights,
)
from flatweights.ray.results._result import is_arrays, may_change
from flatweights.ray.support._errors import SHUT_DOWN, UnreadableResultError

_MOST_OFFERED = 3  # segments for averages that the user keeps
_INSIST = 120.0  # seconds that a worker has to attach if FLATWEIGHTS_RAY=shm
_DEATH = 0.5  # seconds in which Ray has to say why a worker died
_SLICE = 1.0  # seconds between two checks of the Ray calls that serve channels
_MISSING: Any = object()  # a placeholder for a value

_log = logging.getLogger("flatweights")


class LostResultError(ray.exceptions.RayError):  # type: ignore[misc]
    """A worker has answered, but its answer cannot be read."""


class GroupChannels:
    """The channels of a group.

    Attributes:
        platform: What the group uses of Ray and channels.
        backoff: The reason for which the group has no channels.
        made: The channels of this process, once they are made; `channels` makes them.
        last: The last call, and its command; None between rounds.
        asleep: The mailboxes whose workers `wake` is to wake; None if they are woken at once.
    """

    def __init__(self, platform: GroupPlatform = PLATFORM) -> None:
        """Make no channels yet.

        Raises:
            ValueError: If the environment variable is malformed.
        """
        self.platform = platform
        setting = ray_setting()
        self.insists = setting == "shm"
        self.backoff = Backoff("workers are", f"{RAY}=store" if setting == "store" else "")
        self.made: Channels | None = None
        self._close: Callable[[], object] = lambda: None
        self.last: tuple[Call, Message | None] | None = None
        self.asleep: list[_core.Mailbox] | None = None

    @property
    def channels(self) -> Channels | None:
        """The channels of this process, made on first use; None if there can be none now."""
        if self.made is None and self.backoff.is_over:
            try:
                self.made = self.platform.channels()
            except (OSError, MemoryError, AttributeError) as error:  # AttributeError: other systems
                self.backoff.note(_text_of(error), may_pass=is_shortage(error))
            else:
                self._close = weakref.finalize(self, self.made.close)
        return self.made

    def close(self) -> None:
        """Close all channels, and release the memory of segments without a live view."""
        self.done()
        self._close()
        self.made = None
        self.backoff = Backoff("workers are", SHUT_DOWN)

    def command(self, call: Call) -> Message | None:
        """Return the command for ``call``, one for all workers; None if it goes through Ray."""
        assert self.made is not None
        segments, plain = self.made.segments, plain_call(call)
        if plain is not None:
            body, weights = plain
            buffer = None if weights is None else weights.buffer
            message = buffer_message(CALL, body, buffer, segments)
        else:
            sent = plain_weights(None if call.payload is None else call.payload.value)
            value = "call_version", (call.head, sent, call.method, *call.args), call.kwargs
            message = make_message(COMMAND, [value], segments, frozen=True)
        self.last = call, message
        return message

    def offer(self, nbytes: int) -> None:
        """Offer a free segment, if there is one, to the next average, of ``nbytes``."""
        if self.made is not None and nbytes:
            self.made.segments.offer(nbytes, most_taken=_MOST_OFFERED)

    def copy_of(self, value: Any, *, in_segment: bool = True) -> Any:
        """Return a read-only copy of arrays, if possible in a segment; a dict is one buffer."""
        layout = None
        if isinstance(value, np.ndarray):
            nbytes = value.nbytes
        else:
            layout = value.layout if isinstance(value, FlatWeights) else Layout.of(value)
            nbytes = layout.nbytes
        if in_segment and self.made is not None:
            self.made.segments.offer(nbytes)
        try:
            if layout is None:
                made = new_vector(value.size, value.dtype).reshape(value.shape)
                made[...] = value
                return frozen(made)
            buffer = layout.new_buffer()
            if isinstance(value, FlatWeights):
                _core.move_parts([buffer], [value.buffer])
            else:
                _core.move_parts(layout.packed_views(buffer), [*value.values()])
            return FlatWeights.wrap(frozen(buffer), layout)
        finally:
            _core.withdraw_offer()

    def let_sleep(self) -> None:
        """Let workers that are called from now on sleep until `wake`, which wakes them together.

        Otherwise the first to wake may take the processor from the driver, and the others would get
        their commands only after the driver has it back.
        """
        self.asleep = []

    def wake(self) -> None:
        """Wake the workers that were called since `let_sleep`, two with each system call."""
        asleep, self.asleep = self.asleep, None
        if asleep and self.made is not None:
            self.made.wake(asleep)

    def done(self) -> None:
        """Withdraw the offer, and forget the last command."""
        _core.withdraw_offer()
        self.last = None


class ChannelResult(PendingResult):
    """The answer to a command, or to the Ray call that brings it."""

    def __init__(
        self, worker: "Worker", channels: Channels, channel: DriverChannel, call: Call
    ) -> None:
        """Wait for the worker's answer to the command that was just posted.

        Args:
            worker: The worker.
            channels: Those of its group.
            channel: Its own.
            call: The call, which is made through Ray if the worker refuses the command.
        """
        self._worker = worker
        self._platform = worker.platform
        self._channels = channels
        self._channel = channel
        self._call = call
        self._by_ray: RayResult | None = None  # the Ray call's answer, to wait for instead
        self._until = math.inf  # the end of that wait, once the worker has died
        self._value: Any = _MISSING
        self._error: Exception | None = None

    @property
    def is_in_store(self) -> bool:
        """Whether the value comes through Ray."""
        return self._by_ray is not None

    @classmethod
    def wait(
        cls, answers: Sequence["ChannelResult"], timeout: float | None, enough: int = 1
    ) -> list[PendingResult]:
        """Return the answers that have arrived."""
        begin = now = _clock.now()
        end = None if timeout is None else begin + timeout
        if timeout is not None and timeout <= 0:  # no sleep will learn of deaths
            answers[0]._channels.poll()
        there: dict[PendingResult, None] = {}
        while True:
            by_ray: dict[ray.ObjectRef, list[ChannelResult]] = {}
            is_enough = cls._read_all(answers, there, by_ray)
            if by_ray:
                came = cls._take_out(by_ray, answers[0]._platform)
                there |= dict.fromkeys(came)
                is_enough = is_enough or bool(came)
            more = enough - len(there)
            if is_enough or more <= 0:
                return [*there]
            if end is not None or by_ray:
                now = _clock.now()
                if end is not None and now >= end:
                    return [*there]
            # No bell rings for answers through Ray: they are polled, ever less often.
            patience = min(_SLICE, max(5e-4, (now - begin) / 8)) if by_ray else _SLICE
            if end is not None:
                patience = min(patience, end - now)
            channels = [a._channel for a in answers if a not in there and a._by_ray is None]
            # All answers except the last are read while that worker still runs.
            seconds = answers[0]._channels.wait(channels, patience, more - 1 if more > 1 else 1)
            if seconds >= _SLICE and not by_ray:
                for answer in answers:
                    if answer not in there:
                        answer.look_at_call()

    @staticmethod
    def _read_all(
        answers: Sequence["ChannelResult"],
        there: dict[PendingResult, None],
        by_ray: dict[ray.ObjectRef, list["ChannelResult"]],
    ) -> bool:
        """Read the channels of ``answers``, without waiting; return whether one has failed.

        Args:
            answers: The answers.
            there: Those that have arrived; it gets those that are new.
            by_ray: Gets those that come through Ray, by call.
        """
        has_failed = False
        for answer in answers:
            channel = answer._channel
            is_known = answer._value is not _MISSING or answer._error is not None
            is_silent = not (channel.mailbox.is_answered or channel.is_closed or is_known)
            if answer in there or (is_silent and answer._by_ray is None):
                continue
            if is_known or answer._is_there():
                there[answer] = None
                has_failed = has_failed or answer._value is _MISSING
            elif answer._by_ray is not None:
                by_ray.setdefault(answer._by_ray.ref, []).append(answer)
        return has_failed

    @staticmethod
    def _take_out(
        by_ray: dict[ray.ObjectRef, list["ChannelResult"]], platform: GroupPlatform
    ) -> list["ChannelResult"]:
        """Return the answers whose Ray calls have ended, and those of workers that died silently.

        Args:
            by_ray: The answers that come through Ray, by call; it loses the calls that have ended.
            platform: What this process uses of Ray.
        """
        ready = platform.wait([*by_ray], 0, len(by_ray))
        came = [answer for ref in ready for answer in by_ray.pop(ref)]
        dead = [a for rest in by_ray.values() for a in rest if _clock.now() >= a._until]
        for answer in dead:
            answer._count_as_dead()
        return came + dead

    def _is_there(self) -> bool:
        """Whether the answer has come through the channel; if it cannot, wait for the Ray call."""
        if self._error is not None:
            return True
        if self._by_ray is not None:
            return False
        channel = self._channel
        if channel.mailbox.is_answered:
            try:
                kind, value = channel.take()
                if kind == WEIGHTS:
                    self._value = self.packed = value
                elif kind == VALUE:
                    self._value = value
                else:
                    self._ask_ray(kind, value)
            except UnreadableResultError as error:
                self._error = error.with_traceback(None)
            except BaseException as error:  # after an interrupt, it may be half read
                self._error = LostResultError(_text_of(error))
                self._worker.give_up(channel, "its answer could not be read")
                if not isinstance(error, Exception):
                    raise
            return self._by_ray is None
        if channel.is_closed:
            self._worker.give_up(channel, "the worker died")
            self._by_ray = RayResult(channel.latest_call(), self._platform)
            self._until = _clock.now() + _DEATH
        return False

    def _count_as_dead(self) -> None:
        """Wait for Ray's news of the worker no longer: its channel has shown that it died."""
        why = "its process has ended; Ray may be starting it again"
        actor = self._worker.handle._actor_id.binary()
        self._error, self._by_ray = ray.exceptions.ActorUnavailableError(why, actor), None

    def _ask_ray(self, kind: int, value: Any) -> None:
        """Wait for a Ray call, since the answer in the mailbox is not the result."""
        if kind == BY_CALL:
            self._by_ray = RayResult(self._channel.calls[value], self._platform)
            return
        if kind == BROKEN:
            self._worker.note_broken(self._channel, value)
        else:
            _log.info("rank %d refused a command: %s", self._worker.rank, value)
        self._by_ray = self._worker.call_by_ray(self._call, value)

    def look_at_call(self) -> None:
        """Wait for the Ray call instead, if it has ended without an answer in the mailbox."""
        ref = self._channel.latest_call()
        if self._by_ray is not None or not self._platform.wait([ref]):
            return
        if self._is_there() or self._by_ray is not None:
            return
        self._worker.give_up(self._channel, "its call failed")
        self._by_ray = RayResult(ref, self._platform)

    def result(self) -> Any:
        """Return the value: its arrays are views of the worker's segment."""
        if self._error is not None:
            raise self._error
        if self._by_ray is not None:
            return self._by_ray.result()
        if self.packed is not None:
            self._value, self.packed = self.packed.weights(), None
        return self._value

    def may_be_kept(self) -> bool:
        """Whether this process has no other view of the worker's segments."""
        return self._channel.count_views() == 1

    def release(self) -> None:
        """Drop the value."""
        self._value, self.packed = _MISSING, None
        if self._by_ray is not None:
            self._by_ray.release()


class Worker:
    """The driver's end of one worker: a channel, once it has attached; before that, an actor.

    Attributes:
        handle: The actor.
        rank: Its rank in the group.
        platform: What it uses of Ray.
        transport: The transport to it: ``"shm"``, or ``"store"`` with the reason.
        far_node: Its node, if that is known, and is not the driver's.
        log: The log of the calls on the actor's handles, if there is a channel or an agent.
        channel: Its channel, once it has attached.
        token: The token of that channel; `log` has it last while no other call was made since.
    """

    def __init__(self, handle: ray.actor.ActorHandle, rank: int, channels: GroupChannels) -> None:
        """Take the handle of an actor, its rank, and the channels of its group."""
        self.handle = handle
        self.rank = rank
        self.platform = channels.platform
        self._group = channels
        self.channel: DriverChannel | None = None
        self._attaching: ray.ObjectRef | None = (
            None  # the call that asks the worker to attach, with the token
        )
        self.token = b""
        self.log: CallLog | None = None
        self.far_node = ""
        self._backoff = Backoff(f"rank {rank} is")
        self.transport = f"store: {channels.backoff.reason}" if channels.backoff.reason else ""

    def call(self, call: Call) -> PendingResult:
        """Post the call to the channel, or make it through Ray."""
        channel = self._ready()
        if channel is None:
            return call_actor(self.handle, call, self.platform)
        if call.head[2] is not None:
            return self.call_by_ray(call, "the result is encoded")
        if call.payload is not None and not call.payload.is_frozen:
            return self.call_by_ray(call, "these weights go through Ray")
        group, log = self._group, self.log
        made = group.last
        command = made[1] if made is not None and made[0] is call else group.command(call)
        if command is None:
            why = "the arguments are large, or objects of Ray, or no segment is free"
            return self.call_by_ray(call, why)
        channels = group.made
        assert log is not None
        assert channels is not None
        try:
            if log.last != self.token:  # the command must not overtake other calls
                channel.dismiss()
            is_there = channel.post(command, channels.segments, group.asleep)
        except Exception as error:
            self.give_up(channel, _text_of(error))
            return call_actor(self.handle, call, self.platform)
        if not is_there:
            self.serve(channel)
        self.transport = "shm"
        return ChannelResult(self, channels, channel, call)

    @property
    def has_command(self) -> bool:
        """Whether a command is in its channel whose answer nobody has read."""
        return self.channel is not None and self.channel.has_command

    def serve(self, channel: DriverChannel) -> None:
        """Make a Ray call that takes the command that was posted to ``channel``, the worker's."""
        channel.serve(lambda number: self.handle.serve_channel.remote(self.token, number))

    def call_by_ray(self, call: Call, why: str) -> RayResult:
        """Make the call through Ray; dismiss a worker that waits at its mailbox."""
        self.transport = f"store: {why}"
        if self.channel is not None and self.channel.is_answered:
            self.channel.dismiss()
        return call_actor(self.handle, call, self.platform)

    def prepare(self, payload: Payload) -> None:
        """Bring ``payload`` within reach of this worker, unless it already is; send nothing.

        For a channel, the weights must not change: workers read them in place.

        Raises:
            RayError: If the object store has no room for it.
        """
        if self._ready() is None or not (payload.is_frozen or is_arrays(payload.value)):
            argument_of(payload)
        elif not payload.is_frozen:
            payload.value = sent_weights(payload)  # the caller's may have changed since then
            is_dict = isinstance(payload.value, dict) and not isinstance(payload.value, FlatWeights)
            if may_change(payload.value):
                self._replace(payload, self._group.copy_of(payload.value))
            elif is_dict:  # the caller may replace arrays in it
                self._replace(payload, dict(payload.value))
            payload.is_frozen = True

    def look_for_node(self) -> None:
        """Ask the worker for its node once more, since its old node may have died."""
        self.far_node = ""
        self._backoff = Backoff(f"rank {self.rank} is")

    def detach(self) -> None:
        """Give up the channel of a worker that has left and serves no more calls."""
        if self.channel is not None:
            if self.channel.is_answered and not self.channel.is_given_up:
                self.channel.dismiss()
            self.give_up(self.channel, "it has left")

    def give_up(self, channel: DriverChannel, why: str) -> None:
        """Give up ``channel``; the next call asks the worker to attach anew."""
        if self.channel is channel:
            if self._group.made is not None:  # another thread may have shut the group down
                self._group.made.give_up(channel)
            self.channel = None
            self.transport = f"store: {why}"

    def note_broken(self, channel: DriverChannel, reason: str) -> None:
        """Give up ``channel``, which the worker cannot use any more; try a new one later."""
        self.give_up(channel, reason)
        self._backoff.note(reason, may_pass=True)

    def _ready(self) -> DriverChannel | None:
        """Return the channel if the worker has attached; otherwise ask it to attach."""
        channel = self.channel
        if channel is not None:
            if not (channel.is_closed or channel.is_given_up):
                return channel
            self.give_up(
                channel, "the worker died" if channel.is_closed else "a call was broken off"
            )
        channels = self._group.channels
        if channels is None:
            self.transport = f"store: {self._group.backoff.reason}"
        elif self._attaching is not None or self._backoff.is_over:
            self._attach(channels)
        if self.channel is None and self._group.insists:
            self._insist()
        return self.channel

    def _attach(self, channels: Channels) -> None:
        """Ask the worker to attach, or check whether it has attached."""
        if self._attaching is None:
            try:
                self.log = CallLog.of(self.handle)
            except ChannelError as error:
                self._fail(str(error), may_pass=False)
                return
            self.token = channels.new_token()
            node = self.platform.node()
            self._attaching = self.handle.attach_channel.remote(channels.address, self.token, node)
            self.transport = "store: it attaches"
        timeout = _INSIST if self._group.insists else 0
        if not self.platform.wait([self._attaching], timeout):
            return
        attached, self._attaching = self._attaching, None
        try:
            made = self.platform.get(attached)
            if isinstance(made, NoChannel):
                self._fail(made.reason, made.may_pass)
                self.far_node = made.node
            else:
                self.channel = channels.connect(self.token, made)
        except (ChannelError, OSError) as error:
            self._fail(_text_of(error), may_pass=True)
        except ray.exceptions.RayError as error:  # it died: the next call asks again
            self.transport = f"store: {type(error).__name__} when it was asked to attach"
        finally:
            channels.forget(self.token)

    def _fail(self, reason: str, may_pass: bool) -> None:
        """Note the reason for which the worker has not attached."""
        self._backoff.note(reason, may_pass=may_pass)
        self.transport = f"store: {reason}"

    def _insist(self) -> None:
        """Raise if there can be no channel now."""
        for backoff in (self._group.backoff, self._backoff):
            if not backoff.is_over:
                where = f"there is no channel to rank {self.rank}"
                raise RuntimeError(f"{RAY}=shm: {where}: {backoff.reason}")

    @staticmethod
    def _replace(payload: Payload, made: Any) -> None:
        """Let ``payload`` bring ``made`` instead, which does not change."""
        platform = payload.platform
        payload.value = made
        payload.put = lambda: platform.put(made)


def slice_of(timeout: float | None) -> float:
    """Return the seconds until the Ray calls of workers are to be looked at, or time is up."""
    return _SLICE if timeout is None or timeout > _SLICE else timeout


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
