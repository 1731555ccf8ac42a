"""The interface between rounds and workers: calls, and answers to them.

Rounds (averages, `WorkerGroup`) know only `PendingResult` and `wait_any`, and not the transport of
a call. `call_actor` and `RayResult` go through Ray's actor calls and its object store; channels and
agents (`flatweights.ray.channels`, `flatweights.ray.nodes`) are other transports. One round may mix
several. The contract:

- A call returns a `PendingResult` at once. The worker answers its calls in their order.
- `wait_any` waits for several answers, of any transports, until a deadline. A worker that died
  counts as having answered: its answer raises.
- `PendingResult.result` returns the value, or raises the worker's exception; so does every further
  call. The value may be a view of memory that is not the driver's: it is valid until
  `PendingResult.release`, and until the next call or message to that worker at the latest. A round
  copies the values that it keeps, and releases each answer that it has waited for.
- A late answer stays in flight, and nothing is sent to that worker before it has answered. An
  answer whose round was broken off is abandoned: see `PendingResult.abandon`. So no worker is sent
  weights in the middle of a call.
- Weights are sent as the `Payload` of a call. Before that, it is prepared: brought within reach of
  that worker, once for all workers of its transport. If preparing raises, nothing was sent. Memory
  that was sent is never written again: a round owns it until the round is dropped.
- A `Call` carries its `Stamp` and that of the weights it needs. The worker refuses a stamp that is
  not above the last one of its group (Ray repeats calls on a restarted actor), and weights that it
  does not have: see `FlatWorker.call_version`. Each transport passes both through. If the call
  brings these weights itself, the worker sets them first, in the same turn. If it cannot set them,
  it does not run the method; its error says which of the two failed.
- Errors: an error of the worker's method is a `ray.exceptions.RayTaskError` with its ``cause``; a
  dead worker a `ray.exceptions.RayActorError`; `support/_errors.py` has which of these leave a
  worker out (`is_lost`).
"""

from __future__ import annotations

import functools
import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights._layout import unpickle_layout
from flatweights._weights import FlatWeights
from flatweights.ray.peers._platform import PLATFORM, GroupPlatform
from flatweights.ray.results._result import Packed
from flatweights.ray.results._wire import PayloadKind
from flatweights.wire import WireDType

if TYPE_CHECKING:
    from flatweights.ray.peers._result_metadata import Exchanged

# Up to this size, arguments travel with the call and results with its reply. It is faster to put a
# larger value into the object store once than to pickle it into each call. Measured: with four
# actors, by value 2.3 ms against 3.3 ms by reference up to 100 KiB of pickle, 4.8 ms beyond. Some
# of that is the layout's.
BY_VALUE = 96 * 1024


Stamp: TypeAlias = tuple[str, int]
"""Identifies a call: a text that no other group has, in any process, and a number that counts the
calls of the group."""

Head: TypeAlias = tuple[Stamp, Stamp | None, tuple[WireDType, PayloadKind] | None]
"""The head of a call, which travels with it: its stamp; the stamp of the weights that the worker
must have, None if none were sent yet; the dtype on the wire and the kind of the result, if it is to
be encoded. Plain tuples pickle ten times faster than named ones."""


def plain_weights(value: Any) -> Any:
    """Return weights in a list, from which `weights_of` takes them; None for None.

    Only the frames that set the weights keep them, so a segment is free again before the worker's
    method runs. The parts of `FlatWeights` pickle faster than these.
    """
    if type(value) is FlatWeights:
        return None, [value.layout.pickled, pickle.PickleBuffer(value.buffer.data)]
    return None if value is None else (None, [value])


def weights_of(value: Any, platform: GroupPlatform = PLATFORM) -> Any:
    """Return the weights, given a result of `argument_of`, or, maybe `Packed`, `plain_weights`."""
    if type(value) is tuple and len(value) == 1:
        return platform.get(value[0])
    if type(value) is tuple and len(value) == 2 and value[0] is None:
        *layout, buffer = value[1]
        value[1].clear()
        if layout:
            is_array = type(buffer) is np.ndarray  # through Ray, it is a buffer of another kind
            packed = buffer if is_array else np.frombuffer(buffer, np.uint8)
            return Packed(packed, unpickle_layout(layout[0]))
        return buffer
    return value


_NUMBERS = struct.Struct("=qq")  # of a call, and of the version that it needs; -1 for none


def plain_call(call: Call) -> tuple[bytes, FlatWeights | None] | None:
    """Return the body of a call without arguments, and the weights that it brings.

    Only the numbers at its beginning differ from those of the last such call. Reading and writing
    them takes a tenth of the time of a pickle.

    Returns:
        None for other calls, and for weights of other kinds.
    """
    weights = None if call.payload is None else call.payload.value
    if call.args or call.kwargs or type(weights) not in (FlatWeights, NoneType):
        return None
    (group, number), version, encoding = call.head
    if version is not None and version[0] != group:
        return None
    layout = None if weights is None else weights.layout
    numbers = _NUMBERS.pack(number, -1 if version is None else version[1])
    return numbers + _pickled_rest(group, encoding, call.method, layout), weights


@functools.lru_cache(maxsize=64)
def _pickled_rest(*rest: Any) -> bytes:
    return pickle.dumps(rest, protocol=5)


@functools.lru_cache(maxsize=64)
def _read_rest(rest: bytes) -> Any:
    return pickle.loads(rest)


def read_plain_call(body: bytes, buffers: list[NDArray[np.uint8]]) -> tuple[Head, Any, str | None]:
    """Return head, weights for `weights_of`, and method of a call; it empties ``buffers``."""
    number, version = _NUMBERS.unpack_from(body)
    group, encoding, method, layout = _read_rest(body[_NUMBERS.size :])
    head = (group, number), None if version < 0 else (group, version), encoding
    if layout is None:
        return head, None, method
    buffer = buffers.pop() if buffers else np.empty(0, np.uint8)  # weights without bytes
    return head, (None, [Packed(buffer, layout)]), method


class PendingResult(ABC):
    """The answer to one call, which may not have arrived yet.

    Attributes:
        agent: The agent that has the value on another node; then `result` returns metadata of it.
        packed: The value of an arrived answer, if it is only weights, read in place. None has no
            meaning: `result` returns every value.
    """

    agent: Any = None  # of a transport, which this interface does not know
    packed: Packed | None = None

    @property
    def is_in_store(self) -> bool:
        """Whether a value maps an object of Ray's store, of which a round maps a few at a time."""
        return True

    @classmethod
    @abstractmethod
    def wait(
        cls, answers: Sequence[Any], timeout: float | None, enough: int = 1
    ) -> Sequence[PendingResult]:
        """Return the ``answers``, all of this class, that have arrived.

        Args:
            answers: Answers of this class that were not let go of.
            timeout: Seconds to wait; for ever, if None.
            enough: The number of answers to wait for. It may return sooner, as after a failure.
        """

    @abstractmethod
    def result(self) -> Any:
        """Return the value of an answer that has arrived; see the contract.

        Raises:
            Exception: The worker's exception, or the reason for which the value is lost.
        """

    def may_be_kept(self) -> bool:
        """Whether the value of `packed` stays valid for as long as it exists.

        If so, it may be given to the user, and the worker has other memory for its next answers.
        """
        return False

    def fetch(self) -> bool:
        """Ask for the value itself, if `result` would return metadata of it.

        Returns:
            Whether to wait for the answer again.
        """
        return False

    def abandon(self) -> PendingResult | None:
        """Note that the value of an answer that has not arrived is no longer needed.

        Returns:
            The answer to wait for before anything else is sent to this worker: this one. None, if
            the worker queues calls itself.
        """
        return self

    def overdue(self) -> PendingResult:
        """Return, for a late answer, one that arrives once the worker is free again."""
        return self

    @abstractmethod
    def release(self) -> None:
        """Release the memory of the value, which is not taken again. A second call does nothing."""


def error_in(answer: PendingResult) -> Exception | None:
    """Read ``answer``, which has arrived; return its error, or None if it is a value."""
    if answer.packed is None:
        try:
            answer.result()
        except Exception as error:
            return error.with_traceback(None)
    return None


@dataclass(eq=False)
class Payload:
    """Weights on their way to workers.

    Attributes:
        value: `FlatWeights`, a dict of arrays, a vector, a message of the wire, or a reference of
            Ray's to one of them. It may belong to the caller, and change after the broadcast. So a
            transport that does not call `put`, but copies the weights, sets `value` and `put` to
            that copy, since a restarted worker may need them later.
        nbytes: Their bytes; 0 if unknown.
        put: A function that puts them into Ray's object store and returns the reference.
        argument: The argument by which Ray's calls bring them; None before `argument_of`.
        is_frozen: Whether `value` cannot change, so that channels can send it.
        exchanged: The agents that have it, if it is an average that nodes have exchanged.
        nbytes_sent: The bytes that were sent to workers that took it.
        platform: What has put `argument` into the store, if it is a reference.
    """

    value: Any
    nbytes: int
    put: Callable[[], ray.ObjectRef]
    argument: Any = None
    is_frozen: bool = False
    exchanged: Exchanged | None = None
    nbytes_sent: int = 0
    platform: GroupPlatform = PLATFORM


class Call(NamedTuple):
    """One call, for one worker or several.

    Attributes:
        head: Its stamp, the version that it needs, and the encoding of its result: see `Head`.
        method: Name of the method; None, if the worker only sets the weights.
        args: Its arguments.
        kwargs: Its keyword arguments.
        payload: The weights of the version in ``head``, if this call brings them; prepared.
    """

    head: Head
    method: str | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    payload: Payload | None = None

    def with_more(self, arguments: Sequence[Any]) -> Call:
        """Return the call with more ``arguments`` after its own; itself, if there are none."""
        return self._replace(args=(*self.args, *arguments)) if arguments else self
