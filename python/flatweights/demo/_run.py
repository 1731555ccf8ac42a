"""The demo from start to end."""

import re
from pathlib import Path
from typing import Any

import ray

from flatweights.demo._digits import split_digits
from flatweights.demo._history import History
from flatweights.demo._interrupts import Interrupts
from flatweights.demo._local_ray import local_ray
from flatweights.demo._options import DemoError, Options
from flatweights.demo._rounds import DictLoop, FlatLoop, Loop, exchanged, get_all, run_round
from flatweights.demo._screen import Screen, count
from flatweights.demo._worker import DigitsWorker
from flatweights.ray import WorkerError

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_EXIT_DETAIL = re.compile(r"Worker exit detail: (.*?)(?: Some common causes|$)")


def run_demo(options: Options) -> None:
    """Train, compare and report; see `flatweights.demo.run`."""
    histories: dict[str, History] = {"flat": History(), "dict": History()}
    screen = Screen(options.rounds)
    with Interrupts() as interrupts:
        with screen:
            screen.stage("starting Ray")
            with local_ray(options.workers, interrupts):
                try:
                    digest = _train(options, histories, screen)
                except WorkerError as error:
                    raise DemoError(_one_line(error)) from error
        ours, rival = histories["flat"], histories["dict"]
        screen.table(ours, rival, options.workers)
        if options.plot:
            _plot(options.plot, options, ours, rival, screen)
        screen.line(f"test accuracy {ours.accuracies[-1]:.4f}, SHA-256 of the weights {digest}")


def _train(options: Options, histories: dict[str, History], screen: Screen) -> str:
    """Run all rounds both ways; return the digest of the weights at the end."""
    shards, test = split_digits(options.workers, options.seed)
    sizes = [len(shard.labels) for shard in shards]
    per_worker = " or ".join(map(str, sorted(set(sizes))))
    screen.line(
        f"digits: {sum(sizes)} to train on, {per_worker} per worker; {len(test.labels)} held out"
    )
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

    screen.stage(
        f"training: {count(options.rounds, 'round')} of "
        f"{count(options.local_steps, 'local step')}, averaging {options.mode}"
    )
    loops: list[Loop] = [FlatLoop(sizes), DictLoop(sizes)]
    for done in range(1, options.rounds + 1):
        for loop in loops:
            _measure_round(actors, loop, histories[loop.way])
        loops.reverse()  # neither way always runs in the other's wake
        screen.round_done(done, histories["flat"].accuracies[-1])

    digests = set(get_all([actor.digest.remote() for actor in actors]))
    if len(digests) != 1:
        raise DemoError(f"the workers ended with {len(digests)} different sets of weights")
    return str(digests.pop())


def _measure_round(actors: list[Any], loop: Loop, history: History) -> None:
    mean, times = run_round(actors, loop)
    history.times.append(times)
    history.nbytes, history.arrays = exchanged(mean)
    ((loss, accuracy),) = get_all([actors[0].evaluate.remote(loop.way)])
    history.losses.append(loss)
    history.accuracies.append(accuracy)


def _plot(path: Path, options: Options, ours: History, rival: History, screen: Screen) -> None:
    from flatweights.demo._plot import draw  # matplotlib takes a second to import

    try:
        draw(path, options, ours, rival)
    except OSError as error:
        raise DemoError(f"cannot write {path}: {error.strerror}") from error
    screen.line(f"plot: {path}")


def _one_line(error: WorkerError) -> str:
    return "; ".join(f"rank {rank}: {_reason(cause)}" for rank, cause in error.failed.items())


def _reason(error: Exception) -> str:
    cause = getattr(error, "cause", None)
    shown = cause if isinstance(cause, Exception) else error
    name = type(shown).__name__
    lines = [line.strip() for line in _COLOURS.sub("", str(shown)).splitlines() if line.strip()]
    if not lines:
        return name
    if "creation task" in lines[0]:  # the constructor raised: a traceback, the error last
        return f"{name}: {lines[-1]}"
    detail = _EXIT_DETAIL.search(lines[-1])
    return f"{name}: {lines[0]}" + (f" {detail[1]}" if detail else "")
