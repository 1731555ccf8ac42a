"""Programs in processes of their own, forked from one process that has imported what is slow.

That is TensorFlow, unless other modules are named.
"""

import atexit
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

# Imports the modules; then forks a process for each program, in which they are already imported. A
# second process waits for the program's end and reports it. Nothing here calls TensorFlow, which
# would start threads, and these do not live on in a copy.
_SERVER = """
import importlib, os, pickle, signal, socket, sys
errors = os.dup(2)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # TensorFlow greets, whatever it is told
os.environ["TF_USE_LEGACY_KERAS"] = "1"  # for the import alone: it imports no Keras then
for module in sys.argv[2:]:
    importlib.import_module(module)
os.dup2(errors, 2)
here = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
program = None
while program is None:
    data, files, _, _ = socket.recv_fds(here, 1 << 20, 3)
    if not data:
        break
    if os.fork():
        for file in files:
            os.close(file)
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        report = files[2]
        os.close(files[0])
        os.close(files[1])
        os.close(1)
        os.close(2)
        os.write(report, b"%d\\n" % child)
        os.write(report, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    os.dup2(files[0], 1)
    os.dup2(files[1], 2)
    for file in files:
        os.close(file)
    here.close()
    program, arguments, environment = pickle.loads(data)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
if program is not None:
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
"""


class Fork:
    """A program that runs, used as `subprocess.Popen` is.

    Attributes:
        pid: Its process.
        returncode: None until `communicate` has returned; negative after a signal.
    """

    def __init__(self, out: int, err: int, report: int) -> None:
        self._files = [os.fdopen(file, closefd=True) for file in (out, err)]
        self._report = os.fdopen(report)
        started = self._report.readline()
        assert started, "no process was made: a module could not be imported?"
        self.pid = int(started)
        self.returncode: int | None = None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Return all output and all errors, once the program has ended."""
        found = ["", ""]

        def read(which: int) -> None:
            with self._files[which] as file:
                found[which] = file.read()

        threads = [threading.Thread(target=read, args=(k,), daemon=True) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        if any(thread.is_alive() for thread in threads):
            self.kill()
            raise TimeoutError(f"the program has not ended after {timeout} s")
        with self._report:
            self.returncode = int(self._report.readline())
        return found[0], found[1]


class Forks:
    """Runs programs as ``python -c`` does, in copies of a process that has imported modules."""

    def __init__(self, *modules: str) -> None:
        """Start the process; it imports TensorFlow, or the ``modules``."""
        self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(there.fileno()), *(modules or ["tensorflow"])],
                env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
                pass_fds=[there.fileno()],
            )

    def start(
        self, program: str, *arguments: object, environment: Mapping[str, str] | None = None
    ) -> Fork:
        """Start ``program``, with this process' environment or another."""
        pipes = [os.pipe() for _ in range(3)]
        theirs = dict(os.environ if environment is None else environment)
        message = pickle.dumps((program, [str(a) for a in arguments], theirs))
        socket.send_fds(self._here, [message], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        return Fork(*(read for read, _ in pipes))

    def run(
        self, program: str, *arguments: object, **options: Any
    ) -> "subprocess.CompletedProcess[str]":
        """Run ``program`` to its end."""
        fork = self.start(program, *arguments, **options)
        out, err = fork.communicate()
        assert fork.returncode is not None
        return subprocess.CompletedProcess(list(map(str, arguments)), fork.returncode, out, err)

    def stop(self) -> None:
        self._here.close()
        self._process.wait(60)


@functools.cache
def shared_forks(*modules: str) -> Forks:
    """Return those that have imported ``modules``, for all tests; they end with this process."""
    forks = Forks(*modules)
    atexit.register(forks.stop)
    return forks
