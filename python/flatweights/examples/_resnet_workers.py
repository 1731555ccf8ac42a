"""The actors of `resnet`: some train, one evaluates."""

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from flatweights import FlatWeights
from flatweights.examples._exchange import ComparedWorker
from flatweights.examples._images import Images, evaluation_batches, training_batches
from flatweights.examples._resnet_model import EVALUATORS, TRAINERS, Network, Scores
from flatweights.ray import FlatWorker

SCALARS = "scalars"  # the plugin of TensorBoard that draws them


class Plan(NamedTuple):
    """What all actors have to know.

    Attributes:
        mode: ``"eager"`` or ``"graph"``.
        network: What to train.
        train: The images to train on.
        evaluation: The images to evaluate on.
        workers: How many train.
        batch: Images that each takes in a step.
        seed: Of the batches. Not that of the run alone, or one that is resumed would see
            the same batches again.
        gpus: Whether those that train have one each.
    """

    mode: str
    network: Network
    train: Images
    evaluation: Images
    workers: int
    batch: int
    seed: tuple[int, ...]
    gpus: bool


class Metrics(NamedTuple):
    """Means over images.

    Attributes:
        loss: Cross entropy.
        accuracy: Share of the images that were recognised.
        seconds: That one step took; of an evaluation, all of it.
    """

    loss: float
    accuracy: float
    seconds: float


def mean(found: Sequence[Metrics]) -> Metrics:
    """Return the means of several."""
    return Metrics(*np.mean(found, axis=0).tolist())


class Trainer(ComparedWorker):
    """Trains its copy of the network on its share of the images.

    Its weights are those of the network, moving statistics included, and the momenta. These
    are averaged like the weights that they belong to (H. Yu, R. Jin, S. Yang: "On the Linear
    Speedup Analysis of Communication Efficient Momentum SGD for Distributed Non-Convex
    Optimization", ICML 2019): who takes over the average, be it in place of a worker that
    died or in a run that is resumed, goes on as the others do.
    """

    def build(self, plan: Plan, rank: int) -> Any:
        """Build the network in this process, and its batches."""
        _prepare_tensorflow(plan, uses_gpu=plan.gpus)
        batches = partial(training_batches, plan.train, rank, plan.workers, plan.batch, plan.seed)
        variables, self._step = TRAINERS[plan.mode](plan.network, batches)
        return variables

    def train(self, steps: int, rate: float) -> tuple[FlatWeights, Metrics]:
        """Take some steps from the weights that are set; return where they lead."""
        begin = time.perf_counter()
        scores = [self._step(rate) for _ in range(steps)]
        seconds = (time.perf_counter() - begin) / steps
        return self.get_weights(), _metrics(scores, seconds)


class Evaluator(FlatWorker):
    """Tells how well a network does on images that no one trains on; writes to TensorBoard."""

    def build(self, plan: Plan, log_dir: str | None) -> Any:
        """Build the network in this process: without momenta."""
        _prepare_tensorflow(plan, uses_gpu=False)
        import tensorflow as tf

        self._writer = tf.summary.create_file_writer(log_dir) if log_dir else None
        batches = partial(evaluation_batches, plan.evaluation)
        variables, self._evaluate = EVALUATORS[plan.mode](plan.network, batches)
        return variables

    def evaluate(self, number: int, weights: FlatWeights) -> Metrics:
        """Evaluate the weights that a round led to.

        Args:
            number: Of the round.
            weights: Those of a `Trainer`. Its momenta are left alone.
        """
        begin = time.perf_counter()
        self.set_weights({name: weights[name] for name in self.variables.layout.names})
        scores = self._evaluate()
        metrics = _metrics([scores], time.perf_counter() - begin)
        self.write(number, {f"evaluation/{k}": v for k, v in metrics._asdict().items()})
        return metrics

    def write(self, number: int, scalars: dict[str, float]) -> None:
        """Write numbers of a round for TensorBoard, if there is a folder for them."""
        if self._writer is None:
            return
        import tensorflow as tf

        # `tf.summary.scalar` does this too, but wants TensorBoard installed.
        data = tf.compat.v1.SummaryMetadata.PluginData(plugin_name=SCALARS)
        metadata = tf.compat.v1.SummaryMetadata(plugin_data=data)
        with self._writer.as_default():
            for name, value in scalars.items():
                tf.summary.write(name, tf.constant(value, tf.float32), number, metadata)
        self._writer.flush()


def _prepare_tensorflow(plan: Plan, uses_gpu: bool) -> None:
    import tensorflow as tf

    if uses_gpu:
        return
    tf.config.set_visible_devices([], "GPU")  # or it would take the memory of all that there are
    threads = max(1, len(os.sched_getaffinity(0)) // plan.workers)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def _metrics(scores: list[Scores], seconds: float) -> Metrics:
    losses, right = (np.concatenate(parts) for parts in zip(*scores, strict=True))
    return Metrics(float(np.mean(losses)), float(np.mean(right)), seconds)
