from collections.abc import Iterator

import pytest
from keras_programs import Together


@pytest.fixture(scope="session")
def together() -> Iterator[Together]:
    """Calls a function in several processes."""
    made = Together()
    yield made
    made.stop()
