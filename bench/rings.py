"""Rivals between nodes that need no Ray: a ring over plain sockets, and TensorFlow's ring.

Both compute the mean of one float32 vector per node by reduce-scatter and all-gather: a node sends
and receives 2 (K - 1) / K vectors, the least possible for an allreduce of K nodes. The ring over
plain sockets shows what the links allow in practice. `Ring` runs ``python -m bench.rings`` on each
node.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bench import models
from bench.nodes import Nodes

Kind = Literal["sockets", "tensorflow"]
Vector = NDArray[np.float32]
Allreduce = Callable[[Vector], Vector]

_PORTS: dict[Kind, int] = {"sockets": 9911, "tensorflow": 9912}


class Ring:
    """Processes on some nodes that take the mean of their vectors when told to."""

    def __init__(self, kind: Kind, nodes: Nodes, count: int) -> None:
        """Start one process on each of the first ``count`` nodes."""
        addresses = [f"{nodes.address(node)}:{_PORTS[kind]}" for node in range(count)]
        environment = nodes.environment() | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `close`
        self._processes = [
            subprocess.Popen(
                nodes.inside(node, [sys.executable, "-m", "bench.rings", kind, str(node)])
                + addresses,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=environment,
            )
            for node in range(count)
        ]

    def times(self, nbytes: int, count: int) -> list[float]:
        """Return the seconds of ``count`` allreduces; the first result of a size is checked.

        Raises:
            RuntimeError: If a process has ended.
        """
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(f"{nbytes} {count}\n")
                process.stdin.flush()
        except BrokenPipeError:
            pass  # then a process prints nothing, either
        said = [process.stdout.readline() for process in self._processes if process.stdout]
        if not all(said):
            self._errors.seek(0)
            raise RuntimeError(f"a process of a ring has ended:\n{self._errors.read()[-2000:]}")
        times: list[float] = json.loads(said[0])
        return times

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._errors.close()


def _over_sockets(rank: int, addresses: list[str]) -> Allreduce:
    """Return the mean by a ring over two sockets: one to the next node, one from the last."""
    count = len(addresses)
    at = [(host, int(port)) for host, _, port in (one.partition(":") for one in addresses)]
    server = socket.create_server(at[rank])
    end = time.monotonic() + 60
    while True:
        try:
            following = socket.create_connection(at[(rank + 1) % count])
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
    preceding = server.accept()[0]

    def pass_on(sent: Vector, received: Vector) -> None:
        sender = threading.Thread(target=following.sendall, args=(sent.data.cast("B"),))
        sender.start()
        rest = received.data.cast("B")
        while len(rest):
            rest = rest[preceding.recv_into(rest) :]
        sender.join()

    def allreduce(vector: Vector) -> Vector:
        shards = np.array_split(vector, count)
        for step in range(count - 1):
            own = shards[(rank - step - 1) % count]
            other = np.empty_like(own)
            pass_on(shards[(rank - step) % count], other)
            np.add(own, other, out=own)
        shards[(rank + 1) % count] /= count
        for step in range(count - 1):
            pass_on(shards[(rank + 1 - step) % count], shards[(rank - step) % count])
        return vector

    return allreduce


def _by_tensorflow(rank: int, addresses: list[str]) -> Allreduce:
    """Return the mean by the operation that `MultiWorkerMirroredStrategy` uses."""
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    import tensorflow as tf
    from tensorflow.python.ops import collective_ops

    tf.distribute.MultiWorkerMirroredStrategy()  # makes the processes find one another

    def mean(vector: Any) -> Any:
        # The strategy's own calls have keys from 0. A call with another shape is another call.
        group, call = 1000, 1000 + vector.shape[0]
        return collective_ops.all_reduce(
            vector, len(addresses), group, call, "Add", "Div", communication_hint="ring"
        )

    compiled = tf.function(mean)
    return lambda vector: np.asarray(compiled(tf.constant(vector)))


def vector_of(size: int, seed: int) -> Vector:
    """Return a vector of normally distributed values."""
    return models.random_vector(size, seed=seed).astype(np.float32)


def main() -> None:
    """Take the mean for each line with bytes and a number; print the seconds of each."""
    kind, rank, addresses = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    make = _over_sockets if kind == "sockets" else _by_tensorflow
    allreduce = make(rank, addresses)
    size = 0
    for line in sys.stdin:
        nbytes, count = map(int, line.split())
        if nbytes // 4 != size:
            size = nbytes // 4
            vectors = [vector_of(size, seed) for seed in range(len(addresses))]
            expected = np.mean(vectors, axis=0, dtype=np.float64)
            found = allreduce(vectors[rank])
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        vector = vector_of(size, rank)
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            allreduce(vector)
            times.append(time.perf_counter() - begin)
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
