import doctest

from flatweights.tensorflow import _variables


def test_the_documented_example_runs() -> None:
    result = doctest.testmod(_variables)
    assert result.attempted >= 5
    assert result.failed == 0
