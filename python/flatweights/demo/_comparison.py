"""The training both ways, round about."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from flatweights.demo._digits import split_digits
from flatweights.demo._history import History
from flatweights.demo._options import DemoError, Options
from flatweights.demo._rounds import DictLoop, FlatLoop, Loop, exchanged, get_all, run_round
from flatweights.demo._screen import Screen
from flatweights.demo._worker import DigitsWorker


@dataclass
class Comparison:
    """What came of it.

    Attributes:
        ours: With one buffer per message.
        rival: With a dict of arrays.
        workers: How many there were.
        digest: SHA-256 of our weights at the end.
    """

    ours: History
    rival: History
    workers: int
    digest: str

    @property
    def accuracy(self) -> float:
        """Ours, at the end."""
        return self.ours.accuracies[-1]

    def show(self, screen: Screen) -> None:
        """Print both side by side."""
        screen.table(self.ours, self.rival, self.workers)

    def draw(self, path: Path, options: Options) -> None:
        """Write the picture."""
        from flatweights.demo._plot import draw  # matplotlib takes a second to import

        draw(path, options, self.ours, self.rival)


def compare(options: Options, screen: Screen) -> Comparison:
    """Run all rounds both ways.

    Raises:
        WorkerError: If a worker failed.
        DemoError: If the workers ended with different weights.
    """
    histories: dict[str, History] = {"flat": History(), "dict": History()}
    shards, test = split_digits(options.workers, options.seed)
    sizes = [len(shard.labels) for shard in shards]
    screen.digits(sizes, len(test.labels))
    screen.stage("importing TensorFlow and building the models")
    actor_class: Any = ray.remote(DigitsWorker)
    test_ref = ray.put(test)
    actors = [
        actor_class.options(num_cpus=1).remote(options, rank, shard, test_ref)
        for rank, shard in enumerate(shards)
    ]
    (weights,) = get_all([actors[0].get_weights.remote()])
    weights_ref = ray.put(weights)
    get_all([actor.start_from.remote(weights_ref) for actor in actors])

    screen.training(options)
    loops: list[Loop] = [FlatLoop(sizes), DictLoop(sizes)]
    for done in range(1, options.rounds + 1):
        for loop in loops:
            _measure_round(actors, loop, histories[loop.way])
        loops.reverse()  # neither way always runs in the other's wake
        screen.round_done(done, histories["flat"].accuracies[-1])

    digests = set(get_all([actor.digest.remote() for actor in actors]))
    if len(digests) != 1:
        raise DemoError(f"the workers ended with {len(digests)} different sets of weights")
    return Comparison(histories["flat"], histories["dict"], options.workers, str(digests.pop()))


def _measure_round(actors: list[Any], loop: Loop, history: History) -> None:
    mean, times = run_round(actors, loop)
    history.times.append(times)
    history.nbytes, history.arrays = exchanged(mean)
    ((loss, accuracy),) = get_all([actors[0].evaluate.remote(loop.way)])
    history.losses.append(loss)
    history.accuracies.append(accuracy)
