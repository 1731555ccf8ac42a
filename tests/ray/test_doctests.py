import doctest
import importlib

import pytest
import surface

import flatweights.ray

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    "module", ["_average", "_group", "members._member", "publishing._publisher"]
)
def test_the_documented_examples_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"flatweights.ray.{module}"))
    assert result.attempted >= 4
    assert result.failed == 0


def test_the_public_surface_is_described_in_short_names() -> None:
    assert surface.undescribed(flatweights.ray) == []
    assert surface.unreadable_signatures(flatweights.ray) == []
