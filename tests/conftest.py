from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from reference import AVERAGED, MOVED, dtype_id

import flatweights as fw

# Machines that run the tests are shared and slow: no deadlines, few examples.
settings.register_profile(
    "ci", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")


@pytest.fixture(params=MOVED, ids=dtype_id)
def moved_dtype(request: pytest.FixtureRequest) -> np.dtype[Any]:
    """Each dtype that can be moved: all of a fixed size."""
    return request.param


@pytest.fixture(params=AVERAGED, ids=dtype_id)
def averaged_dtype(request: pytest.FixtureRequest) -> np.dtype[Any]:
    """Each dtype that has a mean."""
    return request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240229)


@pytest.fixture
def use_threads() -> Iterator[Callable[[int], None]]:
    """`set_num_threads`, undone after the test."""
    before = fw.get_num_threads()
    yield fw.set_num_threads
    fw.set_num_threads(before)
