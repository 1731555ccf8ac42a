"""Oracles and helpers that the tests share; nothing here calls flatweights."""

import functools
import gc
import inspect
import itertools
import os
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from tf_forks import Forks, shared_forks

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
REAL = tuple(np.dtype(t) for t in (np.float16, BFLOAT16, np.float32, np.float64))
COMPLEX = tuple(np.dtype(t) for t in (np.complex64, np.complex128))
AVERAGED = REAL + COMPLEX
INTEGERS = tuple(
    np.dtype(t)
    for t in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ml_dtypes.int4, ml_dtypes.uint4)
)
# Moved, never averaged.
OTHERS = tuple(
    np.dtype(t)
    for t in (
        ">f4",
        "M8[ns]",
        "S5",
        "U3",
        "V7",
        [("x", "f4"), ("y", "i2", (2,))],
        np.longdouble,
        ml_dtypes.float8_e4m3fn,
    )
)
MOVED = AVERAGED + INTEGERS + OTHERS

_MOST_FRAMES = 60  # of a call that is watched, up to the test that makes it

# The kernels sum blocks of 1024.
BLOCK = 1024
SIZES = (0, 1, 2, 7, 8, 9, 63, 64, 65, *(BLOCK * n + d for n in (1, 2) for d in (-1, 0, 1)))
MISALIGNMENTS = (0, 1, 4, 61)

# Half a unit in the last place, relative; a little more where sums are not exact.
TOLERANCE = {
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float32": 2.0**-24 * 1.001,
    "float64": 2.0**-52,
    "complex64": 2.0**-23,
    "complex128": 2.0**-51,
}

# dtype: (bits of the significand, smallest and largest exponent of a normal number)
_FORMATS = {
    "float16": (11, -14, 15),
    "bfloat16": (8, -126, 127),
    "float32": (24, -126, 127),
    "float64": (53, -1022, 1023),
}


def dtype_id(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.names is None and dtype.isnative else str(dtype)


def random_array(
    rng: np.random.Generator, shape: int | tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Values of ``dtype`` around 1, or any bits for dtypes that are only moved."""
    if dtype.kind == "c":
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    if dtype in REAL:
        return rng.normal(size=shape).astype(dtype)
    if dtype in INTEGERS:
        return rng.integers(0, 2, size=shape).astype(dtype)
    if dtype.kind == "U":
        return rng.choice(["a", "bc", "äöü"], size=shape).astype(dtype)
    if dtype.kind == "M" or dtype.char == "g" or dtype.name.startswith("float8"):
        return rng.integers(0, 100, size=shape).astype(dtype)
    array = np.empty(shape, dtype)
    flat = array.reshape(-1).view(np.uint8)
    flat[:] = rng.integers(1, 100, size=flat.size)
    return array


def exponent(value: Fraction) -> int:
    """The e with 2**e <= abs(value) < 2**(e + 1)."""
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if abs(value) >= Fraction(2) ** guess else guess - 1


def ulp(value: Fraction, dtype: np.dtype[Any]) -> Fraction:
    """The distance between the numbers of ``dtype`` around ``value``."""
    bits, smallest, _ = _FORMATS[dtype.name]
    e = smallest if value == 0 else max(exponent(value), smallest)
    return Fraction(2) ** (e - bits + 1)


def nearest(value: Fraction, dtype: np.dtype[Any]) -> float:
    """The number of ``dtype`` next to ``value``, ties to even."""
    unit = ulp(value, dtype)
    rounded = round(value / unit) * unit
    if abs(rounded) >= Fraction(2) ** (_FORMATS[dtype.name][2] + 1):
        return float("inf") if value > 0 else float("-inf")
    return float(rounded)


def exact_mean(values: Sequence[Any], weights: Sequence[float] | None = None) -> Fraction:
    """The weighted mean of real numbers, without any rounding."""
    factors = [Fraction(w) for w in weights] if weights else [Fraction(1)] * len(values)
    total = sum((w * Fraction(float(v)) for w, v in zip(factors, values, strict=True)), Fraction(0))
    return total / sum(factors)


def wide_mean(
    sources: Sequence[NDArray[Any]], weights: Sequence[float] | None = None
) -> NDArray[Any]:
    """The weighted mean in 80-bit numbers."""
    dtype = np.clongdouble if sources[0].dtype.kind == "c" else np.longdouble
    factors = np.asarray([1.0] * len(sources) if weights is None else weights, np.longdouble)
    total = np.zeros(sources[0].shape, dtype)
    for factor, source in zip(factors, sources, strict=True):
        total += factor * source.astype(np.complex128 if dtype == np.clongdouble else np.float64)
    mean: NDArray[Any] = total / factors.sum()
    return mean


def assert_mean(
    result: NDArray[Any],
    sources: Sequence[NDArray[Any]],
    weights: Sequence[float] | None = None,
) -> None:
    """Fail unless ``result`` is the mean, within the precision of its dtype."""
    assert result.dtype == sources[0].dtype
    assert result.shape == sources[0].shape
    expected = wide_mean(sources, weights)
    tolerance, scale = TOLERANCE[result.dtype.name], np.abs(expected)
    if weights is not None and result.dtype.name in ("float64", "complex128"):
        # Each weight, and its product with a value, is rounded; cancellation leaves these errors.
        tolerance *= 2
        scale = wide_mean([np.abs(source) for source in sources], weights)
    got = result.astype(np.complex128 if result.dtype.kind == "c" else np.float64)
    # Below the normal numbers, all are equally far apart.
    least = ml_dtypes.finfo(np.zeros(0, result.dtype).real.dtype).smallest_subnormal
    assert np.all(np.abs(got - expected) <= tolerance * scale + float(least))


def classes_of_16_bits(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Which of the 16-bit ``values`` are NaN, and which are finite, judged by their bits."""
    magnitude = values.view(np.uint16) & 0x7FFF
    infinity = np.array([np.inf]).astype(values.dtype).view(np.uint16)[0]
    return magnitude > infinity, magnitude < infinity


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether both have the same shape, dtype and bytes."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def arrays_of(model: Any) -> list[NDArray[Any]]:
    """The arrays of a model of any kind: an array, a mapping or a sequence of arrays."""
    if isinstance(model, np.ndarray):
        return [model]
    return [np.asarray(part) for part in (model.values() if hasattr(model, "values") else model)]


def assert_parts(model: Any, expected: Any) -> None:
    """Fail unless both have the same names in the same order, shapes, dtypes and bytes."""
    if isinstance(expected, Mapping):
        assert list(model) == list(expected)
    for i, (got, wanted) in enumerate(zip(arrays_of(model), arrays_of(expected), strict=True)):
        assert same_bits(got, wanted), f"part {i}: expected {wanted!r}, got {got!r}"


def assert_same(got: Any, expected: Any) -> None:
    """Fail unless ``got`` is a model of the same type, parts and buffer, if it has one."""
    assert type(got) is type(expected)
    assert_parts(got, expected)
    if hasattr(expected, "buffer"):
        assert same_bits(got.buffer, expected.buffer)  # including the padding between the parts


class Guarded:
    """A contiguous array at a chosen alignment, with sentinels on both sides.

    Attributes:
        array: The array.
    """

    _MARGIN = 64
    _SENTINEL = 0xA5

    def __init__(self, values: NDArray[Any], misalignment: int = 0) -> None:
        values = np.ascontiguousarray(values).reshape(values.shape)
        self._raw = np.full(values.nbytes + 3 * self._MARGIN, self._SENTINEL, np.uint8)
        self._begin = self._MARGIN + (misalignment - self._raw.ctypes.data) % self._MARGIN
        self._end = self._begin + values.nbytes
        self.array = self._raw[self._begin : self._end].view(values.dtype).reshape(values.shape)
        self.array[...] = values
        assert values.size == 0 or self.array.ctypes.data % self._MARGIN == misalignment

    def is_intact(self) -> bool:
        """Whether nobody wrote beside the array."""
        around = np.concatenate([self._raw[: self._begin], self._raw[self._end :]])
        return bool(np.all(around == self._SENTINEL))


def each(**axes: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on every combination of values as one test, which names the one that fails.

    For cases that take less time than pytest needs for a test of its own.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        cases = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]

        @functools.wraps(test)
        def run_all(**fixtures: Any) -> None:
            for case in cases:
                try:
                    test(**fixtures, **case)
                except Exception as error:
                    raise AssertionError(f"in the case {case}: {error}") from error

        signature = inspect.signature(test)
        rest = [p for p in signature.parameters.values() if p.name not in axes]
        run_all.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run_all

    return decorate


@contextmanager
def refuses(error: type[Exception], match: str, *arrays: NDArray[Any]) -> Iterator[None]:
    """Expect ``error`` with a message like ``match``, and no byte of ``arrays`` changed."""
    before = [array.tobytes() for array in arrays]
    with pytest.raises(error, match=match):
        yield
    assert [array.tobytes() for array in arrays] == before


def least_growth(call: Callable[[], object], count: int) -> int:
    """Return the bytes of Python's memory that ``count`` calls keep, in the best of three tries.

    A leak of each call grows in every try. Caches fill, and TensorFlow frees memory on other
    threads. If the growth is that of an array per call, it is measured once more without the
    allocations of other threads, which takes three times as long.
    """
    growth = _growth(call, count, frames=1)
    return growth if growth < 80 * count else _growth(call, count, frames=_MOST_FRAMES)


def _growth(call: Callable[[], object], count: int, frames: int) -> int:
    of_calls = tracemalloc.Filter(True, __file__, all_frames=True)

    def memory_after(calls: int) -> int:
        for _ in range(calls):
            call()
        gc.collect()
        if frames == 1:
            return tracemalloc.get_traced_memory()[0]
        kept = tracemalloc.take_snapshot().filter_traces([of_calls]).traces
        return sum(trace.size for trace in kept)

    for _ in range(100):  # TensorFlow's own pools of small objects fill
        call()
    tracemalloc.start(frames)
    try:
        marks = [memory_after(50), *(memory_after(count) for _ in range(3))]
    finally:
        tracemalloc.stop()
    return min(after - before for before, after in itertools.pairwise(marks))


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A view that cannot be written to, as `ray.get` gives."""
    view: NDArray[Any] = array.view()
    view.flags.writeable = False
    return view


def run_python(code: str, env: Mapping[str, str] | None = None) -> str:
    """The output of ``code`` in a process of its own, with warnings as errors.

    The process is a copy of one that has imported NumPy, and not flatweights.

    Args:
        code: A program.
        env: Its environment; `clean_environment` if None.
    """
    strict = "import warnings\nwarnings.simplefilter('error')\n"
    done = numpy_forks().run(strict + code, environment=clean_environment() if env is None else env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numpy_forks() -> Forks:
    """Processes that have imported what flatweights imports."""
    return shared_forks("ml_dtypes", "importlib.metadata", "pickle", "threading")


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without variables for threads or streaming, and with ``extra``."""
    ours = (
        "FLATWEIGHTS_NUM_THREADS",
        "OMP_NUM_THREADS",
        "FLATWEIGHTS_STREAM_ABOVE",
        "FLATWEIGHTS_POOL_BYTES",
    )
    return {k: v for k, v in os.environ.items() if k not in ours} | extra


def refusals(first: str, name: str, texts: Sequence[str]) -> list[list[str]]:
    """For each malformed text, the errors of calls that read it; none may have changed anything.

    Args:
        first: A call that only reads a setting, as Python text.
        name: A variable of the environment.
        texts: The values of the variable, one after the other, in one process.
    """
    code = f"""
import os
import numpy as np
import flatweights as fw
a, out, n = np.ones(3), np.zeros(3), np.array([0])
calls = [
    {first},
    lambda: fw.average_into(out, [a, a]),
    lambda: fw.average_into([n, out], [[np.array([5]), a]] * 2),
    lambda: fw.flatten([a], out=out),
    lambda: fw.unflatten_into([out], a),
    lambda: fw.RunningAverage().add(a),
]
for text in {list(texts)!r}:
    os.environ[{name!r}] = text
    for call in calls:
        try:
            call()
        except ValueError as error:
            print(error)
    print("next")
    assert out.tolist() == [0, 0, 0]
    assert n.tolist() == [0]
"""
    found: list[list[str]] = [[]]
    for line in run_python(code).splitlines():
        if line == "next":
            found.append([])
        else:
            found[-1].append(line)
    return found[:-1]
