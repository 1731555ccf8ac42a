"""Rounds of a group whose workers are killed, stopped, slow, wrong or in use by others.

``python tests/ray/group/chaos.py [--rounds N] [--seed S]`` runs them over ``FLATWEIGHTS_RAY`` and
prints what was injected. An oracle recomputes every worker and every average, bit for bit: the
average must be that of the ranks in `Round.used`, all trained from the weights that were sent last.
"""

import argparse
import collections
import contextlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

import flatweights as fw
from flatweights.ray import Round, WorkerError, WorkerGroup

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
from ray_workers import PlainWorker, trained, weights_of
from reference import same_bits

SIZES = (5, 3_000, 40_000)
WORKERS = 3
TIMEOUT = 0.4


class Restless(PlainWorker):
    """Also slow, and keeps the weights and results of earlier rounds."""

    def __init__(self, rank: int = 0, size: int = 5) -> None:
        super().__init__(rank, size)
        self.kept: list[Any] = []

    def set_weights(self, new_weights: Any, *, share: bool = False) -> None:
        before = new_weights["w"].copy()
        super().set_weights(new_weights, share=share)
        self.kept = [new_weights, before]  # a view of what was sent, and how it was

    def chaos(self, plan: dict[int, str], step: float) -> Any:
        """Train, as the plan says for this rank."""
        action = plan.get(self.rank, "")
        if self.kept and not (self.kept[0]["w"] == self.kept[1]).all():
            raise AssertionError("weights that were sent have changed")
        if action == "slow":
            time.sleep(0.02)
        if action == "keep":
            weights = self.train(step)
            self.kept_result = weights
            return weights
        if action == "extras":
            return self.train(step), {"rank": self.rank, "values": np.arange(3000.0) + self.rank}
        if action == "large extras":
            return self.train(step), "x" * 300_000
        return self.act(plan, step=step)

    def spoil_kept(self) -> None:
        """Write to a result that was returned before: nobody else is to see it."""
        if hasattr(self, "kept_result"):
            self.kept_result["w"] += 1000.0


class Chaos:
    """A group, what happens to it, and what it should be."""

    def __init__(self, seed: int) -> None:
        """Start workers."""
        self.random = random.Random(seed)
        # What befalls each round, drawn apart: how often others are drawn depends on the machine.
        self.fates = random.Random(seed)
        self.injected: collections.Counter[str] = collections.Counter()
        self.size = SIZES[seed % len(SIZES)]
        self.group = WorkerGroup.create(
            Restless,
            WORKERS,
            arguments=lambda rank: (rank, self.size),
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=self.random.choice([0, -1]),
        )
        self.latest = weights_of(1.0, self.size)
        self.send(self.latest)
        self.to_send: Any = None  # with the next call
        self.stopped: list[int] = []
        self.kept: list[tuple[Round, Any]] = []
        self.timers: list[threading.Timer] = []

    def round(self) -> None:
        """Inject something or nothing, make a round, and check all that can be known."""
        for timer in self.timers:
            timer.join()
        self.timers.clear()
        if self.stopped and self.random.random() < 0.7:
            os.kill(self.stopped.pop(), signal.SIGCONT)
        if self.group.unhealthy:
            time.sleep(self.random.choice([0.0, 0.05]))  # a restart takes longer than rounds
            self.group.restore(timeout=10 if not self.stopped else 0.2)
        while not self.group.healthy_actor_ids():
            while self.stopped:
                os.kill(self.stopped.pop(), signal.SIGCONT)
            self.group.restore(timeout=10)
        plan = self.inject()
        step = self.random.choice([1.0, 0.5, -2.0])
        to_send, self.to_send = self.to_send, None
        if to_send is not None and any(action.startswith("die") for action in plan.values()):
            # Ray may repeat a call that brings weights on each restart, which then dies, for ever.
            self.send(to_send)
            to_send = None
        self.injected["(calls that brought weights)"] += to_send is not None
        try:
            found = self.group.average(
                "chaos",
                plan,
                step,
                broadcast=to_send,
                min_results=1,
                timeout=TIMEOUT,
                nonfinite="skip",
            )
        except WorkerError:
            self.injected["(rounds without a result)"] += 1
            self.send(self.latest)
            return
        self.check(found, plan, step)
        self.latest = found.weights.copy()
        self.injected[f"({len(found.used)} of {WORKERS} ranks)"] += 1
        self.injected["(by lanes)"] += sum(way == "lane" for way in found.ways.values())
        if self.random.random() < 0.5:
            self.to_send = found
        else:
            self.send(found)
        if self.random.random() < 0.1:
            self.kept.append((found, found.weights.copy()))
            self.kept = self.kept[-5:]
        for one, copy in self.kept:
            assert same_bits(one.weights.buffer, copy.buffer), "a round that was kept has changed"

    def send(self, weights: Any) -> None:
        """Broadcast; who does not take it is restored later, with what was sent now."""
        mine = self.latest.copy()
        try:
            self.group.broadcast(self.random.choice([mine, weights]), timeout=TIMEOUT)
        except WorkerError:
            self.injected["(broadcasts that failed)"] += 1
        mine["w"] += 1000.0
        if self.random.random() < 0.05:
            try:
                values = self.group.step("get_weights", timeout=TIMEOUT)
            except WorkerError:
                return
            for rank, value in values.items():
                assert same_bits(value.buffer, self.latest.buffer), f"rank {rank} has others"

    def check(self, found: Round, plan: dict[int, str], step: float) -> None:
        """Compare the average with the oracle."""
        expected = fw.average([trained(self.latest, rank, step) for rank in found.used])
        assert same_bits(found.weights.buffer, expected.buffer), (plan, found)
        for rank in found.used:
            assert plan.get(rank) not in ("nan", "raise", "other layout")
            if plan.get(rank) == "extras":
                assert (found.extras[rank]["values"] == np.arange(3000.0) + rank).all()

    def inject(self) -> dict[int, str]:
        """Decide what happens in this round; return what workers do themselves."""
        draw = self.fates.random()
        rank = self.random.choice(self.group.healthy_actor_ids())
        if draw < 0.012:
            self.at_random(rank, signal.SIGKILL, "killed")
        elif draw < 0.03:
            pid = self.at_random(rank, signal.SIGSTOP, "stopped")
            if pid:
                self.stopped.append(pid)
        elif draw < 0.035:
            self.injected["died"] += 1
            return {rank: self.random.choice(["die before", "die during"])}
        elif draw < 0.2:
            action = self.random.choice(["nan", "raise", "slow", "keep", "extras", "large extras"])
            self.injected[action] += 1
            # Extras of one rank alone: the average is of one kind of weights all the same.
            return {rank: action}
        elif draw < 0.25:
            self.injected["raw calls"] += 1
            self.group.actors()[rank].spoil_kept.remote()
        elif draw < 0.27:
            self.injected["pauses"] += 1
            time.sleep(self.random.choice([0.004, 0.006, 0.03]))
        return {}

    def at_random(self, rank: int, number: signal.Signals, what: str) -> int:
        """Send a signal to a worker within the next milliseconds; return its process."""
        try:
            pid: int = ray.get(self.group.actors()[rank].pid.remote(), timeout=5)
        except (ray.exceptions.RayError, TimeoutError):
            return 0
        delay = self.random.choice([0.0, 0.0002, 0.0005, 0.001, 0.002, 0.005])
        timer = threading.Timer(delay, _kill, (pid, number))
        timer.start()
        self.timers.append(timer)
        self.injected[what] += 1
        return pid

    def end(self) -> None:
        """Leave nothing behind."""
        for timer in self.timers:
            timer.join()
        for pid in self.stopped:
            _kill(pid, signal.SIGCONT)
        self.group.shutdown()


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def run(rounds: int, seed: int) -> str:
    """Make so many rounds; return a line of what was injected."""
    chaos = Chaos(seed)
    try:
        for _ in range(rounds):
            chaos.round()
    finally:
        chaos.end()
    counts = ", ".join(f"{number} {what}" for what, number in sorted(chaos.injected.items()))
    return f"chaos: seed {seed}, {rounds} rounds of {chaos.size} elements: {counts}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    print(run(options.rounds, options.seed), flush=True)
