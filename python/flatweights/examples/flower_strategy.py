"""A strategy for Flower that aggregates with flatweights: the mean, or a robust average.

`FlatStrategy` is Flower's `FedAvg`, but it aggregates replies by ``rule``, a value of
`flatweights.robust`, or averages them weighted by their numbers of examples. It reads the arrays in
the replies without a copy, and adds replies in the order of their nodes, so the result has the same
bits whatever the order in which they arrived. Copy the class into a ServerApp::

    strategy = FlatStrategy(robust.TrimmedMean(0.2), fraction_train=0.5)
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=10)

The program makes up replies, some of them hostile, and aggregates them as Flower does and as this
strategy does. It prints the times, and the distance of each result from an honest one. It needs no
Ray:

    pip install flwr
    flatweights examples flower_strategy
    flatweights examples flower_strategy --replies 10 --megabytes 100 --rule median
"""

import argparse
import io
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flatweights
from flatweights import robust

try:
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import FedAvg, FedMedian, FedTrimmedAvg
except ImportError as error:
    raise SystemExit(f"flower_strategy needs Flower: pip install flwr ({error})") from None

NUMPY = "numpy.ndarray"  # Flower's name for the format of np.save


def read_array(array: Array) -> NDArray[Any]:
    """Return a view of the values that np.save wrote into ``array``: no byte is copied."""
    if array.stype != NUMPY:
        raise TypeError(f"expected a NumPy array, got {array.stype}")
    file = io.BytesIO(array.data)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read = np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    flat = np.frombuffer(array.data, dtype, int(np.prod(shape)), file.tell())
    return flat.reshape(shape, order="F" if is_fortran else "C")


def write_array(values: NDArray[Any]) -> Array:
    """Return ``values`` as np.save writes them; copied once if they are contiguous."""
    values = np.asarray(values, order="C")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(values))
    data = b"".join((header.getvalue(), values.reshape(-1).view(np.uint8).data))
    return Array(str(values.dtype), values.shape, NUMPY, data)


class FlatStrategy(FedAvg):  # type: ignore[misc]
    """Aggregates by a rule of `flatweights.robust`, or by the mean.

    Args:
        rule: It replaces the mean weighted by numbers of examples.
        **options: The options of Flower's `FedAvg`.
    """

    def __init__(self, rule: robust.Rule | None = None, **options: Any) -> None:
        """Take the rule, and the options of `FedAvg`."""
        super().__init__(**options)
        self.rule = rule

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the aggregated arrays and metrics."""
        valid, _ = self._check_and_log_replies(replies, is_train=True)
        if not valid:
            return None, None
        contents = [m.content for m in sorted(valid, key=lambda m: m.metadata.src_node_id)]
        records = [next(iter(content.array_records.values())) for content in contents]
        models = [{key: read_array(array) for key, array in r.items()} for r in records]
        weights = [
            float(next(iter(content.metric_records.values()))[self.weighted_by_key])
            for content in contents
        ]
        if self.rule is None:
            result = flatweights.average(models, weights)
        else:
            takes_weights = self.rule.takes_weights
            result = self.rule(models, weights if takes_weights else None, nonfinite="skip")
        arrays = ArrayRecord({key: write_array(values) for key, values in result.items()})
        return arrays, self.train_metrics_aggr_fn(contents, self.weighted_by_key)


# By the name of a rule: ours, and Flower's strategy.
STRATEGIES: dict[str, tuple[robust.Rule | None, Callable[[], FedAvg]]] = {
    "mean": (None, FedAvg),
    "median": (robust.Median(), FedMedian),
    "trimmed_mean": (robust.TrimmedMean(0.2), lambda: FedTrimmedAvg(beta=0.2)),
}


def make_reply(node: int, arrays: ArrayRecord, examples: float = 1.0) -> Message:
    """Return the parts of a `Message` that strategies read; only a ServerApp makes a whole one."""
    metrics = MetricRecord({"num-examples": examples})
    content = RecordDict({"arrays": arrays, "metrics": metrics})
    metadata = SimpleNamespace(src_node_id=node)
    return SimpleNamespace(content=content, metadata=metadata, has_error=lambda: False)


def make_replies(count: int, nbytes: int, hostile: int) -> list[Message]:
    """Return ``count`` replies of ``nbytes``; the first ``hostile`` of them are hostile."""
    rng = np.random.default_rng(0)
    honest = rng.normal(size=(100, max(1, nbytes // 400))).astype(np.float32)
    replies = []
    for node in range(count):
        values = honest + np.float32(0.01) * rng.normal(size=honest.shape).astype(np.float32)
        if node < hostile:
            values *= np.float32(-10)
        arrays = ArrayRecord({f"layer {k}": Array(v) for k, v in enumerate(np.split(values, 10))})
        replies.append(make_reply(node, arrays))
    return replies


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replies", type=int, default=10, help="default: %(default)s")
    parser.add_argument(
        "--megabytes", type=float, default=10, help="of a reply; default: %(default)s"
    )
    parser.add_argument(
        "--hostile", type=int, default=2, help="hostile replies; default: %(default)s"
    )
    parser.add_argument("--rule", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    options = parser.parse_args(arguments)
    if options.replies < 1 or not 0 <= options.hostile <= options.replies:
        expected = "at least 1 reply, and no more hostile ones"
        parser.error(f"expected {expected}, got {vars(options)}")
    if not 0 < options.megabytes <= 10_000:
        parser.error(f"--megabytes: expected above 0, at most 10000, got {options.megabytes}")
    nbytes = int(options.megabytes * 1e6)
    honest = make_replies(1, nbytes, 0)[0].content["arrays"]
    print(f"{'rule':<14}{'by':<13}{'seconds':>9}{'distance':>10}", flush=True)
    for name in options.rule:
        ours, theirs = STRATEGIES[name]
        for by, strategy in (("flatweights", FlatStrategy(ours)), ("Flower", theirs())):
            # New ones: some of Flower's strategies take the arrays out of the replies.
            replies = make_replies(options.replies, nbytes, options.hostile)
            begin = time.perf_counter()
            arrays, _ = strategy.aggregate_train(1, replies)
            seconds = time.perf_counter() - begin
            assert arrays is not None  # there were replies
            away = [read_array(a) - read_array(honest[k]) for k, a in arrays.items()]
            distance = float(np.sqrt(np.mean([np.mean(np.square(part)) for part in away])))
            print(f"{name:<14}{by:<13}{seconds:>9.3f}{distance:>10.3f}", flush=True)


if __name__ == "__main__":
    main()
