"""Workers of channels in processes of their own, without Ray: a pipe replaces Ray's calls."""

import contextlib
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import flatweights as fw
from flatweights.ray.channels._driver_channel import Channels, DriverChannel
from flatweights.ray.channels._message import Message, make_message
from flatweights.ray.channels._protocol import COMMAND, WEIGHTS
from flatweights.ray.channels._worker_channel import WorkerChannels
from flatweights.ray.support import _failpoints

# A worker is a fork of a server that has imported everything, once.
_processes = multiprocessing.get_context("forkserver")

LARGE = 50_000  # elements


class Model:
    """Weights, and methods that misuse them."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.weights = fw.FlatWeights({"w": np.full(size, float(rank)), "n": np.int64(rank)})
        self.kept: Any = None

    def get(self, value: float | None = None) -> fw.FlatWeights:
        if value is not None:
            self.weights["w"][:] = value
        return self.weights.copy()

    def get_and_keep(self, value: float) -> fw.FlatWeights:
        self.kept = self.get(value)
        return self.kept  # type: ignore[no-any-return]

    def get_and_keep_with(self, value: float, extras: Any) -> tuple[fw.FlatWeights, Any]:
        return self.get_and_keep(value), extras

    def change_kept(self) -> None:
        self.kept["w"] += 1000.0

    def get_with(self, extras: Any) -> tuple[fw.FlatWeights, Any]:
        return self.get(), extras

    def get_dict(self) -> dict[str, Any]:
        return dict(self.weights)

    def set(self, weights: fw.FlatWeights) -> None:
        self.weights = weights.copy()

    def set_and_keep(self, weights: fw.FlatWeights) -> None:
        self.kept = weights

    def forget(self) -> None:
        self.kept = None

    def total(self) -> float:
        return float(self.kept["w"].sum())

    def echo(self, value: Any) -> Any:
        return value

    def repeat(self, value: Any, count: int) -> Any:
        return value * count

    def fail(self) -> None:
        raise ArithmeticError("diverged")

    def leave(self) -> None:
        raise SystemExit(3)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def die(self) -> None:
        os._exit(1)

    def limit_memory(self, nbytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (_mapped() + nbytes, resource.RLIM_INFINITY))

    def fail_at(self, point: str, action: str) -> None:
        """Die, stop or sleep when the next command reaches ``point``."""
        passed_by_this = ("run", "gathered", "answered", "rung")
        left = [2 if point in passed_by_this else 1]

        def fail(reached: str) -> None:
            if reached != point:
                return
            left[0] -= 1
            if left[0] == 0:
                _failpoints.hook = None
                act(action)

        _failpoints.hook = fail

    def set_by_halves(self, weights: fw.FlatWeights, action: str) -> None:
        self.weights["w"][: LARGE // 2] = weights["w"][: LARGE // 2]
        act(action)
        self.weights["w"][LARGE // 2 :] = weights["w"][LARGE // 2 :]

    def descriptors(self) -> int:
        return len(list(Path("/proc/self/fd").iterdir()))


def act(action: str) -> None:
    """Die, stop until a signal continues it, or sleep."""
    if action == "sleep":
        time.sleep(0.03)
    else:
        os.kill(os.getpid(), signal.SIGKILL if action == "die" else signal.SIGSTOP)


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def command_of(channels: Channels, method: str, *args: Any) -> Message | None:
    """Return a command for workers; None if it has to go through Ray."""
    return make_message(COMMAND, [(method, args, {})], channels.segments, frozen=True)


def _work(pipe: Connection, rank: int, size: int) -> None:
    model, channels = Model(rank, size), WorkerChannels()
    while True:
        try:
            kind, *given = pipe.recv()
        except EOFError:
            return
        try:
            if kind == "serve":
                pipe.send(("value", channels[given[0]].serve(model, given[1])))
            elif kind == "attach":
                pipe.send(("value", channels.attach(*given)))
            elif kind == "attach in a thread":
                with ThreadPoolExecutor(1) as threads:
                    pipe.send(("value", threads.submit(channels.attach, *given).result()))
        except BaseException as error:
            pipe.send(("raised", repr(error)))


def _start_server() -> None:
    """Start the server, unless it runs; it finds this module only by the environment."""
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as inherited:
        inherited.setenv("PYTHONPATH", os.pathsep.join(folders))
        _processes.set_forkserver_preload(["channel_processes"])
        forkserver.ensure_running()


class WorkerProcess:
    """A process, and the driver's end of the channel to it.

    Args:
        pid: The process.
        pipe: The driver's end of the pipe to it: the process ends with it.
    """

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.process = psutil.Process(pid)
        self.pipe = pipe
        self.called = 0
        self.channel: DriverChannel
        self.token = b""

    def attach(self, channels: Channels) -> None:
        self.token = channels.new_token()
        self.pipe.send(("attach", channels.address, self.token))
        kind, nonce = self.pipe.recv()
        assert kind == "value"
        assert isinstance(nonce, bytes), nonce
        self.channel = channels.connect(self.token, nonce)

    def post(self, command: Message, channels: Channels) -> None:
        if not self.channel.post(command, channels.segments):
            self.serve()

    def serve(self) -> None:
        self.channel.serve(self._call)

    def _call(self, number: int) -> None:
        self.called += 1
        self.pipe.send(("serve", self.token, number))

    @property
    def calls(self) -> int:
        return max(self.channel.calls, default=0)

    def outcomes(self, count: int) -> list[Any]:
        """Return the outcomes of ``count`` calls."""
        assert self.pipe.poll(60) or count == 0
        return [self.pipe.recv() for _ in range(count)]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.kill()
            self.process.wait(60)
        self.pipe.close()


def start_worker(rank: int, size: int) -> tuple[int, Connection]:
    """Start the process of a `WorkerProcess`; return its id and a pipe."""
    _start_server()
    ours, theirs = _processes.Pipe()
    process = _processes.Process(target=_work, args=(theirs, rank, size), daemon=True)
    process.start()
    theirs.close()
    assert process.pid is not None
    return process.pid, ours


class Driver:
    """Channels to some workers, and calls over them."""

    def __init__(
        self, count: int, size: int = LARGE, *, workers: Sequence[WorkerProcess] | None = None
    ) -> None:
        self.channels = Channels()
        self.workers = [
            *(workers or (WorkerProcess(*start_worker(rank, size)) for rank in range(count)))
        ]
        for worker in self.workers:
            worker.attach(self.channels)

    def command(self, method: str, *args: Any) -> Message:
        found = command_of(self.channels, method, *args)
        assert found is not None
        return found

    def post(self, method: str, *args: Any) -> None:
        command = self.command(method, *args)
        for worker in self.workers:
            worker.post(command, self.channels)

    def wait(self, workers: Sequence[WorkerProcess] | None = None, seconds: float = 60) -> bool:
        """Wait for the answers of ``workers`` (all, if None); return whether they have arrived."""
        end = time.monotonic() + seconds
        missing = [worker.channel for worker in (self.workers if workers is None else workers)]
        # Look once per turn: nothing would wake a wait without missing answers.
        while missing := [channel for channel in missing if not channel.is_answered]:
            if time.monotonic() > end:
                return False
            self.channels.wait(missing, max(0.0, end - time.monotonic()), len(missing))
        return True

    def answers(self, method: str, *args: Any) -> list[tuple[int, Any]]:
        self.post(method, *args)
        assert self.wait()
        return [worker.channel.take() for worker in self.workers]

    def values(self, method: str, *args: Any) -> list[Any]:
        return [value_of(one) for one in self.answers(method, *args)]

    def is_held(self, index: int) -> bool:
        """Whether a worker holds a view of the driver's segment ``index``."""
        return any(worker.channel.is_holding(index) for worker in self.workers)

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.channels.close()


def value_of(answer: tuple[int, Any]) -> Any:
    """Return the value of a worker's answer."""
    kind, content = answer
    return content.weights() if kind == WEIGHTS else content


def sealed(weights: fw.FlatWeights) -> fw.FlatWeights:
    """Return read-only weights over the same buffer."""
    buffer = weights.buffer.view()
    buffer.flags.writeable = False
    return fw.FlatWeights.wrap(buffer, weights.layout)


def weights_of(value: float) -> fw.FlatWeights:
    return sealed(fw.FlatWeights({"w": np.full(LARGE, value), "n": np.int64(0)}))


def _drive(point: str, action: str, pipe: Connection, worker: tuple[int, Connection]) -> None:
    driver = Driver(1, workers=[WorkerProcess(*worker)])
    mean = weights_of(1.0)
    left = [3]

    def fail(reached: str) -> None:
        left[0] -= reached == point
        if left[0] == 0:
            _failpoints.hook = None
            act(action)

    for value in range(20):
        if value == 5:
            _failpoints.hook = fail
        _failpoints.reach("averaging")
        _failpoints.reach("sending")
        driver.channels.wait([], 0.0)  # a worker that has answered already is not waited for
        driver.values("set", mean)
        for weights in driver.values("get"):
            assert (weights["w"] == mean["w"]).all()
        mean = weights_of(float(value))
        if point in ("calling", "called"):
            time.sleep(0.012)  # workers leave: each command needs a call
    pipe.send("done")
    driver.close()


def start_driver(point: str, action: str) -> tuple[Any, Connection, int]:
    """Start a driver that fails at ``point``; return it, a pipe to it, and its worker's process."""
    # Started here: in the driver it would need another server, which imports everything again.
    worker = start_worker(0, LARGE)
    ours, theirs = _processes.Pipe()
    program = _processes.Process(target=_drive, args=(point, action, theirs, worker))
    program.start()
    theirs.close()
    worker[1].close()
    return program, ours, worker[0]
