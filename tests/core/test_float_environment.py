"""Threads that flush subnormal numbers to zero, as TensorFlow's do, get the same results."""

import ctypes
import platform
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import flatweights as fw
from flatweights import robust

_libm = ctypes.CDLL("libm.so.6")
_FLUSH_TO_ZERO_AND_DENORMALS_ARE_ZERO = 0x8040


@pytest.fixture
def flushing() -> Iterator[None]:
    """Sets this thread's MXCSR, the last word of x86-64's ``fenv_t``, for the test."""
    before, changed = (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
    _libm.fegetenv(before)
    _libm.fegetenv(changed)
    changed[7] |= _FLUSH_TO_ZERO_AND_DENORMALS_ARE_ZERO
    _libm.fesetenv(changed)
    yield
    _libm.fesetenv(before)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="MXCSR is a register of x86-64")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [3, 3_000_000])
def test_subnormal_numbers_are_kept(dtype: type, size: int, flushing: None) -> None:
    least = np.finfo(dtype).smallest_subnormal
    bits = np.uint32 if dtype is np.float32 else np.uint64
    sources: list[Any] = [np.full(size, count, bits).view(dtype) for count in (2, 4)]
    assert least * dtype(2) == 0, "NumPy, by contrast, flushes now"
    # Three times the smallest number there is; by bits, since comparing flushes too.
    assert np.all(fw.average(sources).view(bits) == 3)
    assert np.all(fw.flatten(sources).view(bits)[:size] == 2)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="MXCSR is a register of x86-64")
def test_sums_of_blocks_and_weights_keep_subnormal_numbers(request: pytest.FixtureRequest) -> None:
    """What the calling thread computes between the loops: bits, since comparing flushes too."""
    least, near, far = np.array([5e-324]), np.array([1e-160]), np.array([1e308])

    def results() -> dict[str, bytes]:
        clipped, running = np.ones(2), fw.RunningAverage()
        before = fw.clip_by_norm_(clipped, 5e-324)
        running.add(np.zeros(1), 1.0)
        running.add(far, 1e-310)
        found = {
            "norm": fw.norm(least),
            "clipped": clipped,
            "norm before": before,
            "distances": robust.distances([np.zeros(1), near]),
            "average": fw.average([np.zeros(1), far], [1.0, 1e-310]),
            "running average": running.mean(),
        }
        return {name: np.asarray(value).tobytes() for name, value in found.items()}

    expected = results()
    request.getfixturevalue("flushing")
    assert results() == expected
