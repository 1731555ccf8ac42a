"""`flatweights.ray.average` over the results of real actors."""

import asyncio
import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from reference import arrays_of, assert_mean, assert_same

import flatweights as fw
from flatweights import FlatWeights
from flatweights.ray import Round, WorkerError, average

pytestmark = pytest.mark.ray

LARGE = 300_000  # elements; beyond 100 KiB results lie in shared memory


@ray.remote
class Rank:
    """A worker that acts on the test's orders."""

    def give(self, value: Any) -> Any:
        return value

    def give_after(self, gate: Any, value: Any) -> Any:
        ray.get(gate.passed.remote())
        return value

    def fail(self, error: Exception) -> None:
        raise error

    def die(self) -> None:
        os._exit(1)

    def interrupt(self, pid: int) -> None:
        os.kill(pid, signal.SIGINT)


@ray.remote
class Gate:
    """Closed until it is opened."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()

    async def passed(self) -> None:
        await self._opened.wait()

    async def open(self) -> None:
        self._opened.set()


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return [Rank.remote() for _ in range(3)]  # type: ignore[attr-defined]


@pytest.fixture
def gate() -> Iterator[Any]:
    """A gate, opened after the test so that no rank stays behind it."""
    gate = Gate.remote()  # type: ignore[attr-defined]
    yield gate
    ray.get(gate.open.remote())


def make_dict(rng: np.random.Generator, size: int) -> dict[str, NDArray[Any]]:
    return {
        "kernel": rng.normal(size=(size, 1)).astype(np.float32),
        "half": rng.normal(size=7).astype(ml_dtypes.bfloat16),
        "scale": rng.normal(size=()),
        "step": np.int64(rng.integers(1000)),
    }


KINDS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "array": lambda rng, size: rng.normal(size=size).astype(np.float32),
    "FlatWeights": lambda rng, size: FlatWeights(make_dict(rng, size)),
    "dict": make_dict,
    "list": lambda rng, size: list(make_dict(rng, size).values()),
}


@pytest.mark.parametrize(
    ("size", "weights"),
    [
        pytest.param(3, [1, 5, 2.5], id="inline-weighted"),
        pytest.param(LARGE, None, id="shared-equal"),
        pytest.param(3, None, id="inline-equal", marks=pytest.mark.slow),
        pytest.param(LARGE, [1, 5, 2.5], id="shared-weighted", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_average_is_that_of_the_values(
    ranks: list[Any], rng: np.random.Generator, kind: str, size: int, weights: list[float] | None
) -> None:
    values = [KINDS[kind](rng, size) for _ in ranks]
    round_ = average([r.give.remote(v) for r, v in zip(ranks, values, strict=True)], weights)
    assert_same(round_.weights, fw.average(values, weights))
    assert round_.used == (0, 1, 2)
    first = [arrays_of(value)[0] for value in values]
    assert_mean(arrays_of(round_.weights)[0], first, weights)


def test_ranks_are_added_in_order_however_late_the_first_is(
    ranks: list[Any], gate: Any, rng: np.random.Generator
) -> None:
    # The counter of the first rank is kept, and each weight belongs to one rank.
    values = [KINDS["FlatWeights"](rng, LARGE) for _ in ranks]
    late = ranks[0].give_after.remote(gate, values[0])
    refs = [late, ranks[1].give.remote(values[1]), ranks[2].give.remote(values[2])]
    arrived, waiting = ray.wait(refs, num_returns=2)
    assert arrived == refs[1:]
    assert waiting == [late]
    gate.open.remote()
    assert_same(average(refs, [3, 1, 2]).weights, fw.average(values, [3, 1, 2]))


def test_out_is_written_and_returned(ranks: list[Any]) -> None:
    out = np.zeros(2)
    one, three = np.array([1.0, 2.0]), np.array([3.0, 6.0])
    refs = [ranks[0].give.remote(one), ranks[1].give.remote(three)]
    assert average(refs, out=out).weights is out
    assert out.tolist() == [2.0, 4.0]
    refs += [refs[0], ray.put(one)]  # references may come twice, from any iterable
    assert average(iter(refs)).weights.tolist() == [1.5, 3.0]


def test_ref_is_put_once_and_is_what_was_averaged(
    ranks: list[Any], rng: np.random.Generator
) -> None:
    values = [KINDS["FlatWeights"](rng, LARGE) for _ in range(2)]
    round_ = average([r.give.remote(v) for r, v in zip(ranks, values, strict=False)])
    expected = round_.weights.copy()
    ref = round_.ref
    with pytest.raises(ValueError, match="read-only"):
        round_.weights["kernel"] += 1
    assert round_.ref is ref
    assert_same(ray.get(ref), expected)
    assert_same(ray.get(ranks[2].give.remote(ref)), expected)


class Traced(list[NDArray[Any]]):
    """A list of arrays that notes its arrays when it is unpickled."""

    received: list[weakref.ref[NDArray[Any]]] = []  # noqa: RUF012
    copied = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_traced, (list(self),)


def _unpickle_traced(arrays: Sequence[NDArray[Any]]) -> Traced:
    Traced.received += [weakref.ref(array) for array in arrays]
    Traced.copied += sum(array.flags.writeable or array.flags.owndata for array in arrays)
    return Traced(arrays)


@pytest.fixture
def traced() -> type[Traced]:
    Traced.received, Traced.copied = [], 0
    return Traced


def alive(references: list[weakref.ref[NDArray[Any]]]) -> int:
    return sum(reference() is not None for reference in references)


def test_results_are_read_in_place_and_let_go(
    ranks: list[Any], traced: type[Traced], rng: np.random.Generator
) -> None:
    values = [[rng.normal(size=LARGE), rng.normal(size=LARGE)] for _ in ranks]
    refs = [r.give.remote(Traced(v)) for r, v in zip(ranks, values, strict=True)]
    round_ = average(refs)
    assert len(traced.received) == 6
    assert traced.copied == 0  # read-only views of shared memory
    gc.collect()
    assert alive(traced.received) == 0
    assert_same(round_.weights, fw.average(values))


@pytest.mark.parametrize("size", [3, LARGE], ids=["inline", "shared"])
def test_a_failure_lets_go_of_the_other_results(
    ranks: list[Any], traced: type[Traced], size: int
) -> None:
    refs = [
        ranks[0].give.remote(Traced([np.zeros(size)])),
        ranks[1].fail.remote(ValueError("boom")),
    ]
    ray.wait(refs, num_returns=2)
    with pytest.raises(WorkerError) as caught:
        average(refs)
    gc.collect()
    assert alive(traced.received) == 0
    assert list(caught.value.failed) == [1]


def test_failures_name_their_ranks_and_reasons(ranks: list[Any]) -> None:
    refs = [ranks[0].give.remote(np.zeros(2)), ranks[1].fail.remote(KeyError("batch"))]
    with pytest.raises(WorkerError, match=r"^rank 1: KeyError: 'batch'$") as caught:
        average(refs)
    failed = caught.value.failed
    assert list(failed) == [1]
    assert isinstance(failed[1], KeyError)
    assert isinstance(failed[1], ray.exceptions.RayTaskError)
    assert caught.value.__cause__ is failed[1]  # with the traceback of the worker
    errors = [TimeoutError("too slow"), ray.exceptions.GetTimeoutError("too slow")]
    late = [rank.fail.remote(error) for rank, error in zip(ranks[1:], errors, strict=True)]
    refs = [refs[1], ray.put(np.zeros(2)), *late, late[0]]
    ray.wait(refs[:4], num_returns=4)
    expected = "rank 0: KeyError: 'batch'\nrank 2: TimeoutError: too slow\n"
    expected += "rank 3: GetTimeoutError: too slow\nrank 4: TimeoutError: too slow"
    with pytest.raises(WorkerError) as caught:
        average(refs)
    assert str(caught.value) == expected
    assert list(caught.value.failed) == [0, 2, 3, 4]


@pytest.mark.parametrize(
    "error", [ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError]
)
def test_results_that_did_not_fit_say_how_large_the_store_must_be(
    ranks: list[Any], error: type[Exception]
) -> None:
    refs = [ray.put(np.zeros(8)), ranks[0].fail.remote(error("full"))]
    text = r"rank 1: StoreTooSmallError: the object store is full.* \(2 \+ 2\) \* 64 = 256 bytes"
    with pytest.raises(WorkerError, match=text):
        average(refs)


def test_a_failure_does_not_wait_for_who_still_runs(ranks: list[Any], gate: Any) -> None:
    running = ranks[0].give_after.remote(gate, np.zeros(2))
    with pytest.raises(WorkerError) as caught:
        average([running, ranks[1].fail.remote(ValueError("boom"))])
    assert list(caught.value.failed) == [1]
    gate.open.remote()
    assert ray.get(running).tolist() == [0.0, 0.0]


def test_a_dead_worker_is_named(ranks: list[Any]) -> None:
    doomed = Rank.remote()  # type: ignore[attr-defined]
    dying = doomed.die.remote()
    with pytest.raises(WorkerError, match=r"^rank 1: ActorDiedError: ") as caught:
        average([ranks[0].give.remote(np.zeros(2)), dying])
    assert isinstance(caught.value.failed[1], ray.exceptions.ActorDiedError)
    with pytest.raises(WorkerError, match=r"^rank 0: ActorDiedError: "):
        average([doomed.give.remote(np.zeros(2)), ranks[0].give.remote(np.zeros(2))])


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def average_remotely(refs: list[Any]) -> Any:
    return average(refs).weights


def test_worker_error_pickles(ranks: list[Any]) -> None:
    refs = [ranks[0].give.remote(np.zeros(2)), ranks[1].fail.remote(ValueError("boom"))]
    with pytest.raises(WorkerError) as caught:
        average(refs)
    copy = ray.cloudpickle.loads(ray.cloudpickle.dumps(caught.value))
    assert type(copy) is WorkerError
    assert str(copy) == "rank 1: ValueError: boom"
    assert list(copy.failed) == [1]
    with pytest.raises(WorkerError, match="rank 1: ValueError: boom") as remote:
        ray.get(average_remotely.remote(refs))
    assert list(remote.value.failed) == [1]


def test_interrupt_is_not_swallowed(ranks: list[Any], gate: Any) -> None:
    running = ranks[0].give_after.remote(gate, np.zeros(2))
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  (it may arrive at either line)
        ranks[1].interrupt.remote(os.getpid())
        average([running])
    gate.open.remote()
    assert average([running]).weights.tolist() == [0.0, 0.0]


A = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}


@pytest.mark.parametrize(
    ("given", "other", "error", "message"),
    [
        (
            FlatWeights(A),
            FlatWeights(A | {"b": np.zeros(4, np.float32)}),
            ValueError,
            r"slot 1: expected 'b' ",
        ),
        (FlatWeights(A), FlatWeights({"w": A["w"]}), ValueError, "expected 2 slots, got 1"),
        (FlatWeights(A), A, TypeError, "expected FlatWeights, got a mapping"),
        (FlatWeights(A), A["w"], TypeError, "expected FlatWeights, got an array"),
        (FlatWeights(A), None, TypeError, "NoneType"),
        (A, {"w": A["w"], "c": A["b"]}, ValueError, r"missing \['b'\], unknown \['c'\]"),
        (np.zeros(3), np.zeros(4), ValueError, ""),
        ([np.zeros(3)], [np.zeros(3, np.float32)], TypeError, ""),
    ],
    ids=["shape", "slots", "dict", "array", "None", "keys", "size", "dtype"],
)
def test_another_layout_is_refused_by_rank(
    ranks: list[Any], given: Any, other: Any, error: type[Exception], message: str
) -> None:
    refs = [r.give.remote(v) for r, v in zip(ranks, [given, given, other], strict=True)]
    with pytest.raises(error, match=rf"rank 2\b.*{message}"):
        average(refs)


def test_nonfinite_is_refused_by_rank_and_slot_or_left_out(ranks: list[Any]) -> None:
    bad = FlatWeights(A)
    bad["b"][2] = np.nan
    refs = [ranks[0].give.remote(FlatWeights(A)), ranks[1].give.remote(bad)]
    with pytest.raises(ValueError, match=r"rank 1, slot 1 'b': holds NaN or infinity"):
        average(refs)
    assert np.isnan(average(refs, nonfinite="propagate").weights["b"][2])
    values = [np.array([1.0]), np.array([np.inf]), np.array([4.0])]
    refs = [r.give.remote(v) for r, v in zip(ranks, values, strict=True)]
    round_ = average(refs, [2, 1, 1], nonfinite="skip")
    assert round_.weights.tolist() == [2.0]
    assert round_.used == (0, 2)


def test_what_is_no_list_of_references_is_refused() -> None:
    ref = ray.put(np.zeros(2))
    with pytest.raises(ValueError, match="at least one reference, got none"):
        average([])
    with pytest.raises(TypeError, match="expected a list of references, got ObjectRef"):
        average(ref)
    with pytest.raises(TypeError, match=r"got dict; pass list\(refs\.values\(\)\)"):
        average({0: ray.put(np.ones(2))})
    with pytest.raises(TypeError, match=r"rank 1: expected a ray\.ObjectRef, got ndarray"):
        average([ref, np.zeros(2)])


@pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0], [1, float("nan")]], ids=str)
def test_weights_are_checked_before_results_are_got(ranks: list[Any], weights: list[float]) -> None:
    refs = [r.fail.remote(RuntimeError("got")) for r in ranks[:2]]
    with pytest.raises(ValueError, match="weight"):
        average(refs, weights)


def test_a_round_is_put_anew_in_another_session_of_ray() -> None:
    def full(weights: Any) -> Any:
        raise KeyboardInterrupt

    found = Round([1.0], used=[0])
    assert found._ref_in("one", lambda weights: "first") == "first"
    with pytest.raises(KeyboardInterrupt):
        found._ref_in("two", full)
    assert found._ref_in("two", lambda weights: "second") == "second"
    found = average([ray.put(np.ones(2))])
    first = found.ref
    assert found.ref is first
    found._session = "an earlier session"
    assert found.current_ref() != first
    assert found.ref is found.current_ref()
    assert ray.get(found.ref).tolist() == [1.0, 1.0]


def test_trees_are_averaged_and_put_as_they_are_now(ranks: list[Any]) -> None:
    def tree(value: float) -> dict[str, Any]:
        return {"layers": [{"w": np.full(3, value)}, (np.full(2, -value),)], "n": np.int64(7)}

    found = average([ranks[k].give.remote(tree(float(k))) for k in range(3)])
    layers = found.weights["layers"]
    assert (type(layers), type(layers[1])) == (list, tuple)
    assert (layers[0]["w"].tolist(), layers[1][0].tolist()) == ([1, 1, 1], [-1, -1])
    with pytest.raises(ValueError, match="read-only"):
        layers[1][0][0] = 5
    first = found.ref
    assert found.current_ref() is first
    layers[0]["w"] = np.full(3, 9.0)
    assert ray.get(found.current_ref())["layers"][0]["w"].tolist() == [9, 9, 9]
