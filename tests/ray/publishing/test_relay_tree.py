"""The places of relays: a tree without cycles, whichever relays are lost or replaced."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from flatweights.ray.publishing._relay_tree import RelayTree


def test_each_passes_weights_on_to_as_many() -> None:
    tree: RelayTree[int] = RelayTree(3)
    parents = [tree.parent_of(f"node {k}", k, None) for k in range(124)]
    assert parents[:4] == [None, None, None, 0]
    assert max(Counter(parents).values()) == 3
    depth = [0] * 124
    for k, parent in enumerate(parents):
        depth[k] = 1 if parent is None else 1 + depth[parent]
    assert max(depth) == 5


def test_the_children_of_a_lost_relay_get_weights_from_others() -> None:
    tree: RelayTree[int] = RelayTree(1)
    assert [tree.parent_of(f"node {k}", k, None) for k in range(3)] == [None, 0, 1]
    assert tree.parent_of("node 2", 2, 1) == 0
    assert tree.parent_of("node 2", 2, 0) is None
    # The relay of a node that has another one now takes its place again.
    assert tree.parent_of("node 1", 11, 0) is None
    assert tree.parent_of("node 3", 3, None) == 2
    assert tree.parent_of("node 3", 3, 2) == 11
    # A lost relay that asks again passes weights on again.
    tree = RelayTree(1)
    assert [tree.parent_of(f"node {k}", k, None) for k in range(2)] == [None, 0]
    assert tree.parent_of("node 1", 1, 0) is None
    assert tree.parent_of("node 1", 1, None) is None
    assert tree.parent_of("node 0", 0, None) is None
    assert tree.parent_of("node 1", 1, None) == 0


def test_the_children_of_lost_relays_are_shared_among_the_others() -> None:
    tree: RelayTree[int] = RelayTree(2)
    for k in range(30):
        tree.parent_of(f"node {k}", k, None)
    # The first six have gone; those that got weights from them find others.
    parents = {}
    for k in range(6, 30):
        parent = tree.parent_of(f"node {k}", k, None)
        while parent is not None and parent < 6:
            parent = tree.parent_of(f"node {k}", k, parent)
        parents[k] = parent
    assert sum(parent is None for parent in parents.values()) <= 4
    assert max(Counter(parent for parent in parents.values() if parent is not None).values()) <= 4


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["asks", "has lost", "is new"]))),
)
def test_there_is_never_a_cycle(children: int, events: list[tuple[int, str]]) -> None:
    tree: RelayTree[tuple[int, int]] = RelayTree(children)
    relays: dict[int, tuple[int, int]] = {}
    parents: dict[tuple[int, int], tuple[int, int] | None] = {}
    for number, (node, event) in enumerate(events):
        is_new = event == "is new" or node not in relays
        relay = relays[node] = (node, number) if is_new else relays[node]
        lost = parents.get(relay) if event == "has lost" else None
        parent = tree.parent_of(f"node {node}", relay, lost)
        assert parent is None or parent != lost
        parents[relay] = parent
        chain = [relay]
        while (above := parents[chain[-1]]) is not None:
            assert above[0] not in [one[0] for one in chain]
            chain.append(above)
