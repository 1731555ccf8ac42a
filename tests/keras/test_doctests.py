import doctest
import importlib

import pytest
import surface

import flatweights.keras

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("module", ["_average_logs", "_average_weights", "_gradients"])
def test_the_documented_examples_run(module: str) -> None:
    loaded = importlib.import_module(f"flatweights.keras.{module}")
    result = doctest.testmod(loaded, optionflags=doctest.ELLIPSIS)
    assert result.attempted >= 4
    assert result.failed == 0


def test_the_public_surface_is_described_in_short_names() -> None:
    assert surface.undescribed(flatweights.keras) == []
    assert surface.unreadable_signatures(flatweights.keras) == []
