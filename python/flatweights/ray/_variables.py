"""`Variables`: the protocol of objects that hold a model's weights for workers and members."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flatweights import _core
from flatweights._core import move_parts
from flatweights._flatten import flatten
from flatweights._layout import Layout, cast_for_slot
from flatweights._match import match_slots
from flatweights._trees import as_vector
from flatweights._weights import FlatWeights

Memory: TypeAlias = NDArray[np.uint8] | _core.DeviceWindow | _core.PeerDeviceWindow
"""Packed weights, in memory of the host or in a window of a GPU."""


@runtime_checkable
class Variables(Protocol):
    """An object that holds the weights of a model, of any framework.

    `FlatWorker.build` may return one, and `Member.average_variables` averages one in place.
    `flatweights.tensorflow.TensorFlowVariables` is one. Your own class needs these three members
    and no base class:

    >>> import flatweights
    >>> class Holder:
    ...     def __init__(self, arrays):
    ...         self.arrays = arrays
    ...         self.layout = flatweights.Layout.of(arrays)
    ...     def gather_into(self, buffer):
    ...         for name, view in zip(self.arrays, self.layout.packed_views(buffer)):
    ...             view[...] = self.arrays[name]
    ...     def scatter(self, buffer):
    ...         for name, view in zip(self.arrays, self.layout.packed_views(buffer)):
    ...             self.arrays[name][...] = view
    >>> isinstance(Holder({"w": np.zeros(3)}), Variables)
    True

    A `FlatWorker` gets and sets weights by these three. If the object has its own
    ``get_weights()``, ``set_weights(weights, share=)``, ``get_flat()`` or
    ``set_flat(vector, share=)``, as `flatweights.tensorflow.TensorFlowVariables` has, the worker
    calls that method instead.

    If the object has an attribute ``seed_names`` that is not empty, as that class has for models
    with Dropout, averages and published weights are set with ``seeds=False``: by
    ``scatter(buffer, seeds=False)``, and in a `FlatWorker` also by ``set_weights`` and
    ``set_flat``. The states of random numbers then stay each process's own. The ``state`` that
    heals a `Member` is set by ``scatter(buffer)``.
    """

    @property
    def layout(self) -> Layout:
        """The layout of the variables: the same in every process that builds the same model."""

    def gather_into(self, buffer: NDArray[np.uint8]) -> None:
        """Read all variables into a packed ``buffer``, whose padding is zero."""

    def scatter(self, buffer: NDArray[np.uint8]) -> None:
        """Set all variables from a packed ``buffer``, which may be read-only.

        The buffer is valid only during the call: copy its values.
        """


def text_of(value: Any) -> str:
    """Return how errors name ``value``, which is no `Variables`: its type, and members it lacks."""
    name = type(value).__name__
    arrays = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(arrays, (list, tuple)):
        is_of_arrays = bool(arrays) and all(isinstance(array, np.ndarray) for array in arrays)
        return f"a {name} of NumPy arrays" if is_of_arrays else f"a {name}"
    members = ("layout", "gather_into", "scatter")
    lacking = [member for member in members if not hasattr(value, member)]
    return name if len(lacking) == len(members) else f"{name}, which lacks {', '.join(lacking)}"


def get_weights(variables: Variables) -> FlatWeights:
    """Return the weights of ``variables`` by name."""
    own = getattr(variables, "get_weights", None)
    if own is not None:
        weights: FlatWeights = own()
        return weights
    return _gathered(variables)


def get_flat(variables: Variables) -> NDArray[Any]:
    """Return the weights of ``variables`` as one vector."""
    own = getattr(variables, "get_flat", None)
    vector: NDArray[Any] = flatten(_gathered(variables)) if own is None else own()
    return vector


def set_weights(
    variables: Variables, new_weights: Mapping[str, ArrayLike], *, share: bool = False
) -> None:
    """Set ``variables`` by name, as `flatweights.tensorflow.TensorFlowVariables.set_weights`."""
    own = getattr(variables, "set_weights", None)
    if own is not None:
        own(new_weights, share=share, **_without_seeds(variables))
        return
    _refuse_sharing(variables, share)
    layout = variables.layout
    if isinstance(new_weights, FlatWeights) and new_weights.layout == layout:
        scatter(variables, new_weights.buffer)
        return
    keys = match_slots(new_weights, layout)
    _scatter(variables, {i: cast_for_slot(layout, i, new_weights[key]) for i, key in keys.items()})


def set_flat(variables: Variables, new_weights: ArrayLike, *, share: bool = False) -> None:
    """Set all ``variables`` from one vector."""
    own = getattr(variables, "set_flat", None)
    if own is not None:
        own(new_weights, share=share, **_without_seeds(variables))
        return
    _refuse_sharing(variables, share)
    layout = variables.layout
    flat = as_vector(new_weights, layout.size, "new_weights")
    views = layout.vector_views(np.ascontiguousarray(flat))
    _scatter(variables, {i: cast_for_slot(layout, i, view) for i, view in enumerate(views)})


def scatter(variables: Any, memory: Memory) -> None:
    """Set ``variables`` from packed weights, except states of seed generators."""
    move = variables.scatter if isinstance(memory, np.ndarray) else variables.scatter_window
    move(memory, **_without_seeds(variables))


def _without_seeds(variables: Variables) -> dict[str, bool]:
    return {"seeds": False} if getattr(variables, "seed_names", ()) else {}


def _gathered(variables: Variables) -> FlatWeights:
    weights = FlatWeights.empty(variables.layout)
    variables.gather_into(weights.buffer)
    return weights


def _scatter(variables: Variables, values: Mapping[int, NDArray[Any]]) -> None:
    """Set the variables at some positions of the layout; the others keep their values."""
    layout = variables.layout
    buffer = layout.new_buffer()
    if len(values) < len(layout):
        variables.gather_into(buffer)
    views = layout.packed_views(buffer)
    move_parts([views[i] for i in values], list(values.values()))
    scatter(variables, buffer)


def _refuse_sharing(variables: Variables, share: bool) -> None:
    if share:
        raise TypeError(
            f"share: expected False, got {share!r}: {type(variables).__name__} copies the weights "
            "that it is set to"
        )
