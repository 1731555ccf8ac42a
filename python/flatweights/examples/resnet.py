"""A residual network on CIFAR or digits, data-parallel on GPUs or CPUs, with checkpoints.

The program of Ray's old ResNet page, made current. One actor for each GPU, or for each of
``--num-workers`` on the CPU, trains some steps from the averaged weights on its share of the
images; the driver averages what comes back and sends it to all of them. It needs no TensorFlow.
Beside them, an actor evaluates the average every so often: it takes of it what its network has, not
the momenta. Workers that die are left out until Ray has started them anew.

    python -m flatweights.examples.resnet
    python -m flatweights.examples.resnet --mode graph --plot resnet.png --log-dir logs
    python -m flatweights.examples.resnet --num-gpus 4 --rounds 2000 --batch-size 128

Without files, it trains on scikit-learn's handwritten digits, brought to 32x32x3. Files are those
of CIFAR-10, or with ``--dataset cifar100`` of CIFAR-100, in their binary version:

    --train-data-path 'cifar-10-batches-bin/data_batch*'
    --eval-data-path cifar-10-batches-bin/test_batch.bin

Ctrl-C saves the last complete round, and ``--resume`` goes on after it, with as many workers and in
whichever mode you like. Batches are drawn anew then, so the run does not end with the bits that it
would have had. ``tensorboard --logdir logs`` draws what is logged.

For a model of your own, change `build_model`; for other images, `load_images`.

K. He, X. Zhang, S. Ren, J. Sun: "Deep Residual Learning for Image Recognition", CVPR 2016;
"Identity Mappings in Deep Residual Networks", ECCV 2016.
"""

import argparse
import glob
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import FlatWeights, examples
from flatweights.ray import FlatWorker, WorkerGroup

ENOUGH = 0.95  # of digits
RESTARTS = 3  # of each actor
CHANNELS = (16, 32, 64)  # of the three stages
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
SIDE, PADDING = 32, 4
LABELS = {"digits": (10,), "cifar10": (10,), "cifar100": (20, 100)}  # the last one is learned


class Images(NamedTuple):
    """Some images of 32x32x3 bytes each, and their labels, which are below ``classes``."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int32]
    classes: int


def load_images(pattern: str | None, dataset: str, held_out: bool, seed: int) -> Images:
    """Return the images of CIFAR in files, or digits if there are none, by a split of ``seed``.

    A record of CIFAR is one byte for each label, and the red, green and blue values of the
    pixels, row by row. A file is nothing but records.

    Raises:
        SystemExit: If files are missing, truncated, or not what they should be; it names one.
    """
    if pattern is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng(seed).permutation(len(digits.target))
        chosen = np.split(order, [359])[0 if held_out else 1]
        grey = (digits.images[chosen] * (255 / 16)).round().astype(np.uint8)
        large = grey.repeat(4, axis=1).repeat(4, axis=2)[..., np.newaxis].repeat(3, axis=3)
        return Images(large, digits.target[chosen].astype(np.int32), 10)
    labels, parts = LABELS[dataset], []
    size, first = len(labels) + 3 * SIDE * SIDE, len(labels)
    for file in sorted(glob.glob(pattern)):  # noqa: PTH207 (which takes no absolute pattern)
        data = np.fromfile(file, np.uint8)
        if data.size == 0 or data.size % size:
            wanted = f"expected records of {size} bytes ({dataset})"
            raise SystemExit(f"{file}: {wanted}, got {data.size} bytes")
        parts.append(data.reshape(-1, size))
        if np.any(parts[-1][:, :first] >= labels):
            raise SystemExit(f"{file}: expected labels of {dataset}, below {labels[-1]}")
    if not parts:
        raise SystemExit(f"{pattern}: expected at least one file, found none")
    rows = np.concatenate(parts)
    pixels = rows[:, first:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return Images(np.ascontiguousarray(pixels), rows[:, first - 1].astype(np.int32), labels[-1])


def standardised(pixels: NDArray[Any]) -> NDArray[np.float32]:
    """Return images with a mean of 0 and a deviation of 1 each."""
    values = pixels - pixels.mean(axis=(1, 2, 3), keepdims=True, dtype=np.float32)
    deviation = values.std(axis=(1, 2, 3), keepdims=True)
    scaled: NDArray[np.float32] = values / np.maximum(deviation, 1 / np.sqrt(values[0].size))
    return scaled.astype(np.float32)


def draw_batch(images: Images, size: int, mirror: bool, rng: np.random.Generator) -> Any:
    """Return some images, shifted and, if ``mirror``, mirrored at random, and their labels."""
    chosen = rng.integers(len(images.labels), size=size)
    border = [(0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)]
    padded = np.pad(images.pixels[chosen], border)
    y, x = rng.integers(2 * PADDING + 1, size=(2, size))
    ways = np.where(mirror & (rng.random(size) < 0.5), -1, 1)
    cut = [p[j : j + SIDE, i : i + SIDE] for p, j, i in zip(padded, y, x, strict=True)]
    shown = [one[:, ::way] for one, way in zip(cut, ways, strict=True)]
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


def train_step(model: Any, momenta: Sequence[Any], images: Any, labels: Any, rate: Any) -> Any:
    """Take a step of gradient descent with momentum; return the scores before it, and updates.

    A TF1 graph runs no assignment that nothing depends on, and with it none of those that
    Keras's layers make to their moving statistics; so these are assigned here, in both modes.
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
    updates = [v.assign(value) for v, value in zip(statistics, moved, strict=True)]
    for v, momentum, gradient in zip(trained, momenta, tape.gradient(loss, trained), strict=True):
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

    train: Callable[[Any, Any, float], Any]
    evaluate: Callable[[Any, Any], Any]

    def __init__(self, mode: str, units: int, classes: int, seed: int, trained: bool) -> None:
        """Build it; the same seed gives the same weights."""
        import tensorflow as tf

        from flatweights.tensorflow import TensorFlowVariables

        def build() -> tuple[Any, list[Any]]:
            model = build_model(units, classes, seed)
            zeros = [tf.zeros(v.shape) for v in model.trainable_variables if trained]
            return model, [tf.Variable(z, trainable=False, name="momentum") for z in zeros]

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
            labels, rate = tf1.placeholder(tf.int32, [None]), tf1.placeholder(tf.float32, [])
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
    losses, right = zip(*scores, strict=True)
    return float(np.concatenate(losses).mean()), float(np.concatenate(right).mean())


class Trainer(FlatWorker):
    """Trains its copy of the network on its share of the images.

    Momenta are averaged like the weights that they belong to (H. Yu, R. Jin, S. Yang: "On the
    Linear Speedup Analysis of Communication Efficient Momentum SGD for Distributed Non-Convex
    Optimization", ICML 2019): a worker that takes the average goes on as the others do.
    """

    def build(self, options: argparse.Namespace, first_round: int, rank: int) -> Any:
        """Build the network in this process."""
        threads = max(1, len(os.sched_getaffinity(0)) // options.workers)
        gpus = options.num_gpus is not None
        examples.prepare_tensorflow(threads=threads, deterministic=False, gpus=gpus)
        self.options = options
        images = load_images(options.train_data_path, options.dataset, False, options.seed)
        share = slice(rank, None, options.workers)
        self.images = images._replace(pixels=images.pixels[share], labels=images.labels[share])
        # Not the seed alone, or a run that is resumed would see the same batches again.
        self.rng = np.random.default_rng([options.seed, first_round, rank])
        units = options.num_residual_units
        self.network = Network(options.mode, units, images.classes, options.seed, trained=True)
        return self.network.variables

    def train(self, rate: float) -> tuple[FlatWeights, tuple[float, float, float]]:
        """Take some steps; return where they lead, with loss, accuracy and seconds of a step."""
        begin, scores, options = time.perf_counter(), [], self.options
        mirror = options.train_data_path is not None
        for _ in range(options.steps):
            pixels, labels = draw_batch(self.images, options.batch_size, mirror, self.rng)
            scores.append(self.network.train(pixels, labels, rate))
        seconds = (time.perf_counter() - begin) / options.steps
        return self.get_weights(), (*means(scores), seconds)


class Evaluator(FlatWorker):
    """Evaluates a network on images that no worker trains on; writes to TensorBoard."""

    def build(self, options: argparse.Namespace) -> Any:
        """Build the network in this process: without momenta."""
        examples.prepare_tensorflow(deterministic=False)
        import tensorflow as tf

        self.writer = tf.summary.create_file_writer(options.log_dir) if options.log_dir else None
        self.images = load_images(options.eval_data_path, options.dataset, True, options.seed)
        units, classes = options.num_residual_units, self.images.classes
        self.network = Network(options.mode, units, classes, options.seed, trained=False)
        return self.network.variables

    def evaluate(self, number: int, weights: FlatWeights) -> tuple[float, float]:
        """Return loss and accuracy of the weights that a round led to."""
        self.set_weights({name: weights[name] for name in self.variables.layout.names})
        cuts = range(100, len(self.images.labels), 100)
        parts = (np.split(part, cuts) for part in self.images[:2])
        batches = zip(*parts, strict=True)
        loss, accuracy = means([self.network.evaluate(standardised(x), y) for x, y in batches])
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
    """The last complete round, 0 before the first, and the weights that it led to."""

    number: int = 0
    weights: FlatWeights | None = None

    def save(self, path: Path, settings: dict[str, Any]) -> str:
        """Replace ``path``, at once and whole; return a sentence that says what is saved."""
        if self.weights is None:
            return "no round is complete: nothing to save"
        text = np.frombuffer(json.dumps(settings).encode(), np.uint8)
        FlatWeights({**self.weights, "/round": np.array(self.number), "/settings": text}).save(path)
        return f"round {self.number} is saved: {path}"

    @classmethod
    def load(cls, path: Path, settings: dict[str, Any]) -> "Checkpoint":
        """Return what was saved; fail if it is damaged, or of a training with other settings."""
        try:
            weights = dict(FlatWeights.load(path))
            number, text = int(weights.pop("/round")), weights.pop("/settings").tobytes()
        except (ValueError, KeyError) as error:
            raise SystemExit(f"{path}: no whole checkpoint: {error}") from None
        saved = json.loads(text)
        pairs = {name: (saved.get(name), settings.get(name)) for name in {**saved, **settings}}
        other = [f"{k}: {a!r} there, {b!r} here" for k, (a, b) in pairs.items() if a != b]
        if other:
            raise SystemExit(f"{path}: a checkpoint of another training: {'; '.join(other)}")
        return cls(number, FlatWeights(weights))


def open_checkpoint(path: Path, settings: dict[str, Any], rounds: int, resume: bool) -> Checkpoint:
    """Return where to begin; fail if there is nothing to resume, or a part would be lost."""
    if not resume and not path.exists():
        return Checkpoint()
    checkpoint = Checkpoint.load(path, settings)
    if resume and checkpoint.number >= rounds:
        raise SystemExit(f"{path}: all {rounds} rounds are done")
    if not resume and checkpoint.number < rounds:
        part = "a part of this training, which --resume continues"
        raise SystemExit(f"{path}: {part}; else choose another --checkpoint-dir")
    return checkpoint if resume else Checkpoint()


def learning_rate(first: float, number: int, rounds: int) -> float:
    """Return the rate of a round: a tenth after half of all rounds, and again after 3/4."""
    done = number - 1
    return float(first * 0.1 ** ((2 * done >= rounds) + (4 * done >= 3 * rounds)))


class History(NamedTuple):
    """By round: loss, accuracy, seconds of a step, images per second; and of evaluations."""

    training: dict[int, Any]
    evaluations: dict[int, Any]


def train(
    options: argparse.Namespace, checkpoint: Checkpoint, save: Callable[[Checkpoint], str]
) -> History:
    """Run the rounds that are left, and save them every so often; print the time of an exchange."""
    group = WorkerGroup.create(
        Trainer,
        options.workers,
        options,
        checkpoint.number,
        arguments=lambda rank: [rank],
        num_cpus=1,
        num_gpus=0 if options.num_gpus is None else 1,
        max_restarts=RESTARTS,
    )
    lasting: Any = ray.remote(num_cpus=0, max_restarts=RESTARTS, max_task_retries=RESTARTS)
    evaluator = lasting(Evaluator).remote(options)
    history, running = History({}, {}), dict[int, Any]()
    half = -(-options.workers // 2)
    try:
        # From then on, a worker that is restarted gets what the others have.
        group.broadcast(checkpoint.weights or next(iter(group.step("get_weights").values())))
        for number in range(checkpoint.number + 1, options.rounds + 1):
            rate = learning_rate(options.learning_rate, number, options.rounds)
            (result,) = group.run(1, "train", rate, min_results=half, nonfinite="skip")
            # A copy: it is saved on Ctrl-C, and the next round may use its memory.
            checkpoint = Checkpoint(number, result.weights.copy())
            if number % options.save_every == 0 or number == options.rounds:
                save(checkpoint)
            told = [result.extras[rank] for rank in result.used]
            loss, accuracy, seconds = np.mean(told, axis=0).tolist()
            images = len(result.used) * options.steps * options.batch_size
            speed = images / result.seconds["round"]
            history.training[number] = loss, accuracy, seconds, speed
            scalars = {"loss": loss, "accuracy": accuracy, "seconds": seconds}
            logged = {f"training/{name}": value for name, value in scalars.items()}
            logged |= {"learning rate": rate, "images per second": speed}
            evaluator.write.remote(number, logged)
            lost = [f", without rank {rank}" for rank in sorted({*result.late, *result.failed})]
            print(f"round {number} of {options.rounds}: loss {loss:.3f}", *lost, sep="", flush=True)
            if number % options.eval_every == 0 or number == options.rounds:
                collect(running, history)  # that before this one: it ran beside the training
                running[number] = evaluator.evaluate.remote(number, result.ref)
        collect(running, history)
    except (KeyboardInterrupt, RuntimeError, ray.exceptions.RayError):
        print(save(checkpoint), file=sys.stderr)
        raise
    there = [group.actors()[rank] for rank in group.step("ping")]
    print(examples.time_exchange(WorkerGroup(there)))
    ray.kill(evaluator)
    group.shutdown()
    return history


def collect(running: dict[int, Any], history: History) -> None:
    """Wait for evaluations, and print their results."""
    for number, ref in running.items():
        history.evaluations[number] = loss, accuracy = ray.get(ref)
        print(f"after round {number}: loss {loss:.3f}, accuracy {accuracy:.3f}", flush=True)
    running.clear()


def report(options: argparse.Namespace, history: History) -> None:
    """Print what came of the run, and draw it if asked to."""
    numbers = list(history.training)
    losses, _, steps, speeds = zip(*history.training.values(), strict=True)
    row = {
        "rounds": f"{numbers[0]} to {numbers[-1]}",
        "images/s, median": f"{median(speeds):.0f}",
        "ms a step, median": f"{1e3 * median(steps):.0f}",
        "loss": f"{losses[-1]:.4f}",
        "accuracy": f"{history.evaluations[options.rounds][1]:.4f}",
    }
    examples.print_table([row])
    if options.plot:
        measures = {"trained on": history.training, "held out": history.evaluations}
        panels = []
        for i, title in enumerate(("loss", "accuracy")):
            curves = {name: (list(m), [v[i] for v in m.values()]) for name, m in measures.items()}
            panels.append(examples.Panel(title, "round", curves))
        examples.draw(options.plot, "A residual network, data-parallel", *panels)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = examples.make_parser(
        __doc__,
        "loss and accuracy by round",
        num_residual_units=(5, "in each of three stages"),
        rounds=(30, "how often to average"),
        steps=(10, "that each worker takes in a round"),
        batch_size=(32, "images that each worker takes in a step"),
        eval_every=(5, "rounds"),
        save_every=(10, "rounds"),
    )
    add, number = parser.add_argument, examples.integer(1)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--num-gpus", type=number, metavar="N", help="one worker on each")
    where.add_argument("--num-workers", type=number, default=2, metavar="N", help="on the CPU")
    add("--mode", choices=("eager", "graph"), default="eager", help="graph: of TF1")
    add("--train-data-path", metavar="FILES", help="of CIFAR, with * and ?")
    add("--eval-data-path", metavar="FILES", help="of CIFAR, with * and ?")
    add("--dataset", choices=("cifar10", "cifar100"), help="of the files; default: cifar10")
    rate = "a tenth from half, and from 3/4 of the rounds; default: %(default)s"
    add("--learning-rate", type=examples.positive(), default=0.05, metavar="X", help=rate)
    add("--checkpoint-dir", type=Path, default=Path("resnet-checkpoints"), metavar="DIR")
    add("--resume", action="store_true", help="go on from the checkpoint there")
    add("--log-dir", metavar="DIR", help="write summaries for TensorBoard")
    enough = f"fail if it is below; default: {ENOUGH} for digits, 0 for files"
    add("--enough", type=examples.fraction, metavar="ACCURACY", help=enough)
    options = parser.parse_args(arguments)
    if (options.train_data_path is None) != (options.eval_data_path is None):
        parser.error("--train-data-path, --eval-data-path: expected both or none")
    if options.dataset and options.train_data_path is None:
        parser.error("--dataset: expected --train-data-path with it")
    options.dataset = "digits" if options.train_data_path is None else options.dataset or "cifar10"
    if options.enough is None:
        options.enough = ENOUGH if options.dataset == "digits" else 0.0
    options.workers = options.num_gpus or options.num_workers
    options.log_dir = options.log_dir and str(Path(options.log_dir).absolute())  # for actors
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if files are wrong, Ray has too little, or too little is learned."""
    options = parse_options(arguments)
    images = load_images(options.train_data_path, options.dataset, False, options.seed)
    load_images(options.eval_data_path, options.dataset, True, options.seed)
    if len(images.labels) < options.workers:
        wanted = f"expected an image for each of {options.workers} workers"
        raise SystemExit(f"{wanted}, got {len(images.labels)}")
    kept = ("num_residual_units", "rounds", "steps", "batch_size", "learning_rate", "seed")
    settings = {f"--{name.replace('_', '-')}": getattr(options, name) for name in kept}
    settings |= {"images": options.dataset, "number of images": len(images.labels)}
    path = options.checkpoint_dir / "checkpoint.safetensors"
    checkpoint = open_checkpoint(path, settings, options.rounds, options.resume)
    path.parent.mkdir(parents=True, exist_ok=True)
    examples.start_ray(options.workers)
    there = ray.cluster_resources()
    for resource in ("CPU",) if options.num_gpus is None else ("CPU", "GPU"):
        if there.get(resource, 0) < options.workers:  # Ray would have them wait for ever
            wanted = f"expected a {resource} for each of {options.workers} workers"
            raise SystemExit(f"{wanted}, got {there.get(resource, 0):g}: that is what Ray has")
    history = train(options, checkpoint, lambda last: last.save(path, settings))
    report(options, history)
    if history.evaluations[options.rounds][1] < options.enough:
        raise SystemExit(f"accuracy below {options.enough}: it needs more --rounds")


if __name__ == "__main__":
    examples.run(main, grace=60.0)
