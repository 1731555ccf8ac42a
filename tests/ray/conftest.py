from collections.abc import Iterator

import pytest
from ray_pool import Actors, Lend


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests that start actors of their own to one way of rounds, unless asked for more."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            is_dear = "lend" in item.fixturenames or item.get_closest_marker("starts_actors")
            if item.callspec.params.get("way") == "store" and is_dear:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _cluster(shared_ray: None) -> None:
    """Have a Ray for all tests."""


@pytest.fixture(scope="module", params=["lanes", "store"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How rounds go: over lanes, and once more over Ray's object store.

    Tests that take actors of their own (`lend`, or marked ``starts_actors``) go over the store with
    ``-m slow`` alone.
    """
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FLATWEIGHTS_RAY", "store" if request.param == "store" else "")
        yield request.param


@pytest.fixture(scope="module")
def all_actors() -> Iterator[Actors]:
    """The actors that tests lend one after the other."""
    actors = Actors()
    yield actors
    actors.stop()


@pytest.fixture
def lend(all_actors: Actors) -> Iterator[Lend]:
    """Lends groups of workers, for one test."""
    with all_actors.loan() as lend:
        yield lend
