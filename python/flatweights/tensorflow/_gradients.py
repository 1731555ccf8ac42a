"""The gradients of a model as one vector, from values in memory or tensors of a graph."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.framework.indexed_slices import IndexedSlicesValue

from flatweights import _core
from flatweights._core import is_settable, move_parts
from flatweights._dtypes import is_averaged, is_integer, promote
from flatweights._flatten import new_vector
from flatweights._inplace import clip_by_norm_
from flatweights._layout import Layout, Slot, cast_for_slot, place_of
from flatweights._numbers import finite
from flatweights._trees import as_array, listed
from flatweights.tensorflow._eager import eagerly, wait
from flatweights.tensorflow._kinds import inner_variable, is_symbolic, is_variable, own_name
from flatweights.tensorflow._session import isolated

# The library with the C API of eager tensors, since TensorFlow 2.21 and before. Without it,
# tensors are read through the buffer protocol.
for _name in ("lib_pywrap_tensorflow_common.so", "_pywrap_tensorflow_internal.so"):
    if _core.find_eager_tensors(str(Path(tf.__file__).parent / "python" / _name)):
        break

_IN_MEMORY = (np.ndarray, tf.__internal__.EagerTensor)
_SLICES = (tf.IndexedSlices, IndexedSlicesValue)


class SparseRows(NamedTuple):
    """Rows of a gradient that is zero elsewhere; rows with the same index are added."""

    values: NDArray[Any]
    indices: NDArray[Any]


class Gradients:
    """Puts gradients in the order of a model's variables, and flattens them."""

    def __init__(
        self, variables: Mapping[str, Any], layout: Layout, states: Collection[int]
    ) -> None:
        """Take the ``variables`` at the slots of ``layout``.

        Args:
            variables: In the form that the user passed.
            layout: Their layout.
            states: The positions of those that `trained_positions` leaves out.
        """
        self._wrappers = list(variables.values())
        self._layout = layout
        self._states = states
        self._inner = [inner_variable(wrapper) for wrapper in self._wrappers]
        self._positions: dict[int, int] = {}  # by identity, which `_inner` keeps valid
        for i, variable in enumerate(self._inner):
            replicas: Iterable[Any] = getattr(variable, "values", ())
            for one in (variable, *replicas):
                self._positions[id(one)] = i
        self._built: dict[Hashable, tf.Tensor] = {}

    def flatten(
        self,
        gradients: Any,
        dtype: np.dtype[Any],
        out: NDArray[Any] | None,
        clip_norm: float | None,
    ) -> Any:
        """Return ``gradients`` as one vector, or as one tensor if they are of a graph."""
        most = None if clip_norm is None else _checked_norm(clip_norm, dtype)
        is_list = type(gradients) is list and len(gradients) == len(self._wrappers)
        # A copy, since the core reads without the GIL: another thread may change the caller's list.
        arranged = gradients[:] if is_list else self._arranged(gradients)
        vector = None
        if tf.executing_eagerly() or not (
            tf.inside_function()
            or _is_of_graph(next((one for one in arranged if one is not None), None))
        ):
            vector = new_vector(self._layout.size, dtype) if out is None else out
            if _core.gather(self._layout.core, arranged, vector):
                return _clip(vector, most)
        if is_list:  # it may hold pairs
            arranged = self._arranged(arranged)
        if any(_is_of_graph(gradient) for gradient in arranged):
            if out is not None:
                raise TypeError("out: expected None for gradients of a graph, got an array")
            return self._in_graph(arranged, dtype, most)
        if vector is None:
            raise RuntimeError(
                "inside a tf.function only its own tensors can be flattened; values in memory "
                "would be read once, when it is traced, and never again"
            )
        self._write(arranged, vector)
        return _clip(vector, most)

    def _arranged(self, gradients: Any) -> list[Any]:
        """Return one gradient, or None, per slot."""
        if isinstance(gradients, Mapping):
            unknown = [name for name in gradients if name not in self._layout]
            if unknown:
                raise ValueError(f"grads: expected names of variables, got {unknown}")
            return [gradients.get(name) for name in self._layout.names]
        given = listed(gradients, "grads: expected gradients in a list or by name")
        if any(_is_pair(item) for item in given):
            return self._by_variable(given)
        if len(given) == len(self._wrappers):
            return given
        trained = trained_positions(self._wrappers, self._states)
        if len(given) != len(trained):
            counts = f"{len(self._wrappers)} gradients, one per variable"
            if len(trained) < len(self._wrappers):
                counts += f", or {len(trained)}, one per trainable variable"
            raise ValueError(
                f"grads: expected {counts}, got {len(given)}; pairs (gradient, variable) may be "
                "fewer"
            )
        arranged: list[Any] = [None] * len(self._wrappers)
        for i, gradient in zip(trained, given, strict=True):
            arranged[i] = gradient
        return arranged

    def _by_variable(self, pairs: Sequence[Any]) -> list[Any]:
        arranged: list[Any] = [None] * len(self._wrappers)
        seen = set()
        for n, pair in enumerate(pairs):
            if not _is_pair(pair):
                raise TypeError(
                    f"item {n}: expected a pair (gradient, variable) as the others, got "
                    f"{type(pair).__name__}"
                )
            gradient, variable = pair
            i = self._positions.get(id(inner_variable(variable)))
            if i is None:
                raise ValueError(
                    f"item {n}: expected a variable of this model, got {own_name(variable)!r}"
                )
            if i in seen:
                raise ValueError(f"item {n}: expected each variable once, got {self._where(i)}")
            seen.add(i)
            arranged[i] = gradient
        return arranged

    def _where(self, i: int) -> str:
        return place_of(i, self._layout.slots[i])

    def _write(self, gradients: Sequence[Any], out: NDArray[Any]) -> None:
        """Write gradients in memory to the vector ``out``, after checking all of them."""
        wait()  # errors in computing the gradients must not look like errors in converting them
        pieces = [_piece(one, self._layout, i, out.dtype) for i, one in enumerate(gradients)]
        for i, piece in enumerate(pieces):
            array = piece.values if isinstance(piece, SparseRows) else piece
            if array is not None and np.may_share_memory(out, array):
                raise ValueError(f"out: expected memory of its own, overlaps {self._where(i)}")
        targets, dense = [], []
        for view, piece in zip(self._layout.vector_views(out), pieces, strict=True):
            if piece is None:
                view.fill(0)
            elif isinstance(piece, SparseRows):
                _write_rows(view, piece)
            else:
                targets.append(view)
                dense.append(piece)
        move_parts(targets, dense)

    def _in_graph(
        self, gradients: Sequence[Any], dtype: np.dtype[Any], most: float | None
    ) -> tf.Tensor:
        if tf.inside_function():
            return _clipped(concat(gradients, self._layout, dtype), most)
        graph = next(_parts(g)[0].graph for g in gradients if _is_of_graph(g))
        # Otherwise each call in a loop around a session would add operations to the graph.
        names = tuple(_names(gradient) for gradient in gradients)
        key = (graph, names, dtype, most)
        built = self._built.get(key) if None not in names else None
        if built is None:
            symbolic = [part for g in gradients for part in _parts(g) if is_symbolic(part)]
            # Nothing outside of a branch or loop of TF1 can take a tensor of it.
            is_inside = any(part.op._get_control_flow_context() for part in symbolic)
            call = "flatten its gradients"
            with graph.as_default() if is_inside else isolated(graph, call):
                built = _clipped(concat(gradients, self._layout, dtype), most)
            if None not in names and not is_inside:
                self._built[key] = built
        return built


def trained_positions(variables: Iterable[Any], states: Collection[int]) -> list[int]:
    """Return the positions of the trainable ``variables``.

    Keras calls some that optimizers hold trainable, too, and `tf_keras` the states of recurrent
    layers. No step trains those at the positions ``states``.
    """
    return [i for i, variable in enumerate(variables) if variable.trainable and i not in states]


def concat(gradients: Sequence[Any], layout: Layout, dtype: np.dtype[Any]) -> tf.Tensor:
    """Return the op that concatenates one gradient, or None, per slot to a vector of ``dtype``.

    Raises:
        ValueError: If a static shape differs from that of the slot.
        TypeError: If a dtype cannot be cast.
    """
    target = tf.as_dtype(dtype)
    pieces = []
    for i, (gradient, slot) in enumerate(zip(gradients, layout.slots, strict=True)):
        if gradient is None:
            pieces.append(tf.zeros([slot.size], target))
            continue
        tensor = _dense(gradient, slot, i)
        if not is_settable(np.dtype(tensor.dtype.as_numpy_dtype), dtype):
            raise TypeError(f"{place_of(i, slot)}: expected {dtype}, got {tensor.dtype.name}")
        if not tensor.shape.is_compatible_with(slot.shape):
            raise ValueError(f"{place_of(i, slot)}: expected {slot.shape}, got {tensor.shape}")
        pieces.append(_cast(tf.reshape(tensor, [slot.size]), target, place_of(i, slot)))
    return tf.concat(pieces, axis=0) if pieces else tf.zeros([0], target)


def _dense(gradient: Any, slot: Slot, i: int) -> tf.Tensor:
    if not isinstance(gradient, _SLICES):
        return tf.convert_to_tensor(gradient)
    values = tf.convert_to_tensor(gradient.values)
    if not slot.shape or not values.shape[1:].is_compatible_with(slot.shape[1:]):
        raise ValueError(
            f"{place_of(i, slot)}: expected rows of {slot.shape}, got rows {values.shape}"
        )
    known = None if gradient.dense_shape is None else tf.get_static_value(gradient.dense_shape)
    if known is not None and (shape := tuple(np.asarray(known).tolist())) != slot.shape:
        raise ValueError(f"{place_of(i, slot)}: expected {slot.shape}, got {shape}")
    wide = _dtype_of_sums(np.dtype(values.dtype.as_numpy_dtype))
    rows, indices = slot.shape[0], tf.convert_to_tensor(gradient.indices)
    # On a CPU, the sum raises for indices that are too large, but leaves out negative ones.
    indices = tf.where(indices < 0, tf.cast(rows, indices.dtype), indices)
    return tf.math.unsorted_segment_sum(tf.cast(values, wide), indices, rows)


def _cast(tensor: tf.Tensor, target: tf.DType, where: str) -> tf.Tensor:
    """Return the op that casts as `cast_for_slot` does; for integers, it rounds and checks."""
    source = tensor.dtype
    if source == target or not (target.is_integer or target.is_bool):
        return tf.cast(tensor, target)
    # Not by a cast there and back: a wrong sign, or infinity as the least integer, returns.
    low, high = (0, 1) if target.is_bool else (int(target.min), int(target.max))
    if source.is_floating:
        rounded = tf.round(tf.cast(tensor, tf.float64))
        fits = (rounded >= float(low)) & (rounded < float(high + 1))  # float(high) may be larger
        # TensorFlow casts no floats to int4.
        values = tf.cast(rounded, tf.uint64 if target == tf.uint64 else tf.int64)
    else:
        wide = tf.uint64 if source == tf.uint64 else tf.int64
        values = tf.cast(tensor, wide)
        fits = (values >= max(low, int(wide.min))) & (values <= min(high, int(wide.max)))
    message = f"{where}: expected values that fit {target.name}, got some that do not"
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(fits), [message])]):
        return tf.cast(tf.identity(values), target)  # tf.cast alone may add no op


def _piece(
    gradient: Any, layout: Layout, i: int, dtype: np.dtype[Any]
) -> NDArray[Any] | SparseRows | None:
    """Return the ``gradient`` of slot ``i`` after checking that a vector of ``dtype`` holds it."""
    if gradient is None:
        return None
    if isinstance(gradient, _SLICES):
        rows = _checked_rows(gradient, layout.slots[i], dtype, i)
        if not is_integer(dtype):
            return rows
        gradient = np.empty(layout.slots[i].shape, _dtype_of_sums(rows.values.dtype))
        _write_rows(gradient, rows)
    return cast_for_slot(layout, i, gradient, dtype)


def _checked_rows(slices: Any, slot: Slot, dtype: np.dtype[Any], i: int) -> SparseRows:
    shape, where = slot.shape, place_of(i, slot)
    rows = SparseRows(as_array(slices.values, where), as_array(slices.indices, f"{where}, indices"))
    expected = (len(rows.indices), *shape[1:]) if rows.indices.ndim == 1 else None
    dense_shape: tuple[int, ...] = ()
    if slices.dense_shape is not None:
        dense_shape = tuple(as_array(slices.dense_shape, f"{where}, dense_shape").tolist())
    if not shape or rows.values.shape != expected or dense_shape not in ((), shape):
        raise ValueError(
            f"{where}: expected rows of {dtype} {shape}, got {rows.values.dtype} "
            f"{rows.values.shape} at indices {rows.indices.shape} of {dense_shape or 'unknown'}"
        )
    if not is_settable(rows.values.dtype, dtype):
        raise TypeError(f"{where}: expected {dtype} {shape}, got {rows.values.dtype}")
    if rows.indices.dtype.kind not in "iu":
        raise TypeError(f"{where}, indices: expected integers, got {rows.indices.dtype}")
    if rows.indices.size and not (rows.indices.min() >= 0 and rows.indices.max() < shape[0]):
        raise ValueError(
            f"{where}: expected indices from 0 to {shape[0] - 1}, got some from "
            f"{rows.indices.min()} to {rows.indices.max()}"
        )
    return rows


def _write_rows(view: NDArray[Any], rows: SparseRows) -> None:
    """Write the sums of ``rows`` to ``view``, and zeros elsewhere."""
    view.fill(0)
    if not rows.indices.size:
        return
    with eagerly():
        # Allocates only rows that occur: they may be a small part of a table.
        distinct, which = tf.unique(rows.indices)
        values = tf.cast(rows.values, _dtype_of_sums(rows.values.dtype))
        sums = tf.math.unsorted_segment_sum(values, which, distinct.shape[0])
    with np.errstate(all="ignore"):
        view[np.asarray(distinct)] = np.asarray(sums)


def _dtype_of_sums(dtype: np.dtype[Any]) -> np.dtype[Any]:
    # A 16-bit sum of many small numbers stops growing.
    return promote([dtype, np.dtype(np.float32)]) or dtype


def _checked_norm(clip_norm: float, dtype: np.dtype[Any]) -> float:
    if not is_averaged(dtype):
        raise TypeError(f"clip_norm: expected a vector of a floating dtype, got {dtype}")
    most = finite(clip_norm, "clip_norm")
    if most < 0:
        raise ValueError(f"clip_norm: expected a number that is not negative, got {clip_norm!r}")
    return most


def _clip(flat: NDArray[Any], most: float | None) -> NDArray[Any]:
    try:
        if most is not None:
            clip_by_norm_(flat, most)
    except ValueError:  # the norm is not finite; everything else is checked
        flat.fill(np.nan)
    return flat


def _clipped(flat: tf.Tensor, most: float | None) -> tf.Tensor:
    """Return the op that scales ``flat`` as `_clip` does."""
    if most is None:
        return flat
    # For float16, the sum of squares overflows at a norm of 256.
    wide = tf.cast(flat, tf.float32) if flat.dtype.size < 4 else flat
    parts = [tf.math.real(wide), tf.math.imag(wide)] if wide.dtype.is_complex else [wide]
    norm = tf.linalg.global_norm(parts)
    # Squares overflow from 1e19 on in float32, or vanish: then in units of the largest element.
    largest = tf.reduce_max([tf.reduce_max(tf.abs(part)) for part in parts])
    is_plain = (tf.math.is_finite(norm) & (norm > 0)) | ~(largest > 0)
    unit = tf.where(is_plain, tf.ones_like(largest), largest)
    parts = [part / unit for part in parts]
    scaled = tf.complex(*parts) if wide.dtype.is_complex else parts[0]
    norm = tf.linalg.global_norm(parts)
    # Unlike in `tf.clip_by_global_norm`, nothing changes if the norm is 0 or equals the bound.
    bound = tf.constant(min(most, float(norm.dtype.max)), norm.dtype)
    clipped = tf.where(norm > bound / unit, scaled * tf.cast(bound / norm, wide.dtype), wide)
    clipped = tf.where(tf.math.is_finite(norm), clipped, tf.cast(float("nan"), wide.dtype))
    return tf.cast(clipped, flat.dtype)


def _is_pair(item: Any) -> bool:
    return isinstance(item, (tuple, list)) and len(item) == 2 and is_variable(item[1])


def _parts(gradient: Any) -> tuple[Any, ...]:
    """Return the tensors that ``gradient`` consists of."""
    is_sliced = isinstance(gradient, _SLICES)
    return (gradient.values, gradient.indices) if is_sliced else (gradient,)


def _is_of_graph(gradient: Any) -> bool:
    if gradient is None or type(gradient) in _IN_MEMORY:
        return False
    return any(is_symbolic(part) for part in _parts(gradient))


def _names(gradient: Any) -> tuple[str, ...] | None:
    """Return the names of ``gradient`` in its graph; None for a value in memory."""
    if gradient is None:
        return ()
    parts = _parts(gradient)
    return tuple(part.name for part in parts) if all(map(is_symbolic, parts)) else None
