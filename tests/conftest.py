"""How many processes share the tests, and what all of them use."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from ray_cluster import ray_folder, shared_ray

import flatweights as fw

__all__ = ["ray_folder", "shared_ray"]

TESTS = Path(__file__).parent

# Machines that run the tests are shared and slow: no deadlines, few examples.
settings.register_profile(
    "ci", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process for each core and one more, at most four: each imports TensorFlow, starts a Ray.

    One more, since tests of Ray often wait: for a node to start, for a death to be seen. None of
    its own for the tests of one file: they run in the process that was started.
    """
    files = {argument.split("::")[0] for argument in config.args}
    cores = len(os.sched_getaffinity(0))
    alone = cores == 1 or (len(files) == 1 and all(file.endswith(".py") for file in files))
    return 0 if alone else min(cores + 1, 4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long: those of Ray, then the pages, then TensorFlow's.

    Processes take files in this order, so none of them is left with a long one at the end.
    """
    first = (TESTS / "ray", TESTS.parent / "docs", TESTS / "tensorflow", TESTS)
    items.sort(key=lambda item: next(i for i, at in enumerate(first) if at in item.path.parents))


def pytest_configure() -> None:
    """Set what must be set before Ray is imported, and while nothing runs yet.

    Interrupts interrupt, also where a shell has started the tests in the background. Ray does not
    print what it has to say of its processes: it would at any time, and among the output that a
    test compares.
    """
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "."
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave what is imported out of later garbage collections: TensorFlow is a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240229)


@pytest.fixture
def use_threads() -> Iterator[Callable[[int], None]]:
    """`set_num_threads`, undone after the test."""
    before = fw.get_num_threads()
    yield fw.set_num_threads
    fw.set_num_threads(before)
