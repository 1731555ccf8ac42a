"""Variables and gradients in the memory of a GPU to one vector in host memory, and back.

``python -m bench.bench_gpu [--quick] [--json FILE]``

The limit is one copy of as many bytes by the CUDA driver, between the GPU and pinned host memory.
The column ``% of limit`` compares each call with it. A set is timed until the GPU has the values,
since calls may return earlier; separate rows show when they return.
"""

import ctypes
import json
import os
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # the driver's copies need some, too

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from rich.console import Console

from bench import machine, models, runner
from flatweights import _core
from flatweights.tensorflow import TensorFlowVariables

DEVICE = "GPU:0"

LIMIT = "one cudaMemcpy, pinned memory"

SEGMENT = f"{runner.OURS}, a segment of a channel"

COLUMNS = ("case", "contender", "time", "±%", "GB/s", "% of limit", "vs. ours")

_LEAST_CALLS = 10  # of each contender

Contenders = dict[str, Callable[[], Any]]


class Driver:
    """Copies by CUDA's driver, in the context that TensorFlow uses, too.

    Attributes:
        name: The name of the GPU.
    """

    def __init__(self) -> None:
        """Use the first GPU."""
        self._cuda = ctypes.CDLL("libcuda.so.1")
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        for name, types in {
            "cuInit": [ctypes.c_uint],
            "cuDeviceGet": [pointer, ctypes.c_int],
            "cuDeviceGetName": [ctypes.c_char_p, ctypes.c_int, ctypes.c_int],
            "cuDevicePrimaryCtxRetain": [pointer, ctypes.c_int],
            "cuCtxSetCurrent": [pointer],
            "cuCtxSynchronize": [],
            "cuMemAlloc_v2": [pointer, size],
            "cuMemFree_v2": [ctypes.c_uint64],
            "cuMemHostAlloc": [pointer, size, ctypes.c_uint],
            "cuMemFreeHost": [pointer],
            "cuMemcpyDtoH_v2": [pointer, ctypes.c_uint64, size],
            "cuMemcpyHtoD_v2": [ctypes.c_uint64, pointer, size],
        }.items():
            getattr(self._cuda, name).argtypes = types
        self._call("cuInit", 0)
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._call("cuCtxSetCurrent", self._context)
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, 256, device)
        self.name = text.value.decode()

    def synchronize(self) -> None:
        """Wait until the GPU has done everything."""
        self._call("cuCtxSynchronize")

    def allocate(self, flat: NDArray[Any]) -> tuple[int, NDArray[Any]]:
        """Return the address of a copy of ``flat`` on the GPU, and a pinned vector like it."""
        self._call("cuCtxSetCurrent", self._context)
        there, here = ctypes.c_uint64(), ctypes.c_void_p()
        self._call("cuMemAlloc_v2", ctypes.byref(there), flat.nbytes)
        self._call("cuMemHostAlloc", ctypes.byref(here), flat.nbytes, 0)
        assert here.value
        room = (ctypes.c_uint8 * flat.nbytes).from_address(here.value)
        pinned = np.ctypeslib.as_array(room).view(flat.dtype)
        pinned[:] = flat
        self.set(there.value, pinned)
        return there.value, pinned

    def free(self, there: int, pinned: NDArray[Any]) -> None:
        """Free what `allocate` has returned."""
        self._call("cuMemFree_v2", there)
        self._call("cuMemFreeHost", pinned.ctypes.data)

    def get(self, out: NDArray[Any], there: int) -> NDArray[Any]:
        """Copy from the GPU into ``out``, and return it."""
        self._call("cuMemcpyDtoH_v2", out.ctypes.data, there, out.nbytes)
        return out

    def set(self, there: int, values: NDArray[Any]) -> None:
        """Copy ``values`` to the GPU."""
        self._call("cuMemcpyHtoD_v2", there, values.ctypes.data, values.nbytes)

    def _call(self, name: str, *args: Any) -> None:
        error = getattr(self._cuda, name)(*args)
        if error:
            raise RuntimeError(f"{name} of CUDA's driver failed with error {error}")


class Subject:
    """One model's variables on the GPU, and all ways to move them.

    Attributes:
        flat: The values of all variables.
    """

    def __init__(self, shapes: models.Shapes, driver: Driver) -> None:
        """Make the variables."""
        values = models.random_parts(shapes)
        self._driver = driver
        with tf.device(DEVICE):
            self._variables = [tf.Variable(v, name=f"v{i}") for i, v in enumerate(values)]
            self._ours = TensorFlowVariables(self._variables)
        assert all(DEVICE in variable.device for variable in self._variables)
        self.flat = np.concatenate([value.ravel() for value in values])
        self._segment = _core.Segment(self._ours.layout.nbytes)  # as channels have it
        self._there, self._pinned = driver.allocate(self.flat)
        sizes = [int(np.prod(shape)) for shape in shapes]
        ends = np.cumsum(sizes).tolist()

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def step() -> None:
            for variable in self._variables:
                variable.assign_add(tf.ones_like(variable), read_value=False)

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def concat() -> Any:
            with tf.device(DEVICE):
                return tf.concat([tf.reshape(v, [-1]) for v in self._variables], axis=0)

        @tf.function(  # type: ignore[untyped-decorator]
            autograph=False, input_signature=[tf.TensorSpec(self.flat.shape, tf.float32)]
        )
        def split(flat: Any) -> None:
            with tf.device(DEVICE):
                parts = tf.split(flat, sizes)
            for variable, part in zip(self._variables, parts, strict=True):
                variable.assign(tf.reshape(part, variable.shape), read_value=False)

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def gradients() -> list[Any]:
            with tf.device(DEVICE):
                return [variable + 1 for variable in self._variables]

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def concat_all(tensors: list[Any]) -> Any:
            with tf.device(DEVICE):
                return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)

        self._gradients: list[Any] = []
        self._compute, self._concat_all = gradients, concat_all
        self.step = step
        self._concat, self._split = concat, split
        self._slices = [
            (slice(end - size, end), shape)
            for end, size, shape in zip(ends, sizes, shapes, strict=True)
        ]

    def unbound(self) -> str:
        """Return why operations move our variables; empty if they do not."""
        return "; ".join(sorted({*self._ours.unbound.values()}))

    def free(self) -> None:
        """Free the memory of the limit."""
        self._driver.free(self._there, self._pinned)

    def getters(self) -> Contenders:
        """Return all ways to read the variables into host memory, and the limit."""
        out, pageable = np.zeros_like(self.flat), np.zeros_like(self.flat)
        segment = self._segment.memory()
        views = self._ours.layout.packed_views(segment)

        def get_segment() -> list[NDArray[Any]]:
            self._ours.gather_into(segment)
            return views

        return {
            runner.OURS: lambda: self._ours.get_flat(out),
            SEGMENT: get_segment,
            f"{runner.OURS}, fresh result": self._ours.get_flat,
            LIMIT: lambda: self._driver.get(self._pinned, self._there),
            "one cudaMemcpy, ordinary memory": lambda: self._driver.get(pageable, self._there),
            "tf.function of tf.concat": lambda: self._concat().numpy(),
            "numpy() of each": lambda: [v.numpy() for v in self._variables],
            "Ray's way: np.concatenate of numpy() of each": lambda: np.concatenate(
                [v.numpy().flatten() for v in self._variables]
            ),
        }

    def setters(self) -> Contenders:
        """Return all ways to write the variables from host memory, and the limit."""
        parts = [self.flat[where].reshape(shape) for where, shape in self._slices]

        def assign() -> None:
            for variable, part in zip(self._variables, parts, strict=True):
                variable.assign(part, read_value=False)

        def by_ray() -> None:
            for variable, (where, shape) in zip(self._variables, self._slices, strict=True):
                variable.assign(np.reshape(self.flat[where], shape))

        segment = self._segment.memory()
        for view, part in zip(self._ours.layout.packed_views(segment), parts, strict=True):
            view[...] = part
        return {
            runner.OURS: lambda: self._ours.set_flat(self.flat),
            SEGMENT: lambda: self._ours.scatter(segment),
            LIMIT: lambda: self._driver.set(self._there, self._pinned),
            "one cudaMemcpy, ordinary memory": lambda: self._driver.set(self._there, self.flat),
            "tf.function of tf.split, assign": lambda: self._split(self.flat),
            "assign of each": assign,
            "Ray's way: slices, assign of each": by_ray,
        }

    def compute_gradients(self) -> None:
        """Let TensorFlow compute new gradients, and wait for them."""
        self._gradients = list(self._compute())
        self._driver.synchronize()

    def flatteners(self) -> Contenders:
        """Return all ways to move gradients into one vector in host memory, and the limit."""
        out = np.zeros_like(self.flat)
        return {
            runner.OURS: lambda: self._ours.flatten_gradients(self._gradients, out=out),
            LIMIT: lambda: self._driver.get(self._pinned, self._there),
            "tf.function of tf.concat": lambda: self._concat_all(self._gradients).numpy(),
            "np.concatenate of numpy() of each": lambda: np.concatenate(
                [gradient.numpy().reshape(-1) for gradient in self._gradients]
            ),
        }

    def check(self) -> None:
        """Fail unless every contender moves the values that it should."""
        zeros = np.zeros_like(self.flat)
        for name, call in self.setters().items():
            self._ours.set_flat(zeros)
            call()
            wrong = "cudaMemcpy" not in name and not np.array_equal(self.now(), self.flat)
            assert not wrong, f"{name} sets other values"
        self.step()
        assert np.array_equal(self.now(), self.flat + 1), "the step is another one"
        self._driver.set(self._there, self.now())
        for name, call in self.getters().items():
            got = call()
            if isinstance(got, list):
                got = np.concatenate([part.reshape(-1) for part in got])
            assert np.array_equal(got, self.flat + 1), f"{name} gets other values"
        self._ours.set_flat(self.flat)
        self.compute_gradients()
        self._driver.set(self._there, self.flat + 1)
        for name, call in self.flatteners().items():
            assert np.array_equal(call(), self.flat + 1), f"{name} moves other values"
        self._driver.set(self._there, self.flat)

    def now(self) -> NDArray[Any]:
        """Return all values, one transfer for each variable."""
        return np.concatenate([variable.numpy().reshape(-1) for variable in self._variables])


def time_case(
    case: str,
    contenders: Contenders,
    before: Callable[[], Any],
    *,
    nbytes: int,
    budget: float,
    after: Callable[[], Any] | None = None,
) -> list[runner.Row]:
    """Call ``contenders`` in turn until the time is used up, and return a row for each.

    Each turn has an order of its own, since what was called before leaves its memory in the caches.

    Args:
        case: The name of the case.
        contenders: Calls by name.
        before: Called before each of them; not timed.
        nbytes: The bytes between the GPU and host memory.
        budget: Seconds for all of them.
        after: Called after each of them, and timed.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(2):  # tracing, and CUDA's own compilation
        for call in contenders.values():
            before()
            call()
    end = time.perf_counter() + budget
    rng = np.random.default_rng(0)
    names = [*contenders]
    while time.perf_counter() < end or len(times[runner.OURS]) < _LEAST_CALLS:
        for name in rng.permutation(names).tolist():
            call = contenders[name]
            before()
            begin = time.perf_counter()
            call()
            if after is not None:
                after()
            times[name].append(time.perf_counter() - begin)
    rows = [runner.row_of(case, name, times[name], nbytes) for name in contenders]
    ours = next(row for row in rows if row.contender == runner.OURS)
    for row in rows:
        row.ratio = row.seconds / ours.seconds
    return rows


def run_model(name: str, shapes: models.Shapes, driver: Driver, budget: float) -> list[runner.Row]:
    """Return the rows of one model."""
    subject = Subject(shapes, driver)
    reasons = subject.unbound()
    print(f"{name}: {f'by operations: {reasons}' if reasons else 'all variables are bound'}")
    subject.check()

    def step() -> None:
        subject.step()
        tf.test.experimental.sync_devices()

    # Time, and what is called before and after each call.
    cases: list[tuple[str, Contenders, Callable[[], Any], Callable[[], Any] | None]] = [
        ("get_flat", subject.getters(), driver.synchronize, None),
        ("get_flat after a step", subject.getters(), step, None),
        ("set_flat", subject.setters(), driver.synchronize, driver.synchronize),
        ("set_flat, until it returns", subject.setters(), driver.synchronize, None),
        ("flatten_gradients", subject.flatteners(), subject.compute_gradients, None),
    ]
    rows = []
    for what, contenders, before, after in cases:
        nbytes = subject.flat.nbytes
        case = f"{what} {name}"
        these = time_case(case, contenders, before, nbytes=nbytes, budget=budget, after=after)
        for row in these:
            print(f"  {case}: {row.contender}: {row.seconds * 1e6:.1f} µs", flush=True)
        rows += these
    subject.free()
    return rows


def cells(rows: Sequence[runner.Row]) -> list[tuple[str, ...]]:
    """Return the rows of the table."""
    limits = {row.case: row.seconds for row in rows if row.contender == LIMIT}
    lines: list[tuple[str, ...]] = []
    for row in rows:
        took, spread, rate, _, ratio, _ = runner.cells(row, 0.0)
        share = f"{100 * limits[row.case] / row.seconds:.0f}"
        lines.append((row.case, row.contender, took, spread, rate, share, ratio))
    return lines


def run(options: Namespace) -> None:
    """Run the bench."""
    if not tf.config.list_physical_devices(DEVICE.partition(":")[0]):
        print("no GPU: nothing is measured")
        return
    driver = Driver()
    shapes: dict[str, models.Shapes] = {
        "policy": models.POLICY,
        "resnet20": models.resnet20(),
        "resnet50": models.resnet50(),
    }
    budget = 1.0 if options.quick else 4.0  # of each case
    rows: list[runner.Row] = []
    for name, model in shapes.items():
        rows += run_model(name, model, driver, budget)
    console = Console(width=140)
    info = {"gpu": driver.name, **machine.describe()}
    console.print("[bold]gpu[/bold]")
    console.print("  ".join(f"{key}: {value}" for key, value in info.items()), highlight=False)
    console.print(runner.table_of(COLUMNS, cells(rows)))
    if options.json:
        record = {"machine": info, "limits": {}, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    run(runner.arguments(__doc__ or ""))
