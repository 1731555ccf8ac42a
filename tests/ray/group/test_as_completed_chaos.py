"""Asynchronous rounds while workers are killed in every step of a call, added and removed.

An oracle knows every publication, so it knows every average from the versions that rounds name.
"""

import collections
import contextlib
import os
import random
import signal
import time
from typing import Any

import pytest
import ray
from ray_workers import PlainWorker, weights_of
from reference import same_bits

import flatweights as fw
from flatweights import FlatWeights
from flatweights.ray import Round, WorkerError, WorkerGroup, _failpoints

pytestmark = [pytest.mark.ray, pytest.mark.starts_actors]

SIZES = (5, 3_000, 40_000)
MOST = 4  # workers


class Mortal(PlainWorker):
    """Returns the weights that it has, and its rank added; dies at a point of a call if told to."""

    def set_weights(self, new_weights: Any, *, share: bool = False) -> None:
        if len({*new_weights["w"].tolist()}) != 1:
            raise AssertionError("weights of two publications")
        super().set_weights(new_weights, share=share)

    def work(self) -> FlatWeights:
        return result_of(self.model, self.rank)

    def die_at(self, point: str, calls: int) -> int:
        """Die when ``point`` is reached for so many times; return the process."""
        left = iter(range(calls))

        def hook(reached: str) -> None:
            if reached == point and next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        _failpoints.hook = hook
        return os.getpid()


def result_of(model: FlatWeights, rank: int) -> FlatWeights:
    """The oracle of `Mortal.work`."""
    result = model.copy()
    result["w"] += 0.1 * (rank + 1)
    return result


class Chaos:
    """A group, what happens to it, and what it should give."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.size = SIZES[seed % len(SIZES)]
        self.group = WorkerGroup.create(
            Mortal, 3, arguments=lambda rank: (rank, self.size), num_cpus=0, max_restarts=-1
        )
        self.number = 0  # of the latest publication
        self.removed: set[int] = set()
        self.there = {0, 1, 2}
        self.deaths: collections.Counter[int] = collections.Counter()  # that may be named yet
        self.seen: collections.Counter[str] = collections.Counter()
        self.points = [*_failpoints.WORKER]
        self.publish()

    def publish(self) -> None:
        self.number += 1
        self.group.publish(weights_of(float(self.number), self.size))

    def loop(self, updates: int) -> int:
        """Run one loop, which ends in one of the ways to leave it; return its rounds."""
        buffer = self.random.choice([1, 1, 1, 2])
        stale = self.random.choice([None, None, 3])
        rounds, count = None, 0
        try:
            rounds = self.group.as_completed(
                "work",
                updates=updates,
                buffer=min(buffer, len(self.group.actors())),
                max_staleness=stale,
                timeout=60,
            )
            for found in rounds:
                count += 1
                self.check(found, stale)
                for _ in range(self.random.choice([0, 1, 1, 1, 2, 5])):
                    self.publish()
                self.befall()
                if self.random.random() < 0.02:
                    break
        except WorkerError:
            self.seen["all dead"] += 1
        if rounds is not None:
            rounds.close()
        if self.random.random() < 0.5:
            self.between()
        return count

    def check(self, found: Round, stale: int | None) -> None:
        """Compare a round with the oracle."""
        assert found.staleness.keys() == {*found.used}
        assert stale is None or max(found.staleness.values()) <= stale
        self.there |= {*found.joined}
        assert {*found.used} <= self.there - self.removed, (found, self.there, self.removed)
        results = [
            result_of(weights_of(float(self.number - found.staleness[rank]), self.size), rank)
            for rank in found.used
        ]
        assert same_bits(found.weights.buffer, fw.average(results).buffer), found
        for rank in found.failed:
            assert self.deaths[rank] > 0, f"rank {rank} is named without a death of its own"
            self.deaths[rank] -= 1
            self.seen["named"] += 1

    def befall(self) -> None:
        """Have something happen to the group, or nothing."""
        draw = self.random.random()
        actors = self.group.actors()
        healthy = self.group.healthy_actor_ids()
        if draw < 0.05 and len(healthy) > 1:
            rank = self.random.choice(healthy)
            point = self.points[self.seen["killed"] % len(self.points)]
            self.deaths[rank] += 1
            self.seen["killed"] += 1
            with contextlib.suppress(ray.exceptions.RayError):
                pid = ray.get(actors[rank].die_at.remote(point, self.random.randrange(3)))
                if self.random.random() < 0.3:
                    os.kill(pid, signal.SIGKILL)
        elif draw < 0.07 and len(actors) < MOST:
            self.group.add(1)
            self.seen["added"] += 1
        elif draw < 0.09 and len(healthy) > 2:
            rank = self.random.choice(healthy)
            self.group.remove(rank, kill=self.random.random() < 0.7)
            self.removed.add(rank)
            self.seen["removed"] += 1

    def between(self) -> None:
        """Use the group in another way, and bring back those that are lost."""
        end = time.monotonic() + 120
        while self.group.unhealthy and time.monotonic() < end:
            self.group.restore(timeout=1)
        try:
            found = self.group.average("work", min_results=1, timeout=60)
        except WorkerError:
            return
        self.there |= {*found.joined}
        for rank in found.failed:
            self.deaths[rank] -= 1
        results = [
            result_of(weights_of(float(self.number), self.size), rank) for rank in found.used
        ]
        assert same_bits(found.weights.buffer, fw.average(results).buffer), found
        self.seen["averages"] += 1

    def run(self, rounds: int) -> None:
        """Run so many rounds in all."""
        done = 0
        try:
            while done < rounds:
                done += self.loop(min(rounds - done, 50))
                if not self.group.healthy_actor_ids():
                    self.group.restore(timeout=10)
        finally:
            self.group.shutdown()
        print(dict(self.seen))


def test_two_hundred_rounds() -> None:
    chaos = Chaos(1)
    chaos.run(200)
    assert chaos.seen["killed"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("way", ["lanes", "store"], indirect=True)
def test_three_thousand_rounds(way: str, seed: int) -> None:
    Chaos(seed).run(500 if way == "store" else 3_000)
