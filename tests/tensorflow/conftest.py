from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tf_models import BUILDERS, Model


@pytest.fixture(params=BUILDERS)
def build(request: pytest.FixtureRequest) -> Callable[[Mapping[str, Any]], Model]:
    """Builds variables of given values, eagerly or in a graph with a session."""
    return BUILDERS[request.param]
