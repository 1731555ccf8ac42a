"""The tree in which relays pass on published weights, so that no link carries them to all nodes.

The proxy on the publisher's node is its root. Each relay has a place, in the order in which they
first asked for one, and gets weights from a relay with a lower place, or from the root. So there is
no cycle, whichever relays are lost.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Relay = TypeVar("Relay")

CHILDREN = 2
"""The number of nodes that get large weights from one: it shares its link among them."""

MANY_CHILDREN = 32
"""The same of small weights, for which the number of steps from the root matters more."""


class RelayTree(Generic[Relay]):
    """The places of the relays of one publisher."""

    def __init__(self, children: int) -> None:
        """Begin with the root, which is to have that many ``children``, as each relay."""
        self._children = children
        self._nodes: list[str] = []  # by place, from 1 on
        self._relays: dict[str, Relay] = {}
        self._lost: set[str] = set()

    def parent_of(self, node: str, relay: Relay, lost: Relay | None) -> Relay | None:
        """Return the relay that is to pass on weights to that of a node; None if the root is.

        Args:
            node: The node.
            relay: Its relay.
            lost: A relay that it cannot reach, or that has lost the publisher.
        """
        if node not in self._relays:
            self._nodes.append(node)
        elif self._relays[node] != relay:  # the last relay of this node has ended
            self._lost.discard(node)
        self._relays[node] = relay
        if lost is not None:
            self._lost |= {one for one, other in self._relays.items() if other == lost}
        place = self._nodes.index(node) + 1
        while place := (place - 1) // self._children:
            parent = self._nodes[place - 1]
            if parent not in self._lost:
                return self._relays[parent]
        return None
