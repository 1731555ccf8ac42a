"""Tensors without numbers are refused wherever array data are accepted, and kill no process."""

import json

import pytest
from tf_forks import Forks

# A process of its own: TensorFlow aborts it if DLPack is asked for strings.
PROGRAM = """
import json, os
import numpy as np
import tensorflow as tf
import flatweights as fw
from flatweights.server import FedAvg
from flatweights.tensorflow import TensorFlowVariables

TENSORS = {
    "strings": tf.constant(["a", "b"]),
    "a string": tf.constant("a"),
    "no strings": tf.constant([], tf.string),
    "strings in a variable": tf.Variable(["a", "b"]),
    "variant": tf.raw_ops.EmptyTensorList(
        element_shape=[2], max_num_elements=2, element_dtype=tf.float32
    ),
    "resource": tf.Variable([1.0, 2.0]).handle,
    "sparse": tf.sparse.from_dense([[1.0, 0.0], [0.0, 2.0]]),
    "ragged": tf.ragged.constant([[1.0], [2.0, 3.0]]),
}
v = tf.Variable([1.0, 2.0], name="w")
variables = TensorFlowVariables([v])
weights = fw.FlatWeights({"w": np.ones(2)})
two = np.ones(2)
CALLS = {
    "average": lambda x: fw.average([x]),
    "average of lists": lambda x: fw.average([[x]]),
    "average of dicts": lambda x: fw.average([{"w": two}, {"w": x}]),
    "flatten": lambda x: fw.flatten([x]),
    "FlatWeights": lambda x: fw.FlatWeights({"w": x}),
    "assignment": lambda x: weights.__setitem__("w", x),
    "update": lambda x: weights.update(w=x),
    "Layout.of": lambda x: fw.Layout.of([x]),
    "norm": fw.norm,
    "isfinite": fw.isfinite,
    "axpy_": lambda x: fw.axpy_(two, 1.0, x),
    "a scale": lambda x: fw.scale_(two, x),
    "a weight": lambda x: fw.average([two], [x]),
    "RunningAverage": lambda x: fw.RunningAverage().add(x),
    "FedAvg": lambda x: FedAvg(two).step(x),
    "set_flat": variables.set_flat,
    "set_flat, shared": lambda x: variables.set_flat(x, share=True),
    "add_flat": variables.add_flat,
    "lerp_flat": lambda x: variables.lerp_flat(x, 0.5),
    "set_weights": lambda x: variables.set_weights({"w": x}),
    "set_weights, shared": lambda x: variables.set_weights({"w": x}, share=True),
    "set_weights by position": lambda x: variables.set_weights({"x": x}),
    "flatten_gradients": lambda x: variables.flatten_gradients([x]),
    "rows": lambda x: variables.flatten_gradients([tf.IndexedSlices(x, tf.constant([0, 1]))]),
    "indices": lambda x: variables.flatten_gradients([tf.IndexedSlices(v, x)]),
}
for name, tensor in TENSORS.items():
    for call, function in CALLS.items():
        try:
            function(tensor)
            result = "was taken"
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        print(json.dumps([name, call, result]), flush=True)
assert v.numpy().tolist() == [1.0, 2.0] and two.tolist() == [1.0, 1.0]
assert weights["w"].tolist() == [1.0, 1.0]
"""


@pytest.mark.parametrize("path", ["bound"], indirect=True)
def test_tensors_without_numbers_are_refused_by_their_place(path: str, forks: Forks) -> None:
    done = forks.run(PROGRAM)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (results[-1:], done.stderr[-500:])
    for name, call, result in results:
        assert result.startswith("TypeError: "), (name, call, result)
        assert ": expected " in result, (name, call, result)
