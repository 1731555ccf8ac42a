"""The driver of the demo: rounds, the ways to exchange, and a worker that is killed."""

import argparse
import contextlib
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import ray

from flatweights.demo import SIZES
from flatweights.demo._screen import Screen, draw_comparison, draw_survival, milliseconds, summary
from flatweights.demo._worker import DigitsWorker
from flatweights.examples import print_table, start_ray
from flatweights.ray import WorkerError, WorkerGroup, average

RESTART_S = 300.0
FLAT, STORE, GUIDE = "flatweights", "object store", "Ray's guide"
STEPS = {
    "wait": "collect results",
    "average": "average",
    "put": "put",
    "broadcast": "set variables",
}
"""The titles of the steps of an exchange, by the names in `Round.seconds`."""


class Exchange(NamedTuple):
    """The average, the seconds of each of the `STEPS`, and bytes and arrays of one message."""

    mean: Mapping[str, Any]
    seconds: dict[str, float]
    nbytes: int
    arrays: int

    @property
    def total(self) -> float:
        """The seconds of all steps."""
        return sum(self.seconds.values())


def exchange_flat(group: WorkerGroup, sizes: Sequence[int]) -> Exchange:
    """Exchange through `flatweights`: two lines."""
    result = group.average(weights=sizes)
    group.broadcast(result)
    seconds = {step: result.seconds.get(step, 0.0) for step in STEPS}
    return Exchange(result.weights, seconds, pickled_size(result.weights), 1)


def exchange_through_store(group: WorkerGroup, sizes: Sequence[int]) -> Exchange:
    """Exchange through `flatweights.ray.average` and Ray's object store, as between nodes."""
    actors = group.actors().values()
    result = average([actor.get_weights.remote() for actor in actors], sizes)
    ref = result.ref
    begin = time.perf_counter()
    ray.get([actor.set_weights.remote(ref) for actor in actors])
    seconds = {**result.seconds, "broadcast": time.perf_counter() - begin}
    return Exchange(result.weights, seconds, pickled_size(result.weights), 1)


def exchange_dicts(group: WorkerGroup, sizes: Sequence[int]) -> Exchange:
    """Exchange as in Ray's guide; weighted, if the shares of the digits differ in size."""
    actors = group.actors().values()
    times = [time.perf_counter()]
    replies = ray.get([actor.get_dict.remote() for actor in actors])
    times.append(time.perf_counter())
    if min(sizes) == max(sizes):
        mean = {k: sum(w[k] for w in replies) / len(replies) for k in replies[0]}
    else:
        pairs = [(size / sum(sizes), w) for size, w in zip(sizes, replies, strict=True)]
        mean = {k: sum(share * w[k] for share, w in pairs) for k in replies[0]}
    times.append(time.perf_counter())
    ref = ray.put(mean)
    times.append(time.perf_counter())
    ray.get([actor.set_dict.remote(ref) for actor in actors])
    times.append(time.perf_counter())
    seconds = dict(zip(STEPS, np.diff(times).tolist(), strict=True))
    return Exchange(mean, seconds, pickled_size(mean), len(mean))


def pickled_size(message: Any) -> int:
    """Return the bytes that Ray sends for ``message``: buffers, and the pickle beside them."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    return len(head) + sum(buffer.raw().nbytes for buffer in buffers)


WAYS = {FLAT: exchange_flat, STORE: exchange_through_store, GUIDE: exchange_dicts}


def exchange_by(name: str, group: WorkerGroup, sizes: Sequence[int]) -> Exchange:
    """Exchange in one of the `WAYS`, once the workers are ready for it.

    Workers of a group wait some milliseconds for its next command before they take other calls.
    """
    ray.get([actor.ping.remote() for actor in group.actors().values()])
    if name == FLAT:  # without other ways between, the workers would wait for it already
        group.step("ping")
    return WAYS[name](group, sizes)


def medians(exchanges: Sequence[Exchange]) -> Exchange:
    """Return the medians of some exchanges, except the first, in which memory is new."""
    measured = exchanges[1:] or exchanges
    seconds = {step: median(one.seconds[step] for one in measured) for step in STEPS}
    return exchanges[0]._replace(seconds=seconds)


def train(options: argparse.Namespace) -> None:
    """Train on the digits; see `flatweights.demo.run`."""
    with _screen(options.rounds) as screen:
        screen.stage("starting Ray")
        start_ray(options.workers)
        screen.stage("importing TensorFlow and building the networks")
        group = WorkerGroup.create(
            DigitsWorker,
            options.workers,
            options,
            arguments=lambda rank: [rank],
            max_restarts=int(options.kill_worker),
        )
        try:
            sizes = list(group.step("size").values())
            per_worker = " or ".join(map(str, sorted(set(sizes))))
            screen.line(f"digits: {sum(sizes)} to train on, {per_worker} per worker")
            screen.stage(f"training {summary(options)}, averaging {options.mode}")
            follow = survive if options.kill_worker else compare
            accuracy, show = follow(options, screen, group, sizes)
            digests = set(group.step("digest").values())
        except ray.exceptions.RayError:
            group.step("ping")  # a call that passed the group by does not say which rank has died
            if group.unhealthy:
                raise WorkerError(group.unhealthy) from None
            raise
        group.shutdown()
    show()
    if options.plot:
        screen.line(f"plot: {options.plot}")
    if len(digests) != 1:
        raise SystemExit(f"the workers ended with {len(digests)} different sets of weights")
    screen.line(f"test accuracy {accuracy:.4f}, SHA-256 of the weights {digests.pop()}")


@contextlib.contextmanager
def _screen(rounds: int) -> Iterator[Screen]:
    """Show progress; hide the messages of Ray and of the package about dead workers."""
    screen, log, handler = Screen(rounds), logging.getLogger("flatweights"), logging.NullHandler()
    with contextlib.ExitStack() as stack:
        log.addHandler(handler)  # a warning that has a handler is not printed
        stack.callback(log.removeHandler, handler)
        stack.enter_context(screen.progress)
        # Ray prints to the standard output, whatever its log level.
        nowhere = stack.enter_context(Path(os.devnull).open("w"))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        yield screen


Outcome = tuple[float, Callable[[], None]]  # the accuracy, and a function that shows the results


def compare(
    options: argparse.Namespace, screen: Screen, group: WorkerGroup, sizes: Sequence[int]
) -> Outcome:
    """Train, and exchange in all ways after each round; then exchange arrays of other sizes."""
    ways = list(WAYS)
    exchanges: dict[str, list[Exchange]] = {name: [] for name in WAYS}
    tests, computing, gap = list[tuple[float, float]](), [], 0.0
    for number in range(1, options.rounds + 1):
        seconds = max(group.step("train").values())
        one_round = {name: exchange_by(name, group, sizes) for name in ways}
        ways.reverse()  # no way always follows the same one
        computing.append(seconds + max(group.step("finish").values()))
        mean = one_round[FLAT].mean
        for name, exchanged in one_round.items():
            gap = max(gap, *(float(np.abs(mean[k] - exchanged.mean[k]).max()) for k in mean))
            exchanges[name].append(exchanged._replace(mean={}))
        tests.append(ray.get(group.actors()[0].evaluate.remote()))
        screen.advance(number, f"test accuracy {tests[-1][1]:.4f}")
    screen.stage("exchanging bare arrays of other sizes")
    costs = {name: medians(some) for name, some in exchanges.items()}
    size = SIZES[options.size]
    others: dict[str, dict[float, float]] = {name: {} for name in WAYS}
    for megabytes in size.others:
        group.step("exchange_others", 1e6 * megabytes)
        for name in WAYS:
            # If this kept the means, each exchange would need new memory for its own.
            repeats = range(1 + size.repeats)
            some = [exchange_by(name, group, sizes)._replace(mean={}) for _ in repeats]
            others[name][megabytes] = medians(some).total

    def show() -> None:
        show_exchanges(costs, others)
        (loss, accuracy), measured = tests[-1], computing[1:] or computing
        training = {
            "rounds": options.rounds,
            "computing, per round": milliseconds(median(measured)),
            "test loss": f"{loss:.4f}",
            "test accuracy": f"{accuracy:.4f}",
        }
        print_table([{"training": title, "": cell} for title, cell in training.items()])
        screen.line(f"All ways exchange the same {options.mode}, in turn; times are medians.")
        screen.line(f"{STORE}: flatweights through Ray's object store, as between machines")
        screen.line(f"{GUIDE}: a loop over dicts of arrays")
        screen.line(f"Largest difference between the averages: {gap:.1g}")
        if options.plot:
            draw_comparison(options, tests, costs, others, STEPS)

    return tests[-1][1], show


def show_exchanges(
    costs: Mapping[str, Exchange], others: Mapping[str, Mapping[float, float]]
) -> None:
    """Print a table of exchanges, with a column for each way."""
    ours = costs[FLAT]
    rows: list[tuple[object, ...]] = []

    def add_times(title: str, seconds: Sequence[float]) -> None:
        rows.append((title, *map(milliseconds, seconds)))
        rows.append(("  times flatweights", *(f"{each / seconds[0]:.1f}x" for each in seconds)))

    add_times(f"exchange of {ours.nbytes / 1e6:.3g} MB", [cost.total for cost in costs.values()])
    for step, title in STEPS.items():
        times = (milliseconds(cost.seconds[step]) for cost in costs.values())
        rows.append((f"  {title}", *times))
    for size in others[FLAT]:
        add_times(f"exchange of {size:g} MB", [others[name][size] for name in costs])
    rows.append(("bytes sent, each", *(f"{cost.nbytes:,}" for cost in costs.values())))
    rows.append(("  in arrays", *(cost.arrays for cost in costs.values())))
    print_table([dict(zip(["per round", *costs], row, strict=True)) for row in rows])


def survive(
    options: argparse.Namespace, screen: Screen, group: WorkerGroup, sizes: Sequence[int]
) -> Outcome:
    """Train, and kill the process of the last rank half-way.

    Rounds include that rank again as soon as Ray has restarted its process. The restart takes
    seconds, since TensorFlow is imported, and rounds of the demo take less: after a quarter of all
    rounds without it, they wait.

    Raises:
        SystemExit: If the worker does not come back.
    """
    screen.line("Ray's guide is left out: its loop ends with the first worker that dies")
    victim, dies_in = options.workers - 1, (options.rounds + 1) // 2
    waits_after = dies_in + max(1, options.rounds // 4) - 1
    group.broadcast(group.step("get_weights")[0])
    ray.get(group.actors()[victim].die_in.remote(dies_in))
    tests, records, was_there = list[tuple[float, float]](), list[dict[str, Any]](), True
    results = group.run(options.rounds, "train_on", weights=sizes, min_results=1)
    for number, result in enumerate(results, 1):
        tests.append(ray.get(group.actors()[result.used[0]].evaluate.remote()))
        records.append(result.record())
        is_there = victim in result.used
        if is_there != was_there:
            reason = records[-1]["failed"].get(str(victim), "no answer")
            event = "is back" if is_there else f"died: {reason}"
            share = f"averaged over {len(result.used)} of {options.workers}"
            screen.line(f"round {number}: rank {victim} {event}; {share}")
        was_there = is_there
        screen.advance(number, f"test accuracy {tests[-1][1]:.4f}")
        if number == waits_after:
            _wait_for(group, victim, screen)

    def show() -> None:
        show_rounds(records, victim)
        screen.line(f"test loss {tests[-1][0]:.4f}")
        if options.plot:
            used = [len(record["used"]) for record in records]
            draw_survival(options, [accuracy for _, accuracy in tests], used, victim)

    return tests[-1][1], show


def _wait_for(group: WorkerGroup, rank: int, screen: Screen) -> None:
    """Wait until ``rank`` is there again; it gets the latest weights."""
    if not group.is_actor_healthy(rank):
        screen.stage(f"waiting for rank {rank}: Ray starts its process again")
    end = time.monotonic() + RESTART_S
    while not group.is_actor_healthy(rank):
        if time.monotonic() > end:
            raise SystemExit(f"rank {rank} did not come back in {RESTART_S:.0f} s")
        time.sleep(0.1)
        group.restore()


def show_rounds(records: Sequence[Mapping[str, Any]], victim: int) -> None:
    """Print medians of rounds: a column for those of all workers, and one for the others."""
    parts = [
        [one for one in records if (victim in one["used"]) is is_there]
        for is_there in (True, False)
    ]
    rows: list[tuple[object, ...]] = [
        ("rounds", *map(len, parts)),
        ("results averaged", *(len(part[-1]["used"]) for part in parts)),
    ]
    for step, title in {**STEPS, "wait": "train, collect", "round": "all of it"}.items():
        seconds = [median(one["seconds"].get(step, 0.0) for one in part) for part in parts]
        rows.append((title, *map(milliseconds, seconds)))
    for way in ("in", "out"):
        rows.append((f"bytes {way}", *(f"{part[-1]['bytes'][way]:,}" for part in parts)))
    titles = "per round, median", "all workers", f"without rank {victim}"
    print_table([dict(zip(titles, row, strict=True)) for row in rows])
