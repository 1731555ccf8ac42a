"""Describes this machine, and measures how fast it can move bytes.

The limit of all kernels is memory bandwidth. It is measured in the same run as the kernels, with
routines of the C library: `memchr`, for an absent byte, reads; `memcpy` copies; `memset` writes,
with streaming stores above its threshold.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import flatweights

_libc = ctypes.CDLL(None)
for _name in ("memchr", "memcpy", "memset"):
    getattr(_libc, _name).restype = ctypes.c_void_p
_libc.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


def describe() -> dict[str, str]:
    """Return CPU, cores, versions and commit."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    command = ["git", "describe", "--always", "--dirty"]
    commit = ""
    if shutil.which("git"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        commit = done.stdout.strip()
    return {
        "cpu": cpu,
        "cores": str(len(os.sched_getaffinity(0))),
        "system": f"{platform.system()} {platform.release()}",
        "commit": commit or "unknown",
        **flatweights.show_config(),
    }


def limits(nbytes: int = 400_000_000, rounds: int = 5) -> dict[str, float]:
    """Return bytes per second of each sweep and number of threads, the best of ``rounds``.

    Args:
        nbytes: Size of each buffer; well above the last cache.
        rounds: The number of runs of each sweep.
    """
    source = np.ones(nbytes, np.uint8)
    target = np.ones(nbytes, np.uint8)
    from_, to = source.ctypes.data, target.ctypes.data
    sweeps: dict[str, tuple[int, Callable[[int, int], object]]] = {
        "read (memchr)": (1, lambda at, n: _libc.memchr(from_ + at, 0, n)),
        "copy (memcpy)": (2, lambda at, n: _libc.memcpy(to + at, from_ + at, n)),
        "write (memset)": (1, lambda at, n: _libc.memset(to + at, 1, n)),
    }
    found = {}
    for threads in range(1, len(os.sched_getaffinity(0)) + 1):
        share = nbytes // threads
        with ThreadPoolExecutor(threads) as pool:
            for name, (moved, sweep) in sweeps.items():
                best = float("inf")
                for _ in range(rounds):
                    begin = time.perf_counter()
                    list(pool.map(sweep, range(0, share * threads, share), [share] * threads))
                    best = min(best, time.perf_counter() - begin)
                found[f"{name}, {threads} threads"] = moved * share * threads / best
    return found
