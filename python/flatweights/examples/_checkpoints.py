"""A training that can be taken up where it ended: weights, and how far they have come."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from flatweights import FlatWeights

Settings = Mapping[str, Any]


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or of another training; the message names it."""


class Last(NamedTuple):
    """How far a training has come: the number of its last round, and what that led to."""

    number: int
    weights: FlatWeights


class Checkpoints:
    """The latest checkpoint of a training, in a folder of its own.

    ``checkpoint.json`` names the file of the weights, the round that led to them and the
    settings of the training. The weights are written first and their predecessors deleted
    last: whenever the process dies, the file names weights that are there and whole.

    Attributes:
        last: How far the training has come, saved or not; None before the first round.
        saved: The number of the round that is saved; None without.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Write nothing yet.

        Args:
            folder: Where; it has to be there for `save`.
            settings: By name of the option, whatever must stay as it is for the rest of
                the training.
        """
        self._folder = folder
        self._index = folder / "checkpoint.json"
        self._settings = dict(settings)
        self.last: Last | None = None
        self.saved: int | None = None

    def load(self) -> Last:
        """Return what was saved last.

        Raises:
            CheckpointError: If there is nothing, it is damaged, or has other settings.
        """
        number, file = self._read()
        try:
            self.last = Last(number, FlatWeights.load(self._folder / file))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self._index}: its weights: {error}") from error
        self.saved = number
        return self.last

    def check_free(self, rounds: int) -> None:
        """Make sure that a training from the start replaces no other one.

        Args:
            rounds: Of a complete training. One with the same settings may be replaced.

        Raises:
            CheckpointError: If the folder has a checkpoint of another one, or of a part.
        """
        if not self._index.exists():
            return
        try:
            number = self._read()[0]
        except CheckpointError:
            number = -1
        if number != rounds:
            raise CheckpointError(
                f"{self._folder}: there is a checkpoint of another training, or of a part of this "
                "one, which --resume continues; else choose another --checkpoint-dir"
            )

    def save(self) -> str:
        """Save `last`, if it is not; return in words what is saved."""
        if self.last is None:
            return "no round is complete: nothing to save"
        number, weights = self.last
        file = f"round-{number:06}.safetensors"
        if self.saved != number:
            weights.save(self._folder / file)
            index = {"round": number, "weights": file, "settings": self._settings}
            temporary = self._index.with_suffix(".tmp")
            temporary.write_text(json.dumps(index, indent=2) + "\n")
            temporary.replace(self._index)
            self.saved = number
            for old in self._folder.glob("round-*.safetensors"):
                if old.name != file:
                    with suppress(OSError):
                        old.unlink()
        return f"round {number} is saved: {os.fspath(self._folder / file)}"

    def _read(self) -> tuple[int, str]:
        """Return which round is saved, and in which file."""
        try:
            index = json.loads(self._index.read_text())
            number, file, settings = index["round"], index["weights"], dict(index["settings"])
            if not (isinstance(number, int) and isinstance(file, str)):
                raise TypeError("expected the number of a round and the name of a file")
        except FileNotFoundError:
            raise CheckpointError(f"{self._folder}: no checkpoint to resume") from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{self._index}: no whole checkpoint: {error!r}") from error
        differing = [
            f"{name}: {settings.get(name)!r} there, {self._settings.get(name)!r} here"
            for name in sorted({*settings, *self._settings})
            if settings.get(name) != self._settings.get(name)
        ]
        if differing:
            raise CheckpointError(f"{self._index}: another training: {'; '.join(differing)}")
        return number, file
