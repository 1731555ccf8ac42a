"""Other nodes in a simulated world: the actors that are their agents, and the links to them.

`Link` and both of its ends are the package's own: only the socket and Ray are simulated. A socket
loses what is on its way when it ends, and it may take all and deliver nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.sim.world import Changing, Process, World

from flatweights.ray.nodes._address import Address
from flatweights.ray.nodes._connections import StreamError
from flatweights.ray.nodes._node_reducer import PATIENCE, Endpoints, NodeReducer, Traffic
from flatweights.ray.nodes._plan import Plan

if TYPE_CHECKING:
    from tests.sim.platform import Simulated

_DELAYS = 0.0, 0.0, 0.0002, 0.002, 0.05  # seconds of what is sent
_NOTICED = 0.0, 0.01, 0.3  # seconds until the other end of a socket notices that this one has ended


class SimulatedSocket(Changing):
    """The socket of a link, as `LinkSocket` is one, and its connection to the `peer`."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._arrived = bytearray()
        self._is_woken = self._is_over = False
        self._is_silent = False  # whether what is sent goes nowhere
        self._last = 0.0  # the time at which the last bytes arrive
        self.peer: SimulatedSocket | None = None

    @classmethod
    def pair(cls, world: World) -> tuple[SimulatedSocket, SimulatedSocket]:
        """Return both ends of a connection."""
        one, other = cls(world), cls(world)
        one.peer, other.peer = other, one
        return one, other

    def belongs_to(self, process: Process) -> None:
        """End when a process dies."""
        process.at_death.append(self.shut)

    def wait(self, seconds: float, *, writes: bool) -> None:
        def is_due() -> bool:
            return writes or self._is_woken or self._is_over or bool(self._arrived)

        self._world.block(is_due, self, seconds)

    def wake(self) -> None:
        self._is_woken = True
        self.changed()

    def read(self, received: bytearray) -> None:
        self._is_woken = False
        received += self._arrived
        if self._is_over and not self._arrived:
            raise ConnectionError("the peer has closed it")
        self._arrived.clear()

    def write(self, data: bytearray) -> int:
        world, peer = self._world, self.peer
        assert peer is not None
        if self._is_over:
            raise BrokenPipeError("the socket has ended")
        if world.chance("cut"):
            world.note("a link is cut")
            self.shut()
            return len(data)
        self._is_silent = self._is_silent or world.chance("silent")
        count = len(data) if world.draw() < 0.9 else 1 + int(world.draw() * len(data))
        sent = bytes(data[:count])
        if not self._is_silent:
            self._last = max(self._last, world.now + world.rng.choice(_DELAYS))

            def arrive() -> None:
                if not peer._is_over:
                    peer._arrived += sent
                    peer.changed()

            world.after(self._last - world.now, arrive)
        return count

    def shut(self) -> None:
        """End it here at once, and for the peer soon."""
        peer = self.peer
        assert peer is not None
        self._end()
        self._world.after(self._world.rng.choice(_NOTICED), peer._end)

    def _end(self) -> None:
        self._is_over = True
        self.changed()

    close = shut


class Exchange(Changing):
    """One attempt of nodes to average: what they have brought."""

    def __init__(self, world: World, count: int) -> None:
        super().__init__(world)
        self._count = count
        self._here: set[int] = set()
        self.models: dict[int, Any] = {}
        self.is_broken = False

    @property
    def is_complete(self) -> bool:
        return len(self._here) == self._count

    def bring(self, me: int, models: dict[int, Any]) -> None:
        """Note that a node takes part, with its models by rank."""
        self._here.add(me)
        self.models |= models
        self.changed()

    def break_off(self) -> None:
        """Have all that still wait fail."""
        self.is_broken = self.is_broken or not self.is_complete
        self.changed()


class SimulatedReducer(NodeReducer):
    """A node's part of exchanges, of which the bytes travel at once."""

    def __init__(self, platform: Simulated, offer: Callable[[int], None]) -> None:
        super().__init__(offer, "simulated")
        self._platform, self._world = platform, platform.world
        self._process = platform.world.process()
        self._under_way: dict[bytes, Exchange] = {}  # by epoch
        platform.ports += 1
        self._own = Address("simulated", platform.ports, b"")

    @property
    def address(self) -> Address:
        return self._own

    def expect(self, epoch: bytes, take: Callable[[Any], object]) -> Address:
        self._platform.expected[epoch] = self._process, take
        return self._own

    def connect(self, address: Address, epoch: bytes) -> Any:
        world = self._world
        world.point("connecting a link")
        if world.draw() < 0.3:
            world.sleep(world.rng.choice((0.001, 0.1, 1.0)))
        process, take = self._platform.expected.pop(epoch, (None, None))
        if process is None or take is None or process.is_dead or world.chance("no link"):
            world.note("there is no link")
            raise OSError("the other process cannot be reached")
        ends = SimulatedSocket.pair(world)
        for end, owner in zip(ends, (process, self._process), strict=True):
            end.belongs_to(owner)
        world.spawn(process, lambda: take(ends[0]), f"{process.name}.listener")
        return ends[1]

    def break_off(self, epoch: bytes) -> None:
        if epoch in self._under_way:
            self._under_way[epoch].break_off()

    def stream(self, plan: Plan, me: int, endpoints: Endpoints) -> Traffic:
        world, number = self._world, (endpoints.epoch, plan.number)
        try:
            models = {rank: self.models[rank].copy() for rank in plan.groups[me]}
        except KeyError:
            raise StreamError(-1, "the round is over, and its results are gone") from None
        world.point("exchanging")
        exchange = self._platform.exchanges.get(number)
        if exchange is None:
            exchange = self._platform.exchanges[number] = Exchange(world, len(endpoints.peers))
        self._under_way[endpoints.epoch] = exchange
        self._process.at_death.append(exchange.break_off)
        if self._process.name.startswith("agent") and world.chance("short"):
            world.note("memory is short")
            self._platform.oracle.losses += 1
            raise MemoryError
        mean = self._new_mean(plan)
        exchange.bring(me, models)
        left = PATIENCE if endpoints.left is None else min(PATIENCE, endpoints.left / 3)

        def is_over() -> bool:
            return exchange.is_complete or exchange.is_broken

        world.block(is_over, exchange, left)
        del self._under_way[endpoints.epoch]
        world.point("exchanged")
        if not exchange.is_complete or exchange.is_broken or world.chance("broken"):
            exchange.break_off()
            world.note("an exchange is broken off")
            raise StreamError(-1, "another node does not answer")
        total = sum(
            plan.weights[rank] * exchange.models[rank].view(np.float64)
            for rank in sorted(exchange.models)
        )
        mean.view(np.float64)[:] = total / sum(plan.weights[rank] for rank in exchange.models)
        self._platform.oracle.counts["exchanges"] += 1
        return Traffic(0, 0)

    def close(self) -> None:
        """Listen no more."""


class SimulatedThread(Changing):
    """A thread that others can wait for."""

    def __init__(self, world: World, run: Callable[[], object], name: str) -> None:
        super().__init__(world)
        self._run = run
        self._is_over = False
        process = world.process()
        world.spawn(process, self._main, f"{process.name}.{name.removeprefix('flatweights-')}")

    def _main(self) -> None:
        try:
            self._run()
        finally:
            self._is_over = True
            self.changed()

    def join(self) -> None:
        self._world.block(lambda: self._is_over, self)


class SimulatedQueue(Changing):
    """A queue between threads of a process."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        self.changed()

    def get(self) -> Any:
        self._world.block(lambda: bool(self._items), self)
        return self._items.pop(0)
