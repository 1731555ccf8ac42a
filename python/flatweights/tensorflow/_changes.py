"""Finds out whether layers of Keras 3 have got other variables since they were found."""

from collections.abc import Iterable, Mapping
from typing import Any

from flatweights.tensorflow._kinds import inner_variable, is_layer_of_keras_2


class Changes:
    """The lists in which layers hold their variables, and what was in them.

    ``quantize`` replaces variables, ``enable_lora`` adds some: both change the length of a list,
    and a comparison of lengths costs next to nothing.
    """

    def __init__(self, layers: Iterable[Any], variables: Mapping[str, Any]) -> None:
        """Watch ``layers``; ``variables`` are those that were found, by name."""
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
        lengths = [*map(len, self._lists)]
        if lengths == self._lengths:
            return
        held = self._variables()
        gone = [
            f"lacks {self._names.get(i, one.path)!r}"
            for i, one in self._held.items()
            if i not in held
        ]
        new = [f"has got {one.path!r}" for i, one in held.items() if i not in self._held]
        raise RuntimeError(
            "expected a model with the variables that it had when TensorFlowVariables was made, "
            f"got one that {' and '.join([*gone[:1], *new[:1]])}: after quantize() or "
            "enable_lora(), make a new TensorFlowVariables"
        )

    def _variables(self) -> dict[int, Any]:
        """Return the variables in the lists, by the identity of the `tf.Variable` inside."""
        return {id(inner_variable(one)): one for held in self._lists for one in held}
