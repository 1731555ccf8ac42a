import doctest

import pytest
import surface

import flatweights.tensorflow
from flatweights.tensorflow import _variables

# The way of moving weights is not tested here: once is enough.
pytestmark = pytest.mark.parametrize("path", ["bound"], indirect=True)


def test_the_documented_example_runs() -> None:
    result = doctest.testmod(_variables)
    assert result.attempted >= 5
    assert result.failed == 0


def test_the_public_surface_is_described_in_short_names() -> None:
    assert surface.undescribed(flatweights.tensorflow) == []
    assert surface.unreadable_signatures(flatweights.tensorflow) == []
