"""The order of a group's commands and other calls on the actors' handles.

Ray runs the calls that one process makes on an actor in the order in which they were made. A worker
takes a command of a channel inside a call of `FlatWorker.serve_channel`, which may have been made
long before. So the command would overtake calls that were made since. Hence each actor with a
channel has a `CallLog`, which shows whether the last call on any handle of this process was the
call that serves the channel. If not, the driver dismisses the worker and makes another call, which
Ray runs after the other calls.
"""

import functools
import threading
import weakref
from typing import Any

import ray

from flatweights.ray.channels._end import ChannelError

_SERVE = "serve_channel"
_METHOD = "_actor_method_call"  # of handles: all calls go through it, also in Ray 2.40

_logs: "weakref.WeakValueDictionary[ray.ActorID, CallLog]" = weakref.WeakValueDictionary()
_lock = threading.RLock()  # a signal handler may call another group meanwhile


class CallLog:
    """The last call that this process has made on an actor.

    Attributes:
        last: The token of a channel if the last call serves it, otherwise another object.
    """

    last: object = None

    @classmethod
    def of(cls, handle: ray.actor.ActorHandle) -> "CallLog":
        """Return the log for the actor of ``handle``, and write calls into it from now on.

        Raises:
            ChannelError: If calls of this version of Ray cannot be followed.
        """
        with _lock:
            _follow_calls()
            return _logs.setdefault(handle._actor_id, cls())


def _follow_calls() -> None:
    """Note each call on any handle of this process in the log of its actor, if it has one."""
    call = getattr(ray.actor.ActorHandle, _METHOD, None)
    if call is None:
        raise ChannelError(f"handles of Ray {ray.__version__} have no {_METHOD}")
    if getattr(call, "_is_followed", False):
        return

    @functools.wraps(call)
    def noted(handle: ray.actor.ActorHandle, method_name: str, *args: Any, **kwargs: Any) -> Any:
        log = _logs.get(handle._ray_actor_id)
        if log is None:
            return call(handle, method_name, *args, **kwargs)
        if method_name == _SERVE:
            # Before the call: a simultaneous call of another thread counts as later.
            log.last = (kwargs.get("args") or args[0])[0]
            return call(handle, method_name, *args, **kwargs)
        try:
            return call(handle, method_name, *args, **kwargs)
        finally:
            log.last = method_name

    noted._is_followed = True  # type: ignore[attr-defined]
    if getattr(ray.actor.ActorHandle, _METHOD) is call:  # not by a signal handler meanwhile
        setattr(ray.actor.ActorHandle, _METHOD, noted)
