"""`WorkerGroup.as_completed` and `publish`: results as they arrive, and the versions they name."""

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray_pool import Actors, Lend, wait_until_dead
from ray_workers import PlainWorker, wait_for, weights_of
from reference import assert_same, same_bits

import flatweights as fw
from flatweights import FlatWeights
from flatweights.ray import Round, WorkerError, WorkerGroup
from flatweights.ray.channels import _driver_channel
from flatweights.ray.channels._driver_channel import DriverChannel
from flatweights.ray.core import _loop

SIZE = 3_000

pytestmark = [pytest.mark.ray, pytest.mark.starts_actors]  # mostly over channels


def refuses(
    error: type[Exception], match: str, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    with pytest.raises(error, match=re.escape(match)):
        call(*args, **kwargs)


class Versioned(PlainWorker):
    """Returns its weights plus its rank, which shows their version."""

    def set_weights(self, new_weights: Any, *, share: bool = False) -> None:
        if len({*new_weights["w"].tolist()}) != 1:
            raise AssertionError("weights of two publications")
        super().set_weights(new_weights, share=share)

    def work(self) -> FlatWeights:
        self.calls += 1
        return result_of(self.model, self.rank)

    def work_with_extras(self) -> tuple[FlatWeights, int]:
        return self.work(), self.rank

    def vector(self) -> Any:
        return self.work()["w"]

    def work_once(self, rank: int, where: str) -> FlatWeights:
        """Work; a ``rank`` waits for a file."""
        if self.rank == rank:
            Path(where, "waits").touch()
            wait_for(Path(where, "go on"))
        return self.work()

    def spoil(self, rank: int) -> FlatWeights:
        """Work; a ``rank`` returns NaN."""
        model = self.work()
        if self.rank == rank:
            model["w"][7] = np.nan
        return model

    def nap_or_spoil(self, rank: int) -> FlatWeights:
        """Work; a ``rank`` returns NaN, and others are late."""
        time.sleep(2.0 if self.rank != rank else 0.05)
        return self.spoil(rank)


class Keeping(Versioned):
    """Keeps the weights that it was sent as they came: in the driver's segment."""

    kept: Any = None

    def set_weights(self, new_weights: Any, *, share: bool = False) -> None:
        super().set_weights(new_weights)
        self.kept = new_weights


def result_of(model: FlatWeights, rank: int) -> FlatWeights:
    """The oracle of `Versioned.work`."""
    result = model.copy()
    result["w"] += 0.1 * (rank + 1)
    return result


class Publications:
    """Publishes models that contain their number, and computes results of them."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self.number = 0
        self.publish()

    def publish(self) -> None:
        self.number += 1
        self.group.publish(weights_of(float(self.number), SIZE))

    def check(self, found: Round) -> None:
        """Check that a round is the average of its ranks' results from the versions it names."""
        assert found.staleness.keys() == {*found.used}
        results = [
            result_of(weights_of(float(self.number - found.staleness[rank]), SIZE), rank)
            for rank in found.used
        ]
        assert same_bits(found.weights.buffer, fw.average(results).buffer), found


def ranks_of(rounds: Iterable[Round], publications: Publications, count: int) -> set[int]:
    """The ranks of the next rounds, until there are ``count``: a busy machine may delay one."""
    ranks = set[int]()
    for found in itertools.islice(rounds, 1000):
        publications.check(found)
        ranks |= {*found.used}
        if len(ranks) == count:
            break
    return ranks


@pytest.fixture(scope="module")
def three(way: str, all_actors: Actors) -> Iterator[WorkerGroup]:
    with all_actors.loan() as lend:
        yield lend(Versioned, 3, SIZE)


@pytest.fixture
def group(three: WorkerGroup) -> WorkerGroup:
    """Three workers that several tests share, which leave them healthy."""
    assert len(three.step("forget_calls")) == 3
    return three


def test_each_result_is_a_round_of_the_weights_that_it_names(group: WorkerGroup) -> None:
    before = int(repr(group).partition(" rounds")[0].rpartition(" ")[2])
    publications, used = Publications(group), Counter[int]()
    for found in group.as_completed("work", updates=60):
        assert len(found.used) == 1
        assert found.seconds["round"] >= 0
        publications.check(found)
        used.update(found.used)
        for _ in range(len(used) % 3):  # also none, and several
            publications.publish()
    assert used.keys() == {0, 1, 2}
    assert found.number == 60
    assert f", {before + 60} rounds" in repr(group)
    assert found.record()["staleness"].keys() == {str(found.used[0])}
    for found in group.as_completed("work", updates=20, buffer=3):
        assert len(found.used) == 3
        publications.check(found)
        publications.publish()


@pytest.fixture
def fair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops wait for the oldest call, however slow load makes a worker."""
    monkeypatch.setattr(_loop, "_MOMENT", 60.0)


def test_a_worker_in_a_call_of_an_earlier_loop_may_be_late(
    group: WorkerGroup, tmp_path: Path
) -> None:
    Publications(group)
    loop = group.as_completed("work_once", 1, str(tmp_path))
    next(loop)
    wait_for(tmp_path / "waits")
    loop.close()
    with pytest.raises(WorkerError, match="rank 1: TimeoutError"):
        next(group.as_completed("work", ranks=[1], timeout=0.2))
    (tmp_path / "go on").touch()
    assert group.restore(timeout=None) == [1]


def test_arguments_extras_vectors_and_weights_are_as_in_average(group: WorkerGroup) -> None:
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "buffer: expected 1 to 3", {"buffer": 4}),
        (ValueError, "updates: expected at least 0", {"updates": -1}),
        (ValueError, "max_staleness: expected at least 0", {"max_staleness": -1}),
        (ValueError, "ranks: expected some of 0 to 2", {"ranks": [3]}),
        (ValueError, "timeout", {"timeout": -1.0}),
        (TypeError, "max_staleness", {"max_staleness": "1"}),
    ]
    for error, match, options in wrong:
        refuses(error, match, group.as_completed, "work", **options)
    assert sum(group.step("how_often").values()) == 0
    publications = Publications(group)
    used = Counter[int]()
    for found in group.as_completed("work", updates=9, ranks=[2, 0]):
        used.update(found.used)
    assert used.keys() == {0, 2}
    assert group.step("how_often")[1] == 0
    for found in group.as_completed("work_with_extras", updates=6):
        assert found.extras == {rank: rank for rank in found.used}
        publications.check(found)
    for found in group.as_completed("vector", updates=3):
        (rank,) = found.used
        assert same_bits(found.weights, result_of(weights_of(1.0, SIZE), rank)["w"])
    *_, last = group.as_completed("work", updates=4, buffer=3, weights=[1.0, 2.0, 0.5])
    models = [result_of(weights_of(1.0, SIZE), rank) for rank in last.used]
    given = [[1.0, 2.0, 0.5][rank] for rank in last.used]
    assert_same(last.weights, fw.average(models, given))
    rounds = group.as_completed("act", {}, "", arguments=lambda rank: (10.0 * rank,), updates=9)
    for found in rounds:
        (rank,) = found.used
        assert found.weights["w"][0] == 1.0 + 10 * rank * (rank + 1)
        group.publish(weights_of(1.0, SIZE))


@pytest.mark.parametrize("leave", ["break", "error", "close"])
def test_a_group_is_usable_at_once_after_the_loop(group: WorkerGroup, leave: str) -> None:
    publications = Publications(group)

    def loop() -> None:
        rounds = group.as_completed("work")
        for found in rounds:
            if found.number == 5:
                if leave == "error":
                    raise ZeroDivisionError
                break
        if leave == "close":
            rounds.close()

    if leave == "error":
        with pytest.raises(ZeroDivisionError):
            loop()
    else:
        loop()
    found = group.average("work")
    assert found.used == (0, 1, 2)
    assert not found.failed
    mine = [result_of(weights_of(float(publications.number), SIZE), rank) for rank in range(3)]
    assert_same(found.weights, fw.average(mine))
    assert [one.used for one in group.run(2, "work")] == [(0, 1, 2)] * 2


def test_an_interrupt_of_a_call_in_the_body_spoils_no_result(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    publications, interrupted = Publications(group), list[object]()
    take = DriverChannel.take

    def take_and_raise(channel: DriverChannel) -> Any:
        monkeypatch.setattr(DriverChannel, "take", take)
        interrupted.append(take(channel))
        raise KeyboardInterrupt

    for found in group.as_completed("work_with_extras", updates=30):
        publications.check(found)
        if found.number == 5:
            publications.publish()
            monkeypatch.setattr(DriverChannel, "take", take_and_raise)
            with pytest.raises(KeyboardInterrupt):
                group.step("ping")
    assert interrupted
    group.restore()


def test_loops_that_take_turns_and_end_share_the_workers(group: WorkerGroup) -> None:
    publications = Publications(group)
    for _ in range(2):
        loops = [group.as_completed("work", buffer=buffer) for buffer in (1, 2, 1)]
        for number in range(30):
            publications.check(next(loops[number % 7 % len(loops)]))
            if number % 5 == 4:
                publications.publish()
            if number in (15, 25):
                loops.pop(0).close()  # others may wait for the answers to its calls
        assert ranks_of(loops[0], publications, 3) == {0, 1, 2}


@pytest.mark.slow
def test_a_loop_after_a_loop_that_was_left_may_remove_who_still_works(
    make: "Make", tmp_path: Path
) -> None:
    group = make(2)
    publications = Publications(group)
    for _ in group.as_completed("work_once", 1, str(tmp_path)):
        wait_for(tmp_path / "waits")
        break
    rounds = group.as_completed("work", ranks=[0, 1])
    publications.check(next(rounds))  # rank 1 owes an answer to the loop before
    group.remove(1)
    (tmp_path / "go on").touch()
    for found in itertools.islice(rounds, 20):
        assert found.used == (0,)
        publications.check(found)
    inner = group.as_completed("work")
    for found in itertools.islice(rounds, 6):  # two loops at a time take turns
        publications.check(found)
        publications.check(next(inner))


def test_publish_copies_and_takes_subsets_vectors_and_rounds(group: WorkerGroup) -> None:
    model = weights_of(5.0, SIZE)
    group.publish(model)
    model["w"] += 1.0
    assert_same(group.average("get_weights").weights, weights_of(5.0, SIZE))
    group.publish({"w": np.full(SIZE, 6.0)})
    for found in group.step("get_weights").values():
        assert_same(found, weights_of(6.0, SIZE))
    group.publish(group.average("work"))
    assert group.step("get_weights")[0]["w"][0] == pytest.approx(6.2)
    group.publish(np.arange(SIZE + 1.0) * 0 + 3.0)
    assert group.step("get_weights", ranks=[1])[1]["n"] == 3
    refuses(TypeError, "weights: expected weights by name", group.publish, [1.0, 2.0])
    group.publish(weights_of(7.0, SIZE))
    group.publish(ray.put(weights_of(8.0, SIZE)))
    assert group.step("get_weights")[2]["w"][0] == 8.0


def test_a_publication_reaches_workers_that_all_refused_the_one_before(group: WorkerGroup) -> None:
    group.publish(weights_of(1.0, SIZE))
    group.average("work")
    group.publish({"w": np.arange(1.0 * SIZE)})
    for _ in range(2):
        with pytest.raises(WorkerError, match="weights of two publications"):
            group.average("work")
    group.publish(weights_of(2.0, SIZE))
    found = group.average("work")
    mine = [result_of(weights_of(2.0, SIZE), rank) for rank in range(3)]
    assert (found.used, found.failed) == ((0, 1, 2), {})
    assert_same(found.weights, fw.average(mine))


def test_a_method_that_raises_ends_the_loop(group: WorkerGroup) -> None:
    Publications(group)
    with pytest.raises(WorkerError, match="diverged"):
        for _ in group.as_completed("act", {1: "raise"}, updates=50):
            pass
    assert group.num_healthy_actors() == 3


def test_nan_is_raised_or_left_out(group: WorkerGroup) -> None:
    publications = Publications(group)
    with pytest.raises(ValueError, match="rank 1, slot 0 'w'"):
        for _ in group.as_completed("spoil", 1, updates=50):
            pass
    quarantined = Counter[int]()
    for found in group.as_completed("spoil", 1, updates=30, nonfinite="skip"):
        assert 1 not in found.used
        publications.check(found)
        quarantined.update(found.quarantined)
        assert {*found.quarantined} <= found.failed.keys()
    assert quarantined.keys() == {1}
    for found in group.as_completed("spoil", 1, updates=2, buffer=2, nonfinite="skip"):
        assert found.quarantined in ((), (1,)), "listed once, however often it comes"
    with pytest.raises(WorkerError) as info:
        next(group.as_completed("nap_or_spoil", 1, timeout=1.0, ranks=[0, 1], nonfinite="skip"))
    assert isinstance(info.value.failed[0], TimeoutError)
    assert isinstance(info.value.failed[1], ValueError)
    assert group.restore() == [0]


@pytest.mark.parametrize(("ranks", "buffer"), [(None, 1), (None, 2), ([2], 1), ([0, 2], 2)])
def test_nan_of_all_workers_is_an_error(
    group: WorkerGroup, ranks: list[int] | None, buffer: int
) -> None:
    options: dict[str, Any] = {"ranks": ranks, "buffer": buffer, "nonfinite": "skip"}
    rounds = group.as_completed("spoil", arguments=lambda rank: (rank,), **options)
    with pytest.raises(WorkerError, match=r"slot 0 'w'.* NaN") as info:
        next(rounds)
    assert [*info.value.failed] == (ranks or [0, 1, 2])
    found = next(group.as_completed("work", **options))
    assert len(found.used) == buffer


Make = Callable[..., WorkerGroup]


@pytest.fixture
def make(way: str, lend: Lend) -> Make:
    return lambda n=3, **options: lend(Versioned, n, SIZE, **{"max_restarts": -1} | options)


def test_a_worker_that_dies_is_named_once_and_comes_back(make: Make) -> None:
    group = make(2)
    publications, failed, back = Publications(group), Counter[int](), False
    rounds = group.as_completed("work", timeout=60)
    next(rounds)
    pid = ray.get(group.actors()[1].pid.remote())
    ray.kill(group.actors()[1], no_restart=False)
    for found in rounds:
        publications.check(found)
        failed.update([*found.failed])
        publications.publish()
        back = back or (bool(failed) and found.used == (1,))
        if back:
            break
    assert failed == {1: 1}
    assert ray.get(group.actors()[1].pid.remote()) != pid
    assert group.num_healthy_actors() == 2


@pytest.mark.slow
def test_rounds_have_fewer_results_once_there_are_fewer_workers(make: Make) -> None:
    group = make(3, max_restarts=0)
    publications = Publications(group)
    of_one = group.as_completed("work", ranks=[2])
    next(of_one)
    rounds = group.as_completed("work", buffer=3)
    assert sorted(next(rounds).used) == [0, 1, 2]
    group.remove(2)
    for found in itertools.islice(rounds, 4):
        publications.check(found)
        publications.publish()
        assert sorted(found.used) == [0, 1]
    refuses(WorkerError, "no worker of the loop is left", next, of_one)
    ray.kill(group.actors()[0])
    found = next(found for found in rounds if found.failed)
    assert found.failed.keys() == {0}
    for found in itertools.islice(rounds, 4):
        publications.check(found)
        assert found.used == (1,)


def test_a_wire_brings_weights_in_full(make: Make) -> None:
    group = make(2, wire_dtype="bfloat16")
    publications = Publications(group)
    for found in group.as_completed("work", updates=6):
        publications.check(found)
        publications.publish()
    assert [found.used for found in group.run(2, "work")] == [(0, 1)] * 2


def test_results_that_the_caller_keeps_stay_as_they_are(make: Make) -> None:
    group = make(2)
    publications, kept = Publications(group), []
    for found in group.as_completed("work", updates=20):
        publications.check(found)
        kept.append((found.weights, found.weights.buffer.copy()))
        if len(kept) % 3:
            publications.publish()
    assert not any(weights.buffer.flags.writeable for weights, _ in kept)
    group.average("work")
    for actor in group.actors().values():
        ray.kill(actor)
        wait_until_dead(actor)  # or the next test would get it
    assert all(same_bits(weights.buffer, before) for weights, before in kept)


@pytest.mark.slow
@pytest.mark.usefixtures("fair")
def test_more_workers_than_once_had_segments_all_go_by_channels(make: Make, way: str) -> None:
    count = 20
    group = make(count)
    group.step("ping")  # on a busy machine, the last of twenty processes starts much later
    publications, ways = Publications(group), dict[int, str]()
    for found in group.as_completed("work", updates=100 * count):
        publications.check(found)
        ways |= found.transports
        publications.publish()
        if len(ways) == count and (way == "store" or {*ways.values()} == {"shm"}):
            break
    assert ways.keys() == {*range(count)}
    assert {one.partition(":")[0] for one in ways.values()} == {"shm" if way == "shm" else way}
    for found in group.as_completed("work", updates=3 * count):
        publications.check(found)
        assert max(found.staleness.values()) < 3 * count
        if way == "shm":
            assert {*found.transports.values()} == {"shm"}
        publications.publish()


def test_weights_go_through_the_store_while_workers_keep_all_segments(
    lend: Lend, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_driver_channel, "_MOST_SEGMENTS", 2)
    group = lend(Keeping, 3, SIZE)
    publications, ways, used = Publications(group), set[str](), set[int]()
    for found in group.as_completed("work"):
        publications.check(found)
        publications.publish()
        ways |= {*found.transports.values()}
        used |= {*found.used}
        is_full = way == "store" or any("no segment" in one for one in ways)
        if is_full and len(used) == 3 and found.number is not None and found.number >= 40:
            break
