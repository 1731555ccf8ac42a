"""Calls in threads that nobody waits for at the end of the process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def in_daemon(
    name: str, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> Future[_T]:
    """Call ``function`` in a thread called ``name``; return where its result will be.

    The thread of a call that never returns does not keep the process from ending, as one of a pool
    would.
    """
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(function(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
