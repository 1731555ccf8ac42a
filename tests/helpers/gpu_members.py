"""Members in processes that use a GPU without TensorFlow; their coordinator is in this process."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
from gpu_processes import GPUProcess
from numpy.typing import NDArray

from flatweights import FlatWeights, _core
from flatweights.ray.channels._member_channel import MemberChannel
from flatweights.ray.members._client import ChannelClient, Identity
from flatweights.ray.members._member import Member
from flatweights.ray.members._rendezvous import JoinReply
from flatweights.ray.support import _failpoints


def weights_of(seed: int, large: int = 9_001) -> FlatWeights:
    """Weights of all dtypes that are averaged, and of two that are not."""
    rng = np.random.default_rng(seed)
    return FlatWeights(
        {
            "float32": rng.standard_normal(large).astype(np.float32),
            "float64": rng.standard_normal((3, 5)),
            "float16": rng.standard_normal(9).astype(np.float16),
            "bfloat16": rng.standard_normal(11).astype(ml_dtypes.bfloat16),
            "complex": rng.standard_normal(7).astype(np.complex64),
            "count": rng.integers(0, 99, 5),
            "flag": np.array(bool(seed % 2)),
            "empty": np.zeros((0, 2)),
        }
    )


class Holder:
    """Variables whose weights are moved through segments of a GPU, as those on it are."""

    def __init__(self, weights: FlatWeights, gpu: bytes | None) -> None:
        self.weights = weights
        self.layout = weights.layout
        self.gpu = gpu

    def gather_into(self, buffer: NDArray[np.uint8]) -> None:
        buffer[...] = self.weights.buffer

    def scatter(self, buffer: NDArray[np.uint8]) -> None:
        self.weights.buffer[...] = buffer

    def gather_into_segment(self, segment: _core.DeviceSegment) -> None:
        segment.copy_from(self.weights.buffer)

    def scatter_segment(self, segment: _core.DeviceSegment | _core.PeerDeviceSegment) -> None:
        parts = [np.empty_like(part) for part in self.weights.values()]
        buffer = self.layout.new_buffer()
        segment.copy_to(buffer)  # the padding is anything
        _core.move_parts(parts, self.layout.packed_views(buffer))
        for part, value in zip(self.weights.values(), parts, strict=True):
            part[...] = value


def attach(rank: int, session: int, address: bytes, token: bytes) -> MemberChannel:
    """Make a channel, in the process of a member."""
    return MemberChannel(address, token)


def member_of(channel: MemberChannel, rank: int, session: int, token: bytes) -> Member:
    """Wait for the first response, in the process of a member."""
    coordinator = ChannelClient(None, Identity(token, f"process of rank {rank}"), channel, session)
    return Member("gpu", coordinator, JoinReply(rank, session, None), coordinator.start(60.0))


def die_at(point: str) -> None:
    """Have this process end, as by SIGKILL, when it reaches a point."""

    def hook(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), 9)

    _failpoints.hook = hook


def stop_at(point: str) -> None:
    """Have this process stop, as by SIGSTOP, when it first reaches a point."""

    def hook(reached: str) -> None:
        if reached == point:
            _failpoints.hook = None
            os.kill(os.getpid(), 19)

    _failpoints.hook = hook


class Members:
    """The members of a process group, each in a process of its own."""

    def __init__(
        self, library: str, size: int, idle: list[GPUProcess] | None = None, **env: str
    ) -> None:
        """Start them.

        Args:
            library: The driver.
            size: The number of members.
            idle: Processes of other members, from `release`, that take the place of new ones.
            env: Variables of the environment of new processes.
        """
        from process_groups import LocalProcessGroup

        self.group = LocalProcessGroup(size)
        self.library = library
        self.env = {"FLATWEIGHTS_GPU": "device", **env}  # for few bytes, too
        self.processes: dict[int, GPUProcess] = {}
        self._idle = [] if idle is None else idle
        self._threads = ThreadPoolExecutor(size)
        self.join(*range(size))

    def join(self, *ranks: int) -> None:
        """Start processes for ``ranks``."""
        entries = {rank: self.group.enter(rank) for rank in ranks}
        for rank, entry in entries.items():
            join_reply = entry.join_reply.result()
            process = self._idle.pop() if self._idle else GPUProcess(self.library, **self.env)
            self.processes[rank] = process
            nonce = process.run(
                "from gpu_members import *\n"
                f"place = {rank}, {join_reply.session}, {join_reply.address!r}, {entry.token!r}\n"
                "channel = attach(*place)\nresult = channel.mailbox.nonce"
            )
            self.group.group.queue.call(self.group.group.attach, entry.token, nonce)
        self.run("member = member_of(channel, place[0], place[1], place[3])", *ranks)

    def begin(self, program: str, *ranks: int) -> dict[int, Future[Any]]:
        """Run a program that sees its ``rank`` in the processes of ``ranks``, or in all."""
        chosen = ranks or tuple(self.processes)
        return {
            rank: self._threads.submit(self.processes[rank].run, f"rank = {rank}\n{program}")
            for rank in chosen
        }

    def run(self, program: str, *ranks: int) -> dict[int, Any]:
        """Do the same, and wait for what the programs assign to ``result``."""
        return {rank: future.result() for rank, future in self.begin(program, *ranks).items()}

    def release(self) -> list[GPUProcess]:
        """End the process group; return the processes, for other members."""
        self.run("die_at('nowhere'); member.leave(); member = channel = held = called = None")
        self.run("os.environ['FLATWEIGHTS_GPU'] = 'device'")
        processes = [*self.processes.values()]
        self.processes.clear()
        self.close()
        return processes

    def close(self) -> None:
        """End all processes, and the process group."""
        for process in self.processes.values():
            process.close()
        self._threads.shutdown()
        self.group.thread.join(60)
        assert not self.group.thread.is_alive()
        assert threading.main_thread().is_alive()
