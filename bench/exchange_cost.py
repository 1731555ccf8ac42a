"""What a round costs, by the way in which it is averaged: a model, in bytes that are counted."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal

Way = Literal["driver", "per node", "sharded", "per node, sharded"]


@dataclass(frozen=True)
class ExchangeCost:
    """What one round costs where it costs the most.

    Attributes:
        gathered_in: Bytes that reach the busiest node over the network until the average is there.
        gathered_out: Bytes that leave one.
        returned_in: Bytes that reach the busiest node while all workers fetch the average.
        returned_out: Bytes that leave one.
        network: Bytes that cross the network in all.
        moved: Bytes that the busiest process reads and writes in memory, to average.
        summed: Bytes of models that a process adds up on its node first.
        stored: Bytes in the fullest object store, if nothing is dropped before the round ends.
        objects: Objects that the driver keeps account of.
        seconds: Time for all of it, one step after the other.
    """

    gathered_in: float
    gathered_out: float
    returned_in: float
    returned_out: float
    network: float
    moved: float
    summed: float
    stored: float
    objects: int
    seconds: float


def exchange_cost(
    nbytes: float,
    workers: int,
    *,
    workers_per_node: int = 8,
    num_shards: int | None = None,
    wide: float = 2.0,
    network: float = 1.25e9,
    memory: float = 10e9,
    summing: float = 2e9,
    per_object: float = 0.3e-3,
    cut_by_workers: bool = True,
) -> Mapping[Way, ExchangeCost]:
    """Return what a round costs: by `average`, and by `ShardedAverage` in its three ways.

    ``"driver"`` is `flatweights.ray.average`; ``"per node"`` is ``ShardedAverage(1,
    per_node=True)``; ``"sharded"`` is ``ShardedAverage(num_shards)``, and ``"per node, sharded"``
    that with ``per_node=True``. The driver is on a node with workers; owners are on all nodes in
    turn.

    Bytes are those of weights; Ray adds some hundreds for each object. Each node has one link, of
    which both directions work at once. Every node fetches the average from where it was made.
    (Ray takes an object from any node that has it; nodes that ask at the same time
    find it at the first one only. So ``returned_out`` is the most that can leave a node; in the
    best case it is about ``log2(nodes)`` buffers.) The steps follow one another: all results
    arrive, are averaged, and the average is fetched. Training, and starting processes,
    cost the same in all ways and are left out.

    >>> cost = exchange_cost(1e9, 64)
    >>> min(cost, key=lambda way: cost[way].seconds)
    'per node, sharded'
    >>> cost["driver"].gathered_in / cost["sharded"].gathered_in
    8.0

    Args:
        nbytes: Bytes of the packed buffer.
        workers: How many.
        workers_per_node: How many of them are on each node.
        num_shards: Into how many shards the buffer is cut. One for each node, if None.
        wide: Bytes of a sum for each byte of a model: 2 for float32, and for float64 with its
            compensation, 4 for 16 bits.
        network: Bytes per second of a node's link in one direction. 10 Gbit/s, if not given;
            the defaults of this and the next three are round figures to compare ways with, to be
            replaced by those of the machines.
        memory: Bytes per second that one process reads and writes, averaging.
        summing: Bytes per second of models that one process adds to the float64 sum of a node.
        per_object: Seconds of the driver for each object: a reference made, sent and dropped.
        cut_by_workers: Whether workers cut their results themselves, as a `WorkerGroup` has them.
            Otherwise, results and shards are both in the store.

    Raises:
        ValueError: If an argument is not positive, or not all nodes have as many workers.
    """
    given = {
        "nbytes": nbytes,
        "workers": workers,
        "workers_per_node": workers_per_node,
        "num_shards": 1 if num_shards is None else num_shards,
        "wide": wide,
        "network": network,
        "memory": memory,
        "summing": summing,
        "per_object": per_object,
    }
    for name, value in given.items():
        if not value > 0:
            raise ValueError(f"{name}: expected more than 0, got {value!r}")
    if workers % min(workers, workers_per_node):
        raise ValueError(
            f"workers: expected a multiple of workers_per_node, {workers_per_node}, got {workers}"
        )
    local = min(workers, workers_per_node)
    nodes = workers // local
    setting = _Setting(
        nbytes, nodes, local, wide, network, memory, summing, per_object, cut_by_workers
    )
    shards = nodes if num_shards is None else num_shards
    return {
        "driver": setting.by_driver(),
        "per node": setting.by_shards(1, per_node=True),
        "sharded": setting.by_shards(shards, per_node=False),
        "per node, sharded": setting.by_shards(shards, per_node=True),
    }


@dataclass(frozen=True)
class _Setting:
    nbytes: float
    nodes: int
    local: int
    wide: float
    network: float
    memory: float
    summing: float
    per_object: float
    cut_by_workers: bool

    def by_driver(self) -> ExchangeCost:
        workers = self.nodes * self.local
        away = self.nodes - 1
        return self._cost(
            gathered_in=(workers - self.local) * self.nbytes,
            gathered_out=self.local * self.nbytes if away else 0,
            returned_in=self.nbytes if away else 0,
            returned_out=away * self.nbytes,
            crossing=away * (self.local + 1) * self.nbytes,
            moved=(workers + 3) * self.nbytes,  # all are read, one is written, and put
            summed=0,
            stored=(workers + 1) * self.nbytes,
            objects=workers + 1,
        )

    def by_shards(self, shards: int, *, per_node: bool) -> ExchangeCost:
        workers = self.nodes * self.local
        # A node with one result sends that.
        sent = self.nbytes * (self.wide if self.local > 1 else 1) if per_node else self.nbytes
        per_place = 1 if per_node else self.local  # how many of them a node sends
        owned = ceil(shards / self.nodes) / shards  # of the busiest owner's node, of all
        # A node without an owner sends everything, and fetches everything.
        least = (shards // self.nodes) / shards
        from_away = (self.nodes - 1) * per_place * sent
        results = self.local * self.nbytes if per_node or not self.cut_by_workers else 0
        readings = (self.nodes if per_node else workers) * (shards + 1)
        return self._cost(
            gathered_in=from_away * owned,
            gathered_out=per_place * sent * (1 - least) if self.nodes > 1 else 0,
            returned_in=self.nbytes * (1 - least) if self.nodes > 1 else 0,
            returned_out=(self.nodes - 1) * self.nbytes * owned,
            crossing=from_away + (self.nodes - 1) * self.nbytes,
            moved=(self.nodes * per_place * sent + 2 * self.nbytes) / shards,
            summed=self.local * self.nbytes if per_node and self.local > 1 else 0,
            stored=results + per_place * sent + from_away * owned + self.nbytes,
            objects=workers + readings + 2 * shards,
        )

    def _cost(
        self,
        *,
        gathered_in: float,
        gathered_out: float,
        returned_in: float,
        returned_out: float,
        crossing: float,
        moved: float,
        summed: float,
        stored: float,
        objects: int,
    ) -> ExchangeCost:
        links = max(gathered_in, gathered_out) + max(returned_in, returned_out)
        seconds = links / self.network + objects * self.per_object
        seconds += moved / self.memory + summed / self.summing
        return ExchangeCost(
            gathered_in,
            gathered_out,
            returned_in,
            returned_out,
            crossing,
            moved,
            summed,
            stored,
            objects,
            seconds,
        )
