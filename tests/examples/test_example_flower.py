"""The strategy of the example `flower_strategy`, with Flower if it is installed.

Otherwise stand-ins replace the few names of Flower that the example uses.
"""

import importlib
import io
import itertools
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flatweights import robust

EXAMPLE = "flatweights.examples.flower_strategy"


class Array:
    def __init__(self, *args: Any) -> None:
        if len(args) == 1:
            file = io.BytesIO()
            np.save(file, args[0])
            args = (str(args[0].dtype), args[0].shape, "numpy.ndarray", file.getvalue())
        self.dtype, self.shape, self.stype, self.data = args

    def numpy(self) -> Any:
        return np.load(io.BytesIO(self.data))


class ArrayRecord(dict[str, Array]):
    pass


class MetricRecord(dict[str, float]):
    pass


class RecordDict(dict[str, Any]):
    @property
    def array_records(self) -> dict[str, Any]:
        return {key: value for key, value in self.items() if isinstance(value, ArrayRecord)}

    @property
    def metric_records(self) -> dict[str, Any]:
        return {key: value for key, value in self.items() if isinstance(value, MetricRecord)}


class FedAvg:
    weighted_by_key = "num-examples"

    def _check_and_log_replies(self, replies: Any, is_train: bool) -> tuple[list[Any], list[Any]]:
        replies = list(replies)
        return [r for r in replies if not r.has_error()], [r for r in replies if r.has_error()]

    def train_metrics_aggr_fn(self, contents: list[Any], key: str) -> MetricRecord:
        return MetricRecord(count=float(len(contents)))


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example, with Flower or its stand-ins."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what Flower imports
            importlib.import_module("flwr.serverapp.strategy")
    except ImportError:
        names: dict[str, dict[str, Any]] = {
            "flwr": {},
            "flwr.app": {c.__name__: c for c in (Array, ArrayRecord, MetricRecord, RecordDict)},
            "flwr.serverapp": {},
            "flwr.serverapp.strategy": dict.fromkeys(
                ("FedAvg", "FedMedian", "FedTrimmedAvg"), FedAvg
            ),
        }
        names["flwr.app"]["Message"] = SimpleNamespace
        for name, values in names.items():
            module = ModuleType(name)
            module.__dict__.update(values)
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, EXAMPLE, raising=False)
    yield importlib.import_module(EXAMPLE)
    sys.modules.pop(EXAMPLE, None)


def reply(flower: Any, node: int, values: list[Any], examples: float = 1) -> Any:
    arrays = flower.ArrayRecord(
        {f"layer {k}": flower.Array(np.asarray(v)) for k, v in enumerate(values)}
    )
    return flower.make_reply(node, arrays, float(examples))


def aggregate(flower: Any, replies: list[Any], rule: Any = None) -> list[Any]:
    arrays, metrics = flower.FlatStrategy(rule).aggregate_train(1, replies)
    assert metrics is not None
    assert list(arrays) == ["layer 0", "layer 1"]
    return [arrays[key].numpy() for key in arrays]


def test_arrays_are_read_in_place_and_written_as_numpy_reads_them(flower: Any) -> None:
    grid = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    for values in (
        grid,
        np.asfortranarray(grid),
        grid[:, ::2],
        np.full((), 2.5),
        np.zeros((0, 4), np.float16),
        np.arange(3) > 1,
    ):
        theirs = flower.Array(values)
        read = flower.read_array(theirs)
        np.testing.assert_array_equal(read, values, strict=True)
        assert not values.size or np.shares_memory(read, np.frombuffer(theirs.data, np.uint8))
        ours = flower.write_array(values)
        np.testing.assert_array_equal(ours.numpy(), values, strict=True)
        assert (ours.dtype, tuple(ours.shape)) == (theirs.dtype, tuple(theirs.shape))
    with pytest.raises(TypeError, match="expected a NumPy array, got torch"):
        flower.read_array(flower.Array("float32", (1,), "torch", b"1234"))


def test_replies_are_weighted_by_examples_in_the_order_of_their_nodes(flower: Any) -> None:
    rng = np.random.default_rng(0)
    models: list[list[Any]] = [
        [rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=5)] for _ in range(3)
    ]
    replies = [reply(flower, k, m, k + 1) for k, m in enumerate(models)]
    result = aggregate(flower, replies)
    for k, values in enumerate(result):
        expected = np.average([m[k].astype(np.float64) for m in models], axis=0, weights=[1, 2, 3])
        np.testing.assert_allclose(values, expected, rtol=1e-6)
    for order in itertools.permutations(replies):
        again = aggregate(flower, list(order))
        assert [v.tobytes() for v in again] == [v.tobytes() for v in result]


def test_a_rule_takes_the_place_of_the_mean(flower: Any) -> None:
    honest: list[Any] = [np.arange(1, 4, dtype=np.float32), np.full((), 4.0)]
    models = [[part + np.asarray(0.1 * k, part.dtype) for part in honest] for k in range(4)]
    models.append([part * -100 for part in honest])
    replies = [reply(flower, k, m) for k, m in enumerate(models)]
    for k, values in enumerate(aggregate(flower, replies, robust.Median())):
        expected = np.median([m[k] for m in models], axis=0)
        np.testing.assert_array_equal(values, np.asarray(expected, values.dtype))


def test_without_replies_there_is_no_result(flower: Any) -> None:
    assert flower.FlatStrategy().aggregate_train(1, []) == (None, None)


def test_the_program_compares_with_flowers_strategies(
    flower: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    if flower.FedAvg is FedAvg:
        pytest.skip("Flower is not installed")
    flower.main(["--replies", "6", "--megabytes", "0.01", "--hostile", "1"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:2] for row in rows] == [
        [rule, by] for rule in flower.STRATEGIES for by in ("flatweights", "Flower")
    ]
    distances = [float(row[3]) for row in rows]
    assert distances[::2] == distances[1::2]
    assert distances[0] > 10 * distances[2]  # the mean, the median


@pytest.mark.parametrize("option", ["--replies=0", "--hostile=11", "--megabytes=nan"])
def test_options_that_give_no_result_are_refused(flower: Any, option: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        flower.main([option])


def test_without_flower_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    monkeypatch.delitem(sys.modules, EXAMPLE, raising=False)
    with pytest.raises(SystemExit, match=r"flower_strategy needs Flower: pip install flwr"):
        importlib.import_module(EXAMPLE)
