import doctest
import importlib
import inspect
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from interrupts import each_interruption
from reference import (
    BFLOAT16,
    each,
    random_array,
    read_only,
    refuses,
    run_python,
    same_bits,
)

import flatweights as fw
from flatweights import FlatWeights, Layout, _core
from flatweights import wire as package
from flatweights.wire import (
    DeltaBroadcaster,
    DeltaEncoder,
    Difference,
    GradientEncoder,
    MissedUpdateError,
    Snapshot,
    average_differences,
    dtype_on_wire,
    wire_layout,
)

WIRES = ["bfloat16", "float16"]
DTYPES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}
B = 1 << 15  # several threads share as many numbers


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> Any:
    return request.param


def model(rng: np.random.Generator, scale: float = 1.0) -> fw.FlatWeights:
    """Small and large parts, padding, two floating dtypes, and parts that travel as they are."""
    return fw.FlatWeights(
        {
            "empty": np.zeros((0, 3), np.float32),
            "small": scale * rng.normal(size=5).astype(np.float32),
            "scalar": np.float32(scale * rng.normal()),
            "large": scale * rng.normal(size=(3, B)).astype(np.float32)[:, : B // 2 + 7],
            "wide": scale * rng.normal(size=(B + 1,)),
            "steps": np.int64(7),
            "half": (scale * rng.normal(size=9)).astype(BFLOAT16),
            "complex": (scale * random_array(rng, 3, np.dtype(np.complex64))).astype(np.complex64),
            "last": scale * rng.normal(size=70).astype(np.float32),
        }
    )


def moved(weights: fw.FlatWeights, rng: np.random.Generator, scale: float = 1e-2) -> fw.FlatWeights:
    """The result of training ``weights``."""
    result = weights.copy()
    for part in result.values():
        if part.dtype.kind == "i":
            part += 1
        else:
            part += (scale * rng.normal(size=part.shape)).astype(part.dtype)
    return result


ROUNDED = ("small", "scalar", "large", "wide", "last")
KEPT = ("steps", "half", "complex")


def test_wire_layout_halves_float32_and_leaves_what_is_no_wide_float(wire: Any) -> None:
    layout = wire_layout(model(np.random.default_rng(0)).layout, wire)
    assert {slot.name for slot in layout.slots if slot.dtype == DTYPES[wire]} >= set(ROUNDED)
    assert [layout[name].dtype.name for name in KEPT] == ["int64", "bfloat16", "complex64"]
    assert layout.named


@each(size=[0, 1, 31, 32, B - 1, B, B + 1, 3 * B + 5])
def test_encode_rounds_the_difference_and_keeps_the_rest(size: int, wire: Any) -> None:
    rng = np.random.default_rng(size)
    start = fw.FlatWeights({"w": rng.normal(size=size).astype(np.float32)})
    encoder = DeltaEncoder(DeltaBroadcaster(start, wire).snapshot())
    residual = np.zeros(size, np.float32)
    for _ in range(3):
        trained = moved(start, rng)
        sent = encoder.encode(trained)
        wanted = (trained["w"] - start["w"]) + residual
        assert same_bits(sent.values["w"], wanted.astype(DTYPES[wire]))
        residual = wanted - sent.values["w"].astype(np.float32)
        assert same_bits(encoder.residual["w"], residual)
    assert same_bits(encoder.reference["w"], start["w"])


def test_encode_treats_each_slot_of_a_mixed_model(rng: np.random.Generator, wire: Any) -> None:
    start = model(rng)
    trained = moved(start, rng)
    sent = DeltaEncoder(DeltaBroadcaster(start, wire).snapshot()).encode(trained)
    for name in ROUNDED:
        wanted = trained[name] - start[name]
        if wanted.dtype == np.float64:  # ml_dtypes rounds it twice
            assert np.allclose(sent.values[name].astype(float), wanted, rtol=2**-8, atol=2**-24)
        else:
            assert same_bits(sent.values[name], wanted.astype(DTYPES[wire])), name
    for name in KEPT:
        assert same_bits(sent.values[name], trained[name]), name


def test_all_sides_have_the_same_bits_after_each_round(rng: np.random.Generator, wire: Any) -> None:
    start = model(rng)
    driver = DeltaBroadcaster(start, wire)
    workers = [DeltaEncoder(driver.snapshot()) for _ in range(3)]
    for round_ in range(5):
        sent = [worker.encode(moved(worker.reference, rng)) for worker in workers]
        update = driver.encode(driver.average(sent, weights=[3, 1, 2]))
        for worker in workers:
            received = worker.receive(update)
            assert received.buffer.tobytes() == driver.reference.buffer.tobytes()
            assert worker.version == driver.version
        assert int(driver.reference["steps"]) == 8 + round_
    # Padding stays zero: buffers may be compared and hashed.
    assert fw.FlatWeights(dict(driver.reference)).buffer.tobytes() == (
        driver.reference.buffer.tobytes()
    )


def test_all_sides_have_the_same_bits_after_a_message_was_pickled(
    rng: np.random.Generator, wire: Any
) -> None:
    start = model(rng)
    driver = DeltaBroadcaster(start, wire)

    def travel(message: Any) -> tuple[Any, list[pickle.PickleBuffer]]:
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        copies = [bytes(buffer.raw()) for buffer in buffers]  # read-only, as Ray's are
        return pickle.loads(data, buffers=copies), buffers

    worker = DeltaEncoder(travel(driver.snapshot())[0])
    sent, buffers = travel(worker.encode(moved(start, rng)))
    assert [b.raw().nbytes for b in buffers] == [wire_layout(start.layout, wire).nbytes]
    worker.receive(travel(driver.encode(driver.average([sent])))[0])
    assert worker.reference.buffer.tobytes() == driver.reference.buffer.tobytes()


def test_average_is_that_of_the_differences_in_float32_added_to_the_weights(
    rng: np.random.Generator, wire: Any
) -> None:
    start = model(rng)
    driver = DeltaBroadcaster(start, wire)
    target = moved(start, rng)
    update = driver.encode(target)
    workers = [DeltaEncoder(driver.snapshot()) for _ in range(3)]
    sent = [worker.encode(moved(worker.reference, rng)) for worker in workers]
    mean = fw.average([s.widen() for s in sent], [1, 2, 3])
    assert same_bits(average_differences(sent, [1, 2, 3]).buffer, mean.buffer)
    found = driver.average(sent, [1, 2, 3])
    for name in ROUNDED:
        assert found[name].dtype == start[name].dtype
        # Relative to the given weights, not to those that its rounded difference gives.
        assert same_bits(found[name], target[name] + mean[name]), name
    assert not same_bits(driver.reference["large"], target["large"])
    for name in KEPT:
        assert same_bits(found[name], mean[name]), name
    assert update.base is not None
    assert update.version == update.base + 1


def test_average_writes_to_out_and_refuses_another_layout(
    rng: np.random.Generator, wire: Any
) -> None:
    start = model(rng)
    driver = DeltaBroadcaster(start, wire)
    sent = [DeltaEncoder(driver.snapshot()).encode(moved(start, rng)) for _ in range(2)]
    out = fw.FlatWeights.empty(start.layout)
    assert driver.average(sent, out=out) is out
    assert same_bits(out.buffer, driver.average(sent).buffer)
    with pytest.raises(ValueError, match="out: expected 9 slots, got 1"):
        driver.average(sent, out=fw.FlatWeights({"w": np.zeros(3)}))
    with pytest.raises(TypeError, match="source 1: expected a Difference, got FlatWeights"):
        driver.average([sent[0], start])
    with pytest.raises(ValueError, match="at least one source"):
        driver.average([])


def test_lost_bits_arrive_later_at_workers(wire: Any) -> None:
    start = fw.FlatWeights({"w": np.float32([1.0])})
    driver = DeltaBroadcaster(start, wire)
    target = fw.FlatWeights({"w": np.float32([1.0 + 0.1 + 2**-15])})
    errors = []
    for _ in range(3):
        driver.encode(target)
        errors.append(abs(float(driver.reference["w"][0] - target["w"][0])))
    assert errors[0] > 1e-6
    assert errors[1] <= 2**-22


def test_updates_below_the_last_place_of_16_bits_add_up(wire: Any) -> None:
    step, rounds = np.float32(2**-14), 64
    driver = DeltaBroadcaster(fw.FlatWeights({"w": np.float32([1, 100, 1000])}), wire)
    worker = DeltaEncoder(driver.snapshot())
    for _ in range(rounds):
        trained = worker.reference.copy()
        trained["w"] += step * np.float32([1, 3.337, 7.77])
        worker.receive(driver.encode(driver.average([worker.encode(trained)])))
    moved_by = driver.weights["w"] - np.float32([1, 100, 1000])
    wanted = rounds * step * np.array([1, 3.337, 7.77])
    assert np.allclose(moved_by, wanted, rtol=2e-3, atol=2**-14 * rounds / 2)


def test_a_missed_update_is_an_error_until_there_is_a_snapshot(
    rng: np.random.Generator, wire: Any
) -> None:
    start = model(rng)
    driver = DeltaBroadcaster(start, wire)
    worker, late = (DeltaEncoder(driver.snapshot()) for _ in range(2))
    stale = late.encode(moved(start, rng))
    first = driver.encode(moved(start, rng))
    second = driver.encode(moved(start, rng))
    for update in (first, second):
        worker.receive(update)
    reference = late._reference.buffer
    with refuses(MissedUpdateError, "a snapshot is needed", reference):
        late.receive(second)
    with refuses(MissedUpdateError, "a snapshot is needed", worker._reference.buffer):
        worker.receive(second)  # twice
    with pytest.raises(MissedUpdateError, match="source 1: expected a difference from weights"):
        driver.average([worker.encode(moved(start, rng)), stale])
    with pytest.raises(MissedUpdateError, match="source 1"):
        average_differences([worker.encode(moved(start, rng)), stale])
    late.receive(driver.snapshot())
    third = driver.encode(moved(start, rng))
    for encoder in (worker, late):
        encoder.receive(third)
        assert encoder.reference.buffer.tobytes() == driver.reference.buffer.tobytes()


def test_messages_of_another_driver_are_refused(rng: np.random.Generator, wire: Any) -> None:
    start = model(rng)
    ours, theirs = (DeltaBroadcaster(start, wire) for _ in range(2))
    worker = DeltaEncoder(ours.snapshot())
    with pytest.raises(MissedUpdateError):
        worker.receive(theirs.encode(start))
    with pytest.raises(MissedUpdateError):
        theirs.average([worker.encode(start)])


def test_messages_of_the_wrong_kind_are_refused(rng: np.random.Generator) -> None:
    start = model(rng)
    driver = DeltaBroadcaster(start, "bfloat16")
    worker = DeltaEncoder(driver.snapshot())
    with pytest.raises(
        TypeError, match="message: expected a Difference or a Snapshot, got FlatWeights"
    ):
        worker.receive(start)
    with pytest.raises(ValueError, match="got one from a worker"):
        worker.receive(worker.encode(start))
    other = DeltaBroadcaster(start, "float16")
    with pytest.raises(ValueError, match="slot 0: expected 'empty' bfloat16"):
        worker.receive(other.encode(start))
    smaller = fw.FlatWeights({"w": np.zeros(3, np.float32)})
    for refused in (worker.encode, driver.encode):
        with pytest.raises(ValueError, match="weights: expected 9 slots, got 1"):
            refused(smaller)
    for wrong in ("float32", "bf16", np.float16):
        with pytest.raises(ValueError, match="wire_dtype: expected 'bfloat16' or 'float16'"):
            DeltaBroadcaster(start, wrong)


def test_what_is_no_model_or_message_is_refused() -> None:
    start = fw.FlatWeights({"w": np.zeros(3, np.float32)})
    driver = DeltaBroadcaster(start, "bfloat16")
    worker = DeltaEncoder(driver.snapshot())
    update = driver.encode(start)
    wrong: Any = dict(start)
    refusals: list[tuple[str, Callable[[], object]]] = [
        ("weights", lambda: DeltaBroadcaster(wrong, "bfloat16")),
        ("weights", lambda: driver.encode(wrong)),
        ("weights", lambda: worker.encode(wrong)),
        ("mean", lambda: driver.add_to(wrong)),
        ("out", lambda: update.widen(wrong)),
        ("out", lambda: average_differences([update], out=wrong)),
        ("snapshot, weights", lambda: DeltaEncoder(Snapshot(wrong, 0, "bfloat16"))),
        ("snapshot, weights", lambda: worker.receive(Snapshot(wrong, 0, "bfloat16"))),
        ("source 0, values", lambda: average_differences([Difference(wrong, start.layout)])),
    ]
    for where, refused in refusals:
        with pytest.raises(TypeError, match=f"^{where}: expected FlatWeights, got dict"):
            refused()
    with pytest.raises(TypeError, match="snapshot: expected Snapshot, got FlatWeights"):
        DeltaEncoder(start)
    with pytest.raises(TypeError, match="message: expected a Difference or a Snapshot, got dict"):
        worker.fits(wrong)
    with pytest.raises(TypeError, match="message: expected a Difference or a Snapshot, got dict"):
        worker.receive(wrong)
    with pytest.raises(TypeError, match="sources: expected a list of models, got Difference"):
        driver.average(update)
    with pytest.raises(TypeError, match="layout: expected Layout, got FlatWeights"):
        wire_layout(start, "bfloat16")
    with pytest.raises(TypeError, match="source 0: expected a Difference, got dict"):
        average_differences([wrong])
    names: tuple[Any, ...] = ("float32", None, [])
    for name in names:
        with pytest.raises(ValueError, match="wire_dtype: expected 'bfloat16' or 'float16'"):
            dtype_on_wire(name)


def test_a_difference_whose_values_do_not_fit_its_layout_is_refused(wire: Any) -> None:
    start = fw.FlatWeights({"w": np.zeros(3, np.float32), "n": np.int64(1)})
    driver = DeltaBroadcaster(start, wire)
    wide = Difference(start, start.layout, driver.version - 1, driver.version)
    short = fw.FlatWeights({"w": np.zeros(2, DTYPES[wire]), "n": np.int64(1)})
    for damaged in (wide, Difference(short, start.layout)):
        with pytest.raises(ValueError, match="difference: expected values of 16 bits"):
            damaged.widen()
        with pytest.raises(ValueError, match="source 0: expected values of 16 bits"):
            average_differences([damaged])
        with pytest.raises(ValueError, match="difference: slot 0"):
            DeltaEncoder(driver.snapshot()).receive(damaged)


def test_what_is_read_only_is_not_written_to(wire: Any) -> None:
    start = fw.FlatWeights({"w": np.ones(3, np.float32)})
    driver = DeltaBroadcaster(start, wire)
    sent = [DeltaEncoder(driver.snapshot()).encode(moved(start, np.random.default_rng(0)))]
    out = fw.FlatWeights.wrap(read_only(start.buffer), start.layout)
    for where, refused in [
        ("out", lambda: sent[0].widen(out)),
        ("out", lambda: average_differences(sent, out=out)),
        ("out", lambda: driver.average(sent, out=out)),
        ("mean", lambda: driver.add_to(out)),
    ]:
        with refuses(ValueError, f"^{where}: expected a writable buffer", out.buffer):
            refused()


def test_a_snapshot_of_another_wire_dtype_is_refused(wire: Any) -> None:
    start = fw.FlatWeights({"w": np.ones(3, np.float32)})
    worker = DeltaEncoder(DeltaBroadcaster(start, wire).snapshot())
    (other,) = set(WIRES) - {wire}
    moved_on = fw.FlatWeights({"w": np.zeros(3, np.float32)})
    snapshot = DeltaBroadcaster(moved_on, other).snapshot()
    assert not worker.fits(snapshot)
    with refuses(ValueError, "snapshot, wire_dtype: slot 0", worker._reference.buffer):
        worker.receive(snapshot)


def test_a_difference_goes_as_bytes_alone(rng: np.random.Generator, wire: Any) -> None:
    start = model(rng)
    driver = DeltaBroadcaster(start, wire)
    worker = DeltaEncoder(driver.snapshot())
    sent = worker.encode(moved(start, rng))
    # As a file or a message of MPI is read: read-only, at any alignment.
    memory = np.frombuffer(b"." + sent.values.buffer.tobytes(), np.uint8)[1:]
    values = fw.FlatWeights.empty(wire_layout(start.layout, wire))
    values.buffer[...] = memory
    received = Difference(values, start.layout, sent.base)
    assert same_bits(driver.average([received]).buffer, driver.average([sent]).buffer)


BAD = {"nan": np.nan, "inf": np.inf, "too large": 3.4e38}


@each(name=["small", "last", "wide"])
@each(bad=BAD)
def test_what_does_not_fit_names_the_slot_and_changes_nothing(
    bad: str, name: str, wire: Any, rng: np.random.Generator
) -> None:
    start = model(rng)
    driver = DeltaBroadcaster(start, wire)
    worker = DeltaEncoder(driver.snapshot())
    worker.encode(moved(start, rng))  # so that there is a residual
    gradients = GradientEncoder(wire)
    gradients.encode(moved(start, rng))
    trained = moved(start, rng)
    trained[name].reshape(-1)[-1] = BAD[bad]
    if bad == "too large" and wire == "bfloat16":
        # float32 has the same range, except for the last half unit; float64 has a larger one.
        trained[name].reshape(-1)[-1] = np.finfo(np.float32).max
    reason = "expected a difference that fits" if bad == "too large" else "holds NaN or infinity"
    i = start.layout.index(name)
    expected = f"slot {i} '{name}': {reason}"
    for residual, refused in [
        (worker._residual, worker.encode),
        (gradients._residual, gradients.encode),
    ]:
        assert residual is not None
        before = residual.now.buffer.tobytes()
        with pytest.raises(ValueError, match=expected):
            refused(trained)
        assert residual.now.buffer.tobytes() == before
    version = driver.version
    with refuses(ValueError, expected, driver._reference.buffer, driver._weights.buffer):
        driver.encode(trained)
    assert driver.version == version
    # Everything goes on as if it had not happened.
    worker.receive(driver.encode(driver.average([worker.encode(moved(start, rng))])))
    assert worker.reference.buffer.tobytes() == driver.reference.buffer.tobytes()


@each(name=["half", "complex"])
@each(bad=["nan", "inf"])
def test_parts_that_travel_as_they_are_must_be_finite_too(
    bad: str, name: str, wire: Any, rng: np.random.Generator
) -> None:
    start = model(rng)
    driver = DeltaBroadcaster(start, wire)
    worker = DeltaEncoder(driver.snapshot())
    trained = moved(start, rng)
    trained[name][-1] = BAD[bad]
    expected = f"slot {start.layout.index(name)} '{name}': holds NaN or infinity"
    for refused in (worker.encode, GradientEncoder(wire).encode):
        with pytest.raises(ValueError, match=expected):
            refused(trained)
    with refuses(ValueError, expected, driver._reference.buffer, driver._weights.buffer):
        driver.encode(trained)


def test_broadcaster_refuses_weights_with_nan_at_once() -> None:
    with pytest.raises(ValueError, match=r"slot 0 'w': holds NaN or infinity"):
        DeltaBroadcaster(fw.FlatWeights({"w": np.float32([np.nan])}), "bfloat16")


@each(sign=[1, -1])
@each(at=[0, 1500, 2999])
def test_a_rounded_difference_that_makes_the_reference_infinite_is_refused(
    at: int, sign: int
) -> None:
    start = fw.FlatWeights({"a": np.ones(2), "w": np.full(3000, sign * 1e38, np.float32)})
    driver = DeltaBroadcaster(start, "bfloat16")
    worker = DeltaEncoder(driver.snapshot())
    trained = start.copy()
    trained["w"][at] = sign * np.float32(3.3995e38)  # the difference is rounded away from 0
    expected = "weights, slot 1 'w': expected numbers that a difference in bfloat16 reaches"
    version = driver.version
    for refused in (driver.encode, driver.after):
        with refuses(ValueError, expected, driver._reference.buffer, driver._weights.buffer):
            refused(trained)
    assert driver.version == version
    trained["w"][at] = sign * np.float32(3.39e38)
    for weights in (trained, start):
        worker.receive(driver.encode(weights))
        assert fw.isfinite(worker.reference)
        assert same_bits(worker.reference.buffer, driver.reference.buffer)


def test_float16_reaches_to_65504() -> None:
    driver = DeltaBroadcaster(fw.FlatWeights({"w": np.zeros(1, np.float32)}), "float16")
    with pytest.raises(ValueError, match="fits float16"):
        driver.encode(fw.FlatWeights({"w": np.float32([65520])}))
    driver.encode(fw.FlatWeights({"w": np.float32([65519])}))
    assert driver.reference["w"][0] == 65504


def test_garbage_in_padding_does_no_harm(rng: np.random.Generator, wire: Any) -> None:
    start = model(rng)
    driver = DeltaBroadcaster(start, wire)
    worker = DeltaEncoder(driver.snapshot())
    trained = moved(start, rng)
    expected = worker.encode(trained)
    spoiled = fw.FlatWeights.wrap(np.full_like(trained.buffer, 0xFF), start.layout)
    spoiled.update(trained)
    found = DeltaEncoder(driver.snapshot()).encode(spoiled)
    assert same_bits(found.values.buffer, expected.values.buffer)


def test_gradients_of_many_steps_sum_up_to_what_float32_gives(
    rng: np.random.Generator, wire: Any
) -> None:
    encoder = GradientEncoder(wire)
    gradient = rng.normal(size=1000).astype(np.float32)
    naive, fed_back = np.zeros(1000), np.zeros(1000)
    for _ in range(200):
        fed_back += encoder.encode(gradient).widen()["vector"]
        naive += gradient.astype(DTYPES[wire]).astype(np.float32)
    exact = 200.0 * gradient
    unit = np.abs(gradient).max() * (2**-8 if wire == "bfloat16" else 2**-11)
    assert np.abs(fed_back - exact).max() <= unit
    assert np.abs(naive - exact).max() > 20 * np.abs(fed_back - exact).max()


def test_gradients_are_a_vector_or_weights_of_one_layout(
    rng: np.random.Generator, wire: Any
) -> None:
    vector = rng.normal(size=B + 3).astype(np.float32)
    encoder = GradientEncoder(wire)
    with pytest.raises(ValueError, match="expected a gradient first"):
        _ = encoder.residual
    assert same_bits(encoder.encode(vector).values["vector"], vector.astype(DTYPES[wire]))
    with pytest.raises(ValueError, match="gradient, against the first one: slot 0"):
        encoder.encode(vector[:-1])
    with pytest.raises(ValueError, match="without strides"):
        encoder.encode(vector[::2])
    for wrong in (vector.reshape(1, -1), [1.0]):
        with pytest.raises(TypeError, match="expected FlatWeights or a vector"):
            encoder.encode(wrong)
    weights = model(rng)
    sent = GradientEncoder(wire).encode(weights)
    assert same_bits(sent.values["large"], weights["large"].astype(DTYPES[wire]))
    assert same_bits(sent.widen()["steps"], weights["steps"])


def test_widen_is_exact_and_checks_out(rng: np.random.Generator, wire: Any) -> None:
    weights = model(rng)
    sent = GradientEncoder(wire).encode(weights)
    out = fw.FlatWeights.empty(weights.layout)
    assert sent.widen(out) is out
    for name in ROUNDED:
        assert same_bits(out[name], sent.values[name].astype(out[name].dtype))
    with pytest.raises(ValueError, match="out: expected 9 slots"):
        sent.widen(fw.FlatWeights({"w": np.zeros(3)}))
    values = sent.values.layout
    memory = np.zeros(weights.layout.nbytes, np.uint8)
    received = fw.FlatWeights.wrap(memory[: values.nbytes], values)
    received.buffer[...] = sent.values.buffer
    with refuses(ValueError, "out: overlaps the values", memory):
        Difference(received, sent.layout).widen(fw.FlatWeights.wrap(memory, sent.layout))


@given(st.lists(st.integers(0, 200), max_size=12), st.integers(1, 4), st.sampled_from(WIRES))
def test_any_layout_agrees_on_both_sides(sizes: list[int], workers: int, wire: Any) -> None:
    rng = np.random.default_rng(sum(sizes))
    dtypes = [np.float32, np.float64, np.int32, np.float16, ml_dtypes.bfloat16]
    parts = {
        str(i): rng.integers(-9, 9, size=n).astype(dtypes[int(rng.integers(len(dtypes)))])
        for i, n in enumerate(sizes)
    }
    driver = DeltaBroadcaster(fw.FlatWeights(parts), wire)
    encoders = [DeltaEncoder(driver.snapshot()) for _ in range(workers)]
    for _ in range(2):
        sent = [encoder.encode(moved(encoder.reference, rng)) for encoder in encoders]
        assert same_bits(
            average_differences(sent).buffer, fw.average([s.widen() for s in sent]).buffer
        )
        update = driver.encode(driver.average(sent))
        for encoder in encoders:
            encoder.receive(update)
            assert same_bits(encoder.reference.buffer, driver.reference.buffer)


# Training.


class Blobs:
    """Logistic regression on blobs, by gradient descent in small steps, on four workers."""

    WORKERS, ROUNDS, LR = 4, 200, 5e-3

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        centres = rng.normal(size=(10, 64))
        labels = rng.integers(0, 10, size=1600)
        data = centres[labels] + rng.normal(size=(1600, 64))
        self._x = data.astype(np.float32)
        self._y = labels
        # As after a pause: the weights are large in comparison with the changes of a round.
        self.start = fw.FlatWeights(
            {
                "kernel": 0.3 * rng.normal(size=(64, 10)).astype(np.float32),
                "bias": np.ones(10, np.float32),
            }
        )

    def train(self, weights: fw.FlatWeights, rank: int) -> fw.FlatWeights:
        result = weights.copy()
        rows = slice(rank, None, self.WORKERS)
        x, y = self._x[rows], self._y[rows]
        for _ in range(3):
            p = self._probabilities(result, x)
            p[np.arange(len(y)), y] -= 1
            result["kernel"] -= np.float32(self.LR / len(y)) * (x.T @ p)
            result["bias"] -= np.float32(self.LR / len(y)) * p.sum(axis=0)
        return result

    def loss(self, weights: fw.FlatWeights) -> float:
        p = self._probabilities(weights, self._x)
        return float(-np.log(p[np.arange(len(self._y)), self._y] + 1e-30).mean())

    def accuracy(self, weights: fw.FlatWeights) -> float:
        p = self._probabilities(weights, self._x)
        return float((p.argmax(axis=1) == self._y).mean())

    @staticmethod
    def _probabilities(weights: fw.FlatWeights, x: Any) -> Any:
        z = x @ weights["kernel"] + weights["bias"]
        z = np.exp(z - z.max(axis=1, keepdims=True))
        return z / z.sum(axis=1, keepdims=True)

    def rounds(self, exchange: Callable[[list[fw.FlatWeights]], fw.FlatWeights]) -> fw.FlatWeights:
        weights = self.start
        for _ in range(self.ROUNDS):
            weights = exchange([self.train(weights, rank) for rank in range(self.WORKERS)])
        return weights

    def naive(self, wire: str) -> fw.FlatWeights:
        def rounded(weights: fw.FlatWeights) -> fw.FlatWeights:
            narrow = {name: part.astype(DTYPES[wire]) for name, part in weights.items()}
            return fw.FlatWeights({k: part.astype(np.float32) for k, part in narrow.items()})

        return self.rounds(lambda trained: rounded(fw.average([rounded(w) for w in trained])))

    def fed_back(self, wire: Any) -> fw.FlatWeights:
        driver = DeltaBroadcaster(self.start, wire)
        workers = [DeltaEncoder(driver.snapshot()) for _ in range(self.WORKERS)]

        def exchange(trained: list[fw.FlatWeights]) -> fw.FlatWeights:
            sent = [worker.encode(w) for worker, w in zip(workers, trained, strict=True)]
            update = driver.encode(driver.average(sent))
            return [worker.receive(update) for worker in workers][-1].copy()

        return self.rounds(exchange)


@pytest.fixture(scope="module")
def blobs() -> Blobs:
    return Blobs()


@pytest.fixture(scope="module")
def float32(blobs: Blobs) -> fw.FlatWeights:
    return blobs.rounds(fw.average)


def distance(a: fw.FlatWeights, b: fw.FlatWeights) -> float:
    return float(np.linalg.norm(fw.flatten(a) - fw.flatten(b)))


# The least disadvantage of rounded weights: in loss, in accuracy, in distance.
LOSSES = {"bfloat16": (0.1, 0.04, 0.3), "float16": (2e-3, -1.0, 0.03)}


@pytest.mark.slow
def test_training_is_that_of_float32_where_rounded_weights_stand_still(
    blobs: Blobs, float32: fw.FlatWeights, wire: Any
) -> None:
    assert blobs.loss(float32) < 0.1 * blobs.loss(blobs.start)  # there is room for a disadvantage
    assert blobs.accuracy(float32) > 0.9
    loss, accuracy, way = LOSSES[wire]
    whole_way = distance(float32, blobs.start)
    found, naive = blobs.fed_back(wire), blobs.naive(wire)
    assert abs(blobs.loss(found) - blobs.loss(float32)) < 1e-4
    assert abs(blobs.accuracy(found) - blobs.accuracy(float32)) < 2e-3
    assert distance(found, float32) < 1e-3 * whole_way
    assert blobs.loss(naive) > blobs.loss(float32) + loss
    assert blobs.accuracy(naive) < blobs.accuracy(float32) - accuracy
    assert distance(naive, float32) > way * whole_way


def test_a_message_says_from_and_to_which_version_it_leads(wire: Any) -> None:
    driver = DeltaBroadcaster(fw.FlatWeights({"w": np.zeros(2, np.float32)}), wire)
    base = driver.version
    update = driver.encode(driver.weights)
    assert isinstance(update, Difference)
    assert (update.base, update.version, driver.version) == (base, base + 1, base + 1)


@each(dtype=[np.float32, np.float64])
@each(count=[2, 3, 7])
def test_results_do_not_depend_on_threads(dtype: Any, count: int, rng: np.random.Generator) -> None:
    start = fw.FlatWeights({str(i): rng.normal(size=1 + B * i).astype(dtype) for i in range(5)})
    trained = moved(start, rng)

    def bits() -> list[bytes]:
        driver = DeltaBroadcaster(start, "bfloat16")
        worker = DeltaEncoder(driver.snapshot())
        driver.encode(driver.average([worker.encode(trained)]))
        return [driver.reference.buffer.tobytes(), worker.residual.buffer.tobytes()]

    before = fw.get_num_threads()
    try:
        fw.set_num_threads(1)
        expected = bits()
        fw.set_num_threads(count)
        assert bits() == expected
    finally:
        fw.set_num_threads(before)


# The package.


@pytest.mark.parametrize("name", ["", "._encoders", "._messages", "._layouts"])
def test_examples_in_docstrings_are_right(name: str) -> None:
    module = importlib.import_module(f"flatweights.wire{name}")
    failed, attempted = doctest.testmod(module, extraglobs={"np": np})
    assert failed == 0
    assert attempted


def test_what_is_exported_is_described() -> None:
    for name in set(package.__all__) - {"WireDType"}:
        described = getattr(package, name)
        assert ">>>" in (described.__doc__ or ""), name
        for member, value in vars(described).items():
            if callable(value) and not member.startswith("_"):
                assert inspect.getdoc(value), f"{name}.{member}"


def test_import_needs_neither_tensorflow_nor_ray() -> None:
    code = """
import sys, flatweights
print("flatweights.wire" in sys.modules)
import flatweights.wire
print({"ray", "tensorflow"} & set(sys.modules))
"""
    assert run_python(code).split() == ["False", "set()"]


def bad_encodings() -> Iterator[tuple[str, dict[str, Any], type[Exception], str]]:
    memory = np.zeros(192, np.uint8)
    yield "model", {"model": [np.zeros(2, np.float32)]}, ValueError, "expected float32"
    yield "difference", {"difference": np.zeros(3, np.uint8)}, ValueError, "difference: expected"
    yield "reference", {"reference": np.zeros(3, np.uint8)}, ValueError, "reference: expected"
    yield "residual", {"residual": np.zeros(3, np.uint8)}, ValueError, "residual: expected"
    yield "one residual", {"next_residual": None}, ValueError, "both residuals or none"
    yield "read-only", {"next_residual": read_only(memory[:64])}, ValueError, "next_residual: exp"
    yield "overlap", {"residual": memory[:64], "next_residual": memory[:64]}, ValueError, "overlap"
    yield "overlap", {"reference": memory[:64], "difference": memory[:64]}, ValueError, "overlap"
    narrow = Layout.of({"a": np.zeros(3, np.int16)}).core
    yield "dtype", {"narrow": narrow}, ValueError, "layouts of one model"
    narrow = Layout.of({"a": np.zeros(3, np.float64)}).core
    yield "wider", {"narrow": narrow}, ValueError, "layouts of one model"


def test_the_core_refuses_encodings_of_what_does_not_fit_together() -> None:
    for case, change, error, match in bad_encodings():
        arguments: dict[str, Any] = {
            "layout": Layout.of({"a": np.zeros(3, np.float32)}).core,
            "packed": False,
            "model": [np.ones(3, np.float32)],
            "narrow": Layout.of({"a": np.zeros(3, np.float16)}).core,
            "difference": np.ones(64, np.uint8),
            "reference": np.zeros(64, np.uint8),
            "residual": np.zeros(64, np.uint8),
            "next_residual": np.ones(64, np.uint8),
            **change,
        }
        written = [arguments[name] for name in ("difference", "next_residual")]
        with refuses(error, match, *(array for array in written if array is not None)):
            _core.encode_difference(**arguments)
            print(case)


BAD_WIDENED = {
    "no sources": ({"sources": [], "weights": []}, "expected one weight per source"),
    "weights": ({"weights": [1.0]}, "expected one weight per source"),
    "out": ({"out": np.zeros(3, np.uint8)}, r"out: expected contiguous uint8 \(64,\)"),
    "source": ({"sources": [np.zeros(64, np.uint8), np.zeros(3, np.uint8)]}, "source 1: expected"),
    "read-only": ({"out": read_only(np.zeros(64, np.uint8))}, "out: expected a writable buffer"),
    "slots": ({"narrow": Layout.of({"a": np.float16(0), "b": np.float16(0)}).core}, "one model"),
    "widths": ({"narrow": Layout.of({"a": np.zeros(3, np.int16)}).core}, "layouts of one model"),
    "sizes": (
        {"narrow": Layout.of({"a": np.zeros(4, np.float16)}).core},
        "expected layouts of one",
    ),
}


@pytest.mark.parametrize("case", BAD_WIDENED)
def test_the_core_refuses_what_does_not_fit_together(case: str) -> None:
    change, match = BAD_WIDENED[case]
    given: dict[str, Any] = {
        "wide": Layout.of({"a": np.zeros(3, np.float32)}).core,
        "out": np.ones(64, np.uint8),
        "narrow": Layout.of({"a": np.zeros(3, np.float16)}).core,
        "sources": [np.zeros(64, np.uint8), np.zeros(64, np.uint8)],
        "weights": [1.0, 1.0],
        **change,
    }
    if case == "slots":
        given["sources"] = [np.zeros(128, np.uint8)] * 2
    with refuses(ValueError, match, given["out"]):
        _core.average_widened_into(**given)


def test_the_core_refuses_sources_that_overlap_the_result() -> None:
    memory = np.zeros(192, np.uint8)
    wide = Layout.of({"a": np.zeros(16, np.float32)}).core
    narrow = Layout.of({"a": np.zeros(16, np.float16)}).core
    with refuses(ValueError, "source 0: overlaps out", memory):
        _core.average_widened_into(wide, memory[:64], narrow, [memory[32:96]], [1.0])


@each(to=[np.float32, np.float64])
@each(dtype=[np.float16, ml_dtypes.bfloat16])
@each(count=[1, 2, 3, 8, 9, 17])
def test_widened_averages_have_the_bits_of_those_of_widened_models(
    count: int, dtype: Any, to: Any, rng: np.random.Generator
) -> None:
    # The last one is for several threads.
    for size in (1, 15, 32, 33, 1025, 5000, 4_000_003 // (16 * count) if to == np.float32 else 0):
        halves = [rng.normal(size=size).astype(dtype) for _ in range(count)]
        if size > 40:
            halves[-1][size // 2 : size // 2 + 3] = [np.nan, np.inf, -np.inf]
        weights = None if count % 2 else list(rng.uniform(0.5, 2, count))
        sources = [FlatWeights({"a": half}) for half in halves]
        wide = FlatWeights({"a": np.zeros(size, to)})
        expected = fw.average([half.astype(to) for half in halves], weights)
        _core.average_widened_into(
            wide.layout.core,
            wide.buffer,
            sources[0].layout.core,
            [source.buffer for source in sources],
            weights or [1.0] * count,
        )
        assert same_bits(wide["a"], expected)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"values": None}, "values: expected FlatWeights, got NoneType"),
        ({"values": {"w": 1}}, "values: expected FlatWeights, got dict"),
        ({"layout": None}, "layout: expected Layout, got NoneType"),
        ({"base": "1"}, "base: expected int, got str"),
        ({"version": 1.5}, "version: expected int, got float"),
    ],
)
def test_differences_of_wrong_fields_are_refused(change: dict[str, Any], match: str) -> None:
    driver = DeltaBroadcaster(FlatWeights({"w": np.ones(2, np.float32)}), "bfloat16")
    worker = DeltaEncoder(driver.snapshot())
    message = replace(driver.encode(driver.weights), **change)
    calls: list[Callable[[Any], Any]] = [
        worker.receive,
        worker.fits,
        driver.check,
        Difference.widen,
        lambda m: average_differences([m]),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=match):
            call(message)


@pytest.mark.parametrize("change", [{"weights": None}, {"version": "1"}])
def test_snapshots_of_wrong_fields_are_refused(change: dict[str, Any]) -> None:
    snapshot = DeltaBroadcaster(FlatWeights({"w": np.ones(2, np.float32)}), "bfloat16").snapshot()
    worker = DeltaEncoder(snapshot)
    for call in (worker.receive, DeltaEncoder):
        with pytest.raises(TypeError, match=r"expected (int|FlatWeights), got"):
            call(replace(snapshot, **change))


# Interrupts.


def one_of_each(value: float) -> fw.FlatWeights:
    return fw.FlatWeights(
        {"a": np.float32([value] * 3), "n": np.int64(value), "b": np.full(2, float(value))}
    )


@pytest.mark.parametrize("message", ["difference", "snapshot"])
def test_an_interrupted_receive_has_changed_weights_and_version_or_neither(message: str) -> None:
    driver = DeltaBroadcaster(one_of_each(1), "bfloat16")
    first = driver.snapshot()
    update = driver.encode(one_of_each(2))
    sent = update if message == "difference" else driver.snapshot()

    def make() -> tuple[DeltaEncoder, Callable[[], Any]]:
        worker = DeltaEncoder(first)
        return worker, lambda: worker.receive(sent)

    seen = set()
    for worker in each_interruption(make):
        values = {float(v) for part in worker.reference.values() for v in part.ravel()}
        seen.add((worker.version, *values))
    assert seen == {(first.version, 1.0), (update.version, 2.0)}


def test_an_interrupted_broadcast_has_changed_weights_and_version_or_neither() -> None:
    def make() -> tuple[DeltaBroadcaster, Callable[[], Any]]:
        driver = DeltaBroadcaster(one_of_each(1), "bfloat16")
        driver._held[0] = 7  # instead of a random number
        return driver, lambda: driver.encode(one_of_each(2))

    seen = set()
    for k, driver in enumerate(each_interruption(make)):
        models = driver.reference, driver.weights
        values = {float(v) for m in models for part in m.values() for v in part.ravel()}
        seen.add((driver.version, *values))
        if k % 4:
            continue
        # Workers that missed an interrupted message raise, and a snapshot brings them back.
        worker = DeltaEncoder(driver.snapshot())
        assert same_bits(worker.receive(driver.encode(one_of_each(3)))["b"], np.full(2, 3.0))
    assert seen == {(7, 1.0), (8, 2.0)}


def test_an_interrupted_encode_loses_no_more_than_a_message() -> None:
    driver = DeltaBroadcaster(one_of_each(1), "bfloat16")
    snapshot = driver.snapshot()
    trained = one_of_each(1)
    trained["a"] += np.float32(1.001)

    def make() -> tuple[DeltaEncoder, Callable[[], Any]]:
        worker = DeltaEncoder(snapshot)
        return worker, lambda: worker.encode(trained)

    worker = DeltaEncoder(snapshot)
    worker.encode(trained)
    after = worker.residual["a"].tolist()
    assert after != [0, 0, 0]
    seen = {tuple(worker.residual["a"].tolist()) for worker in each_interruption(make)}
    assert seen == {(0, 0, 0), tuple(after)}


def test_differences_that_were_rounded_elsewhere_are_checked() -> None:
    weights = FlatWeights({"w": np.float32([1, 2])})
    driver = DeltaBroadcaster(weights, "float16")
    values = driver.encode(weights).values
    before = driver.reference["w"].tolist()
    with pytest.raises(ValueError, match="weights, slot 0 'w': holds NaN or infinity"):
        driver.after(FlatWeights({"w": np.float32([1, np.nan])}), values)
    values["w"][0] = np.nan
    with pytest.raises(ValueError, match="weights, slot 0 'w': holds NaN or infinity"):
        driver.after(weights, values)
    with pytest.raises(ValueError, match="values: "):
        driver.after(weights, FlatWeights({"w": np.zeros(1, np.float32)}))
    with pytest.raises(TypeError, match="values: "):
        driver.after(weights, np.zeros(2, np.float16))
    assert driver.reference["w"].tolist() == before


def test_encoders_own_what_they_are_unpickled_with() -> None:
    """Ray's store gives buffers out of band, which are read-only."""

    def sent(value: Any) -> Any:
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return pickle.loads(body, buffers=[bytes(one) for one in buffers])

    start = FlatWeights({"w": np.arange(40_000, dtype=np.float32)})
    moved = FlatWeights({"w": start["w"] * np.float32(1.001)})
    for driver in (DeltaBroadcaster(start, "bfloat16"), sent(DeltaBroadcaster(start, "bfloat16"))):
        worker, gradients = DeltaEncoder(driver.snapshot()), GradientEncoder("bfloat16")
        expected = sent(worker).encode(moved), gradients.encode(moved)
        again = sent(worker).encode(moved), sent(gradients).encode(moved)
        assert same_bits(expected[0].values.buffer, again[0].values.buffer)
        assert same_bits(gradients.encode(moved).values.buffer, again[1].values.buffer)
        message = driver.encode(moved)
        received = sent(worker)
        received.receive(message)
        assert same_bits(received.reference.buffer, driver.reference.buffer)


def test_parts_without_a_mean_are_refused() -> None:
    for dtype in (">f4", ml_dtypes.float8_e4m3fn):
        encoder = GradientEncoder("bfloat16")
        messages = [encoder.encode(np.full(2, k, dtype)) for k in (1, 3)]
        with pytest.raises(TypeError, match="source 0"):
            average_differences(messages)
