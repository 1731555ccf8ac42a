"""The errors of workers, and their texts."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import weakref
from collections.abc import Mapping
from typing import Any

import ray

# The error for an exception that does not unpickle here; older versions of Ray do not have it.
_UNSERIALIZABLE: Any = getattr(ray.exceptions, "UnserializableException", ())

FULL = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)
"""The errors of a result for which the store had no room."""

DEAD = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)
"""The errors of an actor that has ended, or whose node was lost before the actor started there."""

EARLIER_SESSION = (
    "this belongs to an earlier session of Ray, which ray.shutdown() has ended with all actors: "
    "make a new one"
)
"""The error of what was made before the process joined another session."""

SHUT_DOWN = "the group was shut down"
"""The error of calls of a group, and of its workers, after that."""

IN_FORK = (
    "Ray does not work in a fork of a process that is connected to it, and may hang: use a Ray "
    "task or actor instead"
)
"""The error of what needs Ray in such a process."""

_LONGEST_ERROR = 16 << 10  # bytes of a pickled error
_MOST_SHOWN = 2000  # characters of a text that a worker sent
_LONGEST_TEXT = 1000  # characters of the text that replaces a longer error

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*(:|$)")  # in a traceback, after its frames
_EXIT_DETAIL = re.compile(r"Worker exit detail: (.*?)(?: Some common causes|$)")


class WorkerError(RuntimeError):
    """Some workers gave no result that could be averaged.

    Attributes:
        failed: By rank, the exception of each of them.
    """

    def __init__(self, failed: Mapping[int, Exception], remedy: str = "") -> None:
        """Say which ranks failed, and why; then the ``remedy``, a line, if there is one."""
        self.failed = dict(sorted(failed.items()))
        self._remedy = remedy
        lines = [error_of_rank(rank, error) for rank, error in self.failed.items()]
        lines += [remedy] if remedy else []
        super().__init__("\n".join(lines))  # Ray's own errors have several lines

    def _and(self, failed: Mapping[int, Exception]) -> WorkerError:
        """Return this error with more ranks that failed."""
        return WorkerError({**self.failed, **failed}, self._remedy)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments of the constructor."""
        return type(self), (self.failed, self._remedy)


class UnreadableResultError(RuntimeError):
    """The result of a method has come, and cannot be unpickled here."""


class StaleWorkerError(RuntimeError):
    """A call needs weights that the worker does not have, since it was restarted."""


class RefusedWeightsError(RuntimeError):
    """A worker could not set the weights that came with a call, so it did not run the method."""


class StoreTooSmallError(RuntimeError):
    """The object store, and the disk that it spills to, cannot hold a round."""


def check_connected(session: str | None = None) -> None:
    """Raise `RuntimeError` unless this process is connected to Ray.

    Otherwise almost every call of Ray would start a new Ray, or connect to another one. So threads
    and finalizers that may outlive `ray.shutdown` check this before they call Ray.

    Args:
        session: If not None, the `session_of_ray` that the process still has to be in.
    """
    if session and session == _last_session[1] and not _of_parent:  # the usual case
        worker = _context().worker
        if worker.connected and worker.node is _last_session[0]():
            return
    if not ray.is_initialized():
        raise RuntimeError("Ray is not initialized in this process: call ray.init() first")
    check_not_forked()
    if session is not None and session != session_of_ray():
        raise RuntimeError(EARLIER_SESSION)


def check_not_forked() -> None:
    """Raise `RuntimeError` in a fork of a process with Ray, unless it has connected itself."""
    if _of_parent and ray.is_initialized() and _context().worker.node is _of_parent[0]():
        raise RuntimeError(IN_FORK)


def has_other_session(session: str) -> bool:
    """Whether this process has joined another session than that `session_of_ray`."""
    try:
        return ray.is_initialized() and session != session_of_ray()
    except Exception:  # another thread is shutting Ray down
        return False


def session_of_ray() -> str:
    """Return an id that this process has from `ray.init` to `ray.shutdown`, and never again."""
    context = _context()
    node = context.worker.node  # another object after each `ray.init`
    if _last_session[0]() is not node:
        name = f"{node.session_name}, job {context.get_job_id()}"
        _last_session[:] = weakref.ref(node), name
    return str(_last_session[1])


_context = functools.cache(ray.get_runtime_context)  # one object for all sessions
_last_session: list[Any] = [lambda: None, ""]  # a weak reference to Ray's node, and the id
_of_parent: list[Any] = []  # in a fork, a weak reference to the node with which its parent had Ray


def _note_fork() -> None:
    if ray.is_initialized():
        with contextlib.suppress(Exception):  # another thread of the parent was shutting Ray down
            _of_parent[:] = [weakref.ref(_context().worker.node)]


os.register_at_fork(after_in_child=_note_fork)


def too_small(ranks: int, nbytes: int | None) -> StoreTooSmallError:
    """Return the error; it says the size that the store must have for weights of ``nbytes``."""
    need = f"({ranks} + 2) * " + (
        "the bytes of the weights"
        if nbytes is None
        else f"{nbytes:,} = {(ranks + 2) * nbytes:,} bytes"
    )
    return StoreTooSmallError(
        f"the object store is full: the results of {ranks} ranks, their average and the one "
        f"before need at least {need}; set ray.init(object_store_memory=...) or ray start "
        "--object-store-memory"
    )


def is_lost(error: Exception) -> bool:
    """Whether the worker, rather than its method, failed: it died, is stale, or is late."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return is_stale(error)
    # Ray's error for a result that does not unpickle here has the reason.
    is_unreadable = isinstance(getattr(error, "client_exc", None), Exception)
    is_raised = isinstance(error, _UNSERIALIZABLE) or is_unreadable
    return isinstance(error, (ray.exceptions.RayError, TimeoutError)) and not is_raised


def raised(failed: Mapping[int, Exception]) -> dict[int, Exception]:
    """Return the errors that were raised by methods."""
    return {rank: error for rank, error in failed.items() if not is_lost(error)}


def is_refusal(error: Exception) -> bool:
    """Whether the worker could not set the weights that came with a call."""
    return isinstance(getattr(error, "cause", error), RefusedWeightsError)


def note_unchanged(refusal: Exception) -> None:
    """Note on the error of weights that could not be set that the worker's are what they were."""
    with contextlib.suppress(AttributeError):  # of an exception without such attributes
        refusal._left_weights = True  # type: ignore[attr-defined]


def has_left_weights(refusal: Exception) -> bool:
    """Whether a worker that could not set weights certainly has the weights that it had."""
    return getattr(getattr(refusal, "cause", refusal), "_left_weights", False)


def is_stale(error: Exception) -> bool:
    """Whether the worker's weights are not the version that a call needs."""
    return isinstance(getattr(error, "cause", None), StaleWorkerError)


def is_restarting(error: BaseException | None) -> bool:
    """Whether Ray is restarting the actor: it may answer soon."""
    return isinstance(error, ray.exceptions.ActorUnavailableError)


def late_error(timeout: float | None) -> TimeoutError:
    """Return the error of a rank that did not answer in time."""
    return TimeoutError(f"no result after {timeout if timeout is None else f'{timeout:g}'} s")


def reason_of(error: Exception) -> str:
    """Return type and text of a worker's exception, without Ray's error around it."""
    shown = _shown(error)
    if isinstance(shown, _UNSERIALIZABLE):  # a traceback, which ends with the method's error
        return shortened(_end_of(_COLOURS.sub("", str(shown))))
    cause = _cause_in_constructor(shown)
    if not cause:
        return f"{type(shown).__name__}: {shortened(str(shown))}"
    traceback = _COLOURS.sub("", str(shown)).splitlines()
    readable = "\n".join(line for line in traceback if line.strip(" ^~"))
    return f"{type(shown).__name__}: {cause}\n{shortened(readable)}"


def reason_in_a_line(error: Exception) -> str:
    """As `reason_of`, on one line: Ray's own errors have several lines, with colours."""
    shown = _shown(error)
    if isinstance(shown, _UNSERIALIZABLE):
        return reason_of(shown).splitlines()[0]
    name, lines = type(shown).__name__, _lines_of(shown)
    if not lines:
        return name
    cause = _cause_in_constructor(shown)
    if cause:
        return f"{name}: {cause}"
    detail = _EXIT_DETAIL.search(lines[-1])
    return f"{name}: {lines[0]}" + (f" {detail[1]}" if detail else "")


def _end_of(traceback: str) -> str:
    """Return type and text of the error with which a traceback ends; of a group, the first line."""
    lines = traceback.strip().splitlines()
    frames = [k for k, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] :] if frames else []
    texts = [k for k, line in enumerate(after) if _ERROR_LINE.match(line)]
    if texts:
        return "\n".join(after[texts[0] :])
    group = (line[4:] for line in lines if line[:4] == "  | " and _ERROR_LINE.match(line[4:]))
    return next(group, lines[-1])


def shortened(text: str) -> str:
    """Return the beginning and the end of a text that is too long to be shown."""
    if len(text) <= _MOST_SHOWN:
        return text
    begin, end = text[: _MOST_SHOWN * 3 // 4], text[-_MOST_SHOWN // 4 :]
    return f"{begin} ... [{len(text):,} characters] ... {end}"


def portable(error: Exception) -> Exception:
    """Return ``error`` without its frames, or its text if it cannot be sent."""
    bare = error.with_traceback(None)
    bare.__context__ = bare.__cause__ = None
    try:
        pickled = ray.cloudpickle.dumps(bare)
        pickle.loads(pickled)
    except Exception:
        pickled = b""
    if 0 < len(pickled) <= _LONGEST_ERROR:
        return bare
    return RuntimeError(f"{type(bare).__name__}: {str(bare)[:_LONGEST_TEXT]}")


def error_of_rank(rank: int, error: Exception) -> str:
    """Return a line about the error of a rank: a sentence, if the error's text is its predicate."""
    if getattr(error, "follows_rank", False):
        return f"rank {rank} {error}"
    return f"rank {rank}: {reason_of(error)}"


def _lines_of(error: BaseException) -> list[str]:
    text = _COLOURS.sub("", str(error))
    return [shortened(line) for line in map(str.strip, text.splitlines()) if line]


def _cause_in_constructor(error: BaseException) -> str:
    """Return a clause if this is Ray's error of a constructor that raised, else nothing."""
    lines = _lines_of(error) if isinstance(error, DEAD) else []
    is_one = len(lines) > 1 and "creation task" in lines[0]
    return f"its constructor raised {lines[-1]}" if is_one else ""  # Ray's last line is the error


def _shown(error: Exception) -> BaseException:
    cause = getattr(error, "cause", None)  # the cause of a RayTaskError
    return cause if isinstance(cause, BaseException) else error
