"""The state of workers and of a group for the wire; no actor is started."""

import pickle
from typing import Any

import numpy as np
import pytest
from reference import BFLOAT16

from flatweights import FlatWeights
from flatweights.ray.results._result import split, with_weights
from flatweights.ray.results._wire import GroupWire, WorkerWire, nbytes_of, widen
from flatweights.wire import Difference, MissedUpdateError, Snapshot

pytestmark = pytest.mark.ray

WIRE: Any = "bfloat16"


def weights(value: float) -> FlatWeights:
    return FlatWeights({"w": np.full(100, value, np.float32), "n": np.int64(1)})


def bits(model: FlatWeights) -> bytes:
    return model.buffer.tobytes()


def received(worker: WorkerWire, message: Any) -> FlatWeights:
    """The weights that a worker sets its model to."""
    found: list[FlatWeights] = []
    worker.receive(message, found.append)
    return found[0]


def test_a_round_goes_in_full_once_and_then_in_differences() -> None:
    group, workers = GroupWire(WIRE), [WorkerWire() for _ in range(2)]
    assert not group.has_sent
    first, group = group.message(weights(1.0))
    assert isinstance(first, Snapshot)
    assert group.has_sent
    for worker in workers:
        assert bits(received(worker, first)) == bits(weights(1.0))
    sent = [
        worker.encode((weights(1.0 + 2**-9 * (k + 1)), {"rank": k}), "weights", WIRE)
        for k, worker in enumerate(workers)
    ]
    assert [extras for _, extras in sent] == [{"rank": 0}, {"rank": 1}]
    assert sent[0][0].values["w"].dtype == BFLOAT16
    mean = FlatWeights(group.widen(sent[0][0]))
    mean["w"] = (group.widen(sent[0][0])["w"] + group.widen(sent[1][0])["w"]) / 2
    found = group.decode(mean, "weights")
    assert found["w"][0] == np.float32(1.0 + 2**-9 * 1.5)
    second, group = group.message(found)
    assert isinstance(second, Difference)
    assert len({bits(received(worker, second)) for worker in workers}) == 1
    assert bits(received(workers[0], group.snapshot())) == bits(group.snapshot().weights)


def test_a_tuple_of_two_is_weights_and_extras() -> None:
    for result, pair in [
        ((1, "extras"), (1, "extras")),
        ((1, None), (1, None)),  # still a tuple, for functions that weigh results
        (1, (1, None)),
        ([1, 2], ([1, 2], None)),
        ((1, 2, 3), ((1, 2, 3), None)),
        (((1, 2), 3), ((1, 2), 3)),
    ]:
        assert split(result) == pair
        assert with_weights(result, lambda weights: weights) == result
    assert with_weights((1, 2), str) == ("1", 2)
    assert with_weights([1, 2], str) == "[1, 2]"


def test_differences_from_weights_that_the_other_side_lacks_are_refused() -> None:
    group = GroupWire(WIRE)
    _, group = group.message(weights(1.0))
    update, _ = group.message(weights(2.0))
    with pytest.raises(MissedUpdateError, match="never received"):
        received(WorkerWire(), update)
    with pytest.raises(MissedUpdateError, match="no weights have been received"):
        WorkerWire().encode(weights(1.0), "weights", WIRE)
    group, worker = in_touch()
    old = worker.encode(weights(1.5), "weights", WIRE)
    group.widen(old)
    message, group = group.message(weights(2.0))
    received(worker, message)
    with pytest.raises(MissedUpdateError, match="result: expected a difference from weights"):
        group.widen(old)


def in_touch() -> tuple[GroupWire, WorkerWire]:
    """A group and a worker that has its first message."""
    worker = WorkerWire()
    message, group = GroupWire(WIRE).message(weights(1.0))
    received(worker, message)
    return group, worker


def test_another_layout_or_dtype_starts_anew() -> None:
    group, worker = in_touch()
    other = FlatWeights({"v": np.ones(3, np.float32)})
    message, group = group.message(other)
    assert isinstance(message, Snapshot)
    assert bits(received(worker, message)) == bits(other)
    assert isinstance(group.message({"v": np.zeros(3, np.float32)})[0], Difference)
    received(worker, GroupWire("float16").message(weights(1.0))[0])
    assert worker.encode(weights(1.5), "weights", "float16").values["w"].dtype == np.float16


def test_what_was_not_sent_or_not_taken_has_not_happened() -> None:
    group, worker = in_touch()
    before = bits(group.snapshot().weights)
    lost, _ = group.message(weights(2.0))
    with pytest.raises(LookupError, match="w"):
        worker.receive(lost, lambda model: {}[next(iter(model))])  # type: ignore[index]
    assert bits(group.snapshot().weights) == before
    first = worker.encode(weights(1.5), "weights", WIRE)
    assert group.widen(first)["w"][0] == 0.5, "from the weights that both had before"
    message, after = group.message(weights(3.0))
    assert bits(received(worker, message)) == bits(after.snapshot().weights)
    with pytest.raises(MissedUpdateError, match="expected a difference from weights"):
        received(worker, lost)


def test_gradients_need_no_weights_and_may_be_a_vector() -> None:
    worker, group = WorkerWire(), GroupWire(WIRE)
    vector = np.full(5, 1.001, np.float32)
    sent = [worker.encode(vector, "gradients", WIRE) for _ in range(64)]
    total = sum(group.widen(each)["vector"] for each in sent)
    assert np.allclose(total, 64 * 1.001, atol=2**-8)
    mean = sent[0].widen()
    assert group.decode(mean, "gradients") is mean


def test_gradients_have_errors_of_their_own_by_method_and_by_dtype() -> None:
    worker, vector = WorkerWire(), np.full(5, 1.003, np.float32)
    worker.encode(vector, "gradients", "bfloat16", "one")
    other = worker.encode(0 * vector, "gradients", "bfloat16", "another")
    assert not widen(other)["vector"].any()
    assert worker.encode(vector, "gradients", "float16", "one").values["vector"].dtype == np.float16
    wider = np.full(7, 1.003, np.float32)  # of another model: nothing is left of the last errors
    assert widen(worker.encode(wider, "gradients", "bfloat16", "one"))["vector"].tolist() == [1] * 7


def test_what_has_no_names_is_refused() -> None:
    group, worker = in_touch()
    with pytest.raises(TypeError, match="by name"):
        group.message(np.zeros(3))
    with pytest.raises(TypeError, match="by name"):
        worker.encode(np.zeros(3), "weights", WIRE)
    with pytest.raises(ValueError, match="wire_dtype: expected 'bfloat16' or 'float16'"):
        GroupWire("float32")  # type: ignore[arg-type]


def test_sizes_are_those_of_the_buffer_that_travels() -> None:
    group = GroupWire(WIRE)
    model = weights(1.0)
    snapshot, group = group.message(model)
    update, _ = group.message(model)
    assert nbytes_of(snapshot) == nbytes_of(model) == 448 + 64
    assert nbytes_of(update) == 256 + 64
    assert nbytes_of(np.zeros(3)) == 64
    assert nbytes_of("text") is None
    assert len(pickle.dumps(update, protocol=5)) < 256 + 64 + 800
    assert widen(model) is model
