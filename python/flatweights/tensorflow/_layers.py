"""The variables of a Keras model or layer, of Keras 3 or `tf_keras`, named by its structure."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from flatweights.tensorflow._kinds import (
    Path,
    inner_variable,
    is_layer,
    is_layer_of_keras_2,
    is_sequential_or_functional,
    last_name,
)
from flatweights.tensorflow._names import layer_names


def layer_variables(layer: Any, path: Path) -> Iterator[tuple[Path, Any, bool]]:
    """Yield path, variable, and whether it is trained, in Keras's order.

    Args:
        layer: A model or layer that is built.
        path: What leads to it.

    Raises:
        ValueError: If it, or a layer in it, is not built.
    """
    unbuilt = [sub.name for sub in all_layers(layer) if not sub.built]
    if unbuilt:
        raise ValueError(
            f"{type(layer).__name__} {layer.name!r} is not built, so it has not all of its "
            f"variables: call build() or call it on data first (unbuilt: {', '.join(unbuilt)})"
        )
    paths: dict[int, Path] = {}
    for where, sub in layers_by_path(layer, path):
        for name, variable in _own_variables(sub):
            # A variable that several layers share keeps the first of its names.
            paths.setdefault(id(variable), (*where, name))
    # Frozen layers of `tf_keras` do not tell their variables.
    trained = {id(inner_variable(variable)) for variable in layer.trainable_variables}
    for variable in layer.variables:
        where = paths.get(id(variable), (*path, last_name(variable)))
        yield where, variable, id(inner_variable(variable)) in trained


def all_layers(layer: Any) -> list[Any]:
    """Return ``layer`` and all layers in it."""
    return list(layer._flatten_layers())


def layers_by_path(layer: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield what leads to each layer, and the layer: ``layer`` and all in it, each once."""
    entered: set[int] = set()

    def walk(current: Any, where: Path) -> Iterator[tuple[Path, Any]]:
        if id(current) in entered:  # shared: it keeps the first of its names
            return
        entered.add(id(current))
        yield where, current
        for step, sub in _sublayers(current):
            yield from walk(sub, (*where, *step))

    return walk(layer, path)


def _own_variables(layer: Any) -> Iterator[tuple[str, Any]]:
    if not is_layer_of_keras_2(layer):
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        own += [generator.state for generator in layer._seed_generators]
        yield from ((last_name(variable), variable) for variable in own)
        return
    # It takes bare variables in attributes for weights; few of them were given a name.
    attributes = {id(held): name.lstrip("_") for name, held in vars(layer).items()}
    for variable in (*layer._trainable_weights, *layer._non_trainable_weights):
        name = last_name(variable)
        is_nameless = re.fullmatch(r"Variable(_\d+)?", name)
        yield attributes.get(id(variable), name) if is_nameless else name, variable


def _sublayers(layer: Any) -> Iterator[tuple[Path, Any]]:
    """Yield each layer directly within ``layer`` and where it is held.

    In Sequential and functional models that is class and count; elsewhere the attribute.
    """
    sublayers = list(layer._flatten_layers(recursive=False, include_self=False))
    names = layer_names([(type(sub).__name__, sub.name) for sub in sublayers])
    attributes = {} if is_sequential_or_functional(layer) else _attributes_of(layer)
    for name, sublayer in zip(names, sublayers, strict=True):
        yield attributes.get(id(sublayer), (name,)), sublayer


def _attributes_of(layer: Any) -> dict[int, Path]:
    """Return the attribute, and the position within it, that holds each layer in ``layer``."""
    found: dict[int, Path] = {}

    def note(held: Any, path: Path) -> None:
        if is_layer(held):
            found.setdefault(id(held), path)
        elif isinstance(held, Mapping):
            for key, item in held.items():
                note(item, (*path, str(key)))
        elif isinstance(held, (list, tuple)):
            for i, item in enumerate(held):
                note(item, (*path, str(i)))

    # Keras and TensorFlow keep lists of what they track beside the attributes proper.
    attributes = [
        (name, held)
        for name, held in vars(layer).items()
        if name not in ("_layers", "_callable_losses") and not name.startswith("_self_")
    ]
    # A public attribute names a layer in preference to a private one.
    for name, held in sorted(attributes, key=lambda item: item[0].startswith("_")):
        note(held, (name.lstrip("_"),))
    return found
