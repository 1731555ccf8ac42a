"""What the demo is asked to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

Mode = Literal["weights", "gradients"]


class Schedule(NamedTuple):
    """How much to train."""

    rounds: int
    local_steps: int


SCHEDULES: dict[Mode, Schedule] = {
    "weights": Schedule(rounds=40, local_steps=20),
    "gradients": Schedule(rounds=300, local_steps=1),
}
"""By mode, what reaches 98 % on two workers."""


@dataclass(frozen=True)
class Options:
    """The options of the command.

    Attributes:
        workers: Number of Ray actors.
        rounds: How many averages to take.
        local_steps: Batches per worker and round.
        mode: What is averaged.
        seed: Of the data's split, the batches and the initial weights.
        plot: Where to draw, if anywhere.
        kill_worker: Train our way alone, and kill a worker half-way.

    Raises:
        ValueError: If ``kill_worker`` is asked for with one worker, one round or gradients.
    """

    workers: int
    rounds: int
    local_steps: int
    mode: Mode
    seed: int
    plot: Path | None = None
    kill_worker: bool = False

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        if not self.kill_worker:
            return
        for name in ("workers", "rounds"):
            if getattr(self, name) < 2:
                raise ValueError(f"kill_worker: expected at least 2 {name}, got 1")
        if self.mode != "weights":
            raise ValueError(f"kill_worker: averages weights, got mode {self.mode!r}")


class DemoError(RuntimeError):
    """The demo failed for a reason that fits on one line."""
