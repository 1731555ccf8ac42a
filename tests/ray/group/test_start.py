"""All workers start from the same weights, and none keeps weights that nobody sent."""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray_pool import Actors, Lend, wait_until_dead
from ray_workers import PlainWorker, wait_for
from reference import assert_same

import flatweights as fw
from flatweights import FlatWeights
from flatweights.ray import Round, StaleWorkerError, WorkerError, WorkerGroup
from flatweights.ray.peers import _platform
from flatweights.ray.peers._latest import Latest
from flatweights.ray.peers._store import sent_weights
from flatweights.ray.results._wire import GroupWire

pytestmark = [pytest.mark.ray, pytest.mark.starts_actors]  # mostly over channels


WIRES = (None, "bfloat16")

# Of these cases, some differ most.
MISSED = {("both", None), ("the first", "bfloat16")}
GIVEN = {("weights", "bfloat16"), ("later reference", None)}


class Different(PlainWorker):
    """Workers that are built with different weights."""

    def __init__(self, rank: int = 0, size: int = 5) -> None:
        super().__init__(rank, size)
        self.model = own(rank, size)

    def give(self, value: Any) -> Any:
        return value


class Twins(PlainWorker):
    """Workers with two weights of one shape."""

    def __init__(self, rank: int = 0, size: int = 5) -> None:
        super().__init__(rank, size)
        self.model = twins(-1.0, -2.0)

    def train(self, step: float = 1.0) -> FlatWeights:
        return self.get_weights()


class WithoutWeights(PlainWorker):
    def get_weights(self) -> FlatWeights:
        raise LookupError("there are none yet")

    def count(self) -> Any:
        return np.ones(2)


class HalfSetting(Different):
    """Workers that set half of the weights that they refuse."""

    def set_weights(self, new_weights: Any, *, share: bool = False) -> None:
        self.model["w"][...] = new_weights["w"]
        if new_weights["n"] < 0:
            raise ValueError("half of them")
        super().set_weights(new_weights, share=share)

    def ping(self, where: str = "") -> str:
        if where:
            wait_for(Path(where, "go on"))
        return "pong"


def own(rank: int, size: int = 5) -> FlatWeights:
    return FlatWeights({"w": np.full(size, 10.0 * rank), "n": np.int64(rank)})


def twins(a: float, b: float) -> FlatWeights:
    return FlatWeights({"a": np.full(5, a), "b": np.full(5, b)})


def after_training(start: FlatWeights, rank: int) -> FlatWeights:
    after = start.copy()
    after["w"] += rank + 1
    return after


def mean_of(start: FlatWeights, ranks: Any = range(3)) -> FlatWeights:
    return fw.average([after_training(start, rank) for rank in ranks])


@pytest.fixture(scope="module")
def actors(way: str, all_actors: Actors) -> Iterator[list[Any]]:
    with all_actors.loan() as lend:
        yield list(lend(Different, 3).actors().values())


@pytest.fixture
def fresh(actors: list[Any]) -> Callable[..., WorkerGroup]:
    """Makes groups of the same actors, in the state in which they were built."""

    def make(**options: Any) -> WorkerGroup:
        ray.get([actor.build_anew.remote() for actor in actors])
        return WorkerGroup(actors, **options)

    return make


Fresh = Callable[..., WorkerGroup]


def test_the_first_round_starts_from_the_weights_of_the_lowest_rank(fresh: Fresh) -> None:
    (found,) = fresh().run(1, "train")
    assert_same(found.weights, mean_of(own(0)))
    group = fresh()
    found = group.average("train")
    assert_same(found.weights, mean_of(own(0)))
    twice = [after_training(after_training(own(0), rank), rank) for rank in range(3)]
    assert_same(group.average("train").weights, fw.average(twice))
    trained = fresh().step("train")
    for rank, weights in trained.items():
        assert_same(weights, after_training(own(0), rank))


@pytest.mark.parametrize("wire_dtype", WIRES)
def test_a_call_that_brings_weights_needs_no_others(fresh: Fresh, wire_dtype: Any) -> None:
    start = own(7)
    group = fresh(wire_dtype=wire_dtype)
    assert_same(group.average("train", broadcast=start).weights, mean_of(start))
    group = fresh(wire_dtype=wire_dtype)
    group.broadcast(start)
    assert_same(group.step("get_weights")[2], start)


def test_initial_weights_are_those_that_are_given(fresh: Fresh) -> None:
    (found,) = fresh(initial=own(5)).run(1, "train")
    assert_same(found.weights, mean_of(own(5)))
    found = fresh(initial=np.array([1.0, 2, 3, 4, 5, 9])).average("train")
    assert_same(found.weights["w"], np.arange(1.0, 6.0) + 2)
    mine = own(5)
    group = fresh(initial=mine)
    mine["w"] += 1
    assert_same(group.average("train").weights, mean_of(own(5)))
    starts = [after_training(own(rank), rank) for rank in range(3)]
    assert_same(fresh(initial=None).average("train").weights, fw.average(starts))


def test_initial_weights_of_any_kind_complete_a_subset(fresh: Fresh) -> None:
    start = own(5)
    kinds = [start, OrderedDict(start), Round(start, [0]), ray.put(start), ray.put(dict(start))]
    for initial in kinds:
        group = fresh(initial=initial)
        group.broadcast({"n": np.int64(9)})
        for weights in group.step("get_weights").values():
            assert_same(weights, FlatWeights({**start, "n": np.int64(9)}))
    mine = OrderedDict(own(5).copy())
    group = fresh(initial=mine)
    mine["w"] += 1
    assert_same(group.average("train").weights, mean_of(own(5)))


def test_initial_weights_that_are_a_subset_are_completed_by_another(fresh: Fresh) -> None:
    initial, subset = {"w": np.full(5, 7.0)}, {"n": np.int64(9)}
    sends: list[Callable[[WorkerGroup], Any]] = [
        lambda group: group.broadcast(subset),
        lambda group: group.publish(subset),
        lambda group: group.step("ping", broadcast=subset),
        lambda group: group.broadcast(ray.put(subset)),
    ]
    for send in sends:
        group = fresh(initial=initial)
        send(group)
        group.step("train")
        for weights in group.step("get_weights").values():
            assert int(weights["n"]) >= 9
            assert np.all(np.asarray(weights["w"]) >= 7)


def test_a_first_call_that_sends_nothing_leaves_workers_their_own_weights(fresh: Fresh) -> None:
    group = fresh(initial=own(5))
    with pytest.raises(TypeError, match="lock"):  # it cannot be pickled
        group.step("give", threading.Lock(), broadcast={"n": np.int64(1)})
    for rank, weights in group.step("get_weights").items():
        assert_same(weights, own(rank))


def test_to_read_weights_changes_none(fresh: Fresh) -> None:
    for method in ("get_weights", "ping"):
        group = fresh()
        group.step(method)
        assert_same(group.average().weights, fw.average([own(rank) for rank in range(3)]))
    group.step("train")
    group.broadcast(group.average())
    assert_same(group.step("get_weights")[1], mean_of(own(0)))


def test_workers_that_refuse_half_of_the_first_weights_start_from_the_initial_ones(
    lend: Lend, tmp_path: Path
) -> None:
    group = lend(HalfSetting, 2, initial=own(7))
    with pytest.raises(WorkerError):
        group.step("ping", str(tmp_path), timeout=0.01)  # none of them is healthy any more
    (tmp_path / "go on").touch()
    ray.get([actor.ping.remote() for actor in group.actors().values()])
    with pytest.raises(WorkerError, match="half of them"):
        group.broadcast({**own(8), "n": np.int64(-1)})
    assert group.restore() == [0, 1]
    for found in group.step("get_weights").values():
        assert_same(found, own(7))


def test_a_lowest_rank_that_is_dead_is_passed_over(lend: Lend) -> None:
    group = lend(Different, 2)
    group.step("ping")
    ray.kill(group.actors()[0])
    wait_until_dead(group.actors()[0])
    found = group.average("train", min_results=1)
    assert found.used == (1,)
    assert_same(found.weights, mean_of(own(1), (1,)))


def test_workers_without_weights_need_initial_none(lend: Lend) -> None:
    group = lend(WithoutWeights, 1)
    with pytest.raises(WorkerError, match=r"rank 0: .*initial= is given: LookupError: there"):
        group.average("count")
    assert group.healthy_actor_ids() == [0]
    found = WorkerGroup(list(group.actors().values()), initial=None).average("count")
    assert found.used == (0,)


# Subsets of weights: weights that were sent before remain.


def lose_weights(group: WorkerGroup, rank: int) -> None:
    """Reset the actor as a restart by Ray does."""
    ray.get(group.actors()[rank].build_anew.remote())
    group._worker_set.ranks[rank].why = TimeoutError("restarted")


@pytest.mark.parametrize("wire_dtype", WIRES)
def test_a_restored_worker_has_all_weights_after_a_subset(fresh: Fresh, wire_dtype: Any) -> None:
    group = fresh(wire_dtype=wire_dtype)
    group.broadcast({"w": np.full(5, 2.0), "n": np.int64(3)})
    for subset in ({"w": np.full(5, 4.0)}, {"w": np.full(5, 8.0)}, {"n": np.int64(6)}):
        group.broadcast(subset)
        before = group.step("get_weights")
        assert_same(before[1], before[0])
        lose_weights(group, 1)
        assert group.restore(timeout=60) == [1]
        assert_same(group.step("get_weights")[1], before[0])
    assert_same(before[0], FlatWeights({"w": np.full(5, 8.0), "n": np.int64(6)}))


def test_a_subset_that_is_sent_first_leaves_the_rest_to_the_lowest_rank(fresh: Fresh) -> None:
    subset, whole = {"w": np.full(5, 2.0)}, FlatWeights({"w": np.full(5, 2.0), "n": np.int64(0)})
    for kind in (subset, ray.put(subset), Round(ray.put(FlatWeights(subset)), [0])):
        group = fresh()
        group.broadcast(kind)
        lose_weights(group, 2)
        assert group.restore(timeout=60) == [2]
        for weights in group.step("get_weights").values():
            assert_same(weights, whole)


@pytest.mark.slow
@pytest.mark.parametrize("wire_dtype", WIRES)
def test_subsets_that_are_published_first_leave_the_rest_to_the_lowest_rank(
    fresh: Fresh, wire_dtype: Any
) -> None:
    whole = FlatWeights({"w": np.full(5, 2.0), "n": np.int64(0)})
    group = fresh(wire_dtype=wire_dtype)
    group.publish({"w": np.full(5, 1.0)})
    group.publish({"w": np.full(5, 2.0)})
    for weights in group.step("get_weights").values():
        assert_same(weights, whole)
    whole["n"][...] = 7
    group = fresh(wire_dtype=wire_dtype)
    group.publish({"w": np.full(5, 2.0)})
    group.publish(ray.put({"n": np.int64(7)}))
    for result in group.as_completed("get_weights", updates=6):
        assert_same(result.weights, whole)
    for weights in group.step("get_weights").values():
        assert_same(weights, whole)
    group = fresh(wire_dtype=wire_dtype, initial=own(4))
    group.publish({"n": np.int64(7)})
    assert group.average("get_weights").weights["w"].tolist() == [40.0] * 5


def test_a_subset_follows_a_reference_and_no_vector(fresh: Fresh) -> None:
    group = fresh()
    group.broadcast(ray.put(own(3)))
    group.broadcast({"n": np.int64(8)})
    lose_weights(group, 0)
    assert group.restore(timeout=60) == [0]
    assert_same(group.step("get_weights")[0], FlatWeights({**own(3), "n": np.int64(8)}))
    group.broadcast(np.arange(6.0))
    with pytest.raises(ValueError, match="expected all 2 parts, got 1: a subset can follow"):
        group.broadcast({"n": np.int64(1)})
    assert group.step("get_weights")[2]["w"].tolist() == [0, 1, 2, 3, 4]


def in_all(group: WorkerGroup) -> list[FlatWeights]:
    return list(group.step("get_weights").values())


@pytest.mark.parametrize(
    ("missed", "wire_dtype"),
    [
        pytest.param(*case, marks=() if case in MISSED else pytest.mark.slow)
        for case in itertools.product(("both", "the first", "none"), WIRES)
    ],
)
def test_subsets_of_names_that_are_not_known_add_up(
    fresh: Fresh, missed: str, wire_dtype: Any
) -> None:
    group = fresh(initial=None, wire_dtype=wire_dtype)
    group.step("ping", broadcast={"w": np.full(5, 2.0)}, ranks=None if missed == "none" else [0])
    group.step("ping", broadcast={"n": np.int64(7)}, ranks=[0] if missed == "both" else None)
    for weights in in_all(group):
        assert_same(weights, FlatWeights({"w": np.full(5, 2.0), "n": np.int64(7)}))
    group = fresh(initial=None, wire_dtype=wire_dtype)
    group.publish({"w": np.full(5, 2.0)})
    group.publish({"n": np.int64(7)})
    for weights in in_all(group):
        assert_same(weights, FlatWeights({"w": np.full(5, 2.0), "n": np.int64(7)}))


@pytest.fixture(scope="module")
def twin_actors(way: str, all_actors: Actors) -> Iterator[list[Any]]:
    with all_actors.loan() as lend:
        yield list(lend(Twins, 2).actors().values())


@pytest.mark.parametrize(
    ("given", "wire_dtype"),
    [
        pytest.param(*case, marks=() if case in GIVEN else pytest.mark.slow)
        for case in itertools.product(("weights", "reference", "later reference"), WIRES)
    ],
)
def test_subsets_of_one_shape_add_up_although_no_names_are_known(
    twin_actors: list[Any], given: str, wire_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh() -> WorkerGroup:
        ray.get([actor.build_anew.remote() for actor in twin_actors])
        return WorkerGroup(twin_actors, initial=None, wire_dtype=wire_dtype)

    if given == "later reference" and wire_dtype is None:
        monkeypatch.setattr(Latest, "_if_here", lambda self, ref: None)
    send: Callable[[Any], Any] = (lambda model: model) if given == "weights" else ray.put
    group = fresh()
    for name, value in (("a", 3.0), ("b", 4.0), ("a", 5.0)):
        group.step("ping", broadcast=send({name: np.full(5, value)}), ranks=[0])
    for weights in in_all(group):
        assert_same(weights, twins(5.0, 4.0))
    group = fresh()
    for name, value in (("a", 3.0), ("b", 4.0), ("a", 5.0)):
        group.publish(send({name: np.full(5, value)}))
    for weights in in_all(group):
        assert_same(weights, twins(5.0, 4.0))
    for names in ("ba", "aabb"):
        group = fresh()
        published = {"a": -1.0, "b": -2.0}
        loop = group.as_completed("train", updates=8)
        for value, (name, _) in enumerate(zip(names, loop, strict=False)):
            published[name] = float(value)
            group.publish(send({name: np.full(5, published[name])}))
        assert [found.number for found in loop][-1] == 8
        for weights in in_all(group):
            assert_same(weights, twins(published["a"], published["b"]))


def test_other_names_of_the_same_shapes_replace_all_weights(twin_actors: list[Any]) -> None:
    ray.get([actor.build_anew.remote() for actor in twin_actors])
    group = WorkerGroup(twin_actors, initial=None)
    group.broadcast(twins(1.0, 2.0))
    renamed = Latest().after({"x": np.zeros(5), "y": np.ones(5)}, ("", 1))
    assert renamed.is_unclear(twins(1.0, 2.0))
    renamed.own = ("a", "b")
    assert not renamed.is_changed_by(twins(1.0, 2.0))
    assert renamed.is_changed_by({"b": np.zeros(5)})


class ByPosition(PlainWorker):
    """Sets all weights of other names by position, as `TensorFlowVariables` does."""

    def set_weights(self, new_weights: Any, *, share: bool = False) -> None:
        if len(new_weights) == len(self.model) and not {*new_weights} & {*self.model}:
            new_weights = dict(zip(self.model, new_weights.values(), strict=True))
        super().set_weights(new_weights, share=share)


@pytest.mark.parametrize(
    "initial", ["lowest", pytest.param(None, marks=pytest.mark.slow), "by position"]
)
def test_no_subset_follows_weights_that_were_set_by_position(lend: Lend, initial: Any) -> None:
    by_position = {"x": np.full(5, 4.0), "y": np.int64(4)}
    given = by_position if initial == "by position" else initial
    group = lend(ByPosition, 2, initial=given)
    if given is not by_position:
        group.step("ping", broadcast=by_position, ranks=[0])
    subset = {"n": np.int64(8)}
    for call in (group.broadcast, lambda weights: group.step("ping", broadcast=weights)):
        with pytest.raises(ValueError, match=r"expected all 2 weights, got 1: .* have no 'x'"):
            call(subset)
    whole = FlatWeights({"w": np.full(5, 4.0), "n": np.int64(4)})
    assert_same(group.average("train", 0.0).weights, whole)
    group.broadcast(whole)
    group.broadcast(subset)
    for weights in in_all(group):
        assert_same(weights, FlatWeights({**whole, **subset}))


@pytest.mark.parametrize(("second", "third"), [("xy", "x"), ("x", "xy"), ("xy", "yz")])
def test_a_subset_after_a_subset_leaves_all_other_weights(second: str, third: str) -> None:
    latest, expected = Latest(), dict[str, float]()
    for number, names in enumerate(("xyz", second, third), start=1):
        expected |= dict.fromkeys(names, float(number))
        latest = latest.after({name: np.full(5, float(number)) for name in names}, ("", number))
    full = latest.in_full()
    assert full is not None
    weights = {name: part.tolist() for name, part in sent_weights(full).items()}
    assert weights == {name: [value] * 5 for name, value in expected.items()}


def test_a_subset_that_is_published_after_refused_weights_is_completed(fresh: Fresh) -> None:
    group = fresh()
    with pytest.raises(WorkerError, match="unknown names"):
        group.broadcast({"w": np.zeros(5), "n": np.int64(0), "x": np.zeros(1)})
    group.publish({"n": np.int64(8)})
    for weights in in_all(group):
        assert_same(weights, FlatWeights({**own(0), "n": np.int64(8)}))


def test_a_reference_to_a_subset_leaves_the_rest_to_the_latest_weights(fresh: Fresh) -> None:
    subset = FlatWeights({"n": np.int64(8)})
    for kind in (ray.put(subset), ray.put(dict(subset))):
        group = fresh()
        group.step("train")
        group.step("ping", broadcast=own(3), ranks=[0])
        group.step("ping", broadcast=kind, ranks=[0])
        for weights in in_all(group):
            assert_same(weights, FlatWeights({**own(3), "n": np.int64(8)}))
        group.publish({"w": np.full(5, 4.0)})
        for weights in in_all(group):
            assert_same(weights, FlatWeights({"w": np.full(5, 4.0), "n": np.int64(8)}))
    group = fresh(initial=ray.put(dict(own(4))))
    group.step("ping", ranks=[0])
    group.step("train", ranks=[0])
    group.step("ping", broadcast=subset)
    assert_same(in_all(group)[2], FlatWeights({**own(4), "n": np.int64(8)}))


def test_a_reference_that_comes_later_may_be_to_a_subset(
    fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Latest, "_if_here", lambda self, ref: None)
    group = fresh()
    group.broadcast(own(3))
    for value in (6, 7, 8):
        ref = ray.put(FlatWeights({"n": np.int64(value)}))
        group.step("ping", broadcast=ref, ranks=[0])
    for weights in in_all(group):
        assert_same(weights, FlatWeights({**own(3), "n": np.int64(8)}))
    group.step("ping", broadcast=ray.put(own(5)), ranks=[0])
    group.step("ping", broadcast={"n": np.int64(9)}, ranks=[1])
    for weights in in_all(group):
        assert_same(weights, FlatWeights({**own(5), "n": np.int64(9)}))


def test_weights_of_other_names_may_be_all_weights() -> None:
    before = Latest().after({"a": np.zeros(2), "b": np.zeros(3), "c": np.zeros(3)}, ("", 1))
    renamed = {"b": np.zeros(2), "c": np.zeros(3), "d": np.zeros(3)}
    assert not before.is_changed_by(renamed)
    assert before.after(renamed, ("", 2)).in_full().value is renamed  # type: ignore[union-attr]
    assert before.is_changed_by({"b": np.zeros(3), "more": np.zeros(9)})
    assert before.is_changed_by({"more": np.zeros(9)})
    before.own = before.names
    assert not before.is_changed_by({"more": np.zeros(9)})  # workers refuse it


def test_a_subset_that_follows_a_vector_is_refused_although_no_names_are_known(
    fresh: Fresh,
) -> None:
    message = "expected all 6 numbers, got 5: a subset can follow weights by name"
    subset = {"w": np.full(5, 2.0)}
    for initial in (np.arange(6.0), ray.put(np.arange(6.0))):
        group = fresh(initial=initial)
        for send in (group.broadcast, group.publish):
            with pytest.raises(ValueError, match=message):
                send(subset)
        assert group.average("train").weights["n"] == 5
        with pytest.raises(ValueError, match=message):
            group.broadcast(subset)
    group = fresh(initial=None)
    group.step("ping", broadcast=np.arange(6.0), ranks=[0])
    for send in (group.broadcast, group.publish):
        with pytest.raises(ValueError, match=message):
            send(subset)
    group.broadcast(own(3))
    assert_same(in_all(group)[1], own(3))
    group = fresh(initial=np.arange(6.0))
    group.publish(own(3))
    group.publish({"n": np.int64(9)})
    assert_same(in_all(group)[1], FlatWeights({**own(3), "n": np.int64(9)}))


@pytest.mark.parametrize("method", ["ping", "get_weights"])
def test_a_subset_that_comes_with_a_call_that_only_reads_drops_no_initial_weights(
    fresh: Fresh, method: str
) -> None:
    subset = {"n": np.int64(9)}
    group = fresh(initial=np.arange(6.0))
    with pytest.raises(ValueError, match="expected all 6 numbers, got 1: a subset can follow"):
        group.step(method, broadcast=subset)
    assert group.average("train").weights["n"] == 5
    for initial, start in ((own(5), own(5)), ("lowest", own(0))):
        group = fresh(initial=initial)
        group.step(method, broadcast=subset)
        for weights in group.step("get_weights").values():
            assert_same(weights, FlatWeights({**start, **subset}))


def test_a_restarted_worker_refuses_a_subset(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = PlainWorker()
    worker.variables = SimpleNamespace(layout=own(1).layout)
    stamp = ("group", 0)
    monkeypatch.setattr(_platform, "_was_restarted", lambda: True)
    _, wire = GroupWire("bfloat16").message({"n": np.int64(1)})
    with pytest.raises(ValueError, match="expected all weights, got 1 of 2: restarted"):
        worker.call_version((("other", 0), ("other", 0), None), wire.snapshot(), None)
    with pytest.raises(ValueError, match="expected all weights, got 1 of 2: restarted"):
        worker.call_version((stamp, stamp, None), {"n": np.int64(1)}, None)
    with pytest.raises(StaleWorkerError):
        worker.call_version((("group", 1), stamp, None), None, "train")
    worker.call_version((("group", 3), ("group", 2), None), own(1), None)
    worker.call_version((("group", 4), ("group", 4), None), {"n": np.int64(5)}, None)
    assert worker.model["n"] == 5
