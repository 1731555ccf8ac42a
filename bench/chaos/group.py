"""Rounds of a `WorkerGroup`: workers train from the latest average, sent in every possible way."""

import contextlib
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import ray

from bench.chaos import faults, oracle
from bench.chaos.oracle import Entry, Got, Log, Model, Sent
from bench.chaos.run import DrivenMode, Plan
from flatweights import FlatWeights
from flatweights.ray import FlatWorker, Round, WorkerError, WorkerGroup
from flatweights.ray.support import _failpoints

_SEGMENT = 20  # rounds


class Trainer(FlatWorker):
    """Trains from the weights that it was sent, and obeys orders."""

    def __init__(self, folder: str, plan: Plan, rank: int) -> None:
        """Begin with weights that would spoil every average, until others are sent."""
        self.log = Log(Path(folder), rank)
        self.plan, self.rank = plan, rank
        self.model = FlatWeights(oracle.model_of(plan.elements, plan.seed))
        self.model["kernel"] += np.float32(1e30)
        self.received: tuple[Mapping[str, Any], bytes] | None = None
        self.returned: Any = None

    def get_weights(self) -> FlatWeights:
        """Return a copy."""
        return self.model.copy()

    def set_weights(self, new_weights: Mapping[str, Any], *, share: bool = False) -> None:
        """Take weights, and keep them in the form in which they came."""
        self.received = new_weights, oracle.digest_of(new_weights)
        self.model = FlatWeights(new_weights).copy()

    def begin(self) -> str:
        """Obey the order, and take some time; return the fault that is left to cause."""
        fault = faults.obey(self.log)
        if self.received is not None and oracle.digest_of(self.received[0]) != self.received[1]:
            self.log.note("wrong: weights that were sent have changed")
        time.sleep(self.plan.pace)
        return fault

    def work(self) -> FlatWeights:
        """Return the result of training its weights, which stay unchanged."""
        fault = self.begin()
        result = FlatWeights(oracle.trained(self.model, self.plan.seed, self.rank))
        self.log.sent((), result)
        if fault == faults.NAN:
            faults.spoil(result)
        return result

    def train(self, number: int) -> Any:
        """Train, unless there is a fault."""
        fault = self.begin()
        self.model = FlatWeights(oracle.trained(self.model, self.plan.seed, self.rank, number))
        result = self.get_weights()
        if fault == faults.NAN:
            faults.spoil(result)
            return result
        self.log.sent((number,), result)
        self.returned = result
        # Only one rank returns extras: the average still has one kind of weights.
        if (number + self.rank) % 170 == 0:
            return result, "x" * 300_000
        if (number + self.rank) % 17 == 0:
            return result, {"rank": self.rank, "values": np.arange(3000.0) + self.rank}
        return result

    def spoil_returned(self) -> None:
        """Write to a result that was returned before: nobody else may see it."""
        if self.returned is not None:
            self.returned["kernel"] += 1000.0


class Mode(DrivenMode):
    """A driver that averages and broadcasts, round by round."""

    kinds: ClassVar[tuple[str, ...]] = (
        faults.KILLED,
        faults.STOPPED,
        faults.AT_POINT,
        faults.NAN,
        faults.EXCEPTION,
        faults.LATE,
        faults.STORE,
        "agent killed",
    )
    points: ClassVar[tuple[str, ...]] = _failpoints.WORKER

    def steps(self) -> None:
        """Make rounds until the run is over."""
        plan = self.plan
        self.draws = random.Random(plan.seed)
        self.log = Log(self.folder, faults.DRIVER)
        self.group = WorkerGroup(self.make_workers(range(plan.size)))
        self.number = 0
        self.kept: list[tuple[Round, bytes]] = []
        self.latest: Any = FlatWeights(oracle.model_of(plan.elements, plan.seed))
        try:
            self.send(self.latest)
            while not self.over.exists():
                try:
                    self.draws.choice((self.by_run, self.by_average))()
                except WorkerError as error:
                    self.log.note(f"rounds without a result: {error}")
                    self.send(self.latest)
        finally:
            self.group.shutdown()
            self.log.close()

    def make_workers(self, ranks: Sequence[int]) -> list[Any]:
        """Start actors."""
        actor = ray.remote(Trainer)
        options = {"max_restarts": -1, "max_task_retries": self.draws.choice([0, -1])}
        return [
            actor.options(**options, **faults.place(rank)).remote(str(self.folder), self.plan, rank)
            for rank in ranks
        ]

    def by_run(self) -> None:
        """Make some rounds by `WorkerGroup.run`."""
        before = self.number
        for found in self.group.run(
            _SEGMENT,
            "train",
            round_arguments=lambda number: (before + number,),
            timeout=self.plan.timeout,
            min_results=1,
            nonfinite="skip",
        ):
            assert found.number is not None
            self.note(found, before + found.number)
        self.number = before + _SEGMENT

    def by_average(self) -> None:
        """Make some rounds by `WorkerGroup.average`, which may bring the weights with the call."""
        to_send: Any = None
        for _ in range(_SEGMENT):
            if self.over.exists():  # with the weights that were sent last
                return
            self.disturb()
            self.number += 1
            found = self.group.average(
                "train",
                self.number,
                broadcast=to_send,
                timeout=self.plan.timeout,
                min_results=1,
                nonfinite="skip",
            )
            self.note(found, self.number)
            to_send = found if self.draws.random() < 0.5 else None
            if to_send is None:
                self.send(self.draws.choice([found, found.weights]))
        if to_send is not None:
            self.send(to_send)

    def disturb(self) -> None:
        """Call workers in another way, or pause for a moment."""
        draw = self.draws.random()
        if draw < 0.05:
            rank = self.draws.choice([*self.group.actors()])
            self.group.actors()[rank].spoil_returned.remote()
        elif draw < 0.07:
            time.sleep(self.draws.choice([0.004, 0.006, 0.03]))

    def send(self, weights: Any) -> None:
        """Broadcast until a worker has the weights; then overwrite the array that was sent."""
        while True:
            mine = self.latest.copy()
            with contextlib.suppress(WorkerError):
                self.group.broadcast(self.draws.choice([mine, weights]), timeout=self.plan.timeout)
                mine["kernel"] += 1000.0
                if self.draws.random() < 0.05:
                    self.compare()
                return
            self.log.note("broadcasts that failed")
            if self.over.exists():
                return
            self.group.restore(timeout=self.plan.timeout)

    def compare(self) -> None:
        """Check that all workers have the weights that they were sent."""
        digest = oracle.digest_of(self.latest)
        for rank, value in self.group.step("get_weights", timeout=self.plan.timeout).items():
            if oracle.digest_of(value) != digest:
                self.log.note(f"wrong: rank {rank} has other weights than it was sent")

    def note(self, found: Round, number: int) -> None:
        """Note a round, and check the properties that the oracle cannot check."""
        expected = [*self.group.actors()]
        self.log.got(number, found.used, expected, found.weights)
        self.latest = found.weights.copy()
        for rank, way in found.transports.items():
            self.log.note(f"by {way.partition(':')[0]}") if rank in found.used else None
        for rank, extras in found.extras.items():
            if isinstance(extras, dict) and not (
                extras["rank"] == rank and (extras["values"] == np.arange(3000.0) + rank).all()
            ):
                self.log.note(f"wrong: extras of rank {rank}")
        if self.draws.random() < 0.1:
            self.kept = [*self.kept[-4:], (found, oracle.digest_of(found.weights))]
            for one, digest in self.kept:
                if oracle.digest_of(one.weights) != digest:
                    self.log.note("wrong: a round that was kept has changed")

    def check(self, entries: Sequence[Entry]) -> tuple[int, list[str]]:
        """Compute all averages again, each from the last one."""
        plan, wrong = self.plan, list[str]()
        sent = {(e.rank, e.key[0], e.digest) for e in entries if isinstance(e, Sent)}
        rounds = [entry for entry in entries if isinstance(entry, Got)]
        latest: Model = oracle.model_of(plan.elements, plan.seed)
        for found in rounds:
            models = []
            for rank in found.used:
                models.append(oracle.trained(latest, plan.seed, rank, found.number))
                if (rank, found.number, oracle.digest_of(models[-1])) not in sent:
                    wrong.append(
                        f"round {found.number}: rank {rank} has not trained from the latest"
                    )
            latest = oracle.mean_of(models)
            if found.digest != oracle.digest_of(latest):
                wrong.append(f"round {found.number} of ranks {found.used}: another average")
                break  # all later averages depend on it
        return len(rounds), wrong
