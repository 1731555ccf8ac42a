"""Programs in processes of their own, forked from one process that has imported what is slow.

That is TensorFlow, unless other modules are named. All processes of a run of the tests share it.
"""

import atexit
import errno
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

# Imports the modules; then forks a process for each program, in which they are already imported. A
# second process waits for the program's end and reports it. Ends when nobody is connected any more.
# Nothing here calls TensorFlow, which would start threads, and these do not live on in a copy.
_SERVER = """
import importlib, os, pickle, select, signal, socket, sys
errors = os.dup(2)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # TensorFlow greets, whatever it is told
os.environ["TF_USE_LEGACY_KERAS"] = "1"  # for the import alone: it imports no Keras then
for module in sys.argv[2:]:
    importlib.import_module(module)
os.dup2(errors, 2)
listener = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
open_ones = [listener, listener.accept()[0]]
program = None
while program is None and len(open_ones) > 1:
    here = select.select(open_ones, [], [])[0][0]
    if here is listener:
        open_ones.append(listener.accept()[0])
        continue
    data, files, _, _ = socket.recv_fds(here, 1 << 20, 16)
    if not data:
        open_ones.remove(here)
        here.close()
        continue
    if os.fork():
        for file in files:
            os.close(file)
        continue
    for one in open_ones:
        one.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        report = files[2]
        for file in (0, 1, 2, *files):
            if file != report:
                os.close(file)
        os.write(report, b"%d\\n" % child)
        os.write(report, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    os.dup2(files[0], 1)
    os.dup2(files[1], 2)
    for file in files[:3]:
        os.close(file)
    program, arguments, environment = pickle.loads(data)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments, *map(str, files[3:])]
if program is not None:
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
"""


class Fork:
    """A program that runs, used as `subprocess.Popen` is.

    Attributes:
        pid: Its process, once there is one.
        returncode: None until `communicate` has returned; negative after a signal.
    """

    def __init__(self, out: int, err: int, report: int) -> None:
        self._files = [os.fdopen(file, closefd=True) for file in (out, err)]
        self._report = os.fdopen(report)
        self.returncode: int | None = None

    @functools.cached_property
    def pid(self) -> int:
        started = self._report.readline()
        assert started, "no process was made: a module could not be imported?"
        return int(started)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Return all output and all errors, once the program has ended."""
        found = ["", ""]
        assert self.pid

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
        """Connect to the process of this run of the tests; start it, if it is the first to do so.

        It imports TensorFlow, or the ``modules``.
        """
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
        modules = modules or ("tensorflow",)
        address = f"\0flatweights tests {run} {' '.join(modules)}"  # it goes with its process
        self._here = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end = time.monotonic() + 10
        while True:
            _start_server(address, modules)
            try:
                self._here.connect(address)
                return
            except ConnectionRefusedError:  # it begins, or ends, at this moment
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def start(
        self,
        program: str,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        files: Sequence[int] = (),
    ) -> Fork:
        """Start ``program``, with this process' environment or another.

        Args:
            program: Its text.
            arguments: Its arguments.
            environment: Its environment.
            files: Open files that it gets. Their numbers in its process are its last arguments.
        """
        pipes = [os.pipe() for _ in range(3)]
        theirs = dict(os.environ if environment is None else environment)
        message = pickle.dumps((program, [str(a) for a in arguments], theirs))
        socket.send_fds(self._here, [message], [*(write for _, write in pipes), *files])
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


def _start_server(address: str, modules: Sequence[str]) -> None:
    """Start the process that is found at ``address``, unless there is one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return
        listener.listen(64)
        number = listener.fileno()
        os.set_inheritable(number, True)
        program = [sys.executable, "-c", _SERVER, str(number), *modules]
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        os.posix_spawn(sys.executable, program, environment)  # others may need it for longer


@functools.cache
def shared_forks(*modules: str) -> Forks:
    """Return those that have imported ``modules``, for all tests; they end with this process."""
    forks = Forks(*modules)
    atexit.register(forks.stop)
    return forks
