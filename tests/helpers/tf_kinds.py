"""Every kind of object that holds variables, each with its expected variables."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
import tf_keras


class Kind(NamedTuple):
    output: Any
    variables: list[Any]  # as TensorFlow or Keras lists them, in any order


KINDS: dict[str, Callable[[], Kind]] = {}


def kind(build: Callable[[], tuple[Any, Iterable[Any]]]) -> Callable[[], Kind]:
    def built() -> Kind:
        output, variables = build()
        return Kind(output, list(variables))

    KINDS[build.__name__] = built
    return built


def value(variable: Any) -> np.ndarray:
    """The variable's value, read by its own framework."""
    inner = variable._value if isinstance(variable, keras.Variable) else variable
    return np.array(inner.numpy())


def numbers(*shape: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(0).normal(size=shape), tf.float32)


# ---- Keras 3 ----


@kind
def keras_sequential() -> Any:
    model = keras.Sequential(
        [keras.Input((4,)), *(keras.layers.Dense(n) for n in (3, 3, 2))],
    )
    return model, model.variables


@kind
def keras_functional() -> Any:
    inputs = {name: keras.Input((4,), name=name) for name in "ab"}
    stem = keras.layers.Dense(3, name="stem")
    x = keras.layers.Concatenate()([stem(inputs["a"]), stem(inputs["b"])])
    x = keras.layers.Dense(3)(x) + 1.0
    model = keras.Model(inputs, [keras.layers.Dense(1)(x), keras.layers.Dense(2, name="head")(x)])
    return model, model.variables


class Block(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self, units: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(units)
        self.norm = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.5)
        self.bias = self.add_weight(shape=(units,))  # without a name
        self.gain = self.add_weight(shape=(), name="gain", trainable=False)

    def call(self, x: Any, training: Any = False) -> Any:
        return self.drop(self.norm(self.dense(x) * self.gain + self.bias), training=training)


class Tower(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Block(3), Block(3)]
        self.heads = {"policy": keras.layers.Dense(2), "value": keras.layers.Dense(1)}
        self._stem = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        x = self._stem(x)
        for block in self.blocks:
            x = block(x)
        return self.heads["policy"](x), self.heads["value"](x)


@kind
def keras_subclassed() -> Any:
    model = Tower()
    model(numbers(1, 4))
    return model, model.variables


@kind
def keras_nested() -> Any:
    tower = keras.Sequential([keras.Input((3,)), Block(3), keras.layers.Dense(3)])
    middle = keras.Input((3,))
    functional = keras.Model(middle, keras.layers.Dense(3)(tower(middle)))
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(functional(inputs)))
    return model, model.variables


@kind
def keras_shared_layers() -> Any:
    shared = keras.layers.Dense(4)
    a, b = (keras.Sequential([keras.Input((4,)), shared, keras.layers.Dense(2)]) for _ in range(2))
    return [a, b, shared], {id(v): v for v in (*a.variables, *b.variables)}.values()


@kind
def keras_recurrent() -> Any:
    inputs = keras.Input((5, 4), batch_size=2)
    x = keras.layers.Bidirectional(keras.layers.LSTM(3, return_sequences=True))(inputs)
    stateful = keras.layers.GRU(3, stateful=True, return_sequences=True, dropout=0.1)
    x = keras.layers.TimeDistributed(keras.layers.Dense(2))(stateful(x))
    x = keras.layers.RNN([keras.layers.LSTMCell(2), keras.layers.SimpleRNNCell(2)])(x)
    model = keras.Model(inputs, x)
    return model, [*model.variables, *stateful.states]


@kind
def keras_stateful() -> Any:
    inputs = keras.Input((3, 4), batch_size=2)
    lstm = keras.layers.LSTM(3, stateful=True, return_sequences=True)
    both = keras.layers.Bidirectional(keras.layers.SimpleRNN(2, stateful=True))
    cells = keras.layers.RNN(
        [keras.layers.LSTMCell(2), keras.layers.GRUCell(2)], stateful=True, return_sequences=True
    )
    model = keras.Model(inputs, both(cells(lstm(inputs))))
    states = tf.nest.flatten([lstm.states, cells.states, both.states])
    return model, [*model.variables, *states]


@kind
def keras_lookups() -> Any:
    words = keras.layers.StringLookup()
    words.adapt(["a", "b"])
    inputs = keras.Input((1,), dtype="string")
    model = keras.Model(inputs, keras.layers.Embedding(3, 2)(words(inputs)))
    return model, model.variables


@kind
def keras_convolutional() -> Any:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.RandomFlip(),
            keras.layers.Conv2D(4, 3),
            keras.layers.SeparableConv2D(4, 3),
            keras.layers.BatchNormalization(),
            keras.layers.SpectralNormalization(keras.layers.Conv2D(2, 1)),
            keras.layers.GlobalAveragePooling2D(),
        ]
    )
    return model, model.variables


@kind
def keras_attention() -> Any:
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(7, 4)(inputs)
    x = x + keras.layers.MultiHeadAttention(2, 2, dropout=0.1)(x, x)
    x = keras.layers.LayerNormalization()(x)
    model = keras.Model(inputs, keras.layers.EinsumDense("abc,cd->abd", (None, 2))(x))
    return model, model.variables


class Bare(keras.Model):  # type: ignore[misc]
    """Keras does not know the variables in `bare` and in the module."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.scale = tf.Variable(2.0)
        self.tables = {"x": tf.Variable([1.0]), "y": [tf.Variable([2.0]), tf.Variable([3.0])]}
        self.module = Leaf()
        self.listed = [keras.layers.Dense(2)]
        self.counter = keras.Variable(0, dtype="int64", trainable=False)

    def bare(self) -> Any:
        return [self.scale, self.tables["x"], *self.tables["y"], *self.module.variables]

    def call(self, x: Any) -> Any:
        return self.listed[0](self.dense(x)) * self.scale


@kind
def keras_with_bare_variables() -> Any:
    model = Bare()
    model(numbers(1, 4))
    return model, [*model.variables, *model.bare()]


@kind
def keras_layer() -> Any:
    layer = keras.layers.Dense(3)
    layer.build((None, 4))
    return layer, layer.variables


@kind
def keras_half_precision() -> Any:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, dtype="mixed_bfloat16"),
            keras.layers.Dense(2, dtype="bfloat16"),
            keras.layers.Dense(2, dtype="float64"),
        ]
    )
    return model, model.variables


@kind
def keras_lora() -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(3)])
    model.layers[1].enable_lora(2)
    return model, model.variables


@kind
def keras_frozen() -> Any:
    model = keras.Sequential([keras.Input((4,)), Block(3), keras.layers.Dense(3)])
    model.layers[1].trainable = False
    return model, model.variables


@kind
def keras_variables() -> Any:
    model = keras_subclassed().output
    return model.variables, model.variables


def keras_trained(optimizer: Any) -> Any:
    model = keras.Sequential([keras.Input((4,)), Block(3), keras.layers.Dense(2)])
    variables = model.trainable_variables
    optimizer.apply([numbers(*v.shape) for v in variables], variables)
    return [model, optimizer], [*model.variables, *optimizer.variables]


@kind
def keras_model_and_optimizer() -> Any:
    return keras_trained(keras.optimizers.Adam(0.1, amsgrad=True, use_ema=True))


@kind
def keras_model_and_loss_scale() -> Any:
    return keras_trained(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, 0.9)))


@kind
def keras_optimizer_alone() -> Any:
    _, optimizer = keras_trained(keras.optimizers.Adam(0.1))[0]
    return optimizer, optimizer.variables


@kind
def keras_actor_and_critic() -> Any:
    """One optimizer for two models, in front of them."""
    actor, critic = keras_sequential().output, keras_nested().output
    optimizer = keras.optimizers.RMSprop()
    optimizer.build([*actor.trainable_variables, *critic.trainable_variables])
    output = {"optimizer": optimizer, "actor": actor, "critic": critic}
    return output, [*optimizer.variables, *actor.variables, *critic.variables]


# ---- tf_keras ----


@kind
def tf_keras_sequential() -> Any:
    model = tf_keras.Sequential(
        [tf_keras.Input((4,)), *(tf_keras.layers.Dense(n) for n in (3, 3, 2))]
    )
    return model, model.variables


class OldBlock(tf_keras.layers.Layer):  # type: ignore[misc]
    def __init__(self, units: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = tf_keras.layers.Dense(units)
        self.norm = tf_keras.layers.BatchNormalization()
        self.drop = tf_keras.layers.Dropout(0.5)
        self.bias = self.add_weight(shape=(units,))
        self.gain = self.add_weight(shape=(), name="gain", trainable=False)
        self.scale = tf.Variable(2.0)
        self.tables = {"x": tf.Variable([1.0]), "y": [tf.Variable([2.0]), tf.Variable([3.0])]}
        self.module = Leaf()

    def call(self, x: Any, training: Any = False) -> Any:
        x = self.dense(x) * self.gain + self.bias * self.scale
        return self.drop(self.norm(x, training=training), training=training)


class OldTower(tf_keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [OldBlock(3), OldBlock(3)]
        self.heads = {"policy": tf_keras.layers.Dense(2), "value": tf_keras.layers.Dense(1)}
        self._stem = tf_keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        x = self._stem(x)
        for block in self.blocks:
            x = block(x)
        return self.heads["policy"](x), self.heads["value"](x)


@kind
def tf_keras_subclassed() -> Any:
    model = OldTower()
    model(numbers(1, 4))
    return model, model.variables


@kind
def tf_keras_nested() -> Any:
    tower = tf_keras.Sequential([tf_keras.Input((3,)), OldBlock(3), tf_keras.layers.Dense(3)])
    middle = tf_keras.Input((3,))
    functional = tf_keras.Model(middle, tf_keras.layers.Dense(3)(tower(middle)) + 1.0)
    inputs = tf_keras.Input((3,))
    model = tf_keras.Model(inputs, tf_keras.layers.Dense(1)(functional(inputs)))
    return model, model.variables


@kind
def tf_keras_recurrent() -> Any:
    inputs = tf_keras.Input((5, 4), batch_size=2)
    x = tf_keras.layers.Bidirectional(tf_keras.layers.LSTM(3, return_sequences=True))(inputs)
    stateful = tf_keras.layers.GRU(3, stateful=True, return_sequences=True)
    x = tf_keras.layers.TimeDistributed(tf_keras.layers.Dense(2))(stateful(x))
    x = tf_keras.layers.RNN([tf_keras.layers.LSTMCell(2), tf_keras.layers.SimpleRNNCell(2)])(x)
    model = tf_keras.Model(inputs, x)
    return model, [*model.variables, *stateful.states]


@kind
def tf_keras_stateful() -> Any:
    inputs = tf_keras.Input((3, 4), batch_size=2)
    lstm = tf_keras.layers.LSTM(3, stateful=True, return_sequences=True)
    both = tf_keras.layers.Bidirectional(tf_keras.layers.SimpleRNN(2, stateful=True))
    cells = tf_keras.layers.RNN(
        [tf_keras.layers.LSTMCell(2), tf_keras.layers.GRUCell(2)],
        stateful=True,
        return_sequences=True,
    )
    model = tf_keras.Model(inputs, both(cells(lstm(inputs))))
    layers = [lstm, cells, both.forward_layer, both.backward_layer]
    return model, [*model.variables, *tf.nest.flatten([layer.states for layer in layers])]


@kind
def tf_keras_lookups() -> Any:
    words, numbers = tf_keras.layers.StringLookup(), tf_keras.layers.IntegerLookup()
    words.adapt(["a", "b"])
    numbers.adapt([7, 8])
    inputs = [tf_keras.Input((1,), dtype=dtype) for dtype in ("string", "int64")]
    embedding = tf_keras.layers.Embedding(3, 2)
    model = tf_keras.Model(inputs, [embedding(words(inputs[0])), embedding(numbers(inputs[1]))])
    return model, embedding.variables


@kind
def tf_keras_layer() -> Any:
    layer = tf_keras.layers.Dense(3)
    layer.build((None, 4))
    return layer, layer.variables


@kind
def tf_keras_half_precision() -> Any:
    model = tf_keras.Sequential(
        [
            tf_keras.Input((4,)),
            tf_keras.layers.Dense(3, dtype="mixed_float16"),
            tf_keras.layers.BatchNormalization(dtype="mixed_bfloat16"),
            tf_keras.layers.Dense(2, dtype="float64"),
        ]
    )
    return model, [getattr(v, "_variable", v) for v in model.variables]


def unlisted(optimizer: Any) -> list[tf.Variable]:
    """The variables that an optimizer of `tf_keras` does not list."""
    if hasattr(optimizer, "_hyper"):
        return list(optimizer._hyper.values())
    if type(optimizer).__name__ == "Nadam":
        return [optimizer.learning_rate, optimizer._u_product]
    if type(optimizer).__name__ == "Adafactor":  # in the place of slots that a vector does not have
        nothing = [v for held in (optimizer._r, optimizer._c) for v in held if v.dtype == tf.int32]
        return [optimizer.learning_rate, *nothing]
    return [optimizer.learning_rate]


def tf_keras_trained(optimizer: Any) -> Any:
    model = tf_keras.Sequential([tf_keras.Input((4,)), OldBlock(3), tf_keras.layers.Dense(2)])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(numbers(4, 4), training=True) ** 2)
    variables = model.trainable_variables
    gradients = tape.gradient(loss, variables, unconnected_gradients="zero")
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    slots = optimizer.variables
    slots = slots() if callable(slots) else slots
    return [model, optimizer], [*model.variables, *slots, *unlisted(optimizer)]


@kind
def tf_keras_model_and_optimizer() -> Any:
    return tf_keras_trained(tf_keras.optimizers.Adam(0.1, amsgrad=True, use_ema=True))


@kind
def tf_keras_model_and_legacy_optimizer() -> Any:
    return tf_keras_trained(tf_keras.optimizers.legacy.Adam(0.1, amsgrad=True))


# ---- TensorFlow alone ----


class Leaf(tf.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable([1.0, 2.0])
        self.b = tf.Variable(3.0, trainable=False, name="given")


class Tree(tf.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.leaves = [Leaf(), {"k": Leaf(), "v": tf.Variable([[1.0]])}]
        self.again = self.leaves[0]
        self.up = Leaf()
        self.up.back = self  # a cycle
        self._hidden = tf.Variable(5, dtype=tf.int64)


@kind
def module() -> Any:
    tree = Tree()
    return tree, tree.variables


@kind
def module_with_keras_layers() -> Any:
    tree = Tree()
    tree.layer = keras_layer().output
    tree.old_layer = tf_keras_layer().output
    tree.seed = keras.Variable([1, 2], dtype="uint32")
    return tree, [*Tree.variables.fget(tree), *tree.layer.variables, tree.seed]


@dataclass
class Agent:
    name: str
    policy: Any
    target: Any
    temperature: tf.Variable
    steps: list[Any]
    optimizer: Any


@kind
def plain_object() -> Any:
    policy, target = keras_sequential().output, keras_sequential().output
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(policy.trainable_variables)
    steps = [tf.Variable(1, dtype=tf.int32), tf.Variable(True)]
    agent = Agent("agent", policy, target, tf.Variable(1.0), steps, optimizer)
    variables = [*policy.variables, *target.variables, agent.temperature, *agent.steps]
    return agent, [*variables, *optimizer.variables]


@kind
def list_of_variables() -> Any:
    variables = [tf.Variable(numbers(2, 3)), tf.Variable(1.0), tf.Variable(2.0, name="w")]
    return [variables, variables[0]], variables


@kind
def dict_of_variables() -> Any:
    variables = {"b": tf.Variable([1.0]), "a": tf.Variable([2.0]), 3: tf.Variable([3.0])}
    return variables, variables.values()


@kind
def mixture() -> Any:
    old, new = tf_keras_nested().output, keras_nested().output
    loose = tf.Variable([1.0, 2.0])
    tree = Tree()
    output = {"old": old, "new": [new, loose], "tree": (tree, [old])}
    return output, [*old.variables, *new.variables, loose, *tree.variables]
