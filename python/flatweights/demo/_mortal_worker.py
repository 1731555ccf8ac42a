"""A worker that can be killed, once."""

import os
import signal
from typing import Any

from flatweights.demo._digits import split_digits
from flatweights.demo._options import Options
from flatweights.demo._worker import DigitsWorker


class MortalWorker(DigitsWorker):
    """Dies when it is told to, by a signal that no process can catch.

    The process that Ray starts in its place was never told.
    """

    _doomed = False

    def build(self, options: Options, rank: int) -> Any:  # type: ignore[override]
        """Build the replicas, over data that it reads itself.

        Ray starts no actor again whose arguments were large and have left the object store.
        """
        shards, test = split_digits(options.workers, options.seed)
        return super().build(options, rank, shards[rank], test)

    def die_in_next_round(self) -> None:
        """Let `train` end with the end of this process."""
        self._doomed = True

    def train(self) -> Any:
        """Train, and return the weights; or die with them."""
        weights, _ = self.work("flat")
        if self._doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        return weights
