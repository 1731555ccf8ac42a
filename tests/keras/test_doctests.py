import doctest
import importlib

import pytest
import surface

import flatweights.keras

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    "module",
    ["keras._average_logs", "keras._average_weights", "keras._gradients", "ray.members._replace"],
)
def test_the_documented_examples_run(module: str) -> None:
    loaded = importlib.import_module(f"flatweights.{module}")
    result = doctest.testmod(loaded, optionflags=doctest.ELLIPSIS)
    assert result.attempted >= 4
    assert result.failed == 0


def test_the_public_surface_is_described_in_short_names() -> None:
    assert surface.undescribed(flatweights.keras) == []
    assert surface.unreadable_signatures(flatweights.keras) == []
