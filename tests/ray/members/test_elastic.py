"""ProcessGroups that open before all members have joined, and members that join later."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from process_groups import LocalProcessGroup

from flatweights.ray import Member, Round, join
from flatweights.ray.members._config import GroupConfig


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def average(member: Member, value: float) -> Round:
    return member.average({"w": np.full(3, value)}, timeout=60.0)


def test_all_means_those_who_take_part_now(pool: ThreadPoolExecutor) -> None:
    group = LocalProcessGroup(4, 2, 0.0)
    members = [*pool.map(group.join, [0, 1])]
    [*pool.map(average, members, [1.0, 3.0])]
    members.append(group.join(3))
    average(members[2], 0.0)
    for result in pool.map(average, members, [1.0, 2.0, 6.0]):
        assert result.used == (0, 1, 3)
        assert result.weights["w"].tolist() == [3.0] * 3
    members[0].leave()
    for result in pool.map(average, members[1:], [2.0, 6.0]):
        assert result.used == (1, 3)
        assert not result.failed
        assert not result.late
        assert result.weights["w"].tolist() == [4.0] * 3


def test_wrong_terms_raise() -> None:
    for min_size in (0, 4, -1):
        with pytest.raises(ValueError, match="min_size: expected"):
            GroupConfig.of(3, min_size=min_size)
    with pytest.raises(TypeError, match="min_size"):
        GroupConfig.of(3, min_size=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"grace: expected seconds, not negative, got -1"):
        GroupConfig.of(3, min_size=2, grace=-1)


@pytest.mark.ray
def test_processes_of_ray_open_a_group_without_the_third() -> None:
    import ray

    @ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
    def take_part(rank: int) -> Iterator[tuple[int, ...]]:
        before: tuple[int, ...] = ()
        with join("elastic", rank=rank, size=3, min_size=2, grace=0.1) as member:
            while before != (0, 1, 2):
                used = average(member, float(rank)).used
                if used != before:
                    yield used
                before = used
                time.sleep(0.02)

    with pytest.raises(
        ValueError, match=r"grace: expected less than timeout \(5.0 s\), got 30.0 s"
    ):
        join("elastic", size=3, min_size=2, timeout=5.0)
    with pytest.raises(TimeoutError, match=r"expected at least 2 of 3 members in 0.5 s; missing"):
        join("alone of three", rank=0, size=3, min_size=2, grace=0.0, timeout=0.5)
    both = [take_part.remote(rank) for rank in (0, 1)]
    # Any two would open the process group: the third starts once the first two have.
    assert [ray.get(next(used), timeout=60) for used in both] == [(0, 1)] * 2
    seen = [ray.get([*used], timeout=60) for used in (*both, take_part.remote(2))]
    assert seen[:2] == [[(0, 1, 2)]] * 2
    assert seen[2][-1] == (0, 1, 2)
