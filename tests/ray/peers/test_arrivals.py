"""`average` while results arrive: order, number of held results, failures, time."""

import asyncio
import gc
import itertools
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from reference import assert_same, refuses, same_bits

import flatweights as fw
from flatweights import FlatWeights
from flatweights.ray import Round, WorkerError, average
from flatweights.ray.peers import _wait as engine
from flatweights.ray.peers._store import RayResult
from flatweights.ray.peers._wait import wait_any

pytestmark = pytest.mark.ray

LARGE = 30_000  # elements; beyond 100 KiB results lie in shared memory


@ray.remote(num_cpus=0)
class Desk:
    """Returns results in the order in which the test releases them."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Event] = {}

    def _gate(self, rank: int) -> asyncio.Event:
        return self._open.setdefault(rank, asyncio.Event())

    async def give(self, rank: int, value: Any) -> Any:
        await self._gate(rank).wait()
        if isinstance(value, Exception):
            raise value
        return value

    async def let_out(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._gate(rank).set()

    async def close(self) -> None:
        for gate in self._open.values():
            gate.set()
        self._open = {}


@pytest.fixture(scope="module")
def the_desk() -> Any:
    return Desk.options(max_concurrency=100).remote()  # type: ignore[attr-defined]


@pytest.fixture
def desk(the_desk: Any) -> Iterator[Any]:
    yield the_desk
    ray.get(the_desk.close.remote())


def ask(desk: Any, values: Iterable[Any], let_out: Iterable[int] = ()) -> list[Any]:
    """References to values; those of the ranks ``let_out`` have arrived."""
    refs = [desk.give.remote(rank, value) for rank, value in enumerate(values)]
    out = list(let_out)
    ray.get(desk.let_out.remote(out))
    if out:
        ray.wait([refs[rank] for rank in out], num_returns=len(out))
    return refs


@contextmanager
def letting_out(desk: Any, refs: Sequence[Any], order: Sequence[int]) -> Iterator[None]:
    """Let the results out one by one, meanwhile."""

    def work() -> None:
        for rank in order:
            ray.get(desk.let_out.remote([rank]))
            ray.wait([refs[rank]])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def model(rng: np.random.Generator, size: int = 65) -> FlatWeights:
    return FlatWeights(
        {
            "w": rng.normal(size=size).astype(np.float32),
            "scale": rng.normal(size=()),
            "step": np.int64(rng.integers(1000)),
        }
    )


ORDERS = {
    3: list(itertools.permutations(range(3))),
    5: list(itertools.permutations(range(5)))[::11],
    9: [tuple(map(int, np.random.default_rng(k).permutation(9))) for k in range(4)],
}


@pytest.mark.parametrize(("ranks", "max_inflight"), [(3, 2), (3, 3), (5, 4), (9, 1)])
def test_every_order_of_arrival_gives_the_same_bits(
    desk: Any, rng: np.random.Generator, ranks: int, max_inflight: int
) -> None:
    values = [model(rng) for _ in range(ranks)]
    weights = rng.uniform(0.1, 5, size=ranks).tolist()
    expected = fw.average(values, weights)
    for order in ORDERS[ranks]:
        refs = ask(desk, values)
        with letting_out(desk, refs, order):
            found = average(refs, weights, max_inflight=max_inflight)
        assert_same(found.weights, expected)
        assert found.used == tuple(range(ranks))
        ray.get(desk.close.remote())


class Counted(list[NDArray[Any]]):
    """A list of arrays that counts the objects of its kind in the process that unpickles it."""

    alive: ClassVar[weakref.WeakValueDictionary[int, "Counted"]] = weakref.WeakValueDictionary()
    most = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_counted, (list(self),)


def _unpickle_counted(arrays: Sequence[NDArray[Any]]) -> Counted:
    made = Counted(arrays)
    Counted.alive[id(made)] = made
    Counted.most = max(Counted.most, len(Counted.alive))
    return made


@pytest.fixture
def counted() -> Iterator[type[Counted]]:
    Counted.alive.clear()
    Counted.most = 0
    yield Counted
    gc.collect()
    assert not Counted.alive


@pytest.mark.parametrize(
    ("max_inflight", "order", "nonfinite"),
    [
        (1, "up", "raise"),
        (1, "first last", "skip"),
        (3, "down", "skip"),
        (3, "all at once", "raise"),
    ],
)
def test_no_more_than_max_inflight_are_held(
    desk: Any, counted: type[Counted], max_inflight: int, order: str, nonfinite: Any
) -> None:
    ranks = 7
    values = [Counted([np.full(LARGE, float(k))]) for k in range(ranks)]
    if nonfinite == "skip":
        values[2][0][5] = np.nan
    if order == "all at once":
        refs = ask(desk, values, range(ranks))
        found = average(refs, max_inflight=max_inflight, nonfinite=nonfinite)
    else:
        orders = {
            "up": range(ranks),
            "down": range(ranks)[::-1],
            "first last": [*range(1, ranks), 0],
        }
        refs = ask(desk, values)
        with letting_out(desk, refs, orders[order]):
            found = average(refs, max_inflight=max_inflight, nonfinite=nonfinite)
    assert 1 <= counted.most <= max_inflight
    assert not counted.alive
    used = [k for k in range(ranks) if nonfinite == "raise" or k != 2]
    assert same_bits(found.weights[0], fw.average([values[k] for k in used])[0])


def test_failed_ranks_do_not_let_more_be_held(desk: Any, counted: type[Counted]) -> None:
    values: list[Any] = [Counted([np.full(LARGE, float(k))]) for k in range(8)]
    values[0] = values[3] = RuntimeError("boom")
    found = average(ask(desk, values, range(8)), max_inflight=2, min_results=5)
    assert counted.most <= 2
    assert found.used == (1, 2, 4, 5, 6, 7)
    assert list(found.failed) == [0, 3]


def failing_calls() -> dict[str, tuple[type[Exception], dict[str, Any], list[Any]]]:
    good = [Counted([np.full(LARGE, float(k))]) for k in range(3)]
    nan = Counted([np.full(LARGE, np.nan)])
    shape = Counted([np.zeros(LARGE + 1)])

    def weigh(value: Any) -> float:
        if value[0][0] == 2:
            raise LookupError("no such weight")
        return 1.0

    return {
        "raised": (WorkerError, {}, [*good, ValueError("boom")]),
        "late": (WorkerError, {"timeout": 0.05}, [*good, None]),
        "nonfinite": (ValueError, {}, [*good, nan]),
        "layout": (ValueError, {}, [*good, shape]),
        "weigh": (LookupError, {"weights": weigh}, [*good, good[0]]),
        "weigh what is not there": (TypeError, {"weights": lambda value: value[1]}, good),
        "out": (ValueError, {"out": [np.zeros(LARGE + 1)]}, [*good, good[0]]),
        "all skipped": (WorkerError, {"nonfinite": "skip", "min_results": 4}, [*good, nan]),
    }


@pytest.mark.parametrize(
    ("case", "max_inflight"),
    [
        pytest.param(
            case,
            max_inflight,
            id=f"{case}-{way}",
            marks=pytest.mark.slow if way == "fused" and case not in ("late", "nonfinite") else (),
        )
        for case in failing_calls()
        for way, max_inflight in (("streamed", 2), ("fused", 4))
    ],
)
def test_errors_hold_no_result(
    desk: Any, counted: type[Counted], case: str, max_inflight: int
) -> None:
    error, options, values = failing_calls()[case]
    out = range(3) if case == "late" else range(len(values))
    refs = ask(desk, values, out)
    with pytest.raises(error) as caught:
        average(refs, max_inflight=max_inflight, **options)
    gc.collect()
    assert counted.most >= 1
    assert not counted.alive
    assert caught.value.__traceback__ is not None


def test_an_error_of_the_caller_keeps_its_frames() -> None:
    def fail() -> None:
        kept = 7
        raise KeyError(kept)

    def recover() -> None:
        try:
            fail()
        except KeyError:
            average([ray.put(np.array([np.nan]))])

    with pytest.raises(ValueError, match="NaN") as caught:
        recover()
    context: BaseException | None = caught.value
    while not isinstance(context, KeyError):
        assert context is not None
        context = context.__context__
    trace = context.__traceback__
    assert trace is not None
    assert trace.tb_next is not None
    assert trace.tb_next.tb_frame.f_locals == {"kept": 7}


def test_errors_hold_no_reference() -> None:
    ref = ray.put(np.full(LARGE, np.nan))
    with pytest.raises(ValueError, match="rank 0: holds NaN") as caught:
        average(iter([ref]))
    frames = []
    trace = caught.value.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    inner = [f for f in frames if "flatweights/ray/" in f.f_code.co_filename]
    assert inner
    held = [v for f in inner for v in f.f_locals.values()]
    answers = [a for v in held if isinstance(v, dict) for a in v.values()]
    assert all(a.ref is None for a in answers if isinstance(a, RayResult))
    assert not any(ref in v for v in held if isinstance(v, list))


BOTH = pytest.mark.parametrize("max_inflight", [1, 2, 8], ids=["one", "streamed", "fused"])


@BOTH
def test_late_ranks_are_left_out_and_named(
    desk: Any, rng: np.random.Generator, max_inflight: int
) -> None:
    values = [model(rng) for _ in range(5)]
    refs = ask(desk, values, [1, 2, 4])
    begin = time.monotonic()
    found = average(refs, [3, 1, 2, 1, 5], timeout=0.1, min_results=3, max_inflight=max_inflight)
    assert time.monotonic() - begin > 0.09  # Ray counts in milliseconds
    assert found.used == (1, 2, 4)
    assert found.late == (0, 3)
    assert found.failed == {}
    assert_same(found.weights, fw.average([values[k] for k in (1, 2, 4)], [1, 2, 5]))
    # Late results are not lost: another call may average them.
    ray.get(desk.let_out.remote([0, 3]))
    assert_same(average(refs, max_inflight=max_inflight).weights, fw.average(values))


@BOTH
def test_all_that_answered_in_time_are_averaged(desk: Any, max_inflight: int) -> None:
    refs = ask(desk, [np.array([float(k)]) for k in range(4)], range(4))
    found = average(refs, timeout=0, min_results=1, max_inflight=max_inflight)
    assert found.used == (0, 1, 2, 3)
    assert found.weights.tolist() == [1.5]
    assert average(refs, timeout=float("inf")).late == ()


@BOTH
def test_nobody_waits_once_all_have_answered(desk: Any, max_inflight: int) -> None:
    refs = ask(desk, [np.zeros(2), ValueError("boom"), np.ones(2)], range(3))
    begin = time.monotonic()
    found = average(refs, timeout=600, min_results=2, max_inflight=max_inflight)
    assert time.monotonic() - begin < 600
    assert found.used == (0, 2)
    assert str(found.failed[1].cause) == "boom"  # type: ignore[attr-defined]


@BOTH
def test_too_few_in_time_names_every_rank(desk: Any, max_inflight: int) -> None:
    values = [np.zeros(2), ValueError("no data"), np.ones(2), np.ones(2)]
    refs = ask(desk, values, [1, 2])
    out = np.full(2, 7.0)
    with refuses(
        WorkerError,
        r"^rank 0: TimeoutError: no result after 0\.1 s\n"
        r"rank 1: ValueError: no data\n"
        r"rank 3: TimeoutError: no result after 0\.1 s$",
        out,
    ):
        average(refs, timeout=0.1, min_results=2, max_inflight=max_inflight, out=out)
    remedy = r"^rank 0: .* after 0\.1 s\npass min_results=1 to average the ranks that answer"
    with pytest.raises(WorkerError, match=remedy) as caught:
        average(ask(desk, [np.zeros(2)] * 2, [1]), timeout=0.1, max_inflight=max_inflight)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@BOTH
def test_min_results_without_a_timeout_waits_for_all_others(
    desk: Any, rng: np.random.Generator, max_inflight: int
) -> None:
    values = [model(rng), RuntimeError("boom"), model(rng), model(rng)]
    refs = ask(desk, values)
    with letting_out(desk, refs, [1, 3, 2, 0]):
        found = average(refs, [1, 9, 2, 3], min_results=1, max_inflight=max_inflight)
    assert found.used == (0, 2, 3)
    assert list(found.failed) == [1]
    assert_same(found.weights, fw.average([values[k] for k in (0, 2, 3)], [1, 2, 3]))


@BOTH
def test_too_many_failures_raise_without_waiting(desk: Any, max_inflight: int) -> None:
    values = [np.zeros(2), np.zeros(2), ValueError("a"), ValueError("b")]
    refs = ask(desk, values, [2, 3])  # ranks 0 and 1 never answer
    with pytest.raises(WorkerError) as caught:
        average(refs, min_results=3, max_inflight=max_inflight)
    assert list(caught.value.failed) == [2, 3]


@BOTH
def test_a_function_weighs_results(desk: Any, max_inflight: int) -> None:
    values = [(np.array([float(k)]), {"samples": 2**k}) for k in range(4)]
    refs = ask(desk, values, range(4))
    found = average(refs, lambda result: result[1]["samples"], max_inflight=max_inflight)
    expected = fw.average([v for v, _ in values], [1, 2, 4, 8])
    assert same_bits(found.weights, expected)
    with pytest.raises(ValueError, match=r"weight of rank 1: expected a finite weight"):
        average(refs, lambda result: 1.0 - result[0][0] * 2, max_inflight=max_inflight)
    with pytest.raises(ValueError, match="positive weight"):
        average(refs, lambda result: 0.0, max_inflight=max_inflight)


@BOTH
def test_extras_come_back_by_rank(desk: Any, max_inflight: int) -> None:
    values = [
        (np.array([1.0]), {"loss": 0.5}),
        np.array([2.0]),
        (np.array([3.0]), None),
        ((np.array([np.nan])), "x"),
        (np.array([2.0]), ["y"]),
    ]
    refs = ask(desk, values, range(5))
    refs[3] = ray.put((np.array([np.nan]), "spoiled"))
    found = average(refs, nonfinite="skip", max_inflight=max_inflight)
    assert found.weights.tolist() == [2.0]
    assert found.used == (0, 1, 2, 4)
    assert found.extras == {0: {"loss": 0.5}, 4: ["y"]}, "not of rank 3, which is left out"


@BOTH
def test_extras_do_not_hold_the_result(
    desk: Any, counted: type[Counted], max_inflight: int
) -> None:
    large = np.arange(float(LARGE))
    extras = {"a": large, "deep": [(large, FlatWeights({"w": large}))], "n": 3}
    refs = ask(desk, [(Counted([large]), extras)] * 3, range(3))
    found = average(refs, max_inflight=max_inflight)
    got = found.extras[1]
    (array, weights), number = got["deep"][0], got["n"]
    assert number == 3
    for found_array in (got["a"], array, weights["w"]):
        assert same_bits(found_array, large)
        assert found_array.flags.writeable  # no view of the object store


def test_sources_are_mapped_in_place_however_they_came(desk: Any) -> None:
    value = np.arange(float(LARGE))
    ref = ray.put(value)
    again = ask(desk, [value], [0])[0]
    found = average([ref, again, ref, ref, again], [1, 1, 1, 1, 1], max_inflight=2)
    assert same_bits(found.weights, value)
    assert found.used == (0, 1, 2, 3, 4)


def nan_at(k: int, ranks: int) -> list[FlatWeights]:
    values = [FlatWeights({"a": np.full(3, float(r)), "b": np.ones(2)}) for r in range(ranks)]
    values[k]["b"][1] = np.nan
    return values


@BOTH
def test_nonfinite_is_named_with_its_slot(desk: Any, max_inflight: int) -> None:
    values = nan_at(2, 4)
    refs = ask(desk, values, range(4))
    text = "rank 2, slot 1 'b': holds NaN or infinity"
    with pytest.raises(ValueError, match=f"^{text}$"):
        average(refs, max_inflight=max_inflight)
    found = average(refs, [1, 2, 3, 4], nonfinite="skip", max_inflight=max_inflight)
    assert found.used == (0, 1, 3)
    assert {rank: str(error) for rank, error in found.failed.items()} == {2: text}
    assert_same(found.weights, fw.average([values[k] for k in (0, 1, 3)], [1, 2, 4]))
    spread = average(refs, nonfinite="propagate", max_inflight=max_inflight)
    assert np.isnan(spread.weights["b"][1])
    assert spread.failed == {}


@BOTH
def test_a_rank_counts_right_after_others_failed(desk: Any, max_inflight: int) -> None:
    values: list[Any] = nan_at(3, 5)
    values[0] = OSError("gone")
    refs = ask(desk, values, range(5))
    with pytest.raises(ValueError, match=r"^rank 3, slot 1 'b': holds NaN"):
        average(refs, min_results=2, max_inflight=max_inflight)
    found = average(refs, min_results=2, nonfinite="skip", max_inflight=max_inflight)
    assert found.used == (1, 2, 4)
    assert [type(e).__name__ for e in found.failed.values()] == [
        "RayTaskError(OSError)",
        "ValueError",
    ]
    assert_same(found.weights, fw.average([values[k] for k in (1, 2, 4)]))


@BOTH
def test_skip_leaves_at_least_min_results(desk: Any, max_inflight: int) -> None:
    values = nan_at(2, 4)
    values[0]["a"][0] = np.inf
    refs = ask(desk, values, range(4))
    out = FlatWeights({"a": np.full(3, 7.0), "b": np.full(2, 7.0)})
    options: dict[str, Any] = {"nonfinite": "skip", "max_inflight": max_inflight}
    names = r"^rank 0: .*slot 0 'a': holds NaN or infinity\nrank 2: .*slot 1 'b': holds NaN"
    with refuses(WorkerError, names, out.buffer):
        average(refs, min_results=3, out=out, **options)
    found = average(refs, min_results=2, out=out, **options)
    assert found.weights is out
    assert_same(out, fw.average([values[1], values[3]]))


@BOTH
def test_skip_with_nobody_left_names_all(desk: Any, max_inflight: int) -> None:
    refs = ask(desk, [np.array([np.nan]), np.array([np.inf]), np.array([np.nan])], range(3))
    out = np.array([7.0])
    with refuses(WorkerError, r"rank 0: .*NaN(.|\n)*rank 1: .*NaN(.|\n)*rank 2: .*NaN", out):
        average(refs, nonfinite="skip", out=out, max_inflight=max_inflight)
    with pytest.raises(WorkerError):
        average(refs, nonfinite="skip", max_inflight=max_inflight)


@pytest.mark.parametrize(
    ("nonfinite", "max_inflight"), [("raise", 1), ("skip", 2), ("propagate", 8), ("raise", 8)]
)
def test_a_sum_out_of_range_is_nobodys_fault(desk: Any, max_inflight: int, nonfinite: Any) -> None:
    values = [np.array([1.5e308, 1.0])] * 3
    refs = ask(desk, values, range(3))
    found = average(refs, nonfinite=nonfinite, max_inflight=max_inflight)
    with np.errstate(over="ignore"):
        assert same_bits(found.weights, fw.average(values))
    assert found.used == (0, 1, 2)
    assert found.failed == {}


@BOTH
def test_a_weight_of_zero_adds_nothing_but_nan(desk: Any, max_inflight: int) -> None:
    values = [np.array([5.0]), np.array([1.0]), np.array([3.0])]
    refs = ask(desk, values, range(3))
    assert average(refs, [0, 1, 1], max_inflight=max_inflight).weights.tolist() == [2.0]
    refs[0] = ray.put(np.array([np.nan]))
    with pytest.raises(ValueError, match="rank 0: holds NaN"):
        average(refs, [0, 1, 1], max_inflight=max_inflight)
    found = average(refs, [0, 1, 1], nonfinite="skip", max_inflight=max_inflight)
    assert found.weights.tolist() == [2.0]
    assert found.used == (1, 2)


@BOTH
def test_zero_weights_alone_are_refused(desk: Any, max_inflight: int) -> None:
    refs = ask(desk, [np.zeros(1), np.ones(1), KeyError("x")], range(3))
    out = np.array([7.0])
    with refuses(ValueError, "positive weight", out):
        average(refs, [0, 0, 1], min_results=1, out=out, max_inflight=max_inflight)


def other_layouts() -> dict[str, tuple[Any, Any, type[Exception], str]]:
    a = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}
    return {
        "digest": (
            FlatWeights(a),
            FlatWeights(a | {"b": np.zeros(4, np.float32)}),
            ValueError,
            "'b'",
        ),
        "keys": (a, {"w": a["w"], "c": a["b"]}, ValueError, r"missing \['b'\], unknown \['c'\]"),
        "shape": (a["w"], a["b"], ValueError, r"expected float32 \(2, 3\), got float32 \(3,\)"),
        "dtype": ([a["w"]], [a["w"].astype("f8")], TypeError, "expected float32.*got float64"),
        "parts": ([a["w"]], [a["w"]] * 2, ValueError, "expected 1 parts, got 2"),
        "kind": (a, a["w"], TypeError, "expected a mapping of arrays, got an array"),
        "nothing": (a, None, TypeError, "NoneType"),
    }


@pytest.mark.parametrize(
    ("case", "max_inflight"),
    [
        pytest.param(case, most, marks=pytest.mark.slow if most == 2 and case != "digest" else ())
        for case in other_layouts()
        for most in (2, 8)
    ],
)
def test_another_layout_is_refused_naming_both(desk: Any, case: str, max_inflight: int) -> None:
    expected, other, error, message = other_layouts()[case]
    values = [ValueError("boom"), expected, expected, other, expected]
    refs = ask(desk, values, range(5))
    with pytest.raises(error, match=rf"^rank 3\b.*{message}.*\(rank 1 gave what is expected\)$"):
        average(refs, min_results=1, max_inflight=max_inflight)


@BOTH
def test_the_first_result_is_no_model(desk: Any, max_inflight: int) -> None:
    refs = ask(desk, [ValueError("boom"), "text", np.zeros(2)], range(3))
    with pytest.raises(TypeError, match=r"^rank 1: expected an array.*got str$"):
        average(refs, min_results=1, max_inflight=max_inflight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_results": 0}, "min_results: expected 1 to 2, the number of ranks, got 0"),
        ({"min_results": 3}, "min_results: expected 1 to 2, the number of ranks, got 3"),
        ({"max_inflight": 0}, "max_inflight: expected at least 1, got 0"),
        ({"timeout": -1}, "timeout: expected seconds, not negative, got -1"),
        ({"timeout": float("nan")}, "timeout: expected seconds, not negative, got nan"),
        ({"nonfinite": "ignore", "max_inflight": 1}, "nonfinite: expected 'propagate'"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused_at_once(
    desk: Any, options: dict[str, Any], message: str
) -> None:
    refs = ask(desk, [np.zeros(2)] * 2)  # never let out
    with pytest.raises(ValueError, match=message):
        average(refs, **options)


@ray.remote(num_cpus=0)
class Owner:
    """Owns an object, which is lost when it dies."""

    def put(self, value: Any) -> list[Any]:
        return [ray.put(value)]


def is_lost(ref: Any) -> bool:
    try:
        ray.get(ref)
    except ray.exceptions.ObjectLostError:
        return True
    return False


@pytest.mark.parametrize(
    "max_inflight",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)],
    ids=["one", "streamed", "fused"],
)
def test_a_lost_object_is_a_failed_rank(max_inflight: int) -> None:
    owner = Owner.remote()  # type: ignore[attr-defined]
    lost = ray.get(owner.put.remote(np.ones(LARGE)))[0]
    ray.kill(owner)
    while not is_lost(lost):
        time.sleep(0.05)
    values = [np.arange(float(LARGE)) * k for k in range(3)]
    refs = [ray.put(values[0]), lost, *map(ray.put, values[1:])]
    with pytest.raises(WorkerError, match=r"^rank 1: OwnerDiedError: "):
        average(refs, max_inflight=max_inflight)
    found = average(refs, min_results=3, max_inflight=max_inflight)
    assert found.used == (0, 2, 3)
    assert same_bits(found.weights, fw.average(values))


@BOTH
def test_a_round_says_what_it_took(
    desk: Any, max_inflight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = ask(desk, [np.zeros(LARGE)] * 3)

    def let_out_and_wait(*args: Any) -> Any:
        time.sleep(0.2)
        ray.get(desk.let_out.remote([0, 1, 2]))
        return wait_any(*args)

    monkeypatch.setattr(engine, "wait_any", let_out_and_wait)
    begin = time.monotonic()
    found: Round = average(refs, max_inflight=max_inflight)
    elapsed = time.monotonic() - begin
    assert found.nbytes == 3 * LARGE * 8
    assert found.seconds["wait"] >= 0.2
    assert found.seconds["average"] > 0
    assert sum(found.seconds.values()) <= elapsed


@pytest.mark.slow
def test_the_segment_is_a_speedup_not_a_meaning(desk: Any, rng: np.random.Generator) -> None:
    """Runs of any length, cut by failures anywhere, give the bits of one pass."""
    makers: list[Callable[[], Any]] = [lambda: model(rng), lambda: ValueError("boom")]
    for pattern in itertools.product([0, 1], repeat=5):
        if not any(p == 0 for p in pattern):
            continue
        values = [makers[p]() for p in pattern]
        refs = ask(desk, values, range(5))
        good = [v for v in values if isinstance(v, FlatWeights)]
        for max_inflight in (1, 2, 3, 5):
            found = average(refs, min_results=1, max_inflight=max_inflight)
            assert_same(found.weights, fw.average(good))
        ray.get(desk.close.remote())
