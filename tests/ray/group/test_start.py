"""All workers start from the same weights, and none keeps weights that nobody sent."""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ray_pool import Actors, Lend, wait_until_dead
from ray_workers import PlainWorker, wait_for
from reference import assert_same

import flatweights as fw
from flatweights import FlatWeights
from flatweights.ray import Round, StaleWorkerError, WorkerError, WorkerGroup
from flatweights.ray.peers import _platform
from flatweights.ray.peers._latest import Latest
from flatweights.ray.results._wire import GroupWire

pytestmark = [pytest.mark.ray, pytest.mark.starts_actors]  # mostly over channels


WIRES = (None, "bfloat16")

LARGE = 20_000  # elements; beyond 100 KiB weights lie in shared memory


class Different(PlainWorker):
    """Workers that are built with different weights."""

    def __init__(self, rank: int = 0, size: int = 5) -> None:
        super().__init__(rank, size)
        self.model = own(rank, size)

    def give(self, value: Any) -> Any:
        return value


class Alike(PlainWorker):
    """Workers with two weights of one shape."""

    def __init__(self, rank: int = 0, size: int = 5) -> None:
        super().__init__(rank, size)
        parts = {"a": np.full(size, -1.0 - rank), "b": np.full(size, -2.0), "n": np.int64(-3)}
        self.model = FlatWeights(parts)


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
    start = own(7)
    for wire_dtype in WIRES:  # a call that brings weights needs no others
        group = fresh(wire_dtype=wire_dtype)
        assert_same(group.average("train", broadcast=start).weights, mean_of(start))


def test_initial_weights_are_those_that_are_given(fresh: Fresh) -> None:
    (found,) = fresh(initial=own(5)).run(1, "train")
    assert_same(found.weights, mean_of(own(5)))
    found = fresh(initial=np.array([1.0, 2, 3, 4, 5, 9])).average("train")
    assert_same(found.weights["w"], np.arange(1.0, 6.0) + 2)
    for mine in (own(5), OrderedDict(own(5).copy())):
        group = fresh(initial=mine)
        mine["w"] += 1
        assert_same(group.average("train").weights, mean_of(own(5)))
    starts = [after_training(own(rank), rank) for rank in range(3)]
    assert_same(fresh(initial=None).average("train").weights, fw.average(starts))


def test_results_may_have_parts_that_the_initial_weights_lack(fresh: Fresh) -> None:
    group = fresh(initial={"n": np.int64(9)})
    for value in ({"w": np.ones(5)}, [np.ones(5)], np.ones(5)):
        assert group.average("give", value).used == (0, 1, 2)
    sizes = [part.size for part in own(0).values()]
    rounds = group.run(1, "give", np.arange(sum(sizes), dtype=float))
    assert [found.used for found in rounds] == [(0, 1, 2)]


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


def in_all(group: WorkerGroup) -> list[FlatWeights]:
    return list(group.step("get_weights").values())


class Sends(NamedTuple):
    """What a group sends.

    Attributes:
        initial: The weights that all start from: "lowest", none, or those of these places.
        form: The form in which they are given.
        are_known: Whether weights behind references can be read at once.
        events: Calls, with the places of the weights that they send, and the form of these.
    """

    initial: str | set[int] | None
    form: str
    are_known: bool
    events: list[tuple[str, set[int], str]]


PLACES = st.sets(st.integers(0, 2), min_size=1)
FORMS = st.sampled_from(["dict", "FlatWeights", "Round", "reference", "reference to a dict"])
CALLS = st.sampled_from(["broadcast", "publish", "to all", "to one", "loop", "is lost"])
SENDS = st.builds(
    Sends,
    st.sampled_from(["lowest", None]) | PLACES,
    FORMS,
    st.booleans(),
    st.lists(st.tuples(CALLS, PLACES, FORMS), min_size=1, max_size=5),
)


def sent_as(form: str, weights: dict[str, Any]) -> Any:
    """Return weights in a form that groups take."""
    flat = FlatWeights(weights)
    forms = {"FlatWeights": flat, "Round": Round(flat, [0]), "dict": OrderedDict(weights)}
    return forms[form] if form in forms else ray.put(flat if form == "reference" else weights)


def send(group: WorkerGroup, call: str, weights: Any) -> None:
    """Send weights by a call, or let a worker lose its own."""
    if call == "broadcast":
        group.broadcast(weights)
    elif call == "publish":
        group.publish(weights)
    elif call == "loop":
        for _ in group.as_completed("get_weights", updates=2):
            group.publish(weights)
    elif call == "is lost":
        lose_weights(group)
    else:
        group.step("ping", broadcast=weights, ranks=[0] if call == "to one" else None)


def lose_weights(group: WorkerGroup) -> None:
    """Restore a worker after it has started anew, as after a restart by Ray."""
    ray.get(group.actors()[1].build_anew.remote())
    group._worker_set.ranks[1].why = TimeoutError("restarted")
    assert group.restore(timeout=60) == [1]


@pytest.fixture(scope="module")
def alike(way: str, all_actors: Actors) -> Iterator[list[Any]]:
    with all_actors.loan() as lend:
        yield list(lend(Alike, 2, LARGE).actors().values())


@pytest.mark.parametrize("wire_dtype", WIRES)
@pytest.mark.parametrize("are_alike", [False, True])
@settings(max_examples=40)
@given(sends=SENDS)
@example(Sends(None, "dict", False, [("to one", {k}, "reference") for k in (0, 1, 0)]))
@example(Sends(None, "dict", True, [("to one", {0}, "dict"), ("to all", {1}, "dict")]))
@example(Sends("lowest", "dict", False, [("to one", {k}, "reference") for k in (0, 1, 1)]))
@example(Sends("lowest", "dict", True, [("broadcast", {k}, "dict") for k in (0, 1)]))
@example(Sends(None, "dict", True, [("publish", {0}, "dict"), ("loop", {1}, "dict")]))
def test_workers_have_all_weights_whichever_parts_were_sent(
    actors: list[Any], alike: list[Any], are_alike: bool, wire_dtype: Any, sends: Sends
) -> None:
    """The rest are the initial weights, or those of the worker."""
    actors = alike if are_alike else actors
    ray.get([actor.build_anew.remote() for actor in actors])
    kind = functools.partial(Alike, size=LARGE) if are_alike else Different
    expected = [dict(kind(rank).model) for rank in range(len(actors))]
    names = [*expected[0]]

    def filled(places: set[int], value: float) -> dict[str, Any]:
        chosen = {names[place % len(names)] for place in places}
        return {name: np.full_like(expected[0][name], value) for name in names if name in chosen}

    initial: Any = sends.initial
    start = expected[0]
    if isinstance(initial, set):
        # Another name of the same shape may be that of all weights, by position.
        start = filled({0, 1, 2} if are_alike else initial, 99)
        initial = sent_as(sends.form, start)
    has_begun = initial is None
    with pytest.MonkeyPatch.context() as patched:
        if not sends.are_known:
            patched.setattr(Latest, "_if_here", lambda self, ref: None)
        group = WorkerGroup(actors, initial=initial, wire_dtype=wire_dtype)
        for number, (call, places, form) in enumerate(sends.events, 1):
            if initial is None and not sends.are_known:  # a reference makes calls ask for names
                form, call = "reference", "to one" if call in ("publish", "loop") else call
            weights = filled(places, number)
            send(group, call, sent_as(form, weights))
            if call != "is lost":
                starts = {} if has_begun else start
                expected = [{**own, **starts, **weights} for own in expected]
                has_begun = True
        for _ in range(2):
            for found, own in zip(in_all(group), expected, strict=True):
                assert_same(found, FlatWeights(own))
            lose_weights(group)


def test_weights_of_other_names_may_be_all_weights() -> None:
    before = Latest().after({"a": np.zeros(2), "b": np.zeros(3), "c": np.zeros(3)}, ("", 1))
    renamed = {"b": np.zeros(2), "c": np.zeros(3), "d": np.zeros(3)}
    assert not before.is_changed_by(renamed)
    assert before.after(renamed, ("", 2)).in_full().value is renamed  # type: ignore[union-attr]
    assert before.is_changed_by({"b": np.zeros(3), "more": np.zeros(9)})
    assert before.is_changed_by({"more": np.zeros(9)})
    before.own = before.names
    assert not before.is_changed_by({"more": np.zeros(9)})  # workers refuse it
    by_position = Latest().after({"x": np.zeros(5), "y": np.ones(5)}, ("", 1))
    assert by_position.is_unclear({"a": np.ones(5), "b": np.ones(5)})
    by_position.own = ("a", "b")
    assert not by_position.is_changed_by({"a": np.ones(5), "b": np.ones(5)})
    assert by_position.is_changed_by({"b": np.zeros(5)})


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


def test_a_subset_that_is_published_after_refused_weights_is_completed(fresh: Fresh) -> None:
    group = fresh()
    with pytest.raises(WorkerError, match="unknown names"):
        group.broadcast({"w": np.zeros(5), "n": np.int64(0), "x": np.zeros(1)})
    group.publish({"n": np.int64(8)})
    for weights in in_all(group):
        assert_same(weights, FlatWeights({**own(0), "n": np.int64(8)}))


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
    group.broadcast(np.arange(6.0))
    with pytest.raises(ValueError, match="expected all 2 parts, got 1: a subset can follow"):
        group.broadcast({"n": np.int64(1)})
    assert in_all(group)[2]["w"].tolist() == [0, 1, 2, 3, 4]
    group = fresh(initial=np.arange(6.0))
    group.publish(own(3))
    group.publish({"n": np.int64(9)})
    assert_same(in_all(group)[1], FlatWeights({**own(3), "n": np.int64(9)}))
    # A call that only reads drops no initial weights.
    subset = {"n": np.int64(9)}
    for method in ("ping", "get_weights"):
        group = fresh(initial=np.arange(6.0))
        with pytest.raises(ValueError, match="expected all 6 numbers, got 1: a subset can follow"):
            group.step(method, broadcast=subset)
        assert group.average("train").weights["n"] == 5
        for initial, start in ((own(5), own(5)), ("lowest", own(0))):
            group = fresh(initial=initial)
            group.step(method, broadcast=subset)
            assert_same(in_all(group)[2], FlatWeights({**start, **subset}))


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
