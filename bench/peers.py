"""The alternatives: one function per rival, so that a bench reads as a list of names."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Sequence[NDArray[Any]]


def python_sum(sources: Arrays) -> Any:
    """``sum(ws) / n``: the comprehension's line, one temporary per addition."""
    return sum(sources) / np.asarray(len(sources), sources[0].dtype)


def numpy_mean(sources: Arrays) -> Any:
    """``np.mean(ws, axis=0)``: stacks first."""
    return np.mean(sources, axis=0)


def numpy_in_place(sources: Arrays, out: NDArray[Any]) -> Any:
    """NumPy's best: one buffer, one pass per source."""
    np.copyto(out, sources[0])
    for source in sources[1:]:
        np.add(out, source, out=out)
    np.divide(out, np.asarray(len(sources), out.dtype), out=out)
    return out


def numexpr_mean(sources: Arrays, out: NDArray[Any]) -> Any:
    """One expression over all sources, in blocks, on several threads."""
    import numexpr

    names = [f"s{i}" for i in range(len(sources))]
    expression = f"({' + '.join(names)}) / {len(sources)}"
    values = dict(zip(names, sources, strict=True))
    return numexpr.evaluate(expression, values, out=out, casting="same_kind")


def flower_aggregate(sources: Arrays) -> Any:
    """Federated averaging as Flower describes it: weighted lists, reduced layer by layer.

    Written from its documentation (Beutel et al., "Flower: A Friendly Federated Learning
    Research Framework", 2020); its package does not install beside the rest.
    """
    weighted = [source * 1 for source in sources]  # times the number of examples
    return reduce(np.add, weighted) / np.asarray(len(sources), sources[0].dtype)


def flower_aggregate_in_place(sources: Arrays) -> Any:
    """Federated averaging as Flower's strategies do it by default: shares, added up in place.

    Flower scales the received arrays in place; here they are scaled into a buffer, for the next
    call.
    """
    share = np.asarray(1 / len(sources), sources[0].dtype)
    total, scaled = sources[0] * share, np.empty_like(sources[0])
    for source in sources[1:]:
        np.multiply(source, share, out=scaled)
        np.add(total, scaled, out=total)
    return total


def flower_median(sources: Arrays) -> Any:
    """Flower's FedMedian: stacks, and ``np.median``."""
    return np.median(np.stack(sources), axis=0)


def flower_trimmed_mean(sources: Arrays, fraction: float) -> Any:
    """Flower's FedTrimmedAvg, and SciPy's ``trim_mean``: stacks, and ``np.partition``."""
    cut = int(fraction * len(sources))
    ordered = np.partition(np.stack(sources), (cut, len(sources) - cut - 1), axis=0)
    return np.mean(ordered[cut : len(sources) - cut], axis=0)


def flower_distances(sources: Arrays) -> Any:
    """Flower's distances for Krum: squared norms minus twice the products."""
    stacked = np.stack(sources)
    norms = np.square(stacked).sum(axis=1)
    return norms[:, None] + norms[None, :] - 2 * stacked @ stacked.T


def tensorflow_median(sources: Arrays) -> Callable[[], Any]:
    """Return the median by ``tf.sort``, in a ``tf.function``."""
    import tensorflow as tf

    tensors = [tf.constant(source) for source in sources]
    count = len(sources)

    def median(*given: Any) -> Any:
        ordered = tf.sort(tf.stack(given), axis=0)
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2

    compiled = tf.function(median)
    return lambda: compiled(*tensors)


def bottleneck_median(sources: Arrays) -> Callable[[], Any] | None:
    """Return the median of stacked arrays by bottleneck; None if it is not installed."""
    try:
        import bottleneck
    except ImportError:
        return None
    return lambda: bottleneck.median(np.stack(sources), axis=0)


def tensorflow_add_n(sources: Arrays, *, jit: bool) -> Callable[[], Any]:
    """Return ``tf.add_n`` over tensors made beforehand, divided; fused by XLA or not."""
    import tensorflow as tf

    tensors = [tf.constant(source) for source in sources]
    count = tf.constant(len(sources), tensors[0].dtype)

    def mean(*given: Any) -> Any:
        return tf.add_n(given) / count

    compiled = tf.function(mean, jit_compile=jit)
    return lambda: compiled(*tensors)


def torch_mean(sources: Arrays) -> Callable[[], Any] | None:
    """Return the mean of stacked tensors with PyTorch; None if it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    tensors = [torch.from_numpy(source) for source in sources]

    def mean() -> Any:
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total.add_(tensor)
        return total.div_(len(tensors)).numpy()

    return mean


def gloo_collective() -> Any | None:
    """Return `ray.util.collective` if it has gloo; None without PyTorch, which contains gloo."""
    from ray.util import collective

    return collective if collective.gloo_available() else None


def numexpr_axpy(y: NDArray[Any], a: Any, x: NDArray[Any]) -> Any:
    """``y += a * x`` in blocks, on several threads."""
    import numexpr

    return numexpr.evaluate("y + a * x", {"y": y, "a": a, "x": x}, out=y, casting="same_kind")


def blas(name: str, dtype: np.dtype[Any]) -> Callable[..., Any] | None:
    """Return BLAS's ``name`` for ``dtype``, as SciPy ships it; None if there is none."""
    letter = {"float32": "s", "float64": "d"}.get(dtype.name)
    try:
        from scipy.linalg import blas as routines
    except ImportError:
        return None
    return getattr(routines, letter + name) if letter else None


def ravel_concatenate(parts: Arrays) -> Any:
    """Ray's ``get_flat`` of arrays: ravel each, concatenate."""
    return np.concatenate([part.ravel() for part in parts])


def optree_ravel(parts: Arrays) -> Callable[[], Any]:
    """Return optree's ``tree_ravel``."""
    from optree.integrations.numpy import tree_ravel

    return lambda: tree_ravel(list(parts))[0]


def ray_variables(variables: Sequence[Any], session: Any) -> Any:
    """Return Ray's own `TensorFlowVariables`, over variables of distinct names."""
    from ray.rllib.utils.tf_utils import TensorFlowVariables

    return TensorFlowVariables([], session, list(variables))


class KerasHolder:
    """A Keras 3 layer with weights of given shapes, read and written as a list."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Make the layer."""
        import keras

        self._layer = keras.layers.Layer()
        for shape in shapes:
            self._layer.add_weight(shape)

    def get_weights(self) -> Any:
        """Return Keras's list: one array per weight."""
        return self._layer.get_weights()

    def set_weights(self, arrays: Arrays) -> None:
        """Set them with Keras."""
        self._layer.set_weights(arrays)


def tensorflow_functions(variables: Sequence[Any]) -> tuple[Callable[[], Any], Callable[..., None]]:
    """Return TensorFlow's best: a fused concat, and a split with assignments."""
    import tensorflow as tf

    sizes = [variable.shape.num_elements() for variable in variables]

    def concat() -> Any:
        return tf.concat([tf.reshape(variable, [-1]) for variable in variables], 0)

    def split(vector: Any) -> None:
        for variable, piece in zip(variables, tf.split(vector, sizes), strict=True):
            variable.assign(tf.reshape(piece, variable.shape))

    traced = tf.function(split)
    return tf.function(concat), lambda flat: traced(tf.convert_to_tensor(flat))
