"""Residual networks for images of 32x32, trained and evaluated in either mode of TensorFlow.

What they compute is written once. A TF1 graph runs no assignment that nothing depends on, and
with it none of those that Keras's layers make to their moving statistics; so `train_step`
takes these from `stateless_call` and assigns them itself, in both modes.

K. He, X. Zhang, S. Ren, J. Sun: "Deep Residual Learning for Image Recognition", CVPR 2016 (the
three stages, shortcuts without weights, and how to train them); "Identity Mappings in Deep
Residual Networks", ECCV 2016 (normalisation and activation ahead of each convolution).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CHANNELS = (16, 32, 64)  # of the three stages
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4

Scores = tuple[NDArray[Any], NDArray[Any]]
"""Of each image: the loss, and whether it was recognised."""


class Network(NamedTuple):
    """What to build; the same in every process.

    Attributes:
        units: Residual units in each stage; the network has ``6 * units + 2`` layers.
        classes: Of the images.
        seed: Of the first weights.
    """

    units: int
    classes: int
    seed: int


def learning_rate(first: float, number: int, rounds: int) -> float:
    """Return the rate of a round: a tenth after half of all rounds, and again after 3/4.

    Args:
        first: Of the first round.
        number: Of the round, from 1.
        rounds: How many there are.
    """
    done = number - 1
    return float(first * 0.1 ** ((2 * done >= rounds) + (4 * done >= 3 * rounds)))


def build_network(network: Network) -> Any:
    """Return the network as a Keras model, in the mode that TensorFlow is in."""
    import keras

    keras.utils.set_random_seed(network.seed)
    images = keras.Input((32, 32, 3))
    x = _convolution(images, CHANNELS[0], 1)
    for stage, channels in enumerate(CHANNELS):
        for unit in range(network.units):
            x = _residual_unit(x, channels, stride=2 if stage > 0 and unit == 0 else 1)
    x = keras.layers.GlobalAveragePooling2D()(_normalised(x))
    return keras.Model(images, keras.layers.Dense(network.classes)(x))


def _residual_unit(x: Any, channels: int, stride: int) -> Any:
    import keras

    inside = _convolution(_normalised(x), channels, stride)
    inside = _convolution(_normalised(inside), channels, 1)
    if stride > 1:
        x = keras.layers.AveragePooling2D(stride)(x)
    missing = channels - x.shape[-1]
    if missing:  # new channels start at zero
        x = keras.ops.pad(x, [[0, 0], [0, 0], [0, 0], [missing // 2, missing - missing // 2]])
    return keras.layers.Add()([x, inside])


def _convolution(x: Any, channels: int, stride: int) -> Any:
    import keras

    convolution = keras.layers.Conv2D(
        channels, 3, stride, padding="same", use_bias=False, kernel_initializer="he_normal"
    )
    return convolution(x)


def _normalised(x: Any) -> Any:
    import keras

    # A round has few steps: with Keras's 0.99, statistics would follow the weights too slowly.
    return keras.layers.ReLU()(keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x))


def make_momenta(model: Any) -> list[Any]:
    """Return one variable, at zero, for each that is trained."""
    import tensorflow as tf

    trained = model.trainable_variables
    return [tf.Variable(tf.zeros(v.shape), trainable=False, name="momentum") for v in trained]


def train_step(model: Any, momenta: Sequence[Any], images: Any, labels: Any, rate: Any) -> Any:
    """Take a step of gradient descent with momentum.

    Returns:
        The scores of the images before the step, and what a session has to run besides.
    """
    import tensorflow as tf

    trained = [v.value for v in model.trainable_variables]
    statistics = [v.value for v in model.non_trainable_variables]
    kernels = [v.value for v in model.trainable_variables if v.name == "kernel"]
    with tf.GradientTape() as tape:
        outputs, moved = model.stateless_call(trained, statistics, images, training=True)
        losses, right = score(outputs, labels)
        decay = WEIGHT_DECAY * tf.add_n([tf.nn.l2_loss(kernel) for kernel in kernels])
        loss = tf.reduce_mean(losses) + decay
    gradients = tape.gradient(loss, trained)
    updates = [v.assign(value) for v, value in zip(statistics, moved, strict=True)]
    for v, momentum, gradient in zip(trained, momenta, gradients, strict=True):
        velocity = MOMENTUM * momentum + gradient
        updates += [momentum.assign(velocity), v.assign_sub(rate * velocity)]
    return (losses, right), updates


def score(outputs: Any, labels: Any) -> Any:
    """Return the loss of each image, and whether it was recognised."""
    import tensorflow as tf

    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
    return losses, tf.equal(tf.argmax(outputs, axis=1, output_type=labels.dtype), labels)


def eager_trainer(network: Network, batches: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the variables of a training, and a function of the rate that takes one step.

    Args:
        network: What to train.
        batches: Makes an endless dataset of images and labels.
    """
    import tensorflow as tf

    from flatweights.tensorflow import TensorFlowVariables

    endless = iter(batches())
    model = build_network(network)
    momenta = make_momenta(model)

    @tf.function  # type: ignore[untyped-decorator]
    def compiled(images: Any, labels: Any, rate: Any) -> Any:
        return train_step(model, momenta, images, labels, rate)[0]

    def step(rate: float) -> Scores:
        losses, right = compiled(*next(endless), tf.constant(rate))
        return losses.numpy(), right.numpy()

    return TensorFlowVariables(model, input_variables=momenta), step


def graph_trainer(network: Network, batches: Callable[[], Any]) -> tuple[Any, Any]:
    """As `eager_trainer`, in a graph of TF1 and its session."""
    import tensorflow as tf

    from flatweights.tensorflow import TensorFlowVariables

    tf1 = tf.compat.v1
    with tf.Graph().as_default():
        endless = tf1.data.make_initializable_iterator(batches())
        images, labels = endless.get_next()
        rate = tf1.placeholder(tf.float32, [])
        model = build_network(network)
        momenta = make_momenta(model)
        fetches = train_step(model, momenta, images, labels, rate)
        session = tf1.Session()
        session.run([tf1.global_variables_initializer(), endless.initializer])
        variables = TensorFlowVariables(model, session, momenta)

    def step(value: float) -> Scores:
        scores: Scores = session.run(fetches, {rate: value})[0]
        return scores

    return variables, step


def eager_evaluator(network: Network, batches: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the variables of a network, and a function that scores each image of a dataset.

    Args:
        network: What to evaluate.
        batches: Makes a dataset of images and labels.
    """
    import tensorflow as tf

    from flatweights.tensorflow import TensorFlowVariables

    model = build_network(network)

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def compiled(images: Any, labels: Any) -> Any:
        return score(model(images, training=False), labels)

    def evaluate() -> Scores:
        return _joined([compiled(*batch) for batch in batches()])

    return TensorFlowVariables(model), evaluate


def graph_evaluator(network: Network, batches: Callable[[], Any]) -> tuple[Any, Any]:
    """As `eager_evaluator`, in a graph of TF1 and its session."""
    import tensorflow as tf

    from flatweights.tensorflow import TensorFlowVariables

    tf1 = tf.compat.v1
    with tf.Graph().as_default():
        dataset = tf1.data.make_initializable_iterator(batches())
        images, labels = dataset.get_next()
        model = build_network(network)
        fetches = score(model(images, training=False), labels)
        session = tf1.Session()
        session.run(tf1.global_variables_initializer())
        variables = TensorFlowVariables(model, session)

    def evaluate() -> Scores:
        session.run(dataset.initializer)
        found = []
        try:
            while True:
                found.append(session.run(fetches))
        except tf.errors.OutOfRangeError:
            return _joined(found)

    return variables, evaluate


def _joined(scores: Sequence[Any]) -> Scores:
    losses, right = (
        np.concatenate([np.asarray(x) for x in xs]) for xs in zip(*scores, strict=True)
    )
    return losses, right


TRAINERS = {"eager": eager_trainer, "graph": graph_trainer}
EVALUATORS = {"eager": eager_evaluator, "graph": graph_evaluator}
