"""Every instruction set gives the bits that the portable loops give, streamed or not."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from numpy.typing import NDArray
from reference import AVERAGED, REAL

import flatweights as fw
from flatweights import robust, server

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-7, 6e-8, 1e-40, 5e-324, 65504.0, 3.4e38]
SETS = ["portable", "baseline", "avx2", "avx512", "neon"]
NEVER, ALWAYS, LARGE = 2**40, 0, 2**14  # bytes from which results are streamed
SIZES = {
    "few": (0, 1, 7, 33, 63, 65, 1024, 1025, 4097),
    "many": (0, 1, 7, 31, 33, 63, 64, 65, 1023, 1024, 1025, 2049, 4097, 5000),
}
COUNTS = {"few": (1, 2, 3, 8, 17), "many": (1, 2, 3, 8, 9, 16, 17)}


def misaligned(array: NDArray[Any], by: int) -> NDArray[Any]:
    """Return a copy that begins ``by`` bytes after a line."""
    room = np.empty(array.nbytes + 128, np.uint8)
    first = -room.ctypes.data % 64 + by
    copy = room[first : first + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


def source(rng: np.random.Generator, size: int, dtype: Any, special: bool) -> NDArray[Any]:
    values = rng.normal(size=size) * np.exp(rng.normal(scale=6, size=size))
    if special and size:
        at = rng.integers(0, size, size // 8 + 1)
        values[at] = rng.choice(SPECIAL, at.size)
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def changed_in_place(y: NDArray[Any], x: NDArray[Any], a: float) -> Iterator[NDArray[Any]]:
    """``y`` after each operation, one after the other, and its norms."""
    yield np.array([fw.norm(y), fw.norm(x), fw.isfinite(y)])
    fw.axpy_(y, a, x)
    yield y.copy()
    fw.lerp_(y, x, a)
    yield y.copy()
    fw.scale_(y, a)
    yield y.copy()
    if fw.isfinite(y):
        yield np.array([fw.clip_by_norm_(y, a), fw.norm(y)])
    yield y


def ordered(sources: list[NDArray[Any]], out: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Rules by coordinate, over as many sources and over several runs of them."""
    count = len(sources)
    for many in (sources, sources * 3):
        yield robust.median(many, out=out).copy()
        yield robust.trimmed_mean(many, 0.2, out=out).copy()
        yield robust.mean_around_median(many, count, out=out).copy()


def results(how_many: str) -> Iterator[NDArray[Any]]:
    """Averages over dtypes, numbers of sources, sizes, places, weights and odd values."""
    rng = np.random.default_rng(7)
    for dtype in AVERAGED:
        for size in SIZES[how_many]:
            most = [source(rng, size, dtype, special=size % 2 == 1) for _ in range(17)]
            for count in COUNTS[how_many]:
                sources = most[:count]
                by = int(rng.integers(0, 64))
                weights = None if count % 2 else rng.uniform(0.1, 3, count)
                out = misaligned(np.zeros(size, dtype), by)
                yield fw.average([misaligned(s, by ^ 8) for s in sources], weights, out=out)
                if dtype in REAL:
                    yield from ordered(sources, misaligned(np.zeros(size, dtype), by ^ 4))
                running = fw.RunningAverage()
                for one in sources:
                    running.add(one)
                yield running.mean()
                x = misaligned(sources[-1], by ^ 16)
                yield from changed_in_place(out, x, float(rng.uniform(0, 1)))
        # More than one thread takes, and more than one block of sums.
        large = source(rng, 2_200_003 // np.dtype(dtype).itemsize, dtype, False)
        for count in (3, 17) if how_many == "few" else (2, 3, 16, 17):
            views = [large[k : large.size - count + k] for k in range(count)]
            yield fw.average(views)
            if dtype in REAL:
                yield robust.median(views)
            yield robust.distances([misaligned(view, 24) for view in views[:3]])
            out = misaligned(np.zeros_like(views[0]), np.dtype(dtype).itemsize)
            yield fw.average(views, rng.uniform(0.1, 3, count), out=out)
        yield from changed_in_place(out, large[: out.size].copy(), 0.3)
        yield fw.flatten([large[:7], large])
        for optimizer in (server.FedAdagrad, server.FedAdam, server.FedYogi):
            stepping = optimizer(rng.normal(size=1025).astype(dtype), learning_rate=0.1)
            for _ in range(3):
                yield stepping.step(rng.normal(size=1025).astype(dtype)).copy()


def digest(how_many: str) -> str:
    found = hashlib.sha256()
    for result in results(how_many):
        found.update(result.tobytes())
    return found.hexdigest()


def run(
    isa: str, threads: int, stream_above: int, how_many: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "FLATWEIGHTS_ISA": isa,
        "FLATWEIGHTS_NUM_THREADS": str(threads),
        "FLATWEIGHTS_STREAM_ABOVE": str(stream_above),
    }
    path = [str(Path(reference.__file__).parent), *sys.path]
    program = (
        f"import runpy, sys; sys.path[:0] = {path!r}\n"
        f"runpy.run_path({__file__!r}, run_name='__main__')"
    )
    return reference.numpy_forks().run(program, how_many, environment=environment)


@pytest.mark.parametrize(
    ("how_many", "limits"),
    [("few", [LARGE]), pytest.param("many", [ALWAYS, LARGE, NEVER], marks=pytest.mark.slow)],
)
def test_all_instruction_sets_and_thread_counts_give_the_same_bits(
    how_many: str, limits: list[int]
) -> None:
    cases = [("portable", 1, NEVER)]
    cases += [(isa, n, above) for n, isa in enumerate(SETS[1:], start=2) for above in limits]
    digests = {}
    for case in cases:
        isa, done = case[0], run(*case, how_many)
        if "FLATWEIGHTS_ISA: expected one of" in done.stderr:
            continue  # this processor lacks it
        assert done.returncode == 0, done.stderr
        name, _, found = done.stdout.partition(" ")
        assert name == isa, "the loops that were asked for ran"
        digests[case] = found
    assert len(digests) >= 2
    assert len(set(digests.values())) == 1, digests


def test_an_unknown_instruction_set_is_refused_before_anything_is_written() -> None:
    code = (
        "import numpy as np, flatweights as fw\n"
        "out = np.full(3, 7.0)\n"
        "try: fw.average([np.ones(3)], out=out)\n"
        "except ValueError as error: print(error, out)\n"
    )
    done = reference.numpy_forks().run(code, environment={**os.environ, "FLATWEIGHTS_ISA": "mmx"})
    assert done.stdout.startswith("FLATWEIGHTS_ISA: expected one of ")
    assert done.stdout.endswith("got 'mmx' [7. 7. 7.]\n")


if __name__ == "__main__":
    from flatweights import _core

    print(_core.get_isa(), digest(sys.argv[1]))
