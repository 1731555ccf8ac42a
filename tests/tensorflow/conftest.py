from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tf_models import BUILDERS, Model


@pytest.fixture(params=BUILDERS)
def build(request: pytest.FixtureRequest) -> Callable[[Mapping[str, Any]], Model]:
    """Builds variables of given values, eagerly or in a graph with a session."""
    return BUILDERS[request.param]


@pytest.fixture(params=["bound", "ops"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces the way in which weights are moved: every test here runs on both."""
    monkeypatch.setenv("FLATWEIGHTS_TENSORFLOW", request.param)
    return request.param
