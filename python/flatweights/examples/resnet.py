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
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from flatweights import FlatWeights, examples
from flatweights.ray import FlatWorker, WorkerGroup

ENOUGH = 0.95  # of the digits
RESTARTS = 3  # of each actor
CHANNELS = (16, 32, 64)  # of the three stages
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
SIDE, PADDING = 32, 4
LABELS = {"digits": (10,), "cifar10": (10,), "cifar100": (20, 100)}  # the last one is learned


Images = tuple[NDArray[np.uint8], NDArray[np.int32]]  # 32x32x3 bytes each, and the labels
History = dict[int, dict[str, float]]  # by round and name


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
        return large, digits.labels.astype(np.int32)
    limits, parts = LABELS[options.dataset], []
    pixels = ("pixels", np.uint8, (3, SIDE, SIDE))
    record = np.dtype([("labels", np.uint8, len(limits)), pixels])
    for file in sorted(glob.glob(pattern)):  # noqa: PTH207 (which takes no absolute pattern)
        data = np.fromfile(file, np.uint8)
        if data.size == 0 or data.size % record.itemsize:
            expected = f"expected records of {record.itemsize} bytes ({options.dataset})"
            raise SystemExit(f"{file}: {expected}, got {data.size} bytes")
        parts.append(data.view(record))
        if np.any(parts[-1]["labels"] >= limits):
            raise SystemExit(f"{file}: expected labels of {options.dataset}, below {limits[-1]}")
    if not parts:
        raise SystemExit(f"{pattern}: expected at least one file, found none")
    records = np.concatenate(parts)
    return records["pixels"].transpose(0, 2, 3, 1), records["labels"][:, -1].astype(np.int32)


def draw_batch(images: Images, size: int, mirror: bool, rng: np.random.Generator) -> Images:
    """Return some images, shifted and, if ``mirror``, mirrored at random, and their labels."""
    pixels, labels = images
    chosen = rng.integers(len(labels), size=size)
    border = [(0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)]
    shifted = sliding_window_view(np.pad(pixels[chosen], border), (SIDE, SIDE), axis=(1, 2))
    y, x = rng.integers(2 * PADDING + 1, size=(2, size))
    batch = shifted[np.arange(size), y, x].transpose(0, 2, 3, 1)
    if mirror:
        batch = np.where(rng.random((size, 1, 1, 1)) < 0.5, batch[:, :, ::-1], batch)
    return batch, labels[chosen]


def build_model(units: int, classes: int, seed: int) -> Any:
    """Return a network of ``6 * units + 2`` layers, in the mode that TensorFlow is in."""
    import keras

    layers, decay = keras.layers, keras.regularizers.L2(WEIGHT_DECAY / 2)
    keras.utils.set_random_seed(seed)
    options = {"padding": "same", "use_bias": False, "kernel_initializer": "he_normal"}

    def convolution(x: Any, channels: int, stride: int = 1) -> Any:
        return layers.Conv2D(channels, 3, stride, kernel_regularizer=decay, **options)(x)

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
    return keras.Model(images, layers.Dense(classes, kernel_regularizer=decay)(x))


def run_step(model: Any, momenta: Any, pixels: Any, labels: Any, rate: Any = None) -> Any:
    """Return the loss of each image, and whether it was recognised; with a rate, take a step.

    A TF1 graph runs no assignment that nothing depends on, and so none of those that Keras's
    layers make to their moving statistics; in both modes, these are assigned here.
    """
    import tensorflow as tf

    images = tf.image.per_image_standardization(pixels)
    trained = [v.value for v in model.trainable_variables]
    statistics = [v.value for v in model.non_trainable_variables]
    with tf.GradientTape() as tape:
        outputs, moved, penalties = model.stateless_call(
            trained, statistics, images, training=rate is not None, return_losses=True
        )
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
        loss = tf.reduce_mean(losses) + tf.add_n(penalties)
    updates = []
    if rate is not None:
        gradients = tape.gradient(loss, trained)
        updates += [v.assign(value) for v, value in zip(statistics, moved, strict=True)]
        for v, momentum, gradient in zip(trained, momenta, gradients, strict=True):
            velocity = MOMENTUM * momentum + gradient
            updates += [momentum.assign(velocity), v.assign_sub(rate * velocity)]
    with tf.control_dependencies(updates):
        is_right = tf.equal(tf.argmax(outputs, axis=1, output_type=labels.dtype), labels)
        return tf.identity(losses), is_right


def build_network(mode: str, units: int, classes: int, seed: int) -> tuple[Any, ...]:
    """Build a network for a mode of TensorFlow; the same seed gives the same weights.

    Returns:
        The variables: weights, moving statistics included, and momenta. Then `run_step` as a
        function of images, labels and a rate, and as one of images and labels.
    """
    import tensorflow as tf

    from flatweights.tensorflow import TensorFlowVariables

    def build() -> tuple[Any, Any, Callable[..., Any]]:
        model = build_model(units, classes, seed)
        zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
        momenta = [tf.Variable(z, trainable=False, name="momentum") for z in zeros]
        return model, momenta, partial(run_step, model, momenta)

    pixels = tf.TensorSpec([None, SIDE, SIDE, 3], tf.uint8)
    specs = [pixels, tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.float32)]
    if mode == "eager":
        model, momenta, step = build()
        variables = TensorFlowVariables(model, input_variables=momenta)
        return variables, *(tf.function(step, input_signature=specs[:n]) for n in (3, 2))
    tf1 = tf.compat.v1
    with tf.Graph().as_default():
        model, momenta, step = build()
        feeds = [tf1.placeholder(spec.dtype, spec.shape) for spec in specs]
        results = [(step(*feeds[:n]), feeds[:n]) for n in (3, 2)]
        session = tf1.Session()
        session.run(tf1.global_variables_initializer())
        variables = TensorFlowVariables(model, session, momenta)
        return variables, *(session.make_callable(*result) for result in results)


def means(scores: Sequence[Any]) -> tuple[float, float]:
    """Return the mean loss and the share of images that were recognised."""
    losses, is_right = (np.concatenate(column) for column in zip(*scores, strict=True))
    return float(losses.mean()), float(is_right.mean())


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
        self.images = images[0][share], images[1][share]
        # Not the seed alone, or a run that is resumed would see the same batches again.
        self.rng = np.random.default_rng([options.seed, first_round, rank])
        folder = options.log_dir if tests else None
        self.writer = tf.summary.create_file_writer(folder) if folder else None
        variables, self.train_step, self.evaluate_step = build_network(
            options.mode, options.num_residual_units, LABELS[options.dataset][-1], options.seed
        )
        return variables

    def train(self, rate: float) -> tuple[FlatWeights, tuple[float, float]]:
        """Take some steps; return the weights after them, with loss and accuracy."""
        scores, mirror = [], self.options.dataset != "digits"
        for _ in range(self.options.steps):
            batch = draw_batch(self.images, self.options.batch_size, mirror, self.rng)
            scores.append(self.train_step(*batch, rate))
        return self.get_weights(), means(scores)

    def evaluate(self, number: int, weights: FlatWeights) -> dict[str, float]:
        """Return loss and accuracy of the weights after a round."""
        self.set_weights(weights)
        cuts = range(100, len(self.images[1]), 100)
        batches = zip(*(np.split(part, cuts) for part in self.images), strict=True)
        loss, accuracy = means([self.evaluate_step(*batch) for batch in batches])
        scalars = {"evaluation/loss": loss, "evaluation/accuracy": accuracy}
        self.write(number, scalars)
        return scalars

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


def train(
    options: argparse.Namespace, checkpoint: Checkpoint, save: Callable[[Checkpoint], str]
) -> tuple[History, History]:
    """Run the remaining rounds, and save checkpoints; print the time of an exchange.

    Returns:
        Numbers of the training and of evaluations, by round and name.
    """
    group = WorkerGroup.create(
        Worker,
        options.workers,
        options,
        checkpoint.number,
        arguments=lambda rank: [rank],
        num_cpus=1,
        num_gpus=int(options.num_gpus is not None),
        max_restarts=RESTARTS,
    )
    lasting: Any = ray.remote(num_cpus=0, max_restarts=RESTARTS, max_task_retries=RESTARTS)
    evaluator = lasting(Worker).remote(options, 0, options.workers)
    training, evaluation, pending = History(), History(), dict[int, Any]()

    def collect() -> None:
        """Wait for the evaluations that run beside the training, and print their results."""
        for number, ref in pending.items():
            evaluation[number] = ray.get(ref)
            loss, accuracy = evaluation[number].values()
            print(f"after round {number}: loss {loss:.3f}, accuracy {accuracy:.3f}", flush=True)
        pending.clear()

    try:
        # From now on, a restarted worker gets the weights of the others.
        group.broadcast(checkpoint.weights or next(iter(group.step("get_weights").values())))
        for number in range(checkpoint.number + 1, options.rounds + 1):
            rate = learning_rate(options.learning_rate, number, options.rounds)
            half = -(-options.workers // 2)
            (result,) = group.run(1, "train", rate, min_results=half, nonfinite="skip")
            # A copy: Ctrl-C saves it, and the next round may use its memory.
            checkpoint = Checkpoint(number, result.weights.copy())
            is_last = number == options.rounds
            if number % options.save_every == 0 or is_last:
                save(checkpoint)
            loss, accuracy = np.mean([result.extras[rank] for rank in result.used], axis=0).tolist()
            images = len(result.used) * options.steps * options.batch_size
            training[number] = {
                "training/loss": loss,
                "training/accuracy": accuracy,
                "images per second": images / result.seconds["round"],
            }
            evaluator.write.remote(number, {**training[number], "learning rate": rate})
            share = f"{len(result.used)} of {options.workers} workers"
            print(f"round {number} of {options.rounds}: loss {loss:.3f}, {share}", flush=True)
            if number % options.eval_every == 0 or is_last:
                collect()
                pending[number] = evaluator.evaluate.remote(number, result.ref)
        collect()
    except (KeyboardInterrupt, RuntimeError, ray.exceptions.RayError):
        print(save(checkpoint), file=sys.stderr)
        raise
    alive = [group.actors()[rank] for rank in group.step("ping")]
    print(examples.time_exchange(WorkerGroup(alive)))
    ray.kill(evaluator)
    group.shutdown()
    return training, evaluation


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
    count = len(load_images(options, tests=False)[1])
    load_images(options, tests=True)  # fails now, not at the first evaluation
    if count < options.workers:
        raise SystemExit(f"expected an image for each of {options.workers} workers, got {count}")
    settings = (
        f"{count} images of {options.dataset}, {options.num_residual_units} units, "
        f"{options.rounds} rounds of {options.steps} steps, batches of {options.batch_size}, "
        f"learning rate {options.learning_rate}, seed {options.seed}"
    )
    path = options.checkpoint_dir / "checkpoint.safetensors"
    checkpoint = open_checkpoint(path, settings, options.rounds, options.resume)
    path.parent.mkdir(parents=True, exist_ok=True)
    examples.start_ray(options.workers)
    for resource in ("CPU",) if options.num_gpus is None else ("CPU", "GPU"):
        there = ray.cluster_resources().get(resource, 0)
        if there < options.workers:  # Ray would wait for ever
            expected = f"expected a {resource} for each of {options.workers} workers"
            raise SystemExit(f"{expected}, got {there:g}: that is what Ray has")
    training, evaluation = train(options, checkpoint, lambda last: last.save(path, settings))
    speeds = [values["images per second"] for values in training.values()]
    accuracy = evaluation[options.rounds]["evaluation/accuracy"]
    row = {
        "rounds": f"{min(training)} to {max(training)}",
        "images/s, median": f"{median(speeds):.0f}",
        "loss": f"{training[options.rounds]['training/loss']:.4f}",
        "accuracy": f"{accuracy:.4f}",
    }
    panels = []
    for title in ("loss", "accuracy"):
        curves = {}
        for name, history in (("training", training), ("evaluation", evaluation)):
            values = [numbers[f"{name}/{title}"] for numbers in history.values()]
            curves[name] = list(history), values
        panels.append(examples.Panel(title, "round", curves))
    examples.report([row], options.plot, "A residual network, data-parallel", *panels)
    if accuracy < options.enough:
        raise SystemExit(f"accuracy below {options.enough}: it needs more --rounds")


if __name__ == "__main__":
    examples.run(main, grace=60.0)
