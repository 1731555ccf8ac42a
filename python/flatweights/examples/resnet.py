"""A residual network on CIFAR or digits, data-parallel on GPUs or CPUs, with checkpoints.

The program of Ray's old ResNet page, made current. One actor for each GPU, or for each of
``--num-workers`` on the CPU, trains some steps from the averaged weights on its share of the
images; the driver averages what comes back, where it lies in the object store, and sends it
to all of them. It needs no TensorFlow. Beside them, an actor evaluates the average every so
often: it is handed the reference that there is anyway, and takes of it what its network
has, not the momenta. Workers that die are left out until Ray has started them anew.

    python -m flatweights.examples.resnet
    python -m flatweights.examples.resnet --mode graph --plot resnet.png --log-dir logs
    python -m flatweights.examples.resnet --num-gpus 4 --rounds 2000 --batch-size 128

Without files, it trains on scikit-learn's handwritten digits, brought to 32x32x3. Files are
those of CIFAR-10 or CIFAR-100 in their binary version, at one path on all machines:

    --train-data-path 'cifar-10-batches-bin/data_batch*'
    --eval-data-path cifar-10-batches-bin/test_batch.bin

Ctrl-C saves the last complete round, and ``--resume`` goes on after it, with as many workers
and in whichever mode you like. Batches are drawn anew then, so the run does not
end with the bits that it would have had. ``tensorboard --logdir logs`` draws what is logged.

For a model of your own, change `build_network` in `_resnet_model.py`; for other images,
write a class like `Digits` in `_images.py`. The loop in `train` stays as it is.

On two cores of a shared virtual machine (TensorFlow 2.21, Ray 2.60), with 252 variables of
3.7 MB: accuracy 0.994 on digits that were not trained on, after 30 rounds, in 47 seconds; a
round's exchange took 13 ms as one buffer, and 37 ms as a dict of arrays.
"""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import ray

from flatweights.demo._screen import Screen
from flatweights.examples._checkpoints import CheckpointError, Checkpoints, Last
from flatweights.examples._cifar import CifarError
from flatweights.examples._curves import Panel, draw
from flatweights.examples._exchange import Seconds, time_exchange
from flatweights.examples._main import run
from flatweights.examples._ray import ray_for
from flatweights.examples._resnet_model import Network, learning_rate
from flatweights.examples._resnet_options import find_images, parse_options, settings_of
from flatweights.examples._resnet_workers import Evaluator, Metrics, Plan, Trainer, mean
from flatweights.examples._table import print_table
from flatweights.ray import WorkerError, WorkerGroup
from flatweights.ray._errors import reason_in_a_line

RESTARTS = 3  # of each actor


@dataclass
class History:
    """What came of a run.

    Attributes:
        training: By the number of the round: means over workers.
        speeds: Images per second, by the number of the round.
        evaluations: By the number of the round.
        exchange: What one round's exchange takes.
    """

    training: dict[int, Metrics] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, Metrics] = field(default_factory=dict)
    exchange: Seconds | None = None


class Evaluations:
    """Evaluations beside the training, one at a time: while one runs, none is started."""

    def __init__(self, plan: Plan, log_dir: str | None) -> None:
        """Start the actor."""
        evaluator = ray.remote(Evaluator).options(
            num_cpus=0, max_restarts=RESTARTS, max_task_retries=RESTARTS
        )
        self._actor = evaluator.remote(plan, log_dir)
        self._running: dict[int, Any] = {}

    def start(self, number: int, weights: Any) -> None:
        """Evaluate the weights of a round, a reference to them, unless an evaluation runs."""
        if not self._running:
            self._running[number] = self._actor.evaluate.remote(number, weights)

    def collect(self, history: History, wait: bool = False) -> None:
        """Take the result, if there is one; with ``wait``, once there is."""
        for number, ref in list(self._running.items()):
            if wait or ray.wait([ref], timeout=0)[0]:
                history.evaluations[number] = ray.get(self._running.pop(number))

    def write(self, number: int, scalars: dict[str, float]) -> None:
        """Have numbers of a round written for TensorBoard, when the actor has time."""
        self._actor.write.remote(number, scalars)


def train(options: argparse.Namespace, plan: Plan, checkpoints: Checkpoints) -> History:
    """Run the rounds that are left, and save them every so often.

    Raises:
        WorkerError: If fewer than half of the workers are left.
    """
    history = History()
    with Screen(options.rounds) as screen:
        screen.stage("building the network")
        group = WorkerGroup.create(
            Trainer,
            plan.workers,
            plan,
            arguments=lambda rank: (rank,),
            num_cpus=1,
            num_gpus=1 if plan.gpus else 0,
            max_restarts=RESTARTS,
        )
        evaluations = Evaluations(plan, options.log_dir)
        # From then on, a worker that is restarted gets what the others have.
        last = checkpoints.last or Last(0, next(iter(group.step("get_weights").values())))
        group.broadcast(last.weights)
        half = -(-plan.workers // 2)
        screen.stage(f"training, with {plan.workers} workers")
        for number in range(last.number + 1, options.rounds + 1):
            rate = learning_rate(options.learning_rate, number, options.rounds)
            (found,) = group.run(
                1, "train", options.steps, rate, min_results=half, nonfinite="skip"
            )
            checkpoints.last = Last(number, found.weights)
            if number % options.save_every == 0 or number == options.rounds:
                checkpoints.save()
            evaluations.collect(history)
            if number % options.eval_every == 0:
                evaluations.start(number, found.ref)
            trained = mean([found.extras[rank] for rank in found.used])
            speed = len(found.used) * options.steps * options.batch_size / found.seconds["round"]
            history.training[number], history.speeds[number] = trained, speed
            scalars = {f"training/{name}": value for name, value in trained._asdict().items()}
            evaluations.write(number, scalars | {"learning rate": rate, "images per second": speed})
            lost = [f", without rank {rank}" for rank in sorted({*found.late, *found.failed})]
            screen.advance(number, describe(history, number) + "".join(lost))
        screen.stage("evaluating")
        evaluations.collect(history, wait=True)
        if options.rounds not in history.evaluations:
            evaluations.start(options.rounds, found.ref)
            evaluations.collect(history, wait=True)
        actors = group.actors()
        history.exchange = time_exchange([actors[rank] for rank in group.step("ping")])
    return history


def describe(history: History, number: int) -> str:
    """Return in words how far the training has come."""
    text = f"loss {history.training[number].loss:.3f}"
    if history.evaluations:
        evaluated, found = max(history.evaluations.items())
        text += f", accuracy {found.accuracy:.3f} (round {evaluated})"
    return text


def report(options: argparse.Namespace, history: History) -> None:
    """Print what came of the run, and draw it if asked to.

    Raises:
        SystemExit: If the accuracy is not enough.
    """
    last = max(history.training)
    accuracy = history.evaluations[last].accuracy
    print_table(
        ("rounds", "images/s, median", "ms a step, median", "loss", "accuracy"),
        [
            (
                f"{min(history.training)} to {last}",
                f"{median(history.speeds.values()):.0f}",
                f"{1e3 * median(m.seconds for m in history.training.values()):.0f}",
                f"{history.training[last].loss:.4f}",
                f"{accuracy:.4f}",
            )
        ],
    )
    print(history.exchange)
    if options.plot:
        found = {"trained on": history.training, "held out": history.evaluations}
        panels = [
            Panel(
                title,
                "round",
                {
                    k: (sorted(m), [getattr(m[i], title) for i in sorted(m)])
                    for k, m in found.items()
                },
            )
            for title in ("loss", "accuracy")
        ]
        draw(options.plot, "A residual network, data-parallel", *panels)
    if accuracy < options.enough:
        raise SystemExit(f"accuracy below {options.enough}: it needs more --rounds")


def check_resources(plan: Plan) -> None:
    """Make sure that all workers can run at once; Ray would have them wait for ever.

    Raises:
        SystemExit: If they cannot.
    """
    there = ray.cluster_resources()
    for resource in ("CPU", "GPU") if plan.gpus else ("CPU",):
        if there.get(resource, 0) < plan.workers:
            raise SystemExit(
                f"expected a {resource} for each of {plan.workers} workers, "
                f"got {there.get(resource, 0):g}: that is what Ray has"
            )


@contextmanager
def saved_at_last(checkpoints: Checkpoints) -> Iterator[None]:
    """Save the last complete round, and say so, if the training is broken off."""
    try:
        yield
    except (KeyboardInterrupt, WorkerError, ray.exceptions.RayError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this has to be done
        print(checkpoints.save(), file=sys.stderr)
        raise


def main() -> None:
    """Run the program.

    Raises:
        SystemExit: If files are wrong, Ray has too little, workers fail, or too little was
            learned.
    """
    options = parse_options(__doc__)
    try:
        images, held_out = find_images(options)
        checkpoints = Checkpoints(options.checkpoint_dir, settings_of(options, images))
        if options.resume:
            first = checkpoints.load().number + 1
        else:
            first = 1
            checkpoints.check_free(options.rounds)
        options.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    except (CheckpointError, CifarError, OSError) as error:
        raise SystemExit(str(error)) from None
    if first > options.rounds:
        raise SystemExit(f"{options.checkpoint_dir}: all {options.rounds} rounds are done")
    workers = options.num_gpus or options.num_workers
    if images.size < workers:
        raise SystemExit(f"expected an image for each of {workers} workers, got {images.size}")
    plan = Plan(
        mode=options.mode,
        network=Network(options.num_residual_units, images.classes, options.seed),
        train=images,
        evaluation=held_out,
        workers=workers,
        batch=options.batch_size,
        seed=(options.seed, first),
        gpus=options.num_gpus is not None,
    )
    try:
        with saved_at_last(checkpoints), ray_for(plan.workers):
            check_resources(plan)
            history = train(options, plan, checkpoints)
    except WorkerError as error:
        reasons = [f"rank {rank}: {reason_in_a_line(e)}" for rank, e in error.failed.items()]
        raise SystemExit("\n".join(reasons)) from error
    except ray.exceptions.RayError as error:
        raise SystemExit(f"evaluation: {reason_in_a_line(error)}") from error
    except OSError as error:
        raise SystemExit(f"not saved: {error}") from error
    report(options, history)


if __name__ == "__main__":
    run(main)
