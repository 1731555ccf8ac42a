"""Processes that use a GPU without TensorFlow, by NVIDIA's driver or by its stand-in."""

import ctypes
import fcntl
import functools
import os
import pickle
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from reference import clean_environment
from tf_forks import shared_forks

REPOSITORY = Path(__file__).parents[2]
STAND_IN = REPOSITORY / "tests" / "cpp" / "stand_in_cuda.cpp"
REAL = "libcuda.so.1"
"""NVIDIA's driver, by the name with which `load_driver` finds it."""


def has_compiler() -> bool:
    """Return whether `build_stand_in` can work here."""
    is_linux = sys.platform == "linux"
    return is_linux and shutil.which(shlex.split(os.environ.get("CXX", "c++"))[0]) is not None


def build_stand_in(folder: Path, *, without: Sequence[str] = ()) -> str:
    """Build the stand-in for NVIDIA's driver; return the path of the library.

    Args:
        folder: Where to; one folder for each library.
        without: Names of functions that it lacks.
    """
    library = folder / REAL
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = "-std=c++20 -O0 -ffp-contract=off -fPIC -shared -pthread -fvisibility=hidden"
    warnings = "-Wall -Wextra -Werror -Wno-unknown-pragmas"
    command = [*compiler, *flags.split(), *warnings.split(), f"-Wl,-soname,{REAL}"]
    command += [f"-I{REPOSITORY / 'csrc'}", *(f"-D{name}=absent_{name}" for name in without)]
    done = subprocess.run(
        [*command, str(STAND_IN), "-o", str(library)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return str(library)


def shared_stand_in(factory: pytest.TempPathFactory) -> str:
    """Return the stand-in with all functions, built once for all processes of pytest-xdist.

    Without a compiler, the test is skipped.
    """
    if not has_compiler():
        pytest.skip("there is no C++ compiler, or no Linux")
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "stand_in"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = folder / REAL
        return str(built) if built.exists() else build_stand_in(folder)


def load_driver(library: str, *, uses_gpus: Sequence[int] = (0,)) -> ctypes.CDLL:
    """Load a driver, which flatweights finds from then on, and use GPUs as TensorFlow does.

    Args:
        library: A path from `build_stand_in`, or `REAL`.
        uses_gpus: Numbers of GPUs whose contexts are made.
    """
    driver = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    check(driver.cuInit(0))
    for gpu in uses_gpus:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        check(driver.cuDeviceGet(ctypes.byref(device), gpu))
        check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        check(driver.cuCtxSetCurrent(context))
    return driver


def check(result: int) -> None:
    """Raise `RuntimeError` if a function of the driver failed."""
    if result != 0:
        raise RuntimeError(f"the driver failed: {result}")


@functools.cache
def _copying_kernel(driver: ctypes.CDLL) -> ctypes.c_void_p:
    header = (REPOSITORY / "csrc" / "flatweights" / "device_copy_ptx.hpp").read_text()
    (code,) = re.findall(r'R"\((.*)\)"', header, re.DOTALL)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver.cuModuleLoadData(ctypes.byref(module), code.encode()))
    check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"flatweights_copy"))
    return function


def copy_by_kernel(driver: ctypes.CDLL, to: int, source: int, nbytes: int) -> None:
    """Copy between addresses of the GPU by a kernel, and wait for it."""
    piece = 4096
    table = np.array(
        [(source + i, to + i, min(piece, nbytes - i)) for i in range(0, nbytes, piece)], np.uint64
    )
    pinned = ctypes.c_void_p()
    check(driver.cuMemHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(table.nbytes), 0))
    ctypes.memmove(pinned, table.ctypes.data, table.nbytes)
    arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(pinned), ctypes.c_void_p))
    function = _copying_kernel(driver)
    check(driver.cuLaunchKernel(function, len(table), 1, 1, 256, 1, 1, 0, None, arguments, None))
    check(driver.cuCtxSynchronize())
    check(driver.cuMemFreeHost(pinned))


def random_bytes(nbytes: int, seed: int) -> NDArray[np.uint8]:
    """Bytes that a seed decides."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class GPUProcess:
    """A process that uses a GPU and runs pieces of programs, one after the other.

    They see ``_core``, ``driver``, ``uuid`` of the GPU, this module's functions, and what earlier
    ones have assigned. File descriptors go along in both directions.

    Attributes:
        process: A copy of a process that has imported Ray, if there is Ray, and not flatweights.
        descriptors: Those that came with the last reply.
    """

    def __init__(self, library: str, **env: str) -> None:
        """Start a process with a driver, and with these variables of the environment."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(b"")  # to a free address without a file
            listener.listen()
            path = [str(Path(__file__).parent), *sys.path]
            program = (
                f"import sys, warnings; warnings.simplefilter('error'); sys.path[:0] = {path!r}\n"
                "import gpu_processes\n"
                f"gpu_processes._serve({listener.getsockname()!r}, {library!r})"
            )
            ray = ["ray"] if find_spec("ray") else []  # the sanitizers' tests are without it
            forks = shared_forks("ml_dtypes", "importlib.metadata", "pytest", *ray)
            self.process = forks.start(program, environment=clean_environment(**env))
            self._here, _ = listener.accept()
        self.descriptors: list[int] = []

    def run(self, program: str, *descriptors: int) -> Any:
        """Run a piece of a program, and return what it has assigned to ``result``.

        Args:
            program: It finds copies of the descriptors in ``descriptors``. Those that it appends to
                ``sent`` arrive in `descriptors` here, as copies, instead of the last ones.
            descriptors: File descriptors.

        Raises:
            EOFError: If the process has ended.
            Exception: What the program raised.
        """
        self._close_descriptors()
        try:
            socket.send_fds(self._here, [program.encode()], list(descriptors))
            reply, self.descriptors, _, _ = socket.recv_fds(self._here, 1 << 16, 4)
        except ConnectionError as error:
            raise EOFError("the process has ended") from error
        if not reply:
            raise EOFError("the process has ended")
        is_error, value = pickle.loads(reply)
        if is_error:
            raise value
        return value

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        with suppress(ProcessLookupError):  # it has killed itself
            self.process.kill()
        self.process.communicate()

    def close(self) -> None:
        """End the process, and close the descriptors that came from it."""
        self._close_descriptors()
        self._here.close()
        if self.process.returncode is None:
            self.process.communicate()

    def _close_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


@contextmanager
def gpu_processes(library: str, count: int, **env: str) -> Iterator[list[GPUProcess]]:
    """Processes that all use the first GPU."""
    processes = [GPUProcess(library, **env) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.close()


def _serve(address: bytes, library: str) -> None:
    here = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.connect(address)
    driver = load_driver(library)
    from flatweights import _core

    names: dict[str, Any] = dict(globals())
    names |= {"driver": driver, "_core": _core, "uuid": _core.device_uuids()[0]}
    with here:
        while True:
            program, descriptors, _, _ = socket.recv_fds(here, 1 << 16, 4)
            if not program:
                return
            names |= {"descriptors": descriptors, "sent": [], "result": None}
            try:
                exec(program, names)
                outcome = (False, names["result"])
            except Exception as error:
                outcome = (True, error)
            socket.send_fds(here, [pickle.dumps(outcome)], names["sent"])
