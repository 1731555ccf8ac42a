"""Runs a program in a child process; all of its processes end with it, and at Ctrl-C.

Ray starts a dozen processes, takes seconds to start and to stop, and spends some of them in C++,
where Python's handler of a signal does not run. So the program runs in a child, and its parent
does nothing but wait: for the child, or for a signal. Whichever comes first, the parent then
kills every process that is left, also those that their own parents have left behind: it has
asked the kernel to be their parent in that case.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WAITED_FOR = {*_ENDING, signal.SIGCHLD}
_UNKILLABLE_S = 10.0  # a process that the kernel itself has to wait for is left alone then
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


def supervise(main: Callable[[], object], *, grace: float = 0.0) -> int:
    """Call ``main`` in a child process, and let none of the processes that it starts outlive it.

    On SIGINT, SIGTERM or SIGHUP all of them are killed at once, and one line is printed.

    Args:
        main: The program; what it returns or raises makes the exit code, as with `sys.exit`.
        grace: Seconds that ``main`` has to deal with a `KeyboardInterrupt` before it is killed.
            With 0 it gets none.

    Returns:
        The exit code: that of ``main``, or 128 and the number of the signal.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    sys.stdout.flush()
    sys.stderr.flush()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGINT, _raise_once if grace else signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os._exit(_call(main))
    ended_by, code = _wait(child, grace)
    _kill_descendants()
    if ended_by:
        if sys.stderr.isatty():  # a progress bar may stand there, and have hidden the cursor
            sys.stderr.write("\r\x1b[K\x1b[?25h")
        print("interrupted", file=sys.stderr)
        return 128 + ended_by
    if code < 0:
        name = signal.Signals(-code).name
        print(f"ended by {name}; if memory was short, use fewer workers", file=sys.stderr)
        return 128 - code
    return code


def _wait(child: int, grace: float) -> tuple[int, int]:
    """Wait for the end of ``child``, or for the signal that ends it.

    Returns:
        The number of that signal, or 0; and the exit code of the child, as `subprocess` has it.
    """
    ended_by, deadline = 0, float("inf")
    while (left := min(deadline - time.monotonic(), 3600.0)) > 0:
        received = signal.sigtimedwait(_WAITED_FOR, left)
        if received is None:
            continue
        if received.si_signo != signal.SIGCHLD:
            if ended_by or not grace:
                return received.si_signo, 0
            ended_by, deadline = received.si_signo, time.monotonic() + grace
            os.kill(child, signal.SIGINT)
        for pid, status in _ended_children():
            if pid == child:
                return ended_by, os.waitstatus_to_exitcode(status)
    return ended_by, 0


def _ended_children() -> list[tuple[int, int]]:
    ended = []
    with contextlib.suppress(ChildProcessError):  # there are none
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(one)
    return ended


def _kill_descendants() -> None:
    deadline = time.monotonic() + _UNKILLABLE_S
    while (descendants := _descendants()) and time.monotonic() < deadline:
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        _ended_children()


def _descendants() -> list[int]:
    """Return the processes that this one started, directly or through others."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            # pid (name) state parent ...; the name may hold anything
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    descendants = [os.getpid()]
    for pid in descendants:
        descendants.extend(children.get(pid, []))
    return descendants[1:]


def _call(main: Callable[[], object]) -> int:
    """Return the exit code that Python would end with if ``main`` were a program."""
    try:
        sys.exit(main())  # type: ignore[arg-type]
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        if end.code is not None:
            print(end.code, file=sys.stderr)
        return 0 if end.code is None else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has gone
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()


def _raise_once(signum: int, frame: FrameType | None) -> NoReturn:
    # From the terminal, and from the parent: one is enough.
    signal.signal(signum, signal.SIG_IGN)
    raise KeyboardInterrupt
