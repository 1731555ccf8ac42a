import doctest

import flatweights.ray


def test_the_documented_example_runs() -> None:
    result = doctest.testmod(flatweights.ray)
    assert result.attempted >= 4
    assert result.failed == 0
