"""The weak set that threads share."""

from flatweights.keras._weak_set import SharedWeakSet


class Thing:
    pass


def test_a_set_that_changes_meanwhile_is_iterated_over_as_it_was() -> None:
    first, second, third = Thing(), Thing(), Thing()
    known = SharedWeakSet[Thing]()
    known.add(first)
    known.add(second)
    seen = []
    for one in known:
        known.add(third)
        known.discard(first)
        known.discard(second)
        seen.append(one)
    assert {*seen} == {first, second}
    assert [*known] == [third]
    del third
    assert [*known] == []
