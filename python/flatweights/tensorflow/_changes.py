"""Finds out whether layers of Keras have got other variables since they were found."""

from collections.abc import Iterable, Mapping
from typing import Any

from flatweights.tensorflow._kinds import inner_variable, is_layer_of_keras_2, is_sequential


class Changes:
    """The lists in which layers hold their variables and their layers, and what was in them.

    In Keras 3, ``quantize`` replaces variables, ``enable_lora`` adds some: both change the length
    of a list, and a comparison of lengths costs next to nothing. A `Sequential` drops layers by
    ``pop`` and gets others by ``add``.
    """

    def __init__(self, layers: Iterable[Any], variables: Mapping[str, Any]) -> None:
        """Watch ``layers``; ``variables`` are those that were found, by name."""
        layers = [*layers]
        self._sequences = [_Sequence(layer) for layer in layers if is_sequential(layer)]
        self._lists = [
            held
            for layer in layers
            if not is_layer_of_keras_2(layer)
            for held in (layer._trainable_variables, layer._non_trainable_variables)
        ]
        self._lengths = [*map(len, self._lists)]
        self._held = self._variables()
        self._names = {id(inner_variable(one)): name for name, one in variables.items()}

    def check(self) -> None:
        """Raise if a layer no longer has a variable that was found, or has got another one.

        Raises:
            RuntimeError: If so.
        """
        is_same = self._lengths == [*map(len, self._lists)]
        for sequence in self._sequences:
            is_same &= sequence.is_same()
        if is_same:
            return
        held = self._variables()
        gone = [
            f"lacks {self._names.get(i, _name_of(one))!r}"
            for i, one in self._held.items()
            if i not in held
        ]
        new = [f"has got {_name_of(one)!r}" for i, one in held.items() if i not in self._held]
        if not (gone or new):  # but for layers without variables
            return
        raise RuntimeError(
            "expected a model with the variables that it had when TensorFlowVariables was made, "
            f"got one that {' and '.join([*gone[:1], *new[:1]])}: after quantize(), enable_lora(), "
            "or pop() and add() of a Sequential, make a new TensorFlowVariables"
        )

    def _variables(self) -> dict[int, Any]:
        """Return the variables that layers hold, by the identity of the `tf.Variable` inside."""
        found = {id(inner_variable(one)): one for held in self._lists for one in held}
        for sequence in self._sequences:
            for variable in _variables_in(sequence.before):
                found.pop(id(inner_variable(variable)), None)
        for sequence in self._sequences:
            found |= {id(inner_variable(one)): one for one in _variables_in(sequence.now)}
        return found


class _Sequence:
    """The list in which a `Sequential` holds its layers.

    Attributes:
        before: What was in it.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._name = "_self_tracked_trackables" if is_layer_of_keras_2(layer) else "_layers"
        self.before = [*self.now]

    @property
    def now(self) -> list[Any]:
        """What is in it."""
        held: list[Any] = getattr(self._layer, self._name)
        return held

    def is_same(self) -> bool:
        same: bool = getattr(self._layer, self._name) == self.before  # layers, by identity
        return same


def _variables_in(layers: Iterable[Any]) -> list[Any]:
    # A `Sequential` of `tf_keras` has modules, and lists of layers, from its attributes, too.
    built = [layer for layer in layers if getattr(layer, "built", False)]
    return [variable for layer in built for variable in layer.variables]


def _name_of(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name))
