"""The transports of rounds, and actors to lend: fixtures of all tests of groups."""

from collections.abc import Iterator

import pytest
from ray_pool import Actors, Lend


@pytest.fixture(scope="module", params=["shm", "store"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """The way of rounds: over channels, and then over Ray's object store.

    Tests with actors of their own (`lend`, or marked ``starts_actors``) go over the store only with
    ``-m slow``.
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
