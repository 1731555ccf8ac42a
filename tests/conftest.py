"""How many processes share the tests, and a folder of Ray's that no other program sees."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import flatweights as fw

# Machines that run the tests are shared and slow: no deadlines, few examples.
settings.register_profile(
    "ci", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process for each core, at most four (each imports TensorFlow and starts a Ray).

    None of its own for the tests of one file: they run in the process that was started.
    """
    files = {argument.split("::")[0] for argument in config.args}
    cores = len(os.sched_getaffinity(0))
    alone = cores == 1 or (len(files) == 1 and all(file.endswith(".py") for file in files))
    return 0 if alone else min(cores, 4)


def pytest_configure() -> None:
    """Set what must be set before Ray is imported, and while nothing runs yet.

    Interrupts interrupt, also where a shell has started the tests in the background. Ray does not
    print what it has to say of its processes: it would at any time, and among the output that a
    test compares.
    """
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "."
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def ray_folder() -> Iterator[Path]:
    """Where the Rays of this process and its programs write, removed after the tests.

    A Ray leaves its address in such a folder for any program to join: neither do the tests
    join another program's Ray, nor does another program join theirs.
    """
    folder = Path(tempfile.mkdtemp(prefix="fw-", dir="/tmp"))  # the names of sockets must be short
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", str(folder))
        environment.setenv("RAY_ADDRESS", "local")
        # On a busy machine a node needs longer than Ray's 30 s to start; one that has aborted
        # is waited for as long, too.
        environment.setenv("RAY_raylet_start_wait_time_s", "90")
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240229)


@pytest.fixture
def use_threads() -> Iterator[Callable[[int], None]]:
    """`set_num_threads`, undone after the test."""
    before = fw.get_num_threads()
    yield fw.set_num_threads
    fw.set_num_threads(before)
