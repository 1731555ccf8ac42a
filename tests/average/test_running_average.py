import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from interrupts import each_interruption
from reference import (
    AVERAGED,
    BFLOAT16,
    BLOCK,
    Guarded,
    arrays_of,
    assert_mean,
    assert_same,
    each,
    exact_mean,
    random_array,
    read_only,
    refuses,
    same_bits,
)

import flatweights as fw
from flatweights import RunningAverage
from flatweights._locks import CallLock

KINDS: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    "FlatWeights": fw.FlatWeights,
    "dict": dict,
    "list": lambda parts: list(parts.values()),
}


def model(rng: np.random.Generator, step: int = 0) -> dict[str, np.ndarray]:
    return {
        "kernel": random_array(rng, (3, 5), np.dtype(np.float32)),
        "step": np.array(step, np.int64),
        "bias": random_array(rng, BLOCK + 1, np.dtype(np.float64)),
        "half": random_array(rng, (2, 2), np.dtype(np.float16)),
        "brain": random_array(rng, 9, BFLOAT16),
        "phase": random_array(rng, 3, np.dtype(np.complex128)),
        "none": np.zeros((0, 3), np.float32),
    }


def summed(models: list[Any], weights: list[float] | None = None) -> RunningAverage:
    running = RunningAverage()
    for m, weight in zip(models, weights or [1.0] * len(models), strict=True):
        running.add(m, weight)
    return running


WEIGHTS = [None, [1, 1, 1, 1, 1], [0.3, 5, 0, 1.5, 2], [0, 0, 7, 0.1, 1], [1e-150, 1, 0, 2, 1]]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_models_added_in_order_give_the_bits_of_average(
    kind: str, weights: list[float] | None, rng: np.random.Generator
) -> None:
    models = [KINDS[kind](model(rng, k)) for k in range(5)]
    running = summed(models, weights)
    assert_same(running.mean(), fw.average(models, weights))
    assert running.total_weight == sum(weights or [1] * 5)
    # Reading changes nothing.
    assert_same(running.mean(), fw.average(models, weights))


@each(averaged_dtype=AVERAGED)
def test_arrays_of_each_dtype_and_size(
    averaged_dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    for size in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1):
        sources = [random_array(rng, size, averaged_dtype) for _ in range(3)]
        for weights in (None, [2, 3, 0.5]):
            assert_same(summed(sources, weights).mean(), fw.average(sources, weights))
            assert_mean(summed(sources, weights).mean(), sources, weights)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_after_each_model_the_mean_is_that_of_those_so_far(
    count: int, rng: np.random.Generator
) -> None:
    models = [model(rng, k) for k in range(count)]
    running = RunningAverage()
    for n, m in enumerate(models, 1):
        running.add(m, n)
        assert_same(running.mean(), fw.average(models[:n], range(1, n + 1)))


def test_nan_and_infinity_are_those_of_average() -> None:
    sources = [
        np.array([np.nan, np.inf, np.inf, 1, 1.7e308]),
        np.array([1, 1, -np.inf, 1, 1.7e308]),
    ]
    for weights in ([1, 1], [0, 1], [1, 0]):
        np.testing.assert_array_equal(summed(sources, weights).mean(), fw.average(sources, weights))  # type: ignore[arg-type]


def test_sources_are_not_kept(rng: np.random.Generator) -> None:
    parts = model(rng, 3)
    expected = {name: part.copy() for name, part in parts.items()}
    running = summed([parts])
    for part in parts.values():
        part[...] = 0
    assert_same(running.mean(), expected)


def test_integers_keep_the_first_value() -> None:
    running = summed([{"n": np.array([k, k]), "w": np.ones(1)} for k in (5, 6, 7)], [0, 1, 1])
    assert running.mean()["n"].tolist() == [5, 5]


def test_a_result_may_be_changed(rng: np.random.Generator) -> None:
    running = summed([model(rng, 1)])
    first, second = running.mean(), running.mean()
    for part in first.values():
        part[...] = 0
    assert_same(running.mean(), second)


@pytest.mark.parametrize("kind", KINDS)
def test_mean_writes_to_out(kind: str, rng: np.random.Generator) -> None:
    models = [KINDS[kind](model(rng, k)) for k in (1, 2)]
    expected = fw.average(models)
    running = summed(models)
    # Unlike in average, sources are read before, so any of them may be out.
    assert running.mean(out=models[0]) is models[0]
    assert_same(models[0], expected)


def test_mean_writes_nothing_beside_out(rng: np.random.Generator) -> None:
    for size in (1, BLOCK, BLOCK + 1):
        source = random_array(rng, size, np.dtype(np.float32))
        out = Guarded(np.zeros(size, np.float32), 4)
        summed([source]).mean(out=out.array)
        assert same_bits(out.array, source)
        assert out.is_intact()


def test_strided_and_read_only_sources(rng: np.random.Generator) -> None:
    base = random_array(rng, (4, 6), np.dtype(np.float64))
    assert_same(summed([read_only(base.T)]).mean(), base.T.copy())


# Merging.


@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [3, 0.1, 0, 2]])
def test_merged_sums_are_the_mean_of_all(weights: list[float], rng: np.random.Generator) -> None:
    models = [model(rng, k) for k in range(4)]
    left, right = summed(models[:2], weights[:2]), summed(models[2:], weights[2:])
    before = right.mean()
    left.merge(right)
    assert left.total_weight == sum(weights)
    result = left.mean()
    assert same_bits(result.pop("step"), models[0]["step"])
    for name, part in result.items():
        assert_mean(part, [m[name] for m in models], weights)
    assert_same(right.mean(), before)
    left.add(models[0])
    assert left.total_weight == sum(weights) + 1
    assert_same(right.mean(), before)


def test_merging_keeps_what_cancels() -> None:
    left = summed([np.array([1e16]), np.array([1.0])])
    right = summed([np.array([1.0]), np.array([-1e16])])
    left.merge(right)
    assert left.mean().tolist() == [0.5]
    left = summed([np.array([1e16]), np.array([1.0])], [4, 4])
    left.merge(summed([np.array([1.0]), np.array([-4e16])], [1, 1]))
    assert left.mean().tolist() == [0.5]


@pytest.mark.parametrize(("first", "second"), [(0, 2), (2, 0), (0, 0)])
def test_a_sum_of_weight_zero_may_be_merged(first: float, second: float) -> None:
    left, right = summed([np.array([1.0])], [first]), summed([np.array([3.0])], [second])
    left.merge(right)
    left.add(np.array([5.0]), 2)
    values = [1.0, 3.0, 5.0]
    assert left.mean()[0] == float(exact_mean(values, [first, second, 2]))


def test_an_empty_sum_may_be_merged_both_ways(rng: np.random.Generator) -> None:
    models = [model(rng, k) for k in (4, 5)]
    full, empty = summed(models, [2, 1]), RunningAverage()
    full.merge(empty)
    assert_same(full.mean(), fw.average(models, [2, 1]))
    empty.merge(full)
    assert_same(empty.mean(), fw.average(models, [2, 1]))
    assert empty.total_weight == full.total_weight == 3
    empty.add(model(rng, 9))
    assert_same(full.mean(), fw.average(models, [2, 1]))
    both = RunningAverage()
    both.merge(RunningAverage())
    assert both.total_weight == 0


def test_merging_in_the_same_order_gives_the_same_bits(rng: np.random.Generator) -> None:
    models = [random_array(rng, 5000, np.dtype(np.float64)) for _ in range(6)]

    def merged() -> np.ndarray:
        total = RunningAverage()
        for pair in (models[:2], models[2:4], models[4:]):
            total.merge(summed(pair, [0.3, 0.9]))
        return total.mean()  # type: ignore[no-any-return]

    assert same_bits(merged(), merged())


# Interrupts.


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("call", ["add", "add_all", "merge", "merge what was pickled"])
def test_an_interrupted_call_has_added_all_or_nothing(call: str, begun: bool) -> None:
    ten = summed([np.full(3, 10.0)], [2])

    def make() -> tuple[RunningAverage, Callable[[], Any]]:
        running = summed([np.ones(3)], [2]) if begun else RunningAverage()
        if call == "merge what was pickled":
            running = pickle.loads(pickle.dumps(running, protocol=5))
        calls: dict[str, Callable[[], Any]] = {
            "add": lambda: running.add(np.full(3, 10.0), 2),
            "add_all": lambda: running.add_all([np.full(3, 10.0)] * 2, [1, 1]),
        }
        return running, calls.get(call, lambda: running.merge(ten))

    make()[1]()  # checks are cached: a call that fills the cache has more instructions
    before, after = ((2, 1.0), (4, 5.5)) if begun else ((0, None), (2, 10.0))
    seen = set()
    for running in each_interruption(make):
        for one in (running, ten):
            # Tracing raises even where Python cannot: between a call and the end of its lock.
            one._calls = CallLock("sum")
        total = running.total_weight
        mean = running.mean() if total else np.array([None])
        assert len(set(mean.tolist())) == 1
        seen.add((total, mean.tolist()[0]))
        assert ten.mean().tolist() == [10.0] * 3
    assert seen == {before, after}


class Interrupting:
    """A source that makes a call while it is read, as a signal handler may."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self._call()
        return np.full(3, 2.0)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("call", ["add", "add_all", "merge", "mean", "pickle"])
def test_a_call_within_another_is_refused_and_loses_nothing(call: str, begun: bool) -> None:
    running = summed([np.ones(3)] if begun else [])
    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: running.add(np.full(3, 10.0)),
        "add_all": lambda: running.add_all([np.full(3, 10.0)] * 2),
        "merge": lambda: running.merge(summed([np.full(3, 10.0)])),
        "mean": running.mean,
        "pickle": lambda: pickle.dumps(running),
    }

    def handle() -> None:
        with refuses(RuntimeError, "in a call of the running average already.*call later"):
            calls[call]()

    running.add(Interrupting(handle))
    assert running.total_weight == 1 + begun
    assert running.mean().tolist() == [1.5 if begun else 2.0] * 3
    calls[call]()  # it is refused only in the call


def test_a_sum_that_is_merged_is_not_changed_meanwhile() -> None:
    running, other = RunningAverage(), RunningAverage()

    def handle() -> None:
        with refuses(RuntimeError, "in a call of the running average already"):
            running.merge(other)

    other.add(Interrupting(handle))
    assert running.total_weight == 0
    assert other.mean().tolist() == [2.0] * 3


# Pickling.


def travelled(running: RunningAverage, protocol: int = 5) -> RunningAverage:
    return pickle.loads(pickle.dumps(running, protocol=protocol))  # type: ignore[no-any-return]


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_sum_goes_on_with_the_same_bits(
    kind: str, protocol: int, rng: np.random.Generator
) -> None:
    models = [KINDS[kind](model(rng, k)) for k in range(6)]
    weights = [0.0, 0.3, 5, 1.5, 2, 0.1]
    here, there = summed(models[:2], weights[:2]), summed(models[:2], weights[:2])
    for m, weight in zip(models[2:4], weights[2:4], strict=True):
        there = travelled(there, protocol)
        assert_same(there.mean(), here.mean())
        here.add(m, weight)
        there.add(m, weight)
    tail = summed(models[4:], weights[4:])
    here.merge(tail)
    there = travelled(there, protocol)
    there.merge(travelled(tail, protocol))
    assert_same(there.mean(), here.mean())
    assert there.total_weight == here.total_weight


def test_the_compensation_travels() -> None:
    left = travelled(summed([np.array([1e16]), np.array([1.0])]))
    right = travelled(summed([np.array([1.0]), np.array([-1e16])]))
    left.merge(right)
    assert left.mean().tolist() == [0.5]


@pytest.mark.parametrize("size", [0, 1, BLOCK + 1])
@each(averaged_dtype=AVERAGED)
def test_sums_of_ranges_of_a_vector_travel(
    size: int, averaged_dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    vectors = [random_array(rng, 2 * size, averaged_dtype) for _ in range(4)]
    halves = []
    for part in (slice(0, size), slice(size, None)):
        nodes = [summed([v[part] for v in vectors[k : k + 2]], [3, 1]) for k in (0, 2)]
        here, there = RunningAverage(), RunningAverage()
        for node in nodes:
            here.merge(node)
            there.merge(travelled(node))
        assert_same(there.mean(), here.mean())
        halves.append(there.mean())
    assert_mean(np.concatenate(halves), vectors, [3, 1, 3, 1])


def test_an_empty_sum_travels() -> None:
    running = travelled(RunningAverage())
    assert running.total_weight == 0
    running.add(np.ones(2))
    assert running.mean().tolist() == [1, 1]


def test_the_sums_are_one_buffer_that_is_read_where_it_arrives(rng: np.random.Generator) -> None:
    parts = {"a": random_array(rng, 5000, np.dtype("f4")), "b": np.ones(3), "n": np.array(7)}
    running = summed([parts])
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(running, protocol=5, buffer_callback=buffers.append)
    sums = buffers[0].raw()
    assert sums.nbytes == 8 * (5000 + 2 * 3)  # a compensation only for float64 parts
    assert len(data) + sum(b.raw().nbytes for b in buffers[1:]) < 2000
    arrived = bytes(sums), *(bytes(b.raw()) for b in buffers[1:])
    there = pickle.loads(data, buffers=arrived)
    assert np.shares_memory(there._state.sum.memory, np.frombuffer(arrived[0], np.uint8))
    there.add(parts)
    assert arrived[0] == bytes(sums)
    assert_same(there.mean(), parts)


def test_what_is_added_later_is_not_in_what_was_pickled() -> None:
    running = summed([np.ones(3)])
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(running, protocol=5, buffer_callback=buffers.append)
    running.add(np.full(3, 5.0))
    running.merge(summed([np.full(3, 5.0)]))
    there = pickle.loads(data, buffers=buffers)
    assert (there.mean().tolist(), there.total_weight) == ([1.0] * 3, 1)
    assert (running.mean().tolist(), running.total_weight) == ([11 / 3] * 3, 3)


def test_a_sum_that_arrives_misaligned_is_copied() -> None:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(summed([np.ones(3)]), protocol=5, buffer_callback=buffers.append)
    room = np.zeros(100, np.uint8)
    skewed = room[1 : 1 + buffers[0].raw().nbytes]
    skewed[...] = np.frombuffer(buffers[0], np.uint8)  # type: ignore[call-overload]
    assert pickle.loads(data, buffers=[skewed]).mean().tolist() == [1, 1, 1]


def test_a_truncated_pickle_is_refused() -> None:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(summed([np.ones(3)]), protocol=5, buffer_callback=buffers.append)
    with pytest.raises(ValueError, match=r"memory: expected .* float64 \(6,\), got float64 \(5,\)"):
        pickle.loads(data, buffers=[buffers[0].raw()[:-8]])


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_copies_are_independent(duplicate: Callable[[RunningAverage], RunningAverage]) -> None:
    running = summed([{"a": np.ones(3), "n": np.array(4)}])
    other = duplicate(running)
    running.add({"a": np.full(3, 5.0), "n": np.array(5)})
    assert other.mean()["a"].tolist() == [1, 1, 1]
    assert other.mean()["n"] == 4
    assert other.total_weight == 1


# Bad input.


def state(running: RunningAverage) -> tuple[float, list[bytes]]:
    return running.total_weight, [part.tobytes() for part in arrays_of(running.mean())]


BAD_SOURCES = {
    "shape": (ValueError, r"expected float64 \(2,\), got float64 \(3,\)", {"a": np.ones(3)}, 1),
    "dtype": (
        TypeError,
        r"expected float64 \(2,\), got float32 \(2,\)",
        {"a": np.ones(2, "f4")},
        1,
    ),
    "key": (ValueError, r"source: expected the keys.*missing \['a'\]", {"b": np.ones(2)}, 1),
    "kind": (TypeError, "source: expected a mapping of arrays, got an array", np.ones(2), 1),
    "no model": (TypeError, "expected an array, FlatWeights", 3.5, 1),
    "negative": (ValueError, "weight: expected a finite weight, .* got -1", {"a": np.ones(2)}, -1),
    "NaN": (ValueError, "weight: expected a finite weight", {"a": np.ones(2)}, np.nan),
    "infinite": (ValueError, "weight: expected a finite weight", {"a": np.ones(2)}, np.inf),
    "far too heavy": (ValueError, "at most 1.3e.154 times", {"a": np.ones(2)}, 1e200),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_a_bad_source_is_refused_and_leaves_the_sum_alone(case: str) -> None:
    error, match, bad, weight = BAD_SOURCES[case]
    running = summed([{"a": np.array([1.0, 2.0])}])
    before = state(running)
    with pytest.raises(error, match=match):
        running.add(bad, weight)
    assert state(running) == before


def test_a_refused_first_source_sets_nothing() -> None:
    running = RunningAverage()
    for bad in (np.ones(2, int), {"a": np.array(["x"])}):
        with pytest.raises(TypeError, match="expected float16, bfloat16"):
            running.add(bad)
    with pytest.raises(ValueError, match="weight: expected"):
        running.add({"a": np.ones(2)}, -1)
    running.add([np.ones(2)])
    assert running.mean()[0].tolist() == [1, 1]


@pytest.mark.parametrize("running", [RunningAverage(), summed([np.ones(2)], [0])])
def test_nothing_has_no_mean(running: RunningAverage) -> None:
    out = np.zeros(2)
    with refuses(ValueError, "expected at least one source of positive weight, got none", out):
        running.mean(out=out)


@pytest.mark.parametrize(
    ("other", "error", "match"),
    [
        ({"a": np.ones(3)}, ValueError, r"other: slot 0: expected 'a' float64 \(2,\), got 'a'"),
        ({"b": np.ones(2)}, ValueError, "other: slot 0: expected 'a' .* got 'b'"),
        ({"a": np.ones(2), "b": np.ones(1)}, ValueError, "other: expected 1 slots, got 2"),
        ([np.ones(2)], TypeError, "expected sums of a mapping of arrays, got a sequence"),
    ],
)
def test_a_sum_over_another_layout_is_refused(other: Any, error: Any, match: str) -> None:
    running, others = summed([{"a": np.array([1.0, 2.0])}]), summed([other])
    before = state(running), state(others)
    with pytest.raises(error, match=match):
        running.merge(others)
    assert (state(running), state(others)) == before


def test_what_is_no_sum_cannot_be_merged() -> None:
    running = summed([np.ones(2)])
    other: Any = np.ones(2)
    with pytest.raises(TypeError, match="other: expected a RunningAverage, got ndarray"):
        running.merge(other)


def test_a_sum_cannot_be_merged_with_itself() -> None:
    running = summed([np.ones(2)])
    with pytest.raises(ValueError, match="expected another running average, got the same one"):
        running.merge(running)
    assert running.total_weight == 1


@pytest.mark.parametrize("factor", [1e155, 1e200])
def test_sums_of_far_heavier_models_are_refused(factor: float) -> None:
    running = summed([np.ones(2)] * 3, [1, 1e150, 1])
    before = state(running)
    for heavy in (
        summed([np.ones(2)], [factor]),
        summed([np.ones(2)] * 2, [factor / 1e100, factor]),
    ):
        with pytest.raises(ValueError, match=r"at most 1.3e\+154 times"):
            running.merge(heavy)
        assert state(running) == before


BAD_OUT = {
    "shape": (ValueError, r"out, slot 1 'b': expected float64 \(2,\), got", {"b": np.zeros(3)}),
    "dtype": (
        TypeError,
        r"out, slot 1 'b': expected float64 \(2,\), got",
        {"b": np.zeros(2, "f4")},
    ),
    "strides": (ValueError, "out, slot 1 'b': expected a C-contiguous", {"b": np.zeros(4)[::2]}),
    "read-only": (ValueError, "slot 1 'b': expected a writable", {"b": read_only(np.zeros(2))}),
    "integers": (TypeError, "out, slot 2 'n': expected int64", {"n": np.zeros(2)}),
    "key": (ValueError, r"out: expected the keys of the first; .* unknown \['c'\]", {"c": 0}),
    "no array": (TypeError, "out, slot 1 'b': expected a NumPy array, got list", {"b": [0.0, 0.0]}),
}


@pytest.mark.parametrize("case", BAD_OUT)
def test_a_bad_out_is_refused(case: str) -> None:
    error, match, bad = BAD_OUT[case]
    running = summed([{"a": np.ones(3), "b": np.ones(2), "n": np.array([1, 2])}])
    out = {"a": np.zeros(3), "b": np.zeros(2), "n": np.zeros(2, int)} | bad  # type: ignore[operator]
    with refuses(error, match, *(np.asarray(part) for part in out.values())):
        running.mean(out=out)


def test_the_parts_of_out_may_not_overlap() -> None:
    base = np.zeros(5)
    with refuses(ValueError, "out, slot 1 '1': overlaps another part of out", base):
        summed([[np.ones(3), np.ones(3)]]).mean(out=[base[:3], base[2:]])
