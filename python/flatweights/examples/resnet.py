"""A residual network on CIFAR or digits, data-parallel on GPUs or CPUs, with checkpoints.

The program of Ray's old ResNet page, made current. One actor for each GPU, or for each of
``--num-workers`` on the CPU, trains some steps from the averaged weights on its share of the
images; the driver averages what comes back and sends it to all of them. It needs no TensorFlow.
Beside them, an actor evaluates the average every so often: it takes of it what its network
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

For a model of your own, change `build_model`; for other images, `load_images`. The loop in
`train` stays as it is.

K. He, X. Zhang, S. Ren, J. Sun: "Deep Residual Learning for Image Recognition", CVPR 2016 (the
three stages, shortcuts without weights, and how to train them); "Identity Mappings in Deep
Residual Networks", ECCV 2016 (normalisation and activation ahead of each convolution).

On two cores of a shared virtual machine (TensorFlow 2.21, Ray 2.60), with 252 variables of
3.7 MB: accuracy 0.994 on digits that were not trained on, after 30 rounds, in 47 seconds; a
round's exchange took 13 ms as one buffer, and 37 ms as a dict of arrays.
"""

import argparse
import glob
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import FlatWeights
from flatweights.examples import (
    Panel,
    draw,
    fraction,
    integer,
    make_parser,
    positive,
    prepare_tensorflow,
    print_table,
    run,
    start_ray,
    time_exchange,
)
from flatweights.ray import FlatWorker, WorkerGroup

ENOUGH = 0.95  # of digits
HELD_OUT = 359  # digits that are not trained on
RESTARTS = 3  # of each actor
CHANNELS = (16, 32, 64)  # of the three stages
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
SIDE, PADDING = 32, 4
LABELS = {"cifar10": (10,), "cifar100": (20, 100)}  # of a record; the last one is learned


class Images(NamedTuple):
    """Some images: of 32x32x3 bytes each, with a label."""

    name: str
    pixels: NDArray[np.uint8]
    labels: NDArray[np.int32]

    @property
    def classes(self) -> int:
        """How many kinds of images there are."""
        return LABELS.get(self.name, (10,))[-1]


def load_images(pattern: str | None, name: str | None, held_out: bool, seed: int) -> Images:
    """Return images of CIFAR, or digits, if ``pattern`` is None.

    A record of CIFAR is one byte for each label, and the red, green and blue values of the
    pixels, row by row. A file is nothing but records.

    Args:
        pattern: Path of files; ``*``, ``?`` and ``[...]`` stand for others.
        name: Which of `LABELS` they are of; None to tell it from their sizes.
        held_out: Which digits: those that are not trained on, or the others.
        seed: Of that split.

    Raises:
        SystemExit: If files are missing, truncated, or not what they should be; it names one.
    """
    if pattern is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng(seed).permutation(len(digits.target))
        chosen = order[:HELD_OUT] if held_out else order[HELD_OUT:]
        grey = (digits.images[chosen] * (255 / 16)).round().astype(np.uint8)
        large = grey.repeat(4, axis=1).repeat(4, axis=2)[..., np.newaxis].repeat(3, axis=3)
        return Images("digits", large, digits.target[chosen].astype(np.int32))
    files = sorted(glob.glob(pattern))  # noqa: PTH207 (which takes no absolute pattern)
    if not files:
        raise SystemExit(f"{pattern}: expected at least one file, found none")
    parts = []
    for file in files:
        try:
            data = np.fromfile(file, np.uint8)
        except OSError as error:
            raise SystemExit(f"{file}: cannot be read: {error.strerror}") from None
        sizes = {n: len(LABELS[n]) + 3 * SIDE * SIDE for n in ([name] if name else LABELS)}
        fitting = [n for n, size in sizes.items() if data.size and data.size % size == 0]
        if len(fitting) != 1:
            records = " or ".join(f"{size} ({n})" for n, size in sizes.items())
            why = ": both fit: say which, by --dataset" if fitting else ""
            got = f"got {data.size} bytes{why}"
            raise SystemExit(f"{file}: expected records of {records} bytes, {got}")
        name = fitting[0]
        rows = data.reshape(-1, sizes[name])
        kinds = LABELS[name]
        wrong = np.argwhere(rows[:, : len(kinds)] >= np.asarray(kinds))
        if len(wrong):
            row, which = wrong[0]
            raise SystemExit(
                f"{file}: record {row}: expected a label from 0 to {kinds[which] - 1}, "
                f"got {rows[row, which]}"
            )
        parts.append(rows)
    rows, first = np.concatenate(parts), len(kinds)
    pixels = rows[:, first:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return Images(name or "", np.ascontiguousarray(pixels), rows[:, first - 1].astype(np.int32))


def standardised(pixels: NDArray[Any]) -> NDArray[np.float32]:
    """Return images with a mean of 0 and a deviation of 1 each."""
    values = pixels.astype(np.float32)
    values -= values.mean(axis=(1, 2, 3), keepdims=True)
    deviation = values.std(axis=(1, 2, 3), keepdims=True)
    return values / np.maximum(deviation, 1 / np.sqrt(values[0].size))  # type: ignore[no-any-return]


def draw_batch(images: Images, size: int, rng: np.random.Generator) -> Any:
    """Return some images, shifted and, unless digits, mirrored at random, and their labels."""
    chosen = rng.integers(len(images.labels), size=size)
    border = [(0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)]
    padded = np.pad(images.pixels[chosen], border)
    y, x = rng.integers(2 * PADDING + 1, size=(2, size))
    mirrored = (rng.random(size) < 0.5) & (images.name != "digits")
    cut = (p[j : j + SIDE, i : i + SIDE] for p, j, i in zip(padded, y, x, strict=True))
    shown = [one[:, ::-1] if mirror else one for one, mirror in zip(cut, mirrored, strict=True)]
    return standardised(np.stack(shown)), images.labels[chosen]


def build_model(units: int, classes: int, seed: int) -> Any:
    """Return a network of ``6 * units + 2`` layers, in the mode that TensorFlow is in."""
    import keras

    layers = keras.layers
    keras.utils.set_random_seed(seed)

    def convolution(x: Any, channels: int, stride: int) -> Any:
        options = {"padding": "same", "use_bias": False, "kernel_initializer": "he_normal"}
        return layers.Conv2D(channels, 3, stride, **options)(x)

    def normalised(x: Any) -> Any:
        # A round has few steps: with Keras's 0.99, statistics would follow too slowly.
        return layers.ReLU()(layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x))

    images = keras.Input((SIDE, SIDE, 3))
    x = convolution(images, CHANNELS[0], 1)
    for stage, channels in enumerate(CHANNELS):
        for unit in range(units):
            stride = 2 if stage > 0 and unit == 0 else 1
            inside = convolution(normalised(x), channels, stride)
            inside = convolution(normalised(inside), channels, 1)
            if stride > 1:
                x = layers.AveragePooling2D(stride)(x)
            if missing := channels - x.shape[-1]:  # new channels start at zero
                border = [[0, 0], [0, 0], [0, 0], [missing // 2, missing - missing // 2]]
                x = keras.ops.pad(x, border)
            x = layers.Add()([x, inside])
    return keras.Model(
        images, layers.Dense(classes)(layers.GlobalAveragePooling2D()(normalised(x)))
    )


def score(outputs: Any, labels: Any) -> Any:
    """Return the loss of each image, and whether it was recognised."""
    import tensorflow as tf

    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
    return losses, tf.equal(tf.argmax(outputs, axis=1, output_type=labels.dtype), labels)


def train_step(model: Any, momenta: Sequence[Any], images: Any, labels: Any, rate: Any) -> Any:
    """Take a step of gradient descent with momentum.

    A TF1 graph runs no assignment that nothing depends on, and with it none of those that
    Keras's layers make to their moving statistics; so these are assigned here, in both modes.

    Returns:
        The scores of the images before the step, and what a session has to run besides.
    """
    import tensorflow as tf

    trained = [v.value for v in model.trainable_variables]
    statistics = [v.value for v in model.non_trainable_variables]
    kernels = [v.value for v in model.trainable_variables if v.name == "kernel"]
    with tf.GradientTape() as tape:
        outputs, moved = model.stateless_call(trained, statistics, images, training=True)
        scores = score(outputs, labels)
        decay = WEIGHT_DECAY * tf.add_n([tf.nn.l2_loss(kernel) for kernel in kernels])
        loss = tf.reduce_mean(scores[0]) + decay
    gradients = tape.gradient(loss, trained)
    updates = [v.assign(value) for v, value in zip(statistics, moved, strict=True)]
    for v, momentum, gradient in zip(trained, momenta, gradients, strict=True):
        velocity = MOMENTUM * momentum + gradient
        updates += [momentum.assign(velocity), v.assign_sub(rate * velocity)]
    return scores, updates


class Network:
    """A network, run in either mode of TensorFlow.

    Attributes:
        variables: Its weights, moving statistics included, and the momenta, if it is trained.
        train: From images, labels and a rate to scores; takes a step.
        evaluate: From images and labels to scores.
    """

    def __init__(self, mode: str, units: int, classes: int, seed: int, trained: bool) -> None:
        """Build it; the same seed gives the same weights."""
        import tensorflow as tf

        from flatweights.tensorflow import TensorFlowVariables

        def build() -> tuple[Any, list[Any]]:
            model = build_model(units, classes, seed)
            weights = model.trainable_variables if trained else []
            zeros = [tf.zeros(v.shape) for v in weights]
            return model, [tf.Variable(z, trainable=False, name="momentum") for z in zeros]

        self.train: Callable[[Any, Any, float], Any]
        self.evaluate: Callable[[Any, Any], Any]
        if mode == "eager":
            model, momenta = build()
            step: Any = tf.function(lambda x, y, rate: train_step(model, momenta, x, y, rate)[0])
            self.train = lambda x, y, rate: step(x, y, tf.constant(rate))
            self.evaluate = tf.function(
                lambda x, y: score(model(x, training=False), y), reduce_retracing=True
            )
            self.variables = TensorFlowVariables(model, input_variables=momenta)
            return
        tf1 = tf.compat.v1
        with tf.Graph().as_default():
            images = tf1.placeholder(tf.float32, [None, SIDE, SIDE, 3])
            labels = tf1.placeholder(tf.int32, [None])
            rate = tf1.placeholder(tf.float32, [])
            model, momenta = build()
            evaluated = score(model(images, training=False), labels)
            taken = train_step(model, momenta, images, labels, rate) if trained else ()
            session = tf1.Session()
            session.run(tf1.global_variables_initializer())
            self.variables = TensorFlowVariables(model, session, momenta)
        self.train = lambda x, y, r: session.run(taken, {images: x, labels: y, rate: r})[0]
        self.evaluate = lambda x, y: session.run(evaluated, {images: x, labels: y})


def means(scores: Sequence[Any]) -> tuple[float, float]:
    """Return the mean loss and the share of images that were recognised."""
    losses, right = (
        np.concatenate([np.asarray(x) for x in xs]) for xs in zip(*scores, strict=True)
    )
    return float(losses.mean()), float(right.mean())


class Trainer(FlatWorker):
    """Trains its copy of the network on its share of the images.

    Momenta are averaged like the weights that they belong to (H. Yu, R. Jin, S. Yang: "On the
    Linear Speedup Analysis of Communication Efficient Momentum SGD for Distributed Non-Convex
    Optimization", ICML 2019): a worker that takes the average goes on as the others do.
    """

    def build(self, options: argparse.Namespace, first_round: int, rank: int) -> Any:
        """Build the network in this process."""
        threads = max(1, len(os.sched_getaffinity(0)) // options.workers)
        prepare_tensorflow(threads=threads, deterministic=False, gpus=options.num_gpus is not None)
        images = load_images(options.train_data_path, options.dataset, False, options.seed)
        share = slice(rank, None, options.workers)
        self.images = images._replace(pixels=images.pixels[share], labels=images.labels[share])
        # Not the seed alone, or a run that is resumed would see the same batches again.
        self.rng = np.random.default_rng([options.seed, first_round, rank])
        units = options.num_residual_units
        self.network = Network(options.mode, units, images.classes, options.seed, trained=True)
        self.options = options
        return self.network.variables

    def train(self, rate: float) -> tuple[FlatWeights, tuple[float, ...]]:
        """Take some steps; return where they lead, with loss, accuracy and seconds of a step."""
        begin, scores, options = time.perf_counter(), [], self.options
        for _ in range(options.steps):
            pixels, labels = draw_batch(self.images, options.batch_size, self.rng)
            scores.append(self.network.train(pixels, labels, rate))
        seconds = (time.perf_counter() - begin) / options.steps
        return self.get_weights(), (*means(scores), seconds)


class Evaluator(FlatWorker):
    """Evaluates a network on images that no worker trains on; writes to TensorBoard."""

    def build(self, options: argparse.Namespace) -> Any:
        """Build the network in this process: without momenta."""
        prepare_tensorflow(deterministic=False)
        import tensorflow as tf

        self.writer = tf.summary.create_file_writer(options.log_dir) if options.log_dir else None
        self.images = load_images(options.eval_data_path, options.dataset, True, options.seed)
        units, classes = options.num_residual_units, self.images.classes
        self.network = Network(options.mode, units, classes, options.seed, trained=False)
        return self.network.variables

    def evaluate(self, number: int, weights: FlatWeights) -> tuple[float, float]:
        """Return loss and accuracy of the weights that a round led to."""
        self.set_weights({name: weights[name] for name in self.variables.layout.names})
        scores = []
        for begin in range(0, len(self.images.labels), 100):
            part = slice(begin, begin + 100)
            pixels = standardised(self.images.pixels[part])
            scores.append(self.network.evaluate(pixels, self.images.labels[part]))
        loss, accuracy = means(scores)
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


class Checkpoint:
    """The latest checkpoint of a training, in a folder of its own.

    ``checkpoint.json`` names the file of the weights, the round that led to them and the
    settings of the training. The weights are written first and their predecessors deleted
    last: whenever the process dies, the file names weights that are there and whole.

    Attributes:
        number: The last round, saved or not; 0 before the first.
        weights: What it led to.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """Write nothing yet; ``settings`` have to stay as they are for the rest of a training."""
        self.folder, self.index, self.settings = folder, folder / "checkpoint.json", settings
        self.number, self.saved = 0, 0
        self.weights: FlatWeights | None = None

    def load(self) -> None:
        """Load what was saved last.

        Raises:
            SystemExit: If there is nothing, it is damaged, or has other settings.
        """
        self.number, file = self._read()
        try:
            self.weights = FlatWeights.load(self.folder / file)
        except (OSError, ValueError) as error:
            raise SystemExit(f"{self.index}: its weights: {error}") from None
        self.saved = self.number

    def check_free(self, rounds: int) -> None:
        """Refuse to replace another training, or a part of this one.

        Raises:
            SystemExit: If there is one; a complete training with these settings may be replaced.
        """
        with suppress(SystemExit):
            if not self.index.exists() or self._read()[0] == rounds:
                return
        raise SystemExit(
            f"{self.folder}: there is a checkpoint of another training, or of a part of this "
            "one, which --resume continues; else choose another --checkpoint-dir"
        )

    def save(self) -> str:
        """Save the last round unless it is saved; return a sentence that says what is saved."""
        if self.weights is None:
            return "no round is complete: nothing to save"
        file = f"round-{self.number:06}.safetensors"
        if self.saved != self.number:
            self.weights.save(self.folder / file)
            index = {"round": self.number, "weights": file, "settings": self.settings}
            temporary = self.index.with_suffix(".tmp")
            temporary.write_text(json.dumps(index, indent=2) + "\n")
            temporary.replace(self.index)
            self.saved = self.number
            for old in self.folder.glob("round-*.safetensors"):
                if old.name != file:
                    with suppress(OSError):
                        old.unlink()
        return f"round {self.number} is saved: {self.folder / file}"

    def _read(self) -> tuple[int, str]:
        """Return which round is saved, and in which file."""
        try:
            index = json.loads(self.index.read_text())
            number, file, settings = int(index["round"]), str(index["weights"]), index["settings"]
            names = sorted({*settings, *self.settings})
        except FileNotFoundError:
            raise SystemExit(f"{self.folder}: no checkpoint to resume") from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise SystemExit(f"{self.index}: no whole checkpoint: {error!r}") from None
        differing = [
            f"{name}: {settings.get(name)!r} there, {self.settings.get(name)!r} here"
            for name in names
            if settings.get(name) != self.settings.get(name)
        ]
        if differing:
            raise SystemExit(f"{self.index}: another training: {'; '.join(differing)}")
        return number, file


def learning_rate(first: float, number: int, rounds: int) -> float:
    """Return the rate of a round: a tenth after half of all rounds, and again after 3/4."""
    done = number - 1
    return float(first * 0.1 ** ((2 * done >= rounds) + (4 * done >= 3 * rounds)))


class History(NamedTuple):
    """What came of a run, by the number of the round.

    Attributes:
        training: Loss, accuracy, and the seconds of a step; means over workers.
        speeds: Images per second.
        evaluations: Loss and accuracy.
    """

    training: dict[int, tuple[float, ...]]
    speeds: dict[int, float]
    evaluations: dict[int, tuple[float, float]]


def train(options: argparse.Namespace, checkpoint: Checkpoint) -> tuple[History, Any]:
    """Run the rounds that are left, and save them every so often; time an exchange."""
    gpus = 0 if options.num_gpus is None else 1
    group = WorkerGroup.create(
        Trainer,
        options.workers,
        options,
        checkpoint.number,
        arguments=lambda rank: (rank,),
        num_cpus=1,
        num_gpus=gpus,
        max_restarts=RESTARTS,
    )
    lasting = ray.remote(num_cpus=0, max_restarts=RESTARTS, max_task_retries=RESTARTS)
    actor: Any = lasting(Evaluator)
    evaluator = actor.remote(options)
    # From then on, a worker that is restarted gets what the others have.
    weights = checkpoint.weights or next(iter(group.step("get_weights").values()))
    group.broadcast(weights)
    history, running = History({}, {}, {}), dict[int, Any]()
    half = -(-options.workers // 2)
    for number in range(checkpoint.number + 1, options.rounds + 1):
        rate = learning_rate(options.learning_rate, number, options.rounds)
        (result,) = group.run(1, "train", rate, min_results=half, nonfinite="skip")
        # A copy, for it is saved on Ctrl-C, and the next round may use its memory.
        checkpoint.number, checkpoint.weights = number, result.weights.copy()
        if number % options.save_every == 0 or number == options.rounds:
            checkpoint.save()
        for one, ref in list(running.items()):
            if ray.wait([ref], timeout=0)[0]:
                history.evaluations[one] = ray.get(running.pop(one))
        if number % options.eval_every == 0 and not running:
            running[number] = evaluator.evaluate.remote(number, result.ref)
        loss, accuracy, seconds = np.mean([result.extras[r] for r in result.used], axis=0).tolist()
        speed = len(result.used) * options.steps * options.batch_size / result.seconds["round"]
        history.training[number], history.speeds[number] = (loss, accuracy, seconds), speed
        scalars = {"loss": loss, "accuracy": accuracy, "seconds": seconds}
        logged = {f"training/{name}": value for name, value in scalars.items()}
        evaluator.write.remote(number, logged | {"learning rate": rate, "images per second": speed})
        text = f"round {number} of {options.rounds}: loss {loss:.3f}"
        if history.evaluations:
            last, (_, accuracy) = max(history.evaluations.items())
            text += f", accuracy {accuracy:.3f} (round {last})"
        lost = [f", without rank {rank}" for rank in sorted({*result.late, *result.failed})]
        print(text + "".join(lost), flush=True)
    if options.rounds not in running:
        running[options.rounds] = evaluator.evaluate.remote(options.rounds, checkpoint.weights)
    for one, ref in running.items():
        history.evaluations[one] = ray.get(ref)
    exchange = time_exchange(WorkerGroup([group.actors()[rank] for rank in group.step("ping")]))
    ray.kill(evaluator)
    group.shutdown()
    return history, exchange


def report(options: argparse.Namespace, history: History) -> None:
    """Print what came of the run, and draw it if asked to."""
    last = max(history.training)
    cells = {
        "rounds": f"{min(history.training)} to {last}",
        "images/s, median": f"{median(history.speeds.values()):.0f}",
        "ms a step, median": f"{1e3 * median(s for *_, s in history.training.values()):.0f}",
        "loss": f"{history.training[last][0]:.4f}",
        "accuracy": f"{history.evaluations[last][1]:.4f}",
    }
    print_table(list(cells), [list(cells.values())])
    if options.plot:
        measures: dict[str, dict[int, Any]] = {
            "trained on": dict(history.training),
            "held out": dict(history.evaluations),
        }
        panels = [
            Panel(
                title,
                "round",
                {k: (sorted(m), [m[n][i] for n in sorted(m)]) for k, m in measures.items()},
            )
            for i, title in enumerate(("loss", "accuracy"))
        ]
        draw(options.plot, "A residual network, data-parallel", *panels)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(
        __doc__,
        "loss and accuracy by round",
        num_residual_units=(5, "in each of three stages"),
        rounds=(30, "how often to average"),
        steps=(10, "that each worker takes in a round"),
        batch_size=(32, "images that each worker takes in a step"),
        eval_every=(5, "rounds, unless the one before still runs"),
        save_every=(10, "rounds"),
    )
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--num-gpus", type=integer(1), metavar="N", help="one worker on each")
    where.add_argument(
        "--num-workers", type=integer(1), default=2, metavar="N", help="on the CPU; default: 2"
    )
    add("--mode", choices=("eager", "graph"), default="eager", help="graph: of TF1")
    add("--train-data-path", metavar="FILES", help="of CIFAR, with * and ?")
    add("--eval-data-path", metavar="FILES", help="of CIFAR, with * and ?")
    add("--dataset", choices=tuple(LABELS), help="default: told by the files")
    rates = "a tenth from half, and from 3/4 of the rounds; default: %(default)s"
    add("--learning-rate", type=positive(), default=0.05, metavar="X", help=rates)
    folder = Path("resnet-checkpoints")
    add("--checkpoint-dir", type=Path, default=folder, metavar="DIR", help="default: %(default)s")
    add("--resume", action="store_true", help="go on from the checkpoint there")
    add("--log-dir", metavar="DIR", help="write summaries for TensorBoard")
    enough = f"fail if it is below; default: {ENOUGH} for digits, 0 for files"
    add("--enough", type=fraction, metavar="ACCURACY", help=enough)
    options = parser.parse_args(arguments)
    if (options.train_data_path is None) != (options.eval_data_path is None):
        parser.error("--train-data-path, --eval-data-path: expected both or none")
    if options.dataset and options.train_data_path is None:
        parser.error("--dataset: expected --train-data-path and --eval-data-path with it")
    if options.enough is None:
        options.enough = ENOUGH if options.train_data_path is None else 0.0
    options.workers = options.num_gpus or options.num_workers
    if options.log_dir:  # actors may run in another folder
        options.log_dir = str(Path(options.log_dir).absolute())
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program.

    Raises:
        SystemExit: If files are wrong, Ray has too little, or too little was learned.
        KeyboardInterrupt: On Ctrl-C, once the last complete round is saved.
    """
    options = parse_options(arguments)
    images = load_images(options.train_data_path, options.dataset, False, options.seed)
    load_images(options.eval_data_path, images.name, True, options.seed)
    options.dataset = images.name if options.train_data_path else None
    kept = ("num_residual_units", "rounds", "steps", "batch_size", "learning_rate", "seed")
    settings = {f"--{name.replace('_', '-')}": getattr(options, name) for name in kept}
    settings |= {"images": images.name, "number of images": len(images.labels)}
    checkpoint = Checkpoint(options.checkpoint_dir, settings)
    checkpoint.load() if options.resume else checkpoint.check_free(options.rounds)
    options.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    if checkpoint.number >= options.rounds:
        raise SystemExit(f"{options.checkpoint_dir}: all {options.rounds} rounds are done")
    if len(images.labels) < options.workers:
        wanted = f"expected an image for each of {options.workers} workers"
        raise SystemExit(f"{wanted}, got {len(images.labels)}")
    try:
        start_ray(options.workers)
        there = ray.cluster_resources()
        for resource in ("CPU",) if options.num_gpus is None else ("CPU", "GPU"):
            if there.get(resource, 0) < options.workers:  # Ray would have them wait for ever
                raise SystemExit(
                    f"expected a {resource} for each of {options.workers} workers, "
                    f"got {there.get(resource, 0):g}: that is what Ray has"
                )
        history, exchange = train(options, checkpoint)
    except (KeyboardInterrupt, RuntimeError, ray.exceptions.RayError):
        print(checkpoint.save(), file=sys.stderr)
        raise
    report(options, history)
    print(exchange)
    if history.evaluations[options.rounds][1] < options.enough:
        raise SystemExit(f"accuracy below {options.enough}: it needs more --rounds")


if __name__ == "__main__":
    run(main, grace=60.0)
