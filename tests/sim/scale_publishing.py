"""Published weights in a modelled cluster: from the publisher's memory to all subscribers.

The tree of the relays is that of production, of weights above 100 KiB. Ray fetches these from a
node that has them, drawn at random, and sends what it is asked for at the same time in turns.
"""

from __future__ import annotations

import random

from tests.sim.cluster import Clock, Cluster, Node

from flatweights.ray.publishing._relay_tree import CHILDREN, RelayTree

_PIECES = 50  # of the weights: links pass those of several transfers in turns


class Publishing:
    """One version of published weights, which a subscriber in each process is to set.

    Attributes:
        cluster: The sizes.
        nodes: The nodes; the publisher is on the first one.
        times: By phase, the time at which it has ended.
    """

    def __init__(self, cluster: Cluster, children: int = CHILDREN, seed: int = 0) -> None:
        self.cluster, self.clock = cluster, Clock()
        self.nodes = [Node() for _ in range(cluster.nodes)]
        self.times: dict[str, float] = {}
        self._random = random.Random(seed)
        self._have = [0]  # the nodes in whose store the weights are
        self._children: list[list[int]] = [[] for _ in self.nodes]
        tree: RelayTree[int] = RelayTree(children)
        for node in range(1, cluster.nodes):
            self._children[tree.parent_of(str(node), node, None) or 0].append(node)

    def run(self) -> None:
        """Publish, and let all subscribers set the weights."""
        # The publisher writes the weights; the proxy copies them into the store.
        written = self._move(0, 2)
        self._note("published", written)
        self.clock.at(written, lambda: self._read(0))
        if self.cluster.nodes > 1:
            self.clock.at(self._move(0, 2), lambda: self._tell(0))
        self.clock.run()

    def _note(self, phase: str, end: float) -> None:
        self.times[phase] = max(end, self.times.get(phase, 0.0))

    def _move(self, node: int, models: float) -> float:
        nbytes = models * self.cluster.nbytes
        seconds = nbytes / self.cluster.costs["memory"]
        return self.nodes[node].memory.serve(self.clock.now, seconds, nbytes)

    def _tell(self, parent: int) -> None:
        """Answer the relays that ask this node."""
        costs, clock = self.cluster.costs, self.clock
        for child in self._children[parent]:
            told = self.nodes[parent].agent.serve(clock.now, costs["message"])
            told += costs["message latency"] + self.cluster.latency
            clock.at(told, lambda to=child: self._fetch(to))  # type: ignore[misc]

    def _fetch(self, node: int) -> None:
        self._piece(node, self._random.choice(self._have), _PIECES)

    def _piece(self, node: int, source: int, left: int) -> None:
        """Let the next piece pass, then those after it."""
        if not left:
            self._have.append(node)
            self._note("fetched by all nodes", self.clock.now)
            self._tell(node)
            self.clock.at(self._move(node, 2), lambda: self._read(node))  # into its publication
            return
        nbytes = self.cluster.nbytes / _PIECES
        seconds = nbytes / self.cluster.link
        end = self.nodes[source].out.serve(self.clock.now, seconds, nbytes)
        came = max(end, self.nodes[node].into.serve(end - seconds, seconds, nbytes))
        came += self.cluster.latency * (left == 1)
        self.clock.at(came, lambda: self._piece(node, source, left - 1))

    def _read(self, node: int) -> None:
        """Let the subscribers of a node set their variables."""
        self._note("set by all", self._move(node, 2 * self.cluster.workers))
