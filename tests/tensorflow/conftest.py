import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from tf_elsewhere import Elsewhere
from tf_forks import Forks
from tf_models import BUILDERS, Model

NOT_OF_OPERATIONS = (
    "test_bound.py",
    "test_bound_graph.py",
    "test_copy_on_write.py",
    "test_rays_programs.py",
    "test_stress.py",
)
"""Files whose tests find little when operations move the weights."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what runs twice.

    TF1's ref variables are moved by operations, whatever the path, by the code that moves a graph's
    other variables on that path. And other files than `NOT_OF_OPERATIONS` test operations.
    """
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        build, path = params.get("build"), params.get("path")
        if path == "ops" and (
            build in ("graph", "ref-graph") or item.path.name in NOT_OF_OPERATIONS
        ):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Exclude imported objects, above all TensorFlow's, from garbage collections in tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Processes in which TensorFlow is already imported."""
    made = Forks()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def elsewhere(forks: Forks) -> Iterator[Elsewhere]:
    """Another process, in which other models were built before."""
    made = Elsewhere(forks)
    yield made
    made.stop()


@pytest.fixture(params=BUILDERS)
def build(request: pytest.FixtureRequest) -> Callable[[Mapping[str, Any]], Model]:
    """Builds variables of given values, eagerly or in a graph with a session."""
    return BUILDERS[request.param]


@pytest.fixture(params=["bound", "ops"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force the way in which weights are moved: every test here runs with both."""
    monkeypatch.setenv("FLATWEIGHTS_TENSORFLOW", request.param)
    return request.param  # type: ignore[no-any-return]
