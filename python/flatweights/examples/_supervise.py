"""Runs a program in a child process, and kills all of its processes at its end or at Ctrl-C.

Ray starts a dozen processes and takes seconds to start and to stop, some of them in C++, where
Python's signal handlers do not run. So the program runs in a child, and its parent only waits
for the child or for a signal. Then the parent kills every remaining process, orphans included:
it is their subreaper, so the kernel makes it their parent.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_UNKILLABLE_S = 10.0  # after this time, processes in uninterruptible sleep are left alone
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


def supervise(main: Callable[[], object]) -> int:
    """Call ``main`` in a child process, and let none of the processes that it starts outlive it.

    On SIGINT, SIGTERM or SIGHUP all of them are killed at once, and one line is printed; unless
    this process ignores the signal, as under ``nohup``.

    Args:
        main: The program; its result or exception determines the exit code, as in `sys.exit`.

    Returns:
        The exit code of ``main``, or 128 plus the number of the signal.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, none would come
    # Linux keeps signals that are blocked even if they are ignored.
    ending = {one for one in _ENDING if signal.getsignal(one) is not signal.SIG_IGN}
    waited_for = {*ending, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    sys.stdout.flush()
    sys.stderr.flush()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the child, too
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os._exit(_call(main))
    ended_by, code = _wait(child, waited_for)
    _kill_descendants()
    if ended_by:
        if sys.stderr.isatty():  # erase a progress bar and show the cursor that it hid
            sys.stderr.write("\r\x1b[K\x1b[?25h")
        print("interrupted", file=sys.stderr)
        return 128 + ended_by
    if code < 0:
        name = signal.Signals(-code).name
        print(f"ended by {name}; if memory was short, use fewer workers", file=sys.stderr)
        return 128 - code
    return code


def _wait(child: int, waited_for: Collection[signal.Signals]) -> tuple[int, int]:
    """Wait until ``child`` ends or another signal that is ``waited_for`` asks for its end.

    Returns:
        The number of that signal, or 0; and the exit code of the child, as in `subprocess`.
    """
    while (received := signal.sigwaitinfo(waited_for).si_signo) == signal.SIGCHLD:
        for pid, status in _ended_children():
            if pid == child:
                return 0, os.waitstatus_to_exitcode(status)
    return received, 0


def _ended_children() -> list[tuple[int, int]]:
    ended = []
    with contextlib.suppress(ChildProcessError):  # no children are left
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(child)
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
    """Return the ids of all descendants of this process."""
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
    except BrokenPipeError:  # the reader of the output has closed it
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
