"""An allreduce over streams: both steps in one exchange, block by block. It does not import Ray.

Each node's shard is cut into blocks. A node sends every other node its part of that node's blocks,
then the averages of its own blocks, each as soon as the block has arrived from all nodes. So sums
are computed while others travel, and nodes wait for the slowest one once per exchange, not twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from flatweights.ray.nodes._connections import NodeConnections
from flatweights.ray.nodes._plan import Plan
from flatweights.ray.nodes._shards import Bytes
from flatweights.ray.support._failpoints import reach


class StreamAllreduce:
    """One node's part of an exchange over streams."""

    def __init__(self, plan: Plan, me: int, models: Mapping[int, Bytes], mean: Bytes) -> None:
        """Take the models to send, and the memory for the average.

        Args:
            plan: The plan, which all nodes have.
            me: The place of this node.
            models: All bytes of the models of its ranks.
            mean: The memory for all bytes of the average.
        """
        self._plan = plan.in_blocks()
        self._me = me
        self._models = models
        self._mean = mean
        self._nodes = range(len(plan.groups))
        self._mine = self._plan.of_node(me)
        self._coming = {
            node: [self._plan.new_contribution(node, shard) for shard in self._mine]
            for node in self._nodes
            if node != me
        }
        self._buffers = {node: len(parts[0]) for node, parts in self._coming.items()}  # of a block
        self._missing = [sum(map(bool, self._buffers.values()))] * len(self._mine)  # nodes by block
        self._merged = 0  # blocks

    def run(
        self, connections: NodeConnections, *, patience: float, end: float | None
    ) -> tuple[int, int]:
        """Exchange; return the bytes sent and received. The plan has the exchange's number.

        Raises:
            StreamError: If a node does not answer, or its answer is invalid.
        """
        first = self._merge_complete()
        return connections.send_and_receive(
            self._plan.number,
            {node: itertools.chain(self._sums(node), first) for node in self._coming},
            {node: self._receive(node) for node in self._coming},
            patience=patience,
            end=end,
            arrived=self._arrive,
        )

    def _sums(self, node: int) -> Iterator[Bytes]:
        """Yield this node's part of the blocks of ``node``, each made when it is sent."""
        for shard in self._plan.of_node(node):
            yield from self._plan.contribution(self._me, shard, self._models)

    def _receive(self, node: int) -> list[Bytes]:
        """Return the buffers for everything that ``node`` sends."""
        sums = [buffer for parts in self._coming[node] for buffer in parts]
        return sums + [self._mean[self._plan.bounds(shard)] for shard in self._plan.of_node(node)]

    def _arrive(self, node: int, index: int) -> list[Bytes]:
        """Count a buffer; return the averages of blocks that it completes."""
        count = self._buffers[node]
        if index >= count * len(self._mine) or (index + 1) % count:
            return []  # an average, or not the last buffer of a block
        self._missing[index // count] -= 1
        return self._merge_complete()

    def _merge_complete(self) -> list[Bytes]:
        """Return the averages of the next blocks that have arrived from all nodes."""
        plan, me, means = self._plan, self._me, []
        while self._merged < len(self._mine) and not self._missing[self._merged]:
            block, shard = self._merged, self._mine[self._merged]
            own = plan.contribution(me, shard, self._models)
            parts = [own if k == me else self._coming[k][block] for k in self._nodes]
            reach("merging")
            means.append(self._mean[plan.bounds(shard)])
            plan.merge(shard, parts, means[-1])
            reach("placing")
            self._merged += 1
        return means
