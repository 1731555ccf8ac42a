"""A residual network on CIFAR or digits, data-parallel on GPUs or CPUs, with checkpoints.

The program of Ray's old ResNet page, made current. One actor for each GPU, or for each of
``--num-workers`` on the CPU, trains some steps from the averaged weights on its share of the
images; the driver averages the results and sends the average to all of them. The driver needs no
TensorFlow. Beside them, an actor evaluates the average every few rounds. Rounds leave out workers
that died until Ray has restarted them.

    python -m flatweights.examples.resnet
    python -m flatweights.examples.resnet --mode graph --plot resnet.png --log-dir logs
    python -m flatweights.examples.resnet --num-gpus 4 --rounds 2000 --batch-size 128

Without files, it trains on scikit-learn's handwritten digits, enlarged to 32x32x3. Files are those
of CIFAR-10, or with ``--dataset cifar100`` of CIFAR-100, in their binary version:

    --train-data-path 'cifar-10-batches-bin/data_batch*'
    --eval-data-path cifar-10-batches-bin/test_batch.bin

Ctrl-C saves the last complete round, and ``--resume`` goes on after it, with as many workers and in
whichever mode you like. It draws new batches, so the final bits differ from those of a run without
a break. ``tensorboard --logdir logs`` shows the summaries.

For a model of your own, change `build_model`; for other images, `load_images`.

K. He, X. Zhang, S. Ren, J. Sun: "Deep Residual Learning for Image Recognition", CVPR 2016;
"Identity Mappings in Deep Residual Networks", ECCV 2016.
"""

import argparse
import glob
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import FlatWeights, examples
from flatweights.ray import FlatWorker, WorkerGroup

ENOUGH = 0.95  # of the digits
RESTARTS = 3  # of each actor
CHANNELS = (16, 32, 64)  # of the three stages
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
SIDE, PADDING = 32, 4
LABELS = {"digits": (10,), "cifar10": (10,), "cifar100": (20, 100)}  # the last one is learned


class Images(NamedTuple):
    """Images of 32x32x3 bytes, and their labels, which are below ``classes``."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int32]
    classes: int


def load_images(options: argparse.Namespace, tests: bool) -> Images:
    """Return the images in files of CIFAR, or digits if there are none: to train or to test with.

    A record of CIFAR is one byte for each label, and the red, green and blue values of the
    pixels, row by row. A file consists of records.

    Raises:
        SystemExit: If files are missing, truncated, or of another format; the error names one.
    """
    pattern = options.eval_data_path if tests else options.train_data_path
    if pattern is None:
        digits = examples.load_digits(options.seed)[tests]
        small = (255 * digits.images).round().astype(np.uint8).reshape(-1, 8, 8, 1)
        large = small.repeat(4, axis=1).repeat(4, axis=2).repeat(3, axis=3)
        return Images(large, digits.labels.astype(np.int32), 10)
    dataset, parts = options.dataset, []
    limits = LABELS[dataset]
    first, size = len(limits), len(limits) + 3 * SIDE * SIDE
    for file in sorted(glob.glob(pattern)):  # noqa: PTH207 (which takes no absolute pattern)
        data = np.fromfile(file, np.uint8)
        if data.size == 0 or data.size % size:
            expected = f"expected records of {size} bytes ({dataset})"
            raise SystemExit(f"{file}: {expected}, got {data.size} bytes")
        parts.append(data.reshape(-1, size))
        if np.any(parts[-1][:, :first] >= limits):
            raise SystemExit(f"{file}: expected labels of {dataset}, below {limits[-1]}")
    if not parts:
        raise SystemExit(f"{pattern}: expected at least one file, found none")
    records = np.concatenate(parts)
    pixels = records[:, first:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return Images(pixels, records[:, first - 1].astype(np.int32), limits[-1])


def draw_batch(images: Images, size: int, mirror: bool, rng: np.random.Generator) -> Any:
    """Return some images, shifted and, if ``mirror``, mirrored at random, and their labels."""
    chosen = rng.integers(len(images.labels), size=size)
    border = [(0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)]
    padded = np.pad(images.pixels[chosen], border)
    batch = np.empty((size, SIDE, SIDE, 3), np.uint8)
    for i, (y, x) in enumerate(rng.integers(2 * PADDING + 1, size=(size, 2))):
        batch[i] = padded[i, y : y + SIDE, x : x + SIDE]
    if mirror:
        mirrored = rng.random(size) < 0.5
        batch[mirrored] = batch[mirrored, :, ::-1]
    return batch, images.labels[chosen]


def build_model(units: int, classes: int, seed: int) -> Any:
    """Return a network of ``6 * units + 2`` layers, in the mode that TensorFlow is in."""
    import keras

    layers = keras.layers
    keras.utils.set_random_seed(seed)

    def convolution(x: Any, channels: int, stride: int = 1) -> Any:
        options = {"padding": "same", "use_bias": False, "kernel_initializer": "he_normal"}
        return layers.Conv2D(channels, 3, stride, **options)(x)

    def normalised(x: Any) -> Any:
        # A round has few steps: with Keras's 0.99, statistics would follow too slowly.
        return layers.ReLU()(layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x))

    images = keras.Input((SIDE, SIDE, 3))
    x = convolution(images, CHANNELS[0])
    for stage, channels in enumerate(CHANNELS):
        for unit in range(units):
            stride = 2 if stage > 0 and unit == 0 else 1
            inside = convolution(normalised(x), channels, stride)
            inside = convolution(normalised(inside), channels)
            if stride > 1:  # a shortcut without weights: new channels start at zero
                border = (channels - x.shape[-1]) // 2
                x = keras.ops.pad(layers.AveragePooling2D(stride)(x), [[0, 0]] * 3 + [[border] * 2])
            x = layers.Add()([x, inside])
    x = layers.GlobalAveragePooling2D()(normalised(x))
    return keras.Model(images, layers.Dense(classes)(x))


def score(outputs: Any, labels: Any) -> Any:
    """Return the loss of each image, and whether it was recognised."""
    import tensorflow as tf

    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
    return losses, tf.equal(tf.argmax(outputs, axis=1, output_type=labels.dtype), labels)


def evaluate_step(model: Any, pixels: Any, labels: Any) -> Any:
    """Return the scores of some images."""
    import tensorflow as tf

    return score(model(tf.image.per_image_standardization(pixels), training=False), labels)


def train_step(model: Any, momenta: Sequence[Any], pixels: Any, labels: Any, rate: Any) -> Any:
    """Take a step of gradient descent with momentum; return the scores before it, and updates.

    A TF1 graph runs no assignment that nothing depends on, and so none of those that
    Keras's layers make to their moving statistics; in both modes, these are assigned here.
    """
    import tensorflow as tf

    images = tf.image.per_image_standardization(pixels)
    trained = [v.value for v in model.trainable_variables]
    statistics = [v.value for v in model.non_trainable_variables]
    kernels = [v.value for v in model.trainable_variables if v.name == "kernel"]
    with tf.GradientTape() as tape:
        outputs, moved = model.stateless_call(trained, statistics, images, training=True)
        scores = score(outputs, labels)
        decay = WEIGHT_DECAY * tf.add_n([tf.nn.l2_loss(kernel) for kernel in kernels])
        loss = tf.reduce_mean(scores[0]) + decay
    updates = [v.assign(value) for v, value in zip(statistics, moved, strict=True)]
    for v, momentum, gradient in zip(trained, momenta, tape.gradient(loss, trained), strict=True):
        velocity = MOMENTUM * momentum + gradient
        updates += [momentum.assign(velocity), v.assign_sub(rate * velocity)]
    return scores, updates


class Network(NamedTuple):
    """A network that runs in one mode of TensorFlow.

    Attributes:
        variables: The weights, moving statistics included, and the momenta.
        train: Takes a step on images and labels at a rate; returns the scores before it.
        evaluate: Returns the scores of images and labels.
    """

    variables: Any
    train: Callable[[Any, Any, Any], Any]
    evaluate: Callable[[Any, Any], Any]


def build_network(mode: str, units: int, classes: int, seed: int) -> Network:
    """Build a network for a mode; the same seed gives the same weights."""
    import tensorflow as tf

    from flatweights.tensorflow import TensorFlowVariables

    def build() -> tuple[Any, list[Any]]:
        model = build_model(units, classes, seed)
        zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
        return model, [tf.Variable(z, trainable=False, name="momentum") for z in zeros]

    if mode == "eager":
        model, momenta = build()
        variables = TensorFlowVariables(model, input_variables=momenta)
        step = tf.function(lambda x, y, rate: train_step(model, momenta, x, y, rate)[0])
        evaluate = tf.function(lambda x, y: evaluate_step(model, x, y), reduce_retracing=True)
        return Network(variables, lambda x, y, rate: step(x, y, tf.constant(rate)), evaluate)
    tf1 = tf.compat.v1
    with tf.Graph().as_default():
        pixels = tf1.placeholder(tf.uint8, [None, SIDE, SIDE, 3])
        labels, rate = tf1.placeholder(tf.int32, [None]), tf1.placeholder(tf.float32, [])
        model, momenta = build()
        evaluated = evaluate_step(model, pixels, labels)
        trained = train_step(model, momenta, pixels, labels, rate)
        session = tf1.Session()
        session.run(tf1.global_variables_initializer())
        variables = TensorFlowVariables(model, session, momenta)
    return Network(
        variables,
        lambda x, y, r: session.run(trained, {pixels: x, labels: y, rate: r})[0],
        lambda x, y: session.run(evaluated, {pixels: x, labels: y}),
    )


def means(scores: Sequence[Any]) -> tuple[float, float]:
    """Return the mean loss and the share of images that were recognised."""
    losses, right = zip(*scores, strict=True)
    return float(np.concatenate(losses).mean()), float(np.concatenate(right).mean())


class Worker(FlatWorker):
    """Trains the network on a share of the images; one more evaluates it on others.

    Momenta are averaged like the weights that they belong to (H. Yu, R. Jin, S. Yang: "On the
    Linear Speedup Analysis of Communication Efficient Momentum SGD for Distributed Non-Convex
    Optimization", ICML 2019): a worker that takes the average goes on as the others do.
    """

    def build(self, options: argparse.Namespace, first_round: int, rank: int) -> Any:
        """Build the network in this process; the rank after the last evaluates."""
        tests = rank == options.workers
        images = load_images(options, tests)
        threads = max(1, len(os.sched_getaffinity(0)) // options.workers)
        gpus = options.num_gpus is not None and not tests
        examples.prepare_tensorflow(threads=threads, deterministic=False, gpus=gpus)
        import tensorflow as tf

        self.options = options
        share = slice(None) if tests else slice(rank, None, options.workers)
        self.images = Images(images.pixels[share], images.labels[share], images.classes)
        # Not the seed alone, or a run that is resumed would see the same batches again.
        self.rng = np.random.default_rng([options.seed, first_round, rank])
        folder = options.log_dir if tests else None
        self.writer = tf.summary.create_file_writer(folder) if folder else None
        units = options.num_residual_units
        self.network = build_network(options.mode, units, images.classes, options.seed)
        return self.network.variables

    def train(self, rate: float) -> tuple[FlatWeights, tuple[float, float]]:
        """Take some steps; return the weights after them, with loss and accuracy."""
        scores, mirror = [], self.options.dataset != "digits"
        for _ in range(self.options.steps):
            pixels, labels = draw_batch(self.images, self.options.batch_size, mirror, self.rng)
            scores.append(self.network.train(pixels, labels, rate))
        return self.get_weights(), means(scores)

    def evaluate(self, number: int, weights: FlatWeights) -> tuple[float, float]:
        """Return loss and accuracy of the weights after a round."""
        self.set_weights(weights)
        cuts = range(100, len(self.images.labels), 100)
        batches = zip(*(np.split(part, cuts) for part in self.images[:2]), strict=True)
        loss, accuracy = means([self.network.evaluate(*batch) for batch in batches])
        self.write(number, {"evaluation/loss": loss, "evaluation/accuracy": accuracy})
        return loss, accuracy

    def write(self, number: int, scalars: dict[str, float]) -> None:
        """Write numbers of a round for TensorBoard, if there is a folder for them."""
        if self.writer is None:
            return
        import tensorflow as tf

        # `tf.summary.scalar` does this too, but wants TensorBoard installed.
        data = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
        metadata = tf.compat.v1.SummaryMetadata(plugin_data=data)
        with self.writer.as_default():
            for name, value in scalars.items():
                tf.summary.write(name, tf.constant(value, tf.float32), number, metadata)
        self.writer.flush()


class Checkpoint(NamedTuple):
    """The last complete round, 0 before the first, and the weights after it."""

    number: int = 0
    weights: FlatWeights | None = None

    def save(self, path: Path, settings: str) -> str:
        """Replace ``path``, at once and whole; return a sentence about it."""
        if self.weights is None:
            return "no round is complete: nothing to save"
        text = np.frombuffer(settings.encode(), np.uint8)
        FlatWeights({**self.weights, "/round": np.array(self.number), "/settings": text}).save(path)
        return f"round {self.number} is saved: {path}"


def open_checkpoint(path: Path, settings: str, rounds: int, resume: bool) -> Checkpoint:
    """Return where to begin: after the last saved round, if that is to be resumed.

    Raises:
        SystemExit: If the file is damaged or of a training with other settings, if there is nothing
            to resume, or if the new training would replace an unfinished one.
    """
    if not resume and not path.exists():
        return Checkpoint()
    try:
        weights = dict(FlatWeights.load(path))
        number, saved = int(weights.pop("/round")), weights.pop("/settings").tobytes().decode()
    except (ValueError, KeyError) as error:
        raise SystemExit(f"{path}: no whole checkpoint: {error}") from None
    if saved != settings:
        other = "a checkpoint of another training"
        raise SystemExit(f"{path}: {other}:\n  there {saved}\n  here {settings}")
    if resume and number >= rounds:
        raise SystemExit(f"{path}: all {rounds} rounds are done")
    if not resume and number < rounds:
        part = "a part of this training, which --resume continues"
        raise SystemExit(f"{path}: {part}; else choose another --checkpoint-dir")
    return Checkpoint(number, FlatWeights(weights)) if resume else Checkpoint()


def learning_rate(first: float, number: int, rounds: int) -> float:
    """Return the rate of a round: a tenth after half of all rounds, and again after 3/4."""
    done = number - 1
    return float(first * 0.1 ** ((2 * done >= rounds) + (4 * done >= 3 * rounds)))


class History(NamedTuple):
    """By round: loss, accuracy and images per second of the training; loss and accuracy of tests.

    ``pending`` are evaluations that run beside the training.
    """

    training: dict[int, Any]
    tests: dict[int, Any]
    pending: dict[int, Any]

    def collect(self) -> None:
        """Wait for evaluations, and print their results."""
        for number, ref in self.pending.items():
            self.tests[number] = loss, accuracy = ray.get(ref)
            print(f"after round {number}: loss {loss:.3f}, accuracy {accuracy:.3f}", flush=True)
        self.pending.clear()


def train(
    options: argparse.Namespace, checkpoint: Checkpoint, save: Callable[[Checkpoint], str]
) -> History:
    """Run the remaining rounds, and save checkpoints; print the time of an exchange."""
    group = WorkerGroup.create(
        Worker,
        options.workers,
        options,
        checkpoint.number,
        arguments=lambda rank: [rank],
        num_cpus=1,
        num_gpus=0 if options.num_gpus is None else 1,
        max_restarts=RESTARTS,
    )
    lasting: Any = ray.remote(num_cpus=0, max_restarts=RESTARTS, max_task_retries=RESTARTS)
    evaluator = lasting(Worker).remote(options, 0, options.workers)
    history, rounds = History({}, {}, {}), options.rounds
    try:
        # From now on, a restarted worker gets the weights of the others.
        group.broadcast(checkpoint.weights or next(iter(group.step("get_weights").values())))
        for number in range(checkpoint.number + 1, rounds + 1):
            rate = learning_rate(options.learning_rate, number, rounds)
            half = -(-options.workers // 2)
            (result,) = group.run(1, "train", rate, min_results=half, nonfinite="skip")
            # A copy: Ctrl-C saves it, and the next round may use its memory.
            checkpoint = Checkpoint(number, result.weights.copy())
            if number % options.save_every == 0 or number == rounds:
                save(checkpoint)
            loss, accuracy = np.mean([result.extras[rank] for rank in result.used], axis=0).tolist()
            images = len(result.used) * options.steps * options.batch_size
            history.training[number] = loss, accuracy, images / result.seconds["round"]
            names = "training/loss", "training/accuracy", "images per second"
            scalars = dict(zip(names, history.training[number], strict=True))
            evaluator.write.remote(number, {**scalars, "learning rate": rate})
            share = f"{len(result.used)} of {options.workers} workers"
            print(f"round {number} of {rounds}: loss {loss:.3f}, {share}", flush=True)
            if number % options.eval_every == 0 or number == rounds:
                history.collect()
                history.pending[number] = evaluator.evaluate.remote(number, result.ref)
        history.collect()
    except (KeyboardInterrupt, RuntimeError, ray.exceptions.RayError):
        print(save(checkpoint), file=sys.stderr)
        raise
    alive = [group.actors()[rank] for rank in group.step("ping")]
    print(examples.time_exchange(WorkerGroup(alive)))
    ray.kill(evaluator)
    group.shutdown()
    return history


def report(history: History, plot: Path | None) -> None:
    """Print a row about the run, and draw it if asked to."""
    losses, _, speeds = zip(*history.training.values(), strict=True)
    _, accuracy = list(history.tests.values())[-1]
    row = {
        "rounds": f"{min(history.training)} to {max(history.training)}",
        "images/s, median": f"{median(speeds):.0f}",
        "loss": f"{losses[-1]:.4f}",
        "accuracy": f"{accuracy:.4f}",
    }
    panels = []
    for i, title in enumerate(("loss", "accuracy")):
        rows = {"training": history.training, "test": history.tests}
        curves = {name: (list(m), [row[i] for row in m.values()]) for name, m in rows.items()}
        panels.append(examples.Panel(title, "round", curves))
    examples.report([row], plot, "A residual network, data-parallel", *panels)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = examples.make_parser(
        __doc__,
        "loss and accuracy by round",
        num_residual_units=(5, "in each of three stages"),
        rounds=(30, "averages to take"),
        steps=(10, "of each worker in a round"),
        batch_size=(32, "images of each worker in a step"),
        eval_every=(5, "rounds"),
        save_every=(10, "rounds"),
    )
    add, number = parser.add_argument, examples.integer(1)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--num-gpus", type=number, help="one worker on each")
    where.add_argument("--num-workers", type=number, default=2, help="on the CPU")
    add("--mode", choices=("eager", "graph"), default="eager", help="graph: of TF1")
    add("--train-data-path", metavar="FILES", help="of CIFAR, with * and ?")
    add("--eval-data-path", metavar="FILES", help="of CIFAR, with * and ?")
    add("--dataset", choices=LABELS, help="if not given: cifar10 with files, else digits")
    rate = "a tenth from half, and from 3/4 of the rounds"
    add("--learning-rate", type=examples.positive(), default=0.05, help=rate)
    add("--checkpoint-dir", type=Path, default=Path("resnet-checkpoints"), help="folder")
    add("--resume", action="store_true", help="go on from the checkpoint there")
    add("--log-dir", metavar="DIR", help="write summaries for TensorBoard")
    enough = f"accuracy to reach; if not given: {ENOUGH} for digits, 0 for files"
    add("--enough", type=examples.fraction, help=enough)
    options = parser.parse_args(arguments)
    files = [options.train_data_path, options.eval_data_path]
    options.dataset = options.dataset or ("cifar10" if any(files) else "digits")
    if files.count(None) != (2 if options.dataset == "digits" else 0):
        expected = "expected both for CIFAR, none for digits"
        parser.error(f"--train-data-path, --eval-data-path: {expected}")
    if options.enough is None:
        options.enough = ENOUGH if options.dataset == "digits" else 0.0
    options.workers = options.num_gpus or options.num_workers
    options.log_dir = options.log_dir and str(Path(options.log_dir).absolute())  # for actors
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if files are wrong, Ray has too little, or too little is learned."""
    options = parse_options(arguments)
    images = load_images(options, tests=False)
    load_images(options, tests=True)  # fails now, not at the first evaluation
    if len(images.labels) < options.workers:
        expected = f"expected an image for each of {options.workers} workers"
        raise SystemExit(f"{expected}, got {len(images.labels)}")
    settings = (
        f"{len(images.labels)} images of {options.dataset}, {options.num_residual_units} units, "
        f"{options.rounds} rounds of {options.steps} steps, batches of {options.batch_size}, "
        f"learning rate {options.learning_rate}, seed {options.seed}"
    )
    path = options.checkpoint_dir / "checkpoint.safetensors"
    checkpoint = open_checkpoint(path, settings, options.rounds, options.resume)
    path.parent.mkdir(parents=True, exist_ok=True)
    examples.start_ray(options.workers)
    resources = ray.cluster_resources()
    for resource in ("CPU",) if options.num_gpus is None else ("CPU", "GPU"):
        if resources.get(resource, 0) < options.workers:  # Ray would wait for ever
            expected = f"expected a {resource} for each of {options.workers} workers"
            raise SystemExit(
                f"{expected}, got {resources.get(resource, 0):g}: that is what Ray has"
            )
    history = train(options, checkpoint, lambda last: last.save(path, settings))
    report(history, options.plot)
    if history.tests[options.rounds][1] < options.enough:
        raise SystemExit(f"accuracy below {options.enough}: it needs more --rounds")


if __name__ == "__main__":
    examples.run(main, grace=60.0)
