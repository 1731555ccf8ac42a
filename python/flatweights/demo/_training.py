"""The driver of the demo: rounds, the ways to exchange, and a worker that is killed."""

import argparse
import contextlib
import io
import logging
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import ray

from flatweights.demo import SIZES
from flatweights.demo._results import (
    FLAT,
    GUIDE,
    STEPS,
    STORE,
    Cost,
    Screen,
    show_comparison,
    show_survival,
    summary,
)
from flatweights.demo._worker import DigitsWorker
from flatweights.ray import WorkerError, WorkerGroup, average

RESTART_S = 300.0

Exchange = tuple[Mapping[str, Any], Mapping[str, float]]  # the average; seconds by step
AccuracyAndPlot = tuple[float, Callable[[], None]]  # of the test; shows the results


def exchange_flat(group: WorkerGroup) -> Exchange:
    """Exchange through `flatweights`: two lines."""
    result = group.average()
    group.broadcast(result)
    return result.weights, result.seconds


def exchange_through_store(group: WorkerGroup) -> Exchange:
    """Exchange through `flatweights.ray.average` and Ray's object store."""
    actors = group.actors().values()
    result = average([actor.get_weights.remote() for actor in actors])
    ref = result.ref
    begin = time.perf_counter()
    ray.get([actor.set_weights.remote(ref) for actor in actors])
    return result.weights, {**result.seconds, "broadcast": time.perf_counter() - begin}


def exchange_dicts(group: WorkerGroup) -> Exchange:
    """Exchange as in Ray's guide."""
    actors = group.actors().values()
    times = [time.perf_counter()]
    replies = ray.get([actor.get_dict.remote() for actor in actors])
    times.append(time.perf_counter())
    mean = {k: sum(w[k] for w in replies) / len(replies) for k in replies[0]}
    times.append(time.perf_counter())
    ref = ray.put(mean)
    times.append(time.perf_counter())
    ray.get([actor.set_dict.remote(ref) for actor in actors])
    times.append(time.perf_counter())
    return mean, dict(zip(STEPS, np.diff(times).tolist(), strict=True))


WAYS = {FLAT: exchange_flat, STORE: exchange_through_store, GUIDE: exchange_dicts}


def exchange_by(name: str, group: WorkerGroup) -> Exchange:
    """Exchange in one of the `WAYS`, once the workers are ready for it.

    Workers of a group wait some milliseconds for the group's next command before they accept other
    calls.
    """
    ray.get([actor.ping.remote() for actor in group.actors().values()])
    if name == FLAT:  # in a program without the other ways, the workers would already be waiting
        group.step("ping")
    return WAYS[name](group)


def measure(message: Any, times: Sequence[Mapping[str, float]]) -> Cost:
    """Return the medians of some exchanges, and the size of one message as Ray sends it.

    The first exchange does not count, since its memory is new.
    """
    seconds = {step: median(one.get(step, 0.0) for one in times[1:] or times) for step in STEPS}
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    return Cost(seconds, len(head) + sum(b.raw().nbytes for b in buffers), len(buffers))


def train(options: argparse.Namespace) -> None:
    """Train on the digits; see `flatweights.demo.run`."""
    logging.getLogger("flatweights").addHandler(logging.NullHandler())  # else warnings are printed
    screen = Screen(options.rounds)
    # Ray prints to the standard output why a worker died, whatever its log level.
    with screen, contextlib.redirect_stdout(io.StringIO()):
        screen.stage("starting Ray")
        if not ray.is_initialized():
            address = os.environ.get("RAY_ADDRESS", "local")
            ray.init(address, include_dashboard=False, logging_level=logging.ERROR)
        screen.stage("importing TensorFlow and building the networks")
        group = WorkerGroup.create(
            DigitsWorker,
            options.workers,
            options,
            arguments=lambda rank: [rank],
            max_restarts=int(options.kill_worker),
        )
        try:
            screen.line(f"digits to train on: {group.step('size')[0]} per worker")
            screen.stage(f"training, averaging {options.mode} ({summary(options)})")
            follow = survive if options.kill_worker else compare
            accuracy, show = follow(options, screen, group)
            digests = set(group.step("digest").values())
        except ray.exceptions.RayError:
            # Calls that bypassed the group do not name the rank that died. This one does.
            group.step("ping")
            if group.unhealthy:
                raise WorkerError(group.unhealthy) from None
            raise
        group.shutdown()
    show()
    print(f"picture: {options.plot}")
    if len(digests) != 1:
        raise SystemExit(f"the workers ended with {len(digests)} different sets of weights")
    print(f"test accuracy {accuracy:.4f}, SHA-256 of the weights {digests.pop()}")


def compare(options: argparse.Namespace, screen: Screen, group: WorkerGroup) -> AccuracyAndPlot:
    """Train, and exchange in all ways after each round; then exchange arrays of other sizes."""
    ways, tests, computing, gap = list(WAYS), list[tuple[float, float]](), list[float](), 0.0
    times: dict[str, list[Mapping[str, float]]] = {name: [] for name in WAYS}
    for number in range(1, options.rounds + 1):
        seconds = max(group.step("train").values())
        results = {name: exchange_by(name, group) for name in ways}
        ways.reverse()  # no way always follows the same one
        computing.append(seconds + max(group.step("finish").values()))
        ours, _ = results[FLAT]
        for name, (mean, steps) in results.items():
            gap = max(gap, *(float(np.abs(mean[k] - ours[k]).max()) for k in ours))
            times[name].append(steps)
        tests.append(ray.get(group.actors()[0].evaluate.remote()))
        screen.round(number, f"test accuracy {tests[-1][1]:.4f}")
    costs = {name: measure(results[name][0], times[name]) for name in WAYS}
    screen.stage("exchanging bare arrays of other sizes")
    size, others = SIZES[options.size], {name: dict[float, float]() for name in WAYS}
    for megabytes in size.others:
        group.step("exchange_others", 1e6 * megabytes)
        for name in WAYS:
            # If this kept the means, each exchange would need new memory for its own.
            some = [exchange_by(name, group)[1] for _ in range(1 + size.repeats)]
            others[name][megabytes] = measure(None, some).total
    screen.line(f"largest difference between the averages: {gap:.1g}")
    return tests[-1][1], partial(show_comparison, options, tests, computing, costs, others)


def survive(options: argparse.Namespace, screen: Screen, group: WorkerGroup) -> AccuracyAndPlot:
    """Train, and kill the process of the last rank half-way.

    Rounds include that rank again as soon as Ray has restarted its process. The restart takes
    seconds, since the process imports TensorFlow, and rounds of the demo take less. So after a
    quarter of all rounds without that rank, the next round waits for it.

    Raises:
        SystemExit: If the worker does not come back.
    """
    screen.line("Ray's guide is left out: its loop ends with the first worker that dies")
    victim, dies_in = options.workers - 1, (options.rounds + 1) // 2
    waits_after = dies_in + max(1, options.rounds // 4) - 1
    process = group.actors()[victim].__ray_call__.remote(lambda worker: os.getpid())
    tests, away = list[tuple[float, float]](), list[int]()
    for number in range(1, options.rounds + 1):
        if number == dies_in:
            os.kill(ray.get(process), signal.SIGKILL)
        (result,) = group.run(1, "train_on", min_results=1)
        tests.append(ray.get(group.actors()[result.used[0]].evaluate.remote()))
        is_there, was_there = victim in result.used, number - 1 not in away
        if is_there != was_there:
            reason = result.record()["failed"].get(str(victim), "no answer")
            event = "is back" if is_there else f"died: {reason}"
            share = f"averaged over {len(result.used)} of {options.workers}"
            screen.line(f"round {number}: rank {victim} {event}; {share}")
        if not is_there:
            away.append(number)
        screen.round(number, f"test accuracy {tests[-1][1]:.4f}")
        if number == waits_after:
            wait_for(group, victim, screen)
    return tests[-1][1], partial(show_survival, options, tests, away, victim)


def wait_for(group: WorkerGroup, rank: int, screen: Screen) -> None:
    """Wait until ``rank`` answers again; it gets the latest weights."""
    if not group.is_actor_healthy(rank):
        screen.stage(f"waiting for rank {rank}: Ray starts its process again")
    end = time.monotonic() + RESTART_S
    while not group.is_actor_healthy(rank):
        if time.monotonic() > end:
            raise SystemExit(f"rank {rank} did not come back in {RESTART_S:.0f} s")
        time.sleep(0.1)
        group.restore()
