import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import tensorflow as tf
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

OF_REF_VARIABLES = "test_named.py"
"""The file that tries ref variables by default: others move them by the same code."""

OPTIMIZED = (
    "test_copy_on_write.py",
    "test_eager.py",
    "test_python_op.py",
    "test_share.py",
    "test_share_programs.py",
    "test_stress.py",
)
"""Files with graphs that an optimizer may change; to optimize those of others takes longest."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what runs twice.

    TF1's ref variables are moved by operations, whatever the path, by the code that moves a graph's
    other variables on that path. And other files than `NOT_OF_OPERATIONS` test operations.

    Graphs run with the first case of a test by default, and eager variables with all of its cases.
    """
    seen = set()
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        build, path = params.get("build"), params.get("path")
        if path == "ops" and (
            build in ("graph", "ref-graph") or item.path.name in NOT_OF_OPERATIONS
        ):
            item.add_marker(pytest.mark.slow)
        if build in ("graph", "ref-graph") and item.get_closest_marker("slow") is None:
            case = item.path, item.originalname, build  # type: ignore[attr-defined]
            is_elsewhere = build == "ref-graph" and item.path.name != OF_REF_VARIABLES
            if case in seen or is_elsewhere:
                item.add_marker(pytest.mark.slow)
            seen.add(case)


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Exclude imported objects, above all TensorFlow's, from garbage collections in tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _graphs_as_built(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let other files than those of `OPTIMIZED` run graphs without TensorFlow's optimizer."""
    options = {"disable_meta_optimizer": request.path.name not in OPTIMIZED}
    tf.config.optimizer.set_experimental_options(options)
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


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
