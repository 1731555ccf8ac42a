import gc
import os
import pickle
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import read_only

import flatweights as fw
from flatweights import FlatWeights, Layout

MEGABYTE = 1 << 20


class Memory(bytearray):
    """Memory that a weak reference can watch."""


def watched(values: np.ndarray) -> tuple[np.ndarray, "weakref.ref[Memory]"]:
    """An array of ``values``, and whether the memory that it views is alive."""
    memory = Memory(values.tobytes())
    return np.frombuffer(memory, values.dtype), weakref.ref(memory)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_views_keep_flat_alive() -> None:
    flat, alive = watched(np.arange(7.0))
    views = fw.unflatten(flat, Layout.of([np.zeros((2, 2)), np.zeros(3)]))
    del flat
    gc.collect()
    assert alive() is not None
    last = views.pop()  # type: ignore[call-overload]
    del views
    gc.collect()
    assert last.tolist() == [4, 5, 6]
    del last
    gc.collect()
    assert alive() is None


def test_views_keep_a_result_of_flatten_alive() -> None:
    for _ in range(20):
        flat = fw.flatten([np.full(1000, 7.0), np.full(24, 8.0)])
        view = fw.unflatten(flat, Layout.of([np.zeros(1000), np.zeros(24)]))[1]  # type: ignore[index]
        del flat
        gc.collect()
        np.zeros(1024).fill(-1)  # freed memory would be reused
        assert view.tolist() == [8.0] * 24


def test_parts_keep_the_buffer_alive() -> None:
    layout = Layout.of({"a": np.zeros(3), "b": np.zeros(2)})
    buffer, alive = watched(np.arange(layout.nbytes, dtype=np.uint8))
    w = FlatWeights.wrap(buffer, layout)
    part = w["b"]
    del w, buffer
    gc.collect()
    assert alive() is not None
    assert part.view(np.uint8).tolist() == list(range(64, 80))
    del part
    gc.collect()
    assert alive() is None


def test_parts_of_results_keep_their_memory_alive() -> None:
    for _ in range(20):
        bias = fw.average([{"a": np.full(1000, 1.0), "b": np.full(24, 3.0)}])["b"]
        item = fw.average([[np.full(1000, 1.0), np.full(24, 3.0)]])[1]
        part = FlatWeights({"a": np.full(1000, 1.0), "b": np.full(24, 3.0)}).copy()["b"]
        gc.collect()
        np.zeros(1024).fill(-1)
        assert bias.tolist() == item.tolist() == part.tolist() == [3.0] * 24


def test_unpickled_weights_keep_shared_memory_alive() -> None:
    buffers: list[pickle.PickleBuffer] = []
    w = FlatWeights({"a": np.arange(3.0), "b": np.arange(5.0)})
    data = pickle.dumps(w, protocol=5, buffer_callback=buffers.append)
    shared, alive = watched(w.buffer)
    part = pickle.loads(data, buffers=[read_only(shared)])["b"]
    del shared
    gc.collect()
    assert alive() is not None
    assert part.tolist() == [0, 1, 2, 3, 4]
    del part
    gc.collect()
    assert alive() is None


def test_a_pickle_buffer_outlives_the_weights() -> None:
    buffers: list[pickle.PickleBuffer] = []
    w = FlatWeights({"a": np.arange(1000.0)})
    data = pickle.dumps(w, protocol=5, buffer_callback=buffers.append)
    del w
    gc.collect()
    np.zeros(1000).fill(-1)
    assert pickle.loads(data, buffers=buffers)["a"].tolist() == list(range(1000))


def test_weights_die_without_the_collector() -> None:
    gc.disable()
    try:
        w = FlatWeights({"a": np.zeros(3)})
        alive = weakref.ref(w)
        del w
        assert alive() is None
    finally:
        gc.enable()


def test_a_running_average_keeps_no_source() -> None:
    source, alive = watched(np.arange(100.0))
    running = fw.RunningAverage()
    running.add({"a": source, "n": np.arange(3)})
    del source
    gc.collect()
    assert alive() is None
    assert running.mean()["a"].tolist() == list(range(100))


CALLS: dict[str, Callable[[np.ndarray], Any]] = {
    "flatten": lambda a: fw.flatten([a, a]),
    "flatten strided": lambda a: fw.flatten([a[::2], a.astype("f4")]),
    "flatten, refused": lambda a: fw.flatten([a], out=np.zeros(1)),
    "unflatten": lambda a: fw.unflatten(a, Layout.of([a])),
    "unflatten, refused": lambda a: fw.unflatten(a, Layout.of([a, a])),
    "unflatten_into": lambda a: fw.unflatten_into([np.zeros_like(a)], a),
    "unflatten_into, refused": lambda a: fw.unflatten_into([a[::2], a], np.zeros(3)),
    "Layout": lambda a: pickle.loads(pickle.dumps(Layout.of({"a": a}))),
    "FlatWeights": lambda a: FlatWeights({"a": a, "b": a}),
    "update": lambda a: FlatWeights({"a": a}).update(a=a[::-1]),
    "update, refused": lambda a: FlatWeights({"a": a}).update(a=a[1:]),
    "pickle": lambda a: pickle.loads(pickle.dumps(FlatWeights({"a": a}))),
    "old pickle": lambda a: pickle.loads(pickle.dumps(FlatWeights({"a": a}), 4)),
    "copy": lambda a: FlatWeights({"a": a}).copy(),
    "average": lambda a: fw.average([a, a]),
    "average of dicts": lambda a: fw.average([{"a": a}, {"a": a}], nonfinite="skip"),
    "average of FlatWeights": lambda a: fw.average([FlatWeights({"a": a})] * 2),
    "average, refused": lambda a: fw.average([a, a[1:]], out=a.copy()),
    "average, overlap": lambda a: fw.average([a[1:]], out=a[:-1]),
    "average, not finite": lambda a: fw.average([a, a * np.nan], nonfinite="raise"),
    "RunningAverage": lambda a: running_mean([a, a]),
    "RunningAverage, refused": lambda a: running_mean([a, a[1:]]),
}


def running_mean(sources: list[np.ndarray]) -> Any:
    running, other = fw.RunningAverage(), fw.RunningAverage()
    for source in sources:
        other.add(source)
    running.merge(other)
    return running.mean()


@pytest.mark.parametrize("call", CALLS)
def test_repeated_calls_leave_nothing_behind(call: str) -> None:
    source = np.arange(MEGABYTE // 8, dtype=np.float64)
    references = sys.getrefcount(source)

    def cycle(times: int) -> None:
        for _ in range(times):
            if "refused" in call or "overlap" in call or "not finite" in call:
                with pytest.raises(ValueError):  # noqa: PT011
                    CALLS[call](source)
            else:
                CALLS[call](source)

    cycle(20)
    before = resident_bytes()
    cycle(100)
    assert resident_bytes() - before < 40 * MEGABYTE  # of the 100 that would be left
    gc.collect()
    assert sys.getrefcount(source) == references


def test_layouts_and_views_leave_no_reference_to_a_dtype_behind() -> None:
    dtype = np.dtype([("x", "f4"), ("y", "i8")])
    source = np.ones(3, dtype)

    def cycle(times: int) -> None:
        for _ in range(times):
            w = FlatWeights({"a": source})
            pickle.loads(pickle.dumps(w.copy()))
            fw.unflatten(fw.flatten([source]), w.layout)

    cycle(10)
    gc.collect()
    before = sys.getrefcount(dtype)
    cycle(100)
    # The layouts that are remembered, for pickles, are all equal.
    gc.collect()
    assert sys.getrefcount(dtype) - before < 20
