"""The tree in which relays pass on published weights, so that no link carries them to all nodes.

The proxy on the publisher's node is its root. Each relay has a place, in the order in which they
first asked for one, and gets weights from a relay with a lower place, or from the root. So there is
no cycle, whichever relays are lost.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

Relay = TypeVar("Relay")

CHILDREN = 2
"""The number of nodes that get large weights from one: it shares its link among them."""

MANY_CHILDREN = 32
"""The same of small weights, for which the number of steps from the root matters more."""


class RelayTree(Generic[Relay]):
    """The places of the relays of one publisher. The root has place 0."""

    def __init__(self, children: int) -> None:
        """Begin with the root, which is to have that many ``children``, as each relay."""
        self._children = children
        self._nodes: list[str] = []  # by place, from 1 on
        self._relays: dict[str, Relay] = {}
        self._parents: dict[str, int] = {}  # by node, the place of its relay's parent
        self._lost: set[str] = set()

    def parent_of(self, node: str, relay: Relay, lost: Relay | None) -> Relay | None:
        """Return the relay that is to pass on weights to that of a node; None if the root is.

        A relay that asks without a loss counts as able to pass weights on, even if it was lost.

        Args:
            node: The node.
            relay: Its relay.
            lost: A relay that it cannot reach, or that has lost the publisher.
        """
        if node not in self._relays:
            self._nodes.append(node)
        if lost is None or self._relays.get(node) != relay:
            self._lost.discard(node)
        self._relays[node] = relay
        if lost is not None:
            self._lost |= {one for one, other in self._relays.items() if other == lost}
        own = self._nodes.index(node) + 1
        parent = (own - 1) // self._children
        if parent and self._nodes[parent - 1] in self._lost:
            parent = self._idlest_before(own)
        self._parents[node] = parent
        return self._relays[self._nodes[parent - 1]] if parent else None

    def _idlest_before(self, place: int) -> int:
        """Return a lower place, perhaps the root's, that passes weights on to the fewest."""
        counts = Counter(self._parents.values())
        living = [k for k in range(1, place) if self._nodes[k - 1] not in self._lost]
        return min([*living, 0], key=counts.__getitem__)
