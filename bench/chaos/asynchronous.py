"""Results as they arrive, from workers that have the weights that were published last."""

import random
from collections import Counter
from collections.abc import Sequence

import ray

from bench.chaos import faults, group, oracle
from bench.chaos.oracle import Entry, Got, Log, Note
from bench.chaos.run import own_processes
from flatweights import FlatWeights
from flatweights.ray import Round, WorkerError, WorkerGroup
from flatweights.ray.support._errors import is_stale

_STALEST = 20  # publications
_DEAD = "said to have died"


class Mode(group.Mode):
    """A driver that publishes after each result, and whose group grows and shrinks."""

    kinds = (*group.Mode.kinds, faults.ADDED, faults.REMOVED)
    in_turns = True

    def steps(self) -> None:
        """Take results until the run is over."""
        plan = self.plan
        self.draws = random.Random(plan.seed)
        self.log = Log(self.folder, faults.DRIVER)
        self.group = WorkerGroup(self.make_workers(range(plan.size)))
        self.version = self.number = self.count = 0
        self.next_rank = plan.size
        self.lost, self.removed = set[int](), set[int]()  # ranks that a call reported dead
        try:
            self.publish()
            while not self.over.exists():
                try:
                    self.loop()
                    if self.draws.random() < 0.5:
                        self.average()
                except WorkerError as error:
                    self.log.note(f"rounds without a result: {error}")
                    self.lost |= error.failed.keys()
                    self.group.restore(timeout=plan.timeout)
        finally:
            self.group.shutdown()
            self.log.close()

    def is_as_at_first(self) -> bool:
        """Whether the group is as large as at first, and the processes of others have ended."""
        trainers = sum("Trainer" in role for role in own_processes().values())
        return max(len(self.group.actors()), trainers) <= self.plan.size

    def publish(self) -> None:
        """Publish other weights; then overwrite the array that was published."""
        self.version += 1
        model = FlatWeights(oracle.model_of(self.plan.elements, self.plan.seed, self.version))
        self.group.publish(model)
        model["kernel"] += 1000.0

    def loop(self) -> None:
        """Take results, and leave the loop at a random one."""
        stalest = self.draws.choice([None, None, _STALEST])
        rounds = self.group.as_completed(
            "work",
            buffer=self.draws.choice([1, 1, 1, 2]),
            max_staleness=stalest,
            timeout=self.plan.timeout,
            nonfinite="skip",
        )
        try:
            for found in rounds:
                if stalest is not None and max(found.staleness.values()) > stalest:
                    self.log.note(f"wrong: staler than {stalest}: {found.staleness}")
                self.note_versions(found, [self.version - found.staleness[r] for r in found.used])
                self.note_deaths(found)
                for _ in range(self.draws.choice([0, 1, 1, 1, 2, 5])):
                    self.publish()
                self.grow_or_shrink()
                if self.draws.random() < 0.01 or self.over.exists():
                    break
        finally:
            rounds.close()

    def average(self) -> None:
        """Call the group in another way."""
        found = self.group.average(
            "work", timeout=self.plan.timeout, min_results=1, nonfinite="skip"
        )
        self.note_versions(found, [self.version] * len(found.used))

    def note_versions(self, found: Round, versions: Sequence[int]) -> None:
        """Note a round, and the publications that its results come from."""
        self.lost |= {*found.failed, *found.late}
        self.number += 1
        self.count = self.number
        ranks = [*self.group.actors()]
        if not {*found.used} <= {*ranks}:
            self.log.note(f"wrong: ranks {found.used} are used of {ranks}")
        self.log.got(self.number, found.used, ranks, found.weights, tuple(versions))

    def note_deaths(self, found: Round) -> None:
        """Note the ranks that were reported dead since the last result."""
        for rank, error in found.failed.items():
            if isinstance(error, ray.exceptions.RayActorError) or is_stale(error):
                self.log.note(f"{_DEAD}:{rank}")

    def grow_or_shrink(self) -> None:
        """Add or remove a worker, if there is such an order."""
        kind, _, rest = self.log.order().partition(":")
        size, healthy = len(self.group.actors()), self.group.healthy_actor_ids()
        if kind:
            self.log.note(faults.BEFALLEN + kind)
        is_extra = size > self.plan.size and len(healthy) > 2
        if kind == faults.ADDED and size <= self.plan.size:
            self.group.add(actors=self.make_workers([self.next_rank]))
            self.next_rank += 1
        elif is_extra and (kind == faults.REMOVED or self.is_quiet):
            rank = healthy[int(float(rest or 0) * len(healthy))]
            self.group.remove(rank, kill=self.draws.random() < 0.7)
            self.removed.add(rank)
            for file in ("pid", "seen"):
                self.folder.joinpath(f"{rank}.{file}").unlink(missing_ok=True)

    def check(self, entries: Sequence[Entry]) -> tuple[int, list[str]]:
        """Compute all results again, each from the publication that its round names."""
        plan, wrong, count = self.plan, list[str](), 0
        lives, named = Counter[int](), Counter[int]()
        for entry in entries:
            if isinstance(entry, Note) and entry.text.startswith(_DEAD):
                named[int(entry.text.partition(":")[2])] += 1
            elif isinstance(entry, Note) and entry.text == oracle.BEGUN:
                lives[entry.rank] += 1
            elif isinstance(entry, Got):
                count += 1
                results = []
                for rank, version in zip(entry.used, entry.key, strict=True):
                    published = oracle.model_of(plan.elements, plan.seed, version)
                    results.append(oracle.trained(published, plan.seed, rank))
                if entry.digest != oracle.digest_of(oracle.mean_of(results)):
                    wrong.append(f"round {entry.number} of {entry.used}: not of {entry.key}")
        # Each death is followed by another life: ranks that were reported dead are not removed.
        for rank, times in lives.items():
            if named[rank] >= times:
                wrong.append(f"rank {rank} is said to have died {named[rank]} of {times - 1} times")
            if times > 1 and rank not in self.lost | self.removed:
                wrong.append(f"rank {rank} has died, and no call says that it is lost")
        return count, wrong
