"""A residual network on digits or CIFAR, data-parallel on CPUs or GPUs, with checkpoints.

This is an up-to-date version of the program on Ray's old ResNet page. One actor for each GPU, or
``--num-workers`` actors on the CPU, train some steps from the averaged weights, each on its share
of the images. The driver averages the results and sends the average to all of them. The driver
needs no TensorFlow. Another actor evaluates the average every few rounds. Rounds leave out workers
that died until Ray has restarted them.

    flatweights examples resnet
    flatweights examples --plot resnet.png resnet --mode graph --log-dir logs
    flatweights examples resnet --dataset cifar10 --num-gpus 4 --rounds 2000 --enough 0.9

The digits are scikit-learn's handwritten ones, enlarged to 32x32x3. Keras downloads CIFAR to
``~/.keras`` at the first use.

With ``--checkpoint FILE``, each round writes a file at its end, and the same command resumes after
the last round in the file, with any number of workers and in either mode. It draws new batches, so
the final bits differ from those of a run without a break. ``tensorboard --logdir logs`` shows the
summaries.

For a model of your own, change `build_model`; for other images, `load_images`.

K. He, X. Zhang, S. Ren, J. Sun: "Deep Residual Learning for Image Recognition", CVPR 2016;
"Identity Mappings in Deep Residual Networks", ECCV 2016.
"""

import argparse
import contextlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from flatweights import FlatWeights
from flatweights.ray import FlatWorker, WorkerGroup

RESTARTS = 3  # of each actor
CHANNELS = (16, 32, 64)  # of the three stages
SIDE, PADDING = 32, 4
LABELS = {"digits": 10, "cifar10": 10, "cifar100": 100}

Images = tuple[NDArray[np.uint8], NDArray[np.int32]]  # 32x32x3 bytes each, and the labels


def load_images(dataset: str, seed: int) -> tuple[Images, Images]:
    """Return images to train on, and others to test with."""
    if dataset == "digits":
        small, labels = load_digits(return_X_y=True)  # 0 to 16
        pixels = (small * (255 / 16)).round().reshape(-1, 8, 8, 1)
        pixels = pixels.repeat(4, 1).repeat(4, 2).repeat(3, 3)
        split = train_test_split(pixels, labels, test_size=0.2, random_state=seed)
        parts: Any = (split[0], split[2]), (split[1], split[3])
    else:
        import keras

        parts = getattr(keras.datasets, dataset).load_data()
    train, test = ((x.astype(np.uint8), y.reshape(-1).astype(np.int32)) for x, y in parts)
    return train, test


def draw_batch(images: Images, size: int, mirror: bool, rng: np.random.Generator) -> Images:
    """Return some images, shifted together and, if ``mirror``, mirrored one by one, at random."""
    chosen = rng.integers(len(images[1]), size=size)
    y, x = rng.integers(2 * PADDING + 1, size=2)
    border = [(0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)]
    pixels = np.pad(images[0][chosen], border)[:, y : y + SIDE, x : x + SIDE]
    if mirror:
        pixels = np.where(rng.random((size, 1, 1, 1)) < 0.5, pixels[:, :, ::-1], pixels)
    return pixels, images[1][chosen]


def build_model(units: int, classes: int) -> Any:
    """Return a network of ``6 * units + 2`` layers, in the mode that TensorFlow is in."""
    from keras import Input, Model, layers, ops

    options = {"padding": "same", "use_bias": False, "kernel_initializer": "he_normal"}

    def convolution(x: Any, channels: int, stride: int = 1) -> Any:
        return layers.Conv2D(channels, 3, stride, **options)(x)

    def normalised(x: Any) -> Any:
        # A round has few steps: with Keras's 0.99, statistics would follow too slowly.
        return layers.ReLU()(layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x))

    images = Input((SIDE, SIDE, 3))
    x = convolution(images, CHANNELS[0])
    for stage, channels in enumerate(CHANNELS):
        for unit in range(units):
            stride = 2 if stage > 0 and unit == 0 else 1
            inside = convolution(normalised(x), channels, stride)
            inside = convolution(normalised(inside), channels)
            if stride > 1:  # a shortcut without weights: new channels start at zero
                border = (channels - x.shape[-1]) // 2
                x = ops.pad(layers.AveragePooling2D(stride)(x), [[0, 0]] * 3 + [[border] * 2])
            x = layers.Add()([x, inside])
    outputs = layers.Dense(classes)(layers.GlobalAveragePooling2D()(normalised(x)))
    return Model(images, outputs)


def build_network(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Build the network in a mode of TensorFlow; the same seed gives the same weights.

    Returns:
        The variables of the model and of its optimizer; then two functions of images and labels.
        Both return the loss of each image, and whether it was recognised; the first takes a step.
    """
    import keras
    import tensorflow as tf

    from flatweights.tensorflow import TensorFlowVariables

    tf1, rate, steps = tf.compat.v1, options.learning_rate, options.rounds * options.steps
    with tf.Graph().as_default() if options.mode == "graph" else contextlib.nullcontext():
        keras.utils.set_random_seed(options.seed)
        model = build_model(options.num_residual_units, LABELS[options.dataset])
        trained = model.trainable_variables
        # A tenth after half of all steps, and again after three quarters.
        rates = keras.optimizers.schedules.PiecewiseConstantDecay(
            [steps // 2, 3 * steps // 4], [rate, 0.1 * rate, 0.01 * rate]
        )
        optimizer = keras.optimizers.SGD(rates, momentum=0.9, weight_decay=1e-4, name="sgd")
        optimizer.build(trained)

        def step(training: bool, pixels: Any, labels: Any) -> tuple[Any, Any]:
            images = tf.image.per_image_standardization(pixels)
            with tf.GradientTape() as tape:
                outputs = model(images, training=training)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
                loss = tf.reduce_mean(losses)
            if training:
                optimizer.apply(tape.gradient(loss, [v.value for v in trained]))
            return losses, tf.equal(tf.argmax(outputs, 1, labels.dtype), labels)

        specs = [tf.TensorSpec([None, SIDE, SIDE, 3], tf.uint8), tf.TensorSpec([None], tf.int32)]
        calls = [tf.function(partial(step, training), specs) for training in (True, False)]
        variables = {v.path: v.value for v in (*model.variables, *optimizer.variables)}
        if options.mode == "eager":
            return TensorFlowVariables(variables), *calls
        feeds = [tf1.placeholder(spec.dtype, spec.shape) for spec in specs]
        fetches = [call(*feeds) for call in calls]
        session = tf1.Session()
        session.run(tf1.global_variables_initializer())
        calls = [session.make_callable(fetch, feeds) for fetch in fetches]
        return TensorFlowVariables(variables, session), *calls


def means(scores: Sequence[Any]) -> tuple[float, float]:
    """Return the mean loss and the share of recognised images."""
    losses, is_right = (np.concatenate(column) for column in zip(*scores, strict=True))
    return float(losses.mean()), float(is_right.mean())


class Worker(FlatWorker):
    """Trains the network on a share of the images; one more evaluates it on others.

    Momenta are averaged like the weights that they belong to (H. Yu, R. Jin, S. Yang: "On the
    Linear Speedup Analysis of Communication Efficient Momentum SGD for Distributed Non-Convex
    Optimization", ICML 2019): a worker that takes the average goes on as the others do.
    """

    def build(self, options: argparse.Namespace, rounds_done: int, rank: int) -> Any:
        """Build the network in this process; the rank after the last evaluates."""
        evaluates = rank == options.workers
        # Not the seed alone, or a training that goes on would see the same batches again.
        self.rng = np.random.default_rng([options.seed, rounds_done, rank])
        import tensorflow as tf

        threads = max(1, len(os.sched_getaffinity(0)) // options.workers)
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        pixels, labels = load_images(options.dataset, options.seed)[evaluates]
        share = slice(None) if evaluates else slice(rank, None, options.workers)
        self.images, self.options, self.writer = (pixels[share], labels[share]), options, None
        if evaluates and options.log_dir:
            with tf.Graph().as_default():  # an eager writer wants TensorBoard installed
                self.writer = tf.compat.v1.summary.FileWriter(options.log_dir)
        variables, self.train_step, self.evaluate_step = build_network(options)
        return variables

    def train(self) -> tuple[FlatWeights, tuple[float, float]]:
        """Take some steps; return the weights after them, with loss and accuracy."""
        scores, mirror = [], self.options.dataset != "digits"
        for _ in range(self.options.steps):
            batch = draw_batch(self.images, self.options.batch_size, mirror, self.rng)
            scores.append(self.train_step(*batch))
        return self.get_weights(), means(scores)

    def log(self, number: int, scalars: dict[str, float], weights: Any) -> dict[str, float]:
        """Write the numbers of a round for TensorBoard; evaluate ``weights``, if there are any."""
        if weights is not None:
            self.set_weights(weights)
            cuts = range(100, len(self.images[1]), 100)
            batches = zip(*(np.split(part, cuts) for part in self.images), strict=True)
            loss, accuracy = means([self.evaluate_step(*batch) for batch in batches])
            scalars = {**scalars, "evaluation/loss": loss, "evaluation/accuracy": accuracy}
        if self.writer is not None:
            from tensorflow.compat.v1 import Summary

            values = [Summary.Value(tag=k, simple_value=x) for k, x in scalars.items()]
            self.writer.add_summary(Summary(value=values), number)
            self.writer.flush()
        return scalars


def train(
    options: argparse.Namespace, done: int, weights: FlatWeights | None
) -> dict[int, dict[str, float]]:
    """Run the rounds after the first ``done``; return the numbers of each, by name."""
    # Actors that need a download should find it done, or fail before they start.
    ray.get(ray.remote(num_cpus=0)(load_images).remote(options.dataset, options.seed))
    group = WorkerGroup.create(
        Worker,
        options.workers,
        options,
        done,
        arguments=lambda rank: [rank],
        num_cpus=1,
        num_gpus=int(options.num_gpus is not None),
        max_restarts=RESTARTS,
    )
    lasting: Any = ray.remote(num_cpus=0, max_restarts=RESTARTS, max_task_retries=RESTARTS)
    evaluator = lasting(Worker).remote(options, done, options.workers)
    # From now on, a restarted worker gets the weights of the others.
    group.broadcast(weights or next(iter(group.step("get_weights").values())))
    history, pending = dict[int, dict[str, float]](), dict[int, Any]()

    def collect() -> None:
        """Wait for the numbers of rounds; print those of evaluations."""
        for number, ref in pending.items():
            history[number] = ray.get(ref)
            if "evaluation/loss" in history[number]:
                loss, accuracy = (history[number][f"evaluation/{k}"] for k in ("loss", "accuracy"))
                print(f"after round {number}: loss {loss:.3f}, accuracy {accuracy:.3f}", flush=True)
        pending.clear()

    half = -(-options.workers // 2)
    rounds = group.run(options.rounds - done, "train", min_results=half, nonfinite="skip")
    for number, result in enumerate(rounds, done + 1):
        if options.checkpoint:
            result.weights.save(options.checkpoint)
        loss, accuracy = np.mean([result.extras[rank] for rank in result.used], axis=0).tolist()
        images = len(result.used) * options.steps * options.batch_size
        speed = {"images per second": images / result.seconds["round"]}
        scalars = {"training/loss": loss, "training/accuracy": accuracy, **speed}
        share = f"{len(result.used)} of {options.workers} workers"
        print(f"round {number} of {options.rounds}: loss {loss:.3f}, {share}", flush=True)
        evaluated = None
        if number % options.eval_every == 0 or number == options.rounds:
            collect()  # the evaluation before this one, if it is still going on
            evaluated = result.ref
        pending[number] = evaluator.log.remote(number, scalars, evaluated)
    collect()
    ray.kill(evaluator)
    group.shutdown()
    return history


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--num-gpus", type=int, help="GPUs, with one worker on each")
    where.add_argument("--num-workers", type=int, default=2, help="workers on the CPU; default: 2")
    add("--num-residual-units", type=int, default=5, help="of each of three stages; default: 5")
    add("--rounds", type=int, default=30, help="averages to take; default: %(default)s")
    add("--steps", type=int, default=10, help="steps of a worker in a round; default: %(default)s")
    add("--batch-size", type=int, default=32, help="images of a step; default: %(default)s")
    add("--eval-every", type=int, default=5, help="rounds per evaluation; default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the data and the first weights")
    add("--mode", choices=("eager", "graph"), default="eager", help="graph: a TF1 graph")
    add("--dataset", choices=LABELS, default="digits", help="default: %(default)s")
    rate = "a tenth of it from half of the rounds on, a hundredth from 3/4 on; default: %(default)s"
    add("--learning-rate", type=float, default=0.05, help=rate)
    add("--checkpoint", type=Path, help="file to write, or to go on from")
    # Actors have folders of their own.
    add("--log-dir", type=os.path.abspath, metavar="DIR", help="write summaries for TensorBoard")
    add("--enough", type=float, default=0.95, help="accuracy to reach; default: %(default)s")
    options = parser.parse_args(arguments)
    if not 0 <= options.seed < 2**31:
        parser.error(f"--seed: expected 0 to {2**31 - 1}, got {options.seed}")
    counts = ("num_workers", "num_residual_units", "rounds", "steps", "batch_size", "eval_every")
    if min(getattr(options, name) for name in counts) < 1:
        parser.error(f"expected at least 1 of {', '.join(counts)}, got {vars(options)}")
    if options.num_gpus is not None and options.num_gpus < 1:
        parser.error(f"--num-gpus: expected at least 1, got {options.num_gpus}; else --num-workers")
    if options.checkpoint and not options.checkpoint.absolute().parent.is_dir():
        parser.error(f"--checkpoint: expected a file in a folder that exists: {options.checkpoint}")
    options.workers = options.num_gpus or options.num_workers
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run the program; return curves. It fails if too little is learned."""
    options = parse_options(arguments)
    done, weights = 0, None
    if options.checkpoint and options.checkpoint.exists():
        try:
            weights = FlatWeights.load(options.checkpoint)
            done = int(weights["sgd/iteration"]) // options.steps  # the counter is averaged, too
        except (ValueError, KeyError) as error:
            message = f"{options.checkpoint}: no checkpoint of this program: {error}"
            raise SystemExit(message) from None
        print(f"{options.checkpoint}: {done} of {options.rounds} rounds are done", flush=True)
        if done >= options.rounds:
            raise SystemExit("nothing is left: choose more --rounds or another --checkpoint")
    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="ERROR")
    for name, wanted in (("CPU", options.workers), ("GPU", options.num_gpus or 0)):
        if (
            available := ray.cluster_resources().get(name, 0)
        ) < wanted:  # else actors wait for ever
            raise SystemExit(f"{name}s of Ray: expected at least {wanted}, got {available:g}")
    history = train(options, done, weights)
    last = history[options.rounds]
    speed = median(numbers["images per second"] for numbers in history.values())
    loss, accuracy = last["training/loss"], last["evaluation/accuracy"]
    rounds = f"rounds {min(history)} to {max(history)}: {speed:.0f} images per second (median)"
    print(f"{rounds}, training loss {loss:.4f}, accuracy {accuracy:.4f} on other images")
    if accuracy < options.enough:
        raise SystemExit(f"accuracy below {options.enough}: it needs more --rounds")

    def curve(name: str) -> tuple[list[int], list[float]]:
        points = {n: numbers[name] for n, numbers in history.items() if name in numbers}
        return list(points), list(points.values())

    kinds = ("training", "evaluation")
    return {f"{x} by round": {k: curve(f"{k}/{x}") for k in kinds} for x in ("loss", "accuracy")}


if __name__ == "__main__":
    main()
