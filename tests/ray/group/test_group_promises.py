"""The promises of a group under all faults: names of ranks, one version, no call twice."""

import gc
import os
import pickle
import re
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray_pool import Actors, Lend
from ray_workers import PlainWorker, trained, wait_for, weights_of
from reference import same_bits

import flatweights as fw
from flatweights import FlatWeights
from flatweights.ray import (
    FlatWorker,
    RefusedWeightsError,
    Round,
    StaleWorkerError,
    StoreTooSmallError,
    WorkerError,
    WorkerGroup,
    average,
)
from flatweights.ray.peers import _wait as engine
from flatweights.ray.peers._transport import Head, Stamp
from flatweights.ray.results._result import Packed
from flatweights.ray.support._errors import has_left_weights, reason_in_a_line, reason_of

pytestmark = [pytest.mark.ray, pytest.mark.starts_actors]  # mostly over channels

LARGE = 80_000  # elements; in 16 bits, too, beyond what travels by value


class TwoArgumentsError(Exception):
    """Does not unpickle."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Told(PlainWorker):
    """Waits, trains and refuses on orders; its weights may be float32, for the wire."""

    def __init__(self, rank: int = 0, size: int = 5) -> None:
        super().__init__(rank, size)
        self.model = FlatWeights({"w": np.ones(size, np.float32), "n": np.int64(0)})

    def set_weights(self, new_weights: Any, *, share: bool = False) -> None:
        if new_weights["w"][0] > 50:
            raise ValueError("too large")
        super().set_weights(new_weights)

    def wait_and_train(self, where: str) -> FlatWeights:
        Path(where, f"{self.rank} began").touch()
        wait_for(Path(where) / "go on")
        return self.train()

    def give(self, rank: int, value: Any, otherwise: Any) -> Any:
        return value if rank == self.rank else otherwise

    def raise_two_arguments(self) -> None:
        raise TwoArgumentsError(1, 2)

    def raise_text(self, rank: int, size: int) -> FlatWeights:
        if rank == self.rank:
            raise OSError("x" * size + "end")
        return self.get_weights()

    def takes_all(self, **options: Any) -> tuple[FlatWeights, Any]:
        return self.get_weights(), options


class AsyncTold(Told):
    """An async actor."""

    async def train_async(self) -> FlatWeights:
        return self.train()

    def train_step_by_step(self) -> Iterator[FlatWeights]:
        yield self.train()

    async def train_async_step_by_step(self) -> AsyncIterator[FlatWeights]:
        yield self.train()


def head(stamp: Stamp, version: Stamp | None) -> Head:
    return stamp, version, None


def start_of(value: float, size: int = 5) -> FlatWeights:
    return FlatWeights({"w": np.full(size, value, np.float32), "n": np.int64(3)})


@pytest.fixture(scope="module")
def three(way: str, all_actors: Actors) -> Iterator[WorkerGroup]:
    with all_actors.loan() as lend:
        yield lend(Told, 3, max_restarts=-1)


@pytest.fixture(scope="module")
def wired(way: str, all_actors: Actors) -> Iterator[WorkerGroup]:
    with all_actors.loan() as lend:
        yield lend(Told, 3, LARGE, wire_dtype="bfloat16", max_restarts=-1)


def heal(group: WorkerGroup) -> None:
    for _ in range(600):
        if len(group.healthy_actor_ids()) == len(group.actors()):
            return
        group.restore(timeout=60)
        threading.Event().wait(0.1)
    raise AssertionError(group.unhealthy)


@pytest.fixture
def group(three: WorkerGroup) -> WorkerGroup:
    heal(three)
    three.broadcast(start_of(1.0))
    return three


def bits(group: WorkerGroup) -> list[bytes]:
    return [weights.buffer.tobytes() for weights in group.step("get_weights").values()]


# Ranks are those of the group, though some are not called.


def without_rank_0(group: WorkerGroup) -> None:
    group._worker_set.ranks[0].why = TimeoutError("away")


@pytest.mark.parametrize("plan", ["at once", "streamed"])
def test_errors_name_the_ranks_of_the_group(group: WorkerGroup, plan: str) -> None:
    if plan == "streamed":
        group = WorkerGroup(list(group.actors().values()), max_inflight=1)
    options: dict[str, Any] = {"min_results": 1}
    without_rank_0(group)
    good, nan = np.ones(3), np.array([1.0, np.nan, 1.0])
    with pytest.raises(ValueError, match=r"^rank 2: holds NaN"):
        group.average("give", 2, nan, good, **options)
    found = group.average("give", 2, (nan, "x"), (good, "y"), nonfinite="skip", **options)
    assert (found.used, found.quarantined, found.extras) == ((1,), (2,), {1: "y"})
    assert str(found.failed[2]).startswith("rank 2: holds NaN")
    assert found.record()["failed"]["2"] == "ValueError: rank 2: holds NaN or infinity"
    with pytest.raises(ValueError, match=r"^rank 2\b.*expected.*\(rank 1 gave what is expected\)"):
        group.average("give", 2, np.ones(4), good, **options)
    with pytest.raises(ValueError, match=r"^weight of rank 2: expected a finite weight"):
        group.average("give", 2, -good, good, weights=lambda result: float(result[0]), **options)
    with pytest.raises(WorkerError, match=r"^rank 0: TimeoutError: away\nrank 2: ValueError: rank"):
        group.average("give", 2, nan, good, nonfinite="skip", **options | {"min_results": 2})
    weighed = group.average("give", 2, 3 * good, good, weights=[100, 3, 1], **options)
    assert weighed.weights.tolist() == [1.5] * 3
    group._worker_set.ranks[0].why = None


# A broadcast happened, or it did not.


def begin_twice(group: WorkerGroup, elements: int) -> None:
    """Send weights in full, and then as changes, if the group has a wire."""
    heal(group)
    group.broadcast(start_of(1.0, elements))
    group.broadcast(start_of(1.25, elements))


class Checking:
    """Variables that check all weights before they set any, as TensorFlowVariables."""

    layout = weights_of(1.0).layout
    scatters_weights = True

    def set_weights(self, *_: Any, **__: Any) -> None:
        raise ValueError("unknown names")

    set_flat = gather_into = scatter = set_weights


class Torn:
    """Variables of which half are set when told to fail."""

    layout = FlatWeights({"w": np.zeros(2)}).layout

    def __init__(self) -> None:
        self.values = np.zeros(2)
        self.fails = False

    def gather_into(self, buffer: Any) -> None:
        self.layout.packed_views(buffer)[0][...] = self.values

    def scatter(self, buffer: Any) -> None:
        (view,) = self.layout.packed_views(buffer)
        self.values[0] = view[0]
        if self.fails:
            raise OSError("half-way")
        self.values[1] = view[1]


class TornWorker(FlatWorker):
    def build(self) -> Any:
        return Torn()


def by_channel(value: float) -> Any:
    """Weights as commands of channels bring them."""
    weights = FlatWeights({"w": np.full(2, value)})
    return Packed(weights.buffer, weights.layout)


@pytest.mark.parametrize("method", [None, "get_weights"])
def test_a_worker_does_not_hold_weights_that_it_could_not_set(method: str | None) -> None:
    worker = TornWorker()
    worker.variables.fails = True
    weights = by_channel(1.0)
    buffer = weakref.ref(weights.buffer)
    gc.disable()
    try:
        with pytest.raises((OSError, RuntimeError), match="half-way") as why:
            worker.call_version(head(("group", 1), ("group", 1)), weights, method)
        del weights, why
        assert buffer() is None
    finally:
        gc.enable()


class WithoutChange(FlatWorker):
    def build(self) -> Any:
        return Checking()


def test_refused_weights_that_changed_nothing_cost_no_training() -> None:
    """The group sends no earlier weights again, which would undo what workers trained since."""
    stamp = ("group", 0)
    for worker, is_unchanged in ((WithoutChange(), True), (PlainWorker(), False)):
        for number, method in ((1, None), (2, "train")):
            with pytest.raises((ValueError, KeyError, RuntimeError), match="unknown names") as why:
                worker.call_version(head(("group", number), stamp), {"x": np.ones(1)}, method)
            arrived = pickle.loads(ray.cloudpickle.dumps(why.value))
            assert has_left_weights(arrived) == is_unchanged


@pytest.mark.parametrize(
    ("size", "how"),
    [
        ("wire", "average"),
        pytest.param("wire", "step", marks=pytest.mark.slow),
        pytest.param("plain", "step", marks=pytest.mark.slow),
        ("plain", "broadcast"),
    ],
)
def test_where_no_worker_is_healthy_weights_bring_those_back_that_take_them(
    three: WorkerGroup, wired: WorkerGroup, size: str, how: str
) -> None:
    group, elements = (wired, LARGE) if size == "wire" else (three, 5)
    begin_twice(group, elements)
    before = bits(group)
    without_any(group)
    with pytest.raises(WorkerError, match=r"rank 0: ValueError: too large\nrank 1: Value"):
        send(group, how, start_of(100.0, elements))
    assert group.healthy_actor_ids() == []
    assert group.restore(timeout=60) == [0, 1, 2]
    assert bits(group) == before
    without_any(group)
    send(group, how, start_of(3.0, elements))
    assert group.healthy_actor_ids() == [0, 1, 2]
    assert {*bits(group)} == {start_of(3.0, elements).buffer.tobytes()}


def without_any(group: WorkerGroup) -> None:
    for rank in group.actors():
        group._worker_set.ranks[rank].why = TimeoutError("away")


def pid_of(actor: Any) -> int:
    for _ in range(1200):  # Ray takes a while to restart an actor
        try:
            pid: int = ray.get(actor.__ray_call__.remote(lambda worker: os.getpid()))
        except ray.exceptions.RayActorError:
            threading.Event().wait(0.05)
        else:
            return pid
    raise AssertionError("the actor has not come back")


@pytest.mark.slow
def test_workers_that_all_restart_before_the_first_broadcast_come_back_with_it(lend: Lend) -> None:
    group = lend(Told, 2, max_restarts=-1)
    group.step("ping")
    before = {rank: pid_of(actor) for rank, actor in group.actors().items()}
    for rank, actor in group.actors().items():
        ray.kill(actor, no_restart=False)
        while pid_of(actor) == before[rank]:  # it takes effect later: until then it answers
            threading.Event().wait(0.01)
    with pytest.raises(WorkerError):
        group.step("ping")
    assert group.healthy_actor_ids() == []
    assert group.broadcast(start_of(1.0), timeout=60) == [0, 1]
    assert group.average("get_weights").used == (0, 1)
    assert set(bits(group)) == {start_of(1.0).buffer.tobytes()}


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def lost() -> None:
    raise ValueError("lost")


@ray.remote(num_cpus=0)
class Owner:
    def put(self) -> list[Any]:
        return [ray.put(start_of(5.0, LARGE))]


def ref_without_owner() -> Any:
    owner: Any = Owner.remote()  # type: ignore[attr-defined]
    (ref,) = ray.get(owner.put.remote())
    ray.kill(owner)
    for _ in range(1200):  # until Ray has noticed
        try:
            ray.get(ref)
        except ray.exceptions.OwnerDiedError:
            return ref
        threading.Event().wait(0.05)
    raise AssertionError("the object has outlived its owner")


class NotHere:
    """Weights that no worker can unpickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _raise_value_error, ()


def _raise_value_error() -> None:
    raise ValueError("lost")


BROKEN: dict[str, Callable[[], Any]] = {
    "task": lambda: lost.remote(),
    "owner": ref_without_owner,
    "class": NotHere,
    "session": ray.ObjectRef.from_random,  # another one
}


def send(
    group: WorkerGroup,
    how: str,
    weights: Any,
    argument: Any = None,
) -> None:
    """Send ``weights``, alone or with a call."""
    call = ("get_weights",) if argument is None else ("give", -1, argument, None)
    if how == "broadcast":
        group.broadcast(weights)
    elif how == "step":
        group.step(*call, broadcast=weights)
    else:
        group.average(*call, broadcast=weights)


@pytest.mark.parametrize(
    ("how", "what"),
    [(how, "task") for how in ("broadcast", "step", "average")]
    + [("broadcast", "session"), ("average", "session")]
    + [pytest.param("average", "owner", marks=pytest.mark.slow), ("average", "class")],
)
def test_weights_that_reached_nobody_are_not_the_latest(
    group: WorkerGroup, how: str, what: str
) -> None:
    group.step("forget_calls")
    error: Any = WorkerError, r"rank [012]: .*(lost|OwnerDiedError)"
    if what == "session":
        error = ValueError, "owner is unknown"
    with pytest.raises(error[0], match=error[1]):
        send(group, how, BROKEN[what]())
    assert group.healthy_actor_ids() == [0, 1, 2]
    without_rank_0(group)
    assert group.restore(timeout=60) == [0]
    assert set(bits(group)) == {start_of(1.0).buffer.tobytes()}


@pytest.mark.parametrize("how", ["step", "average"])
def test_ranks_whose_call_did_not_begin_get_its_weights_with_the_next(
    group: WorkerGroup, how: str
) -> None:
    with pytest.raises(WorkerError, match=r"rank [012]: ValueError: lost"):
        send(group, how, start_of(5.0), argument=lost.remote())
    assert group.healthy_actor_ids() == [0, 1, 2]
    assert set(bits(group)) == {start_of(5.0).buffer.tobytes()}
    assert group.healthy_actor_ids() == [0, 1, 2]


def test_weights_that_some_rank_took_before_its_method_raised_are_the_latest(
    group: WorkerGroup,
) -> None:
    with pytest.raises(WorkerError, match=r"rank [012]: ArithmeticError: diverged"):
        group.average("act", dict.fromkeys(range(3), "raise"), broadcast=start_of(2.0))
    without_rank_0(group)
    assert group.restore(timeout=60) == [0]
    assert bits(group)[0] == start_of(2.0).buffer.tobytes()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ray.exceptions.ObjectStoreFullError, StoreTooSmallError),
        (KeyboardInterrupt, KeyboardInterrupt),
    ],
)
def test_weights_that_could_not_be_put_are_not_the_latest(
    wired: WorkerGroup, monkeypatch: pytest.MonkeyPatch, error: Any, expected: Any
) -> None:
    heal(wired)
    wired.broadcast(start_of(1.0, LARGE))
    wired.step("forget_calls", broadcast=start_of(1.5, LARGE))
    with monkeypatch.context() as patched:
        patched.setattr(ray, "put", raising(error))
        with pytest.raises(expected) as caught:
            wired.broadcast(start_of(3.0, LARGE))
        with pytest.raises(expected):
            wired.average("train", broadcast=start_of(3.0, LARGE))
    if expected is StoreTooSmallError:
        assert re.search(r"need at least \(3 \+ 2\) \* [\d,]+ = [\d,]+ bytes", str(caught.value))
    assert wired.step("how_often") == {0: 0, 1: 0, 2: 0}
    without_rank_0(wired)
    assert wired.restore(timeout=60) == [0]
    assert np.all(wired.average("get_weights").weights["w"] == 1.5)


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("is_wired", [False, True], ids=["plain", "16 bits"])
def test_a_call_that_brings_weights_gives_what_two_calls_give(
    group: WorkerGroup, wired: WorkerGroup, is_wired: bool
) -> None:
    if is_wired:
        heal(wired)
        group = wired
    start = start_of(1.0, LARGE if group is wired else 5)

    def as_two_calls(broadcast: Any) -> Round:
        group.broadcast(broadcast)
        return group.average("train")

    def as_one_call(broadcast: Any) -> Round:
        return group.average("train", broadcast=broadcast)

    averages = []
    for call in (as_two_calls, as_one_call):
        group.broadcast(start)
        first = call(start)
        averages.append(call(first).weights)
    assert same_bits(averages[0].buffer, averages[1].buffer)
    assert averages[0]["w"][0] > start["w"][0]


# No call runs twice, and none beside newer weights.


def test_a_worker_runs_no_call_twice_and_none_on_other_weights() -> None:
    worker = Told()
    stamps = [("group", number) for number in range(7)]
    result = worker.call_version(head(stamps[1], stamps[0]), start_of(2.0), "train")
    assert same_bits(result.buffer, trained(start_of(2.0), 0).buffer)
    with pytest.raises(StaleWorkerError, match="call 1 came again or too late, after call 1"):
        worker.call_version(head(stamps[1], stamps[0]), None, "train")
    with pytest.raises(RefusedWeightsError, match=r"^ValueError: too large$"):
        worker.call_version(head(stamps[3], stamps[2]), start_of(100.0), "train")
    with pytest.raises(StaleWorkerError, match="expected weights of version 2, got 0"):
        worker.call_version(head(stamps[4], stamps[2]), None, "train")
    with pytest.raises(StaleWorkerError, match="call 3 came again or too late, after call 4"):
        worker.call_version(head(stamps[3], stamps[2]), start_of(5.0), "train")
    assert same_bits(worker.get_weights().buffer, result.buffer)
    worker.call_version(head(stamps[5], stamps[0]), start_of(2.0), None)
    another = ("another", 1), ("another", 0)
    with pytest.raises(StaleWorkerError, match="expected weights of version 0, got 0 of another"):
        worker.call_version(head(*another), None, "train")
    worker.call_version(head(("another", 2), None), None, "ping")
    # As after a broadcast that only a late worker took.
    with pytest.raises(StaleWorkerError, match="expected no weights of the group, got version 0"):
        worker.call_version(head(stamps[6], None), None, "train")
    # As on a restarted actor: restored first, then the fatal call again.
    again = PlainWorker()
    again.call_version(head(stamps[2], stamps[0]), weights_of(1.0), None)
    for weights in (None, weights_of(5.0)):
        with pytest.raises(StaleWorkerError, match="call 1 came again or too late, after call 2"):
            again.call_version(head(stamps[1], stamps[0]), weights, "train")
    assert (worker.calls, again.calls) == (1, 0)


def test_after_an_interrupt_weights_are_sent_once_the_call_has_ended(
    way: str, lend: Lend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Workers that run several calls at a time would train on weights that were sent early."""
    group = lend(Told, 2, max_restarts=-1, max_concurrency=4)
    group.broadcast(start_of(1.0))

    def interrupt(*arguments: Any) -> Any:
        for rank in range(2):
            wait_for(tmp_path / f"{rank} began")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine, "wait_any", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(group.run(1, "wait_and_train", str(tmp_path)))
    timer = threading.Timer(0.5, (tmp_path / "go on").touch)
    timer.start()
    (found,) = group.run(1, "train")
    timer.join()
    expected = fw.average([trained(start_of(1.0), rank) for rank in range(2)])
    assert same_bits(found.weights.buffer, expected.buffer)
    assert set(bits(group)) == {expected.buffer.tobytes()}


def test_run_brings_back_workers_whose_refusals_nobody_has_read(group: WorkerGroup) -> None:
    another = WorkerGroup(list(group.actors().values()), initial=None)
    for _ in range(10):
        group.broadcast(start_of(1.0))
        another.broadcast(start_of(2.0))
        with pytest.raises(WorkerError, match="StaleWorkerError"):
            group.average("train")  # it raises at the first one that it reads
        (found,) = group.run(1, "train")
        assert (found.used, found.failed) == ((0, 1, 2), {})


@pytest.mark.skipif(
    not hasattr(ray.exceptions, "UnserializableException"),
    reason="an older Ray tells of a failure of its own, so the rank is restored",
)
@pytest.mark.parametrize("call", ["step", "average"])
def test_an_error_that_does_not_unpickle_leaves_its_actor_healthy(
    group: WorkerGroup, call: str
) -> None:
    reason = r"[\w.]*TwoArgumentsError: 1 and 2"
    with pytest.raises(WorkerError, match=rf"^rank [012]: {reason}(\nrank [12]: {reason})*$"):
        getattr(group, call)("raise_two_arguments")
    assert group.healthy_actor_ids() == [0, 1, 2]
    with pytest.raises(WorkerError, match=rf"^rank [012]: {reason}"):
        getattr(group, call)("raise_two_arguments", broadcast=start_of(2.0))
    assert group.average("get_weights").used == (0, 1, 2)
    assert set(bits(group)) == {start_of(2.0).buffer.tobytes()}


GROUP = """
  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 3, in train
  |     raise ExceptionGroup("two shards", [ValueError("1"), TwoArgumentsError(1, 2)])
  | ExceptionGroup: two shards (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: 1
    +------------------------------------
"""
LINES = """Traceback (most recent call last):
  File "train.py", line 3, in train
    raise TwoArgumentsError("a shard", "another")
__main__.TwoArgumentsError: a shard is missing:
  see the log
"""


@pytest.mark.skipif(
    not hasattr(ray.exceptions, "UnserializableException"), reason="an older Ray has no such error"
)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GROUP, "ExceptionGroup: two shards (2 sub-exceptions)"),
        (LINES, "__main__.TwoArgumentsError: a shard is missing:\n  see the log"),
        ("no traceback", "no traceback"),
    ],
)
def test_errors_of_users_are_shown_with_all_of_their_text(text: str, expected: str) -> None:
    error = ray.exceptions.UnserializableException(text)
    assert reason_of(error) == expected
    assert reason_in_a_line(error) == expected.splitlines()[0]

    class Ends(BaseException):
        pass

    error = ray.exceptions.RayTaskError("train", "many\nlines", Ends("mine"))
    assert str(WorkerError({1: error})) == "rank 1: Ends: mine", "it is no exception"


def test_a_method_that_is_async_or_yields_is_refused(lend: Lend) -> None:
    group = lend(AsyncTold, 1)
    for call in (group.step, group.average):
        with pytest.raises(WorkerError, match="TypeError: expected a plain method, got an async o"):
            call("train_async")
        with pytest.raises(WorkerError, match="got an async one: 'train_async_step_by_step'"):
            call("train_async_step_by_step")
        with pytest.raises(WorkerError, match="expected a plain method, got one that yields"):
            call("train_step_by_step")
    assert group.step("how_often") == {0: 0}


# Arguments are checked, and go to the right place.


def test_run_gives_all_other_arguments_to_the_method(group: WorkerGroup) -> None:
    (found,) = group.run(1, "takes_all", out=1, payload_kind="gradients")
    assert found.extras[0] == {"out": 1, "payload_kind": "gradients"}
    (found,) = group.run(1, "takes_all", head=1, new_weights=2)
    assert found.extras[0] == {"head": 1, "new_weights": 2}


@pytest.mark.parametrize("timeout", [1e16, 10**400])
def test_a_timeout_may_be_longer_than_clocks_count(group: WorkerGroup, timeout: Any) -> None:
    group.broadcast(start_of(2.0), timeout=timeout)
    assert group.step("ping", timeout=timeout) == dict.fromkeys(range(3), "pong")
    without_rank_0(group)
    assert group.restore(timeout=timeout) == [0]
    assert group.average("get_weights", timeout=timeout).used == (0, 1, 2)
    (found,) = group.run(1, "train", timeout=timeout)
    assert found.used == (0, 1, 2)
    assert average([ray.put(np.ones(2))], timeout=timeout).weights.tolist() == [1.0, 1.0]


def test_texts_of_errors_are_cut_where_they_are_shown(
    group: WorkerGroup, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(WorkerError) as caught:
        group.average("raise_text", 1, 300_000)
    assert len(str(caught.value)) < 4000
    assert str(caught.value).startswith("rank 1: OSError: xxx")
    assert str(caught.value).endswith("... [300,003 characters] ... " + "x" * 497 + "end")
    with caplog.at_level("INFO", logger="flatweights"):
        found = group.average("raise_text", 1, 300_000, min_results=2)
    assert len(found.record()["failed"]["1"]) < 4000
    assert "rank 1: OSError: xxx" in caplog.text
    assert len(caplog.text) < 10_000


def test_a_driver_of_ray_client_is_told_before_it_starts_actors(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    calls: list[Callable[[], Any]] = [
        lambda: WorkerGroup.create(PlainWorker, 1, num_cpus=0),
        lambda: WorkerGroup(list(group.actors().values())),
        lambda: average([ray.put(np.zeros(2))]),
    ]
    monkeypatch.setattr(PlainWorker, "__init__", raising(AssertionError))
    for call in calls:
        with pytest.raises(RuntimeError, match="expected a driver in Ray's cluster, got one that"):
            call()


# A method returns weights or gradients.


def test_a_result_that_is_no_model_of_the_workers_is_named(group: WorkerGroup) -> None:
    actors = list(group.actors().values())
    wrong: dict[str, Any] = {
        "parts of the names 'loss'": {"loss": [0.3]},
        "parts of the names 'x', 'y'": FlatWeights({"x": np.ones(2), "y": np.ones(2)}),
        r"2 parts of the shapes \[\(5,\), \(5,\)\]": [np.ones(5), np.ones(5)],
        r"an array of the shape \(7,\)": np.ones(7),
        "float64": np.float64(3),
        "float": 0.3,
        "NoneType": None,
        "PosixPath": Path(),
    }
    again = WorkerGroup(actors)
    again.broadcast(start_of(1.0))
    for got, value in wrong.items():
        refused = f"^rank 0: expected weights .* from 'give', got {got}: should it return"
        with pytest.raises(TypeError, match=refused):
            again.average("give", 0, value, value)
        with pytest.raises(TypeError, match=refused):
            list(again.run(1, "give", 0, (value, "extras"), (value, "extras")))
    right: list[Any] = [
        start_of(1.0),
        {"n": np.int64(3)},
        [np.ones(5)],
        np.ones(6),
        np.ones(3),
        FlatWeights({"v": np.ones(5, np.float32), "m": np.int64(3)}),
    ]
    for value in right:
        assert again.average("give", 0, value, value).used == (0, 1, 2)
    unknown = WorkerGroup(actors, initial=None)
    assert unknown.average("give", 0, np.ones(7), np.ones(7)).used == (0, 1, 2)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ([np.ones(5), np.int64(3)], "a list of 2"),
        (np.ones(3), r"an array of the shape \(3,\)"),  # gradients
    ],
)
def test_run_names_the_method_whose_result_cannot_be_sent_to_workers(
    group: WorkerGroup, value: Any, got: str
) -> None:
    before = bits(group)
    refused = f"^rank 1: expected weights by name from 'give', .*6 elements.*; got {got}: should it"
    with pytest.raises(TypeError, match=refused):
        list(group.run(1, "give", 0, value, value, ranks=[1, 2]))
    assert bits(group) == before
    vector = np.arange(6.0)
    assert [result.used for result in group.run(1, "give", 0, vector, vector)] == [(0, 1, 2)]


@pytest.mark.parametrize("method", ["average", "step"])
def test_arguments_of_workers_that_come_back_may_remove_others(lend: Lend, method: str) -> None:
    group = lend(PlainWorker, 3)
    group.broadcast(start_of(1.0))
    for record in group._worker_set.ranks.records.values():
        record.leave_out(TimeoutError("it was late"))

    def remove(rank: int) -> tuple[float]:
        if len(group.actors()) == 3:
            group.remove(1, kill=False)
        return (1.0,)

    found = getattr(group, method)("train", arguments=remove)
    assert tuple(found if method == "step" else found.used) == (0, 2)


def test_weights_of_a_run_that_broke_off_are_let_go_of_with_the_next_ones(
    group: WorkerGroup,
) -> None:
    with pytest.raises(WorkerError, match="diverged"):
        list(group.run(1, "act", dict.fromkeys(range(3), "raise")))
    latest = weakref.ref(group._worker_set.latest)
    assert latest() is not None
    assert len(list(group.run(1, "train"))) == 1
    gc.collect()
    assert latest() is None


def test_nan_is_sent_as_it_is_and_found_in_the_next_average(group: WorkerGroup) -> None:
    not_finite = start_of(np.nan)
    assert group.broadcast(not_finite) == [0, 1, 2]
    assert set(bits(group)) == {not_finite.buffer.tobytes()}
    with pytest.raises(ValueError, match=r"^rank 0, slot 0 'w': holds NaN"):
        group.average()
    group.publish(start_of(1.0))
    assert group.average("train").used == (0, 1, 2)


# Workers get the weights of the round itself.


def models() -> dict[str, Any]:
    arrays = {"a": np.arange(3.0), "b": np.ones((2, 2))}
    return {
        "array": arrays["a"],
        "dict": arrays,
        "list": list(arrays.values()),
        "FlatWeights": FlatWeights(arrays),
    }


@pytest.mark.parametrize("max_inflight", [1, 4])
@pytest.mark.parametrize("kind", models())
def test_the_average_cannot_be_changed(kind: str, max_inflight: int) -> None:
    model = models()[kind]
    found = average([ray.put(model), ray.put(model)], max_inflight=max_inflight)
    weights = found.weights
    assert type(weights) is type(model)
    parts = list(weights.values()) if isinstance(weights, dict) else weights
    parts = [parts] if kind == "array" else parts
    for part in parts:
        with pytest.raises(ValueError, match="read-only"):
            part += 1
    with pytest.raises(AttributeError):
        found.weights = model  # type: ignore[misc]


def test_what_is_sent_is_what_the_weights_are(group: WorkerGroup) -> None:
    by_name = group.average("give", -1, None, dict(start_of(1.0)))
    assert by_name.ref is by_name.ref
    by_name.weights["w"] = np.full(5, 7, np.float32)  # a dict is the user's to fill
    group.broadcast(by_name)
    assert group.step("get_weights")[2]["w"].tolist() == [7.0] * 5
    out = start_of(0.0, LARGE)
    found = group.average("give", -1, None, start_of(1.0, LARGE), out=out)
    assert found.weights is out
    assert ray.get(found.ref)["w"][0] == 1.0
    out["w"] += 1
    group.broadcast(found)
    assert group.step("get_weights")[2]["w"][0] == 2.0


def test_a_round_shows_ranks_and_seconds() -> None:
    failed: dict[int, Exception] = {1: ValueError("<NaN>"), 3: OSError("gone")}
    found = Round(
        FlatWeights({f"w{k}": np.zeros(1000) for k in range(320)}),
        used=[0, 4],
        failed=failed,
        late=[2],
        quarantined=[1],
        seconds={"wait": 1.0, "average": 0.5},
        number=7,
    )
    shown = "<Round 7: 2 of 5 ranks (0, 4), late (2), quarantined (1), failed (3), 1.500 s>"
    assert repr(found) == str(found) == shown
    table = found._repr_html_()
    assert "<td>[0, 4]</td>" in table
    assert "rank 1: ValueError: &lt;NaN&gt;; rank 3: OSError: gone" in table
    assert len(table) < 1000
