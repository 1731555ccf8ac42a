"""The number of processes that share the tests, and the settings of all of them."""

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

LONG = (
    "tests/keras/test_callbacks.py",
    "tests/sim/test_schedules.py",
    "tests/tensorflow/test_gradients.py",
    "tests/ray/members/test_members.py",
    "tests/ray/group/test_worker_group.py",
    "tests/examples/test_demo_rounds.py",
    "tests/keras/test_healing.py",
    "tests/ray/publishing/test_publishing.py",
    "tests/keras/test_average_gradients.py",
    "tests/ray/nodes/test_nodes_rounds.py",
    "tests/keras/test_report.py",
    "tests/keras/test_settings.py",
    "tests/tensorflow/test_library.py",
    "tests/ray/members/test_gpu_rounds.py",
    "tests/ray/peers/test_arrivals.py",
    "tests/keras/test_optimizers.py",
    "tests/tensorflow/test_bound.py",
    "tests/keras/test_names.py",
    "tests/keras/test_hooks.py",
    "tests/tensorflow/test_share.py",
    "tests/tensorflow/test_sources.py",
    "tests/tensorflow/test_optimizers.py",
    "tests/ray/group/test_as_completed.py",
    "tests/keras/test_sparse.py",
)
"""The files that take longest: processes begin with them."""

# Machines that run the tests are shared and slow: no deadlines, few examples.
settings.register_profile(
    "ci", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes: one more than cores, at most four.

    Each process imports TensorFlow, and half of them start a Ray. There is one more than cores,
    since tests of Ray often wait for the start of a node or the news of a death. There are fewer if
    memory is below 3 GiB for each, and none for the tests of a single file: these run in the
    process that was started.
    """
    files = {argument.split("::")[0] for argument in config.args}
    cores = len(os.sched_getaffinity(0))
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    alone = cores == 1 or (len(files) == 1 and all(file.endswith(".py") for file in files))
    return 0 if alone else max(1, min(cores + 1, 4, room // 3))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give marked tests the shared Ray; begin with the files that take long.

    Tests that start actors of their own run with one way of rounds, unless asked for more.

    The `LONG` files come first, then tests of Ray, the pages and TensorFlow's tests. Processes take
    files in this order, so none of them has a long file left at the end.
    """
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        ray = item.get_closest_marker("ray")
        if ray is not None and not ray.kwargs.get("own"):
            item.fixturenames.insert(0, "shared_ray")
        is_dear = "lend" in item.fixturenames or item.get_closest_marker("starts_actors")
        if is_dear and hasattr(item, "callspec") and item.callspec.params.get("way") == "store":
            item.add_marker(pytest.mark.slow)
    root = TESTS.parent
    rest = [TESTS / "ray", TESTS / "keras", root / "docs", TESTS / "tensorflow", TESTS]
    order = {at: place for place, at in enumerate([*(root / file for file in LONG), *rest])}

    def place_of(item: pytest.Item) -> int:
        return min(order[at] for at in (item.path, *item.path.parents) if at in order)

    items.sort(key=place_of)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Make half of the processes begin with the files of Ray, and the others with the rest.

    Tests of Ray wait while others compute, so both run at the same time. To start Ray takes a
    process longer than most files, so only one more than half of them ever do.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Halves(LoadFileScheduling):  # type: ignore[misc]
        def _takes_ray(self, node: Any, count: int) -> bool:
            """Whether the process is one of ``count`` that have Ray, or may become one."""
            with_ray = [n for n, files in self.assigned_work.items() if any(map(_uses_ray, files))]
            return node in with_ray or len(with_ray) < count

        def _reschedule(self, node: Any) -> None:
            may_take_ray = self._takes_ray(node, self.numnodes // 2 + 1)
            is_left = may_take_ray or not all(map(_uses_ray, self.workqueue))
            if not is_left and not node.shutting_down:
                node.shutdown()
            super()._reschedule(node)

        def _assign_work_unit(self, node: Any) -> None:
            takes_ray = self._takes_ray(node, self.numnodes // 2)
            for file in self.workqueue:
                if _uses_ray(file) == takes_ray:
                    self.workqueue.move_to_end(file, last=False)
                    break
            super()._assign_work_unit(node)

    return Halves(config, log)


@functools.cache
def _uses_ray(file: str) -> bool:
    return file.endswith(".md") or "pytest.mark.ray" in (TESTS.parent / file).read_text()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Exclude what is left after the last test of a file from garbage collections.

    Tests collect garbage; what others have imported and cached would take most of that time.
    """
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Change settings before Ray and TensorFlow are imported, while nothing else runs.

    Interrupts work even if a shell has started the tests in the background. Ray prints nothing
    about its processes, since that could come at any time, within the output that a test compares.

    TensorFlow puts all variables on a GPU that it sees, but most tests are about those of the host.
    So GPUs are hidden unless the tests of GPUs are asked for by file.
    """
    if not any("test_gpu" in argument for argument in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "."
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup() -> None:
    """Let interrupts raise: Ray Train's `fit` leaves a handler of its own behind."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude imported objects from garbage collections: TensorFlow has a million."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240229)


@pytest.fixture
def use_threads() -> Iterator[Callable[[int], None]]:
    """`set_num_threads`, undone after the test."""
    before = fw.get_num_threads()
    yield fw.set_num_threads
    fw.set_num_threads(before)
