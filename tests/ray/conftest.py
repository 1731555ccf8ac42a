import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray_pool import Actors, Lend

ROOT = Path(__file__).parents[2]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests that start actors of their own to one way of rounds, unless asked for more."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            is_dear = "lend" in item.fixturenames or item.get_closest_marker("starts_actors")
            if item.callspec.params.get("way") == "store" and is_dear:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _cluster(ray_folder: Path) -> Iterator[None]:
    """Ray on two CPUs; its workers can import the test modules, and TensorFlow is quiet in them."""
    found = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as inherited:
        inherited.setenv("PYTHONPATH", os.pathsep.join(found))
        inherited.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        for attempts_left in (2, 1, 0):
            try:
                ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
                break
            except Exception:
                # A raylet gives its agent, a Python process, 15 s to start, and else aborts:
                # too few on a machine that is very busy, and there is no setting.
                ray.shutdown()
                if not attempts_left:
                    raise
    # Ray waits a second for each of its processes, and then leaves it to itself.
    node = ray._private.worker._global_node
    processes = [info.process for infos in node.all_processes.values() for info in infos]
    yield
    ray.shutdown()
    for process in processes:
        process.wait(60)


@pytest.fixture(scope="module", params=["lanes", "store"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How rounds go: over lanes, and once more over Ray's object store.

    Tests that take actors of their own (`lend`, or marked ``starts_actors``) go over the store with
    ``-m slow`` alone.
    """
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FLATWEIGHTS_RAY", "store" if request.param == "store" else "")
        yield request.param


@pytest.fixture(scope="session")
def all_actors() -> Actors:
    """The actors that tests lend one after the other."""
    return Actors()


@pytest.fixture
def lend(all_actors: Actors) -> Iterator[Lend]:
    """Lends groups of workers, for one test."""
    with all_actors.loan() as lend:
        yield lend
