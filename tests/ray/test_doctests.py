import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["_driver", "_group"])
def test_the_documented_examples_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"flatweights.ray.{module}"))
    assert result.attempted >= 4
    assert result.failed == 0
