"""`Member.all_gather`: small objects of all members, which are threads of this process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from process_groups import LocalProcessGroup, kill

from flatweights import Layout
from flatweights.ray import CallsDifferError, Member, WorkerError

OBJECTS: list[Any] = [{"lr": 0.1, "names": ["a", "b"]}, None, "x" * 100_000, np.arange(3.0)]


class Counter:
    """A state of one number."""

    def __init__(self, value: float) -> None:
        self.layout = Layout(["count"], [(1,)], [np.dtype(np.float64)])
        self.value = value

    def gather_into(self, buffer: Any) -> None:
        buffer.view(np.float64)[0] = self.value

    def scatter(self, buffer: Any) -> None:
        self.value = float(buffer.view(np.float64)[0])


def gathered(members: list[Member], values: list[Any], **options: Any) -> list[Any]:
    """Return the results of one call of all ``members``."""
    with ThreadPoolExecutor(len(members)) as pool:
        calls = [
            pool.submit(member.all_gather, value, **options)
            for member, value in zip(members, values, strict=True)
        ]
        return [call.result(60) for call in calls]


def test_all_members_get_the_objects_of_all_by_rank() -> None:
    members = LocalProcessGroup(3).join_all()
    for k in range(len(OBJECTS)):
        values = [OBJECTS[(rank + k) % len(OBJECTS)] for rank in range(3)]
        for result in gathered(members, values):
            assert result.used == (0, 1, 2)
            assert [*result.weights] == [0, 1, 2]
            np.testing.assert_equal([*result.weights.values()], values)
            assert result.number == k + 1


def test_averages_and_objects_take_turns() -> None:
    members = LocalProcessGroup(2).join_all()

    def steps(member: Member) -> list[Any]:
        results = []
        for k in range(20):
            mean = member.average({"w": np.full(4, float(member.rank + k))}).weights["w"]
            results.append((mean.tolist(), member.all_gather((member.rank, k)).weights))
        return results

    with ThreadPoolExecutor(2) as pool:
        for results in pool.map(steps, members):
            expected = [([0.5 + k] * 4, {0: (0, k), 1: (1, k)}) for k in range(20)]
            assert results == expected


def test_names_tell_calls_apart() -> None:
    members = LocalProcessGroup(2).join_all()

    def error_of(member: Member) -> str:
        with pytest.raises(CallsDifferError) as error:
            member.all_gather(member.rank, f"name of {member.rank}")
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        for text in pool.map(error_of, members):
            assert "rank 0: all_gather(name='name of 0'" in text
            assert "rank 1: all_gather(name='name of 1'" in text
    assert gathered(members, [5, 6])[0].weights == {0: 5, 1: 6}


def test_objects_of_the_dead_and_the_late_are_left_out() -> None:
    group = LocalProcessGroup(3)
    members = group.join_all()
    kill(members[2])
    for result in gathered(members[:2], ["a", "b"], min_results=1):
        assert result.weights == {0: "a", 1: "b"}
        assert [*result.failed] == [2]
    only = members[0].all_gather("c", timeout=0.01, min_results=1)
    assert (only.weights, only.late) == ({0: "c"}, (1,))
    late = members[1].all_gather("d", min_results=1)  # gets the last response
    assert (late.weights, late.late) == ({0: "c"}, (1,))
    with pytest.raises(WorkerError, match="rank 2"):
        gathered(members[:2], ["e", "f"])


def test_what_cannot_be_pickled_raises_before_anything_is_sent() -> None:
    members = LocalProcessGroup(2).join_all()
    with pytest.raises(TypeError, match="value: cannot be pickled"):
        members[0].all_gather(iter_forever())
    with pytest.raises(TypeError, match="name: expected a text, got 3"):
        members[0].all_gather(1, 3)  # type: ignore[arg-type]
    assert gathered(members, [1, 2])[1].weights == {0: 1, 1: 2}


def test_an_object_that_cannot_be_unpickled_breaks_no_later_call() -> None:
    members = LocalProcessGroup(2).join_all()

    def call(member: Member) -> str:
        with pytest.raises(TypeError) as error:
            member.all_gather(Unreadable() if member.rank == 1 else 0)
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        text = "value of rank 1: cannot be unpickled: RuntimeError: not here"
        assert [*pool.map(call, members)] == [text] * 2
    assert gathered(members, [1, 2])[0].weights == {0: 1, 1: 2}


def iter_forever() -> Any:
    """Return a generator, which cannot be pickled."""
    yield


def refuse() -> None:
    raise RuntimeError("not here")


class Unreadable:
    """An object that raises when it is unpickled."""

    def __reduce__(self) -> Any:
        return refuse, ()


class Interrupting:
    """An object whose unpickling is interrupted in one member."""

    def __reduce__(self) -> Any:
        return _interrupt_first, ()


def _interrupt_first() -> str:
    if interrupted.acquire(blocking=False):
        raise KeyboardInterrupt
    return "unpickled"


interrupted = threading.Lock()


def test_a_member_that_is_interrupted_while_it_unpickles_is_healed() -> None:
    members = LocalProcessGroup(2).join_all()
    states = [Counter(0.0), Counter(0.0)]

    def step(member: Member, value: Any) -> Any:
        state = states[member.rank]
        try:
            result = member.all_gather(value, state=state, min_results=1)
        except KeyboardInterrupt:
            return member.rank
        state.value += 1
        return result

    with ThreadPoolExecutor(2) as pool:
        for value in (1, Interrupting(), 2, 3):
            results = [*pool.map(step, members, [value] * 2)]
            if value == 2:
                assert len({result.healed for result in results}) == 1
                assert len(results[0].healed) == 1
    assert [state.value for state in states] == [4.0, 4.0]
