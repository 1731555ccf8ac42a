"""`flatweights demo --kill-worker`: a worker dies, and the training goes on."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from flatweights.demo._digits import split_digits
from flatweights.demo._mortal_worker import MortalWorker
from flatweights.demo._options import DemoError, Options
from flatweights.demo._screen import Screen
from flatweights.demo._worker import Way
from flatweights.ray import Round, WorkerGroup
from flatweights.ray._errors import reason_in_a_line

_RESTART_S = 120.0
_WAY: Way = "flat"


@dataclass
class Survival:
    """A training in which one worker was missing for some rounds.

    Attributes:
        victim: The rank that was killed.
        losses: By round, on the examples held out.
        accuracies: By round, on the examples held out.
        records: By round, what `Round.record` says.
        digest: SHA-256 of the weights at the end.
    """

    victim: int
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    digest: str = ""

    @property
    def accuracy(self) -> float:
        """At the end."""
        return self.accuracies[-1]

    @property
    def without(self) -> list[int]:
        """The numbers of the rounds without the victim."""
        return [one["round"] for one in self.records if self.victim not in one["used"]]

    def show(self, screen: Screen) -> None:
        """Print the table."""
        screen.survival_table(self)

    def draw(self, path: Path, options: Options) -> None:
        """Write the picture."""
        from flatweights.demo._survival_plot import draw  # matplotlib takes a second to import

        draw(path, options, self)


def survive(options: Options, screen: Screen) -> Survival:
    """Train on; half-way, the last rank's process is killed.

    It is averaged again as soon as Ray has started it anew. That takes seconds, in which
    TensorFlow is imported, and rounds of the demo take milliseconds: after a quarter of all
    rounds without it, they wait.

    Raises:
        WorkerError: If more than that went wrong.
        DemoError: If the worker does not come back.
    """
    shards, test = split_digits(options.workers, options.seed)
    sizes = [len(shard.labels) for shard in shards]
    screen.digits(sizes, len(test.labels))
    screen.line("the loop from Ray's guide is left out: it ends with the first worker that dies")
    screen.stage("importing TensorFlow and building the models")
    group = WorkerGroup.create(
        MortalWorker,
        options.workers,
        options,
        arguments=lambda rank: (rank,),
        num_cpus=1,
        max_restarts=1,
    )
    group.broadcast(group.step("get_weights")[0])

    screen.training(options)
    survival = Survival(victim=options.workers - 1)
    dies_in = (options.rounds + 1) // 2
    waits_after = dies_in + max(1, options.rounds // 4) - 1
    if dies_in == 1:
        _doom(group, survival.victim)
    for found in group.run(options.rounds, "train", weights=sizes, min_results=1):
        _look_at(group, found, survival, screen)
        if found.number == dies_in - 1:
            _doom(group, survival.victim)
        if found.number == waits_after:
            _wait_for(group, survival.victim, screen)
    digests = set(group.step("digest").values())
    if len(digests) != 1:
        raise DemoError(f"the workers ended with {len(digests)} different sets of weights")
    survival.digest = str(digests.pop())
    return survival


def _doom(group: WorkerGroup, rank: int) -> None:
    ray.get(group.actors()[rank].die_in_next_round.remote())


def _look_at(group: WorkerGroup, found: Round, survival: Survival, screen: Screen) -> None:
    """Evaluate a round, say what became of the victim, and keep what is shown later."""
    loss, accuracy = ray.get(group.actors()[found.used[0]].evaluate.remote(_WAY))
    survival.losses.append(loss)
    survival.accuracies.append(accuracy)
    rank, number = survival.victim, found.number
    was_there = not survival.records or rank in survival.records[-1]["used"]
    is_there = rank in found.used
    of_all = f"averaged over {len(found.used)} of {len(found.used) + len(found.failed)}"
    if was_there and not is_there:
        reason = reason_in_a_line(found.failed[rank])
        screen.line(f"round {number}: rank {rank} died: {reason}; {of_all}")
    if is_there and not was_there:
        screen.line(f"round {number}: rank {rank} is back; {of_all}")
    survival.records.append(found.record())
    screen.round_done(len(survival.records), accuracy)


def _wait_for(group: WorkerGroup, rank: int, screen: Screen) -> None:
    """Wait until ``rank`` is there again; it gets the latest weights."""
    if group.is_actor_healthy(rank):
        return
    screen.stage(f"waiting for rank {rank}: Ray starts its process again")
    end = time.monotonic() + _RESTART_S
    while not group.is_actor_healthy(rank):
        if time.monotonic() > end:
            reason = reason_in_a_line(group.unhealthy[rank])
            raise DemoError(f"rank {rank} did not come back in {_RESTART_S:.0f} s: {reason}")
        time.sleep(0.1)
        group.restore()
