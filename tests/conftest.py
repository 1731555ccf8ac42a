"""How many processes share the tests, and what all of them use."""

import functools
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    """Two processes more than cores, at most four: each imports TensorFlow, half start a Ray.

    Two more, since tests of Ray often wait: for a node to start, for a death to be seen. Fewer
    where there are not 3 GiB for each. None of its own for the tests of one file: they run in the
    process that was started.
    """
    files = {argument.split("::")[0] for argument in config.args}
    cores = len(os.sched_getaffinity(0))
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    alone = cores == 1 or (len(files) == 1 and all(file.endswith(".py") for file in files))
    return 0 if alone else max(1, min(cores + 2, 4, room // 3))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the shared Ray for the tests that are marked; begin with the files that take long.

    Tests that start actors of their own are left to one way of rounds, unless asked for more.

    Those of Ray come first, then the pages, then TensorFlow's. Processes take files in this order,
    so none of them is left with a long one at the end.
    """
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        if item.get_closest_marker("ray"):
            item.fixturenames.insert(0, "shared_ray")
        is_dear = "lend" in item.fixturenames or item.get_closest_marker("starts_actors")
        if is_dear and hasattr(item, "callspec") and item.callspec.params.get("way") == "store":
            item.add_marker(pytest.mark.slow)
    first = (TESTS / "ray", TESTS / "keras", TESTS.parent / "docs", TESTS / "tensorflow", TESTS)
    items.sort(key=lambda item: next(i for i, at in enumerate(first) if at in item.path.parents))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have half of the processes begin with the files of Ray, and the others with the rest.

    Tests of Ray wait where others compute, so both go on at the same time; and half of the
    processes need no Ray, or a short while at the end.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Halves(LoadFileScheduling):  # type: ignore[misc]
        def _assign_work_unit(self, node: Any) -> None:
            with_ray = [n for n, files in self.assigned_work.items() if any(map(_uses_ray, files))]
            takes_ray = node in with_ray or len(with_ray) < len(self.nodes) // 2
            for file in self.workqueue:
                if _uses_ray(file) == takes_ray:
                    self.workqueue.move_to_end(file, last=False)
                    break
            super()._assign_work_unit(node)

    return Halves(config, log)


@functools.cache
def _uses_ray(file: str) -> bool:
    return file.endswith(".md") or "pytest.mark.ray" in (TESTS.parent / file).read_text()


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
