"""The demo from start to end."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from flatweights.demo._comparison import compare
from flatweights.demo._interrupts import Interrupts
from flatweights.demo._local_ray import local_ray
from flatweights.demo._options import DemoError, Options
from flatweights.demo._screen import Screen
from flatweights.demo._survival import survive
from flatweights.ray import WorkerError
from flatweights.ray._errors import reason_in_a_line


class Outcome(Protocol):
    """What came of a training.

    Attributes:
        digest: SHA-256 of the weights at the end.
    """

    digest: str

    @property
    def accuracy(self) -> float:
        """At the end, on the examples held out."""

    def show(self, screen: Screen) -> None:
        """Print a table."""

    def draw(self, path: Path, options: Options) -> None:
        """Write a picture.

        Raises:
            OSError: If it cannot be written.
        """


def run_demo(options: Options) -> None:
    """Train and report; see `flatweights.demo.run`."""
    train = survive if options.kill_worker else compare
    screen = Screen(options.rounds)
    with Interrupts() as interrupts:
        with screen:
            screen.stage("starting Ray")
            with local_ray(options.workers, interrupts), _quiet():
                try:
                    outcome: Outcome = train(options, screen)
                except WorkerError as error:
                    raise DemoError(_one_line(error)) from error
        outcome.show(screen)
        if options.plot:
            _plot(options.plot, options, outcome, screen)
        screen.line(
            f"test accuracy {outcome.accuracy:.4f}, SHA-256 of the weights {outcome.digest}"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the package's log off the screen, which says the same, unless someone wants it."""
    log = logging.getLogger("flatweights")
    nowhere = logging.NullHandler()
    log.addHandler(nowhere)
    try:
        yield
    finally:
        log.removeHandler(nowhere)


def _plot(path: Path, options: Options, outcome: Outcome, screen: Screen) -> None:
    try:
        outcome.draw(path, options)
    except OSError as error:
        raise DemoError(f"cannot write {path}: {error.strerror}") from error
    screen.line(f"plot: {path}")


def _one_line(error: WorkerError) -> str:
    reasons = (f"rank {rank}: {reason_in_a_line(cause)}" for rank, cause in error.failed.items())
    return "; ".join(reasons)
