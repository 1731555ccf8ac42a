"""Ray for as long as a program runs."""

import contextlib
import logging
import os
from collections.abc import Iterator

import ray

from flatweights.demo._interrupts import Interrupts

# Inherited by the actors. What TensorFlow and Ray log as they start would bury the result.
_ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns that this will be the default
    "RAY_USAGE_STATS_ENABLED": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@contextlib.contextmanager
def ray_for(cpus: int) -> Iterator[None]:
    """Start Ray for actors that want ``cpus`` in all, and stop it after the block.

    An interrupt waits while Ray starts or stops.

    With ``RAY_ADDRESS`` set, a cluster that is there is used instead, with what it has.

    Args:
        cpus: How many to promise; so many actors run, however few cores there are.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with Interrupts() as interrupts:
        # Half started, Ray can neither be used nor stopped.
        with interrupts.held("interrupted: Ray will stop as soon as it has started"):
            _start(cpus)
        try:
            yield
        finally:
            with interrupts.held("interrupted: Ray is stopping"):
                ray.shutdown()


def _start(cpus: int) -> None:
    if os.environ.get("RAY_ADDRESS", "local") != "local":
        ray.init(logging_level=logging.ERROR)
    else:
        ray.init(
            address="local",
            num_cpus=max(cpus, os.cpu_count() or 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
