"""The variables of a Keras model or layer, of Keras 3 or `tf_keras`, named by its structure."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flatweights.tensorflow._kinds import (
    KeyPath,
    inner_variable,
    is_layer_of_keras_2,
    is_of_keras_3,
    is_sequential_or_functional,
    is_variable,
    key_texts,
    last_name,
)


def layer_variables(
    layer: Any, layers: Sequence[tuple[KeyPath, Any]], bare: Mapping[int, KeyPath]
) -> Iterator[tuple[KeyPath, Any, bool]]:
    """Yield path, variable, and whether it is trained, in Keras's order.

    The states of stateful recurrent layers follow at the end, since Keras does not list them among
    its variables. Keras does list lookup tables of `tf_keras`, but they hold no numbers that could
    be moved, and are left out. So are variables without a fixed shape in its preprocessing layers,
    which compute with constants instead.

    Args:
        layer: A model or layer that is built.
        layers: Its `layers_by_path`, the first of which is ``layer``.
        bare: By identity, paths of bare variables in attributes and modules, which `tf_keras`
            treats as weights.

    Raises:
        ValueError: If ``layer``, or a layer in it, is not built.
    """
    unbuilt = [sub.name for sub in layer._flatten_layers() if not _is_complete(sub)]
    if unbuilt:
        raise ValueError(
            f"{type(layer).__name__} {layer.name!r} is not built, so some of its variables do not "
            f"exist: call build() or call it on data first (unbuilt: {', '.join(unbuilt)})"
        )
    paths: dict[int, KeyPath] = {}
    summaries = {
        id(variable)
        for _, sub in layers
        if ".layers.preprocessing." in type(sub).__module__ and is_layer_of_keras_2(sub)
        for variable in filter(is_variable, sub.variables)
        if not variable.shape.is_fully_defined()
    }
    path, _ = layers[0]
    for where, sub in layers:
        for name, variable in _own_variables(sub):
            # A variable that several layers share keeps the first of its names.
            paths.setdefault(id(variable), (*where, *name))
    # Variables in frozen layers of `tf_keras` still say that they are trainable.
    trained = {id(inner_variable(variable)) for variable in layer.trainable_variables}
    for variable in filter(is_variable, layer.variables):
        if id(variable) in summaries:
            continue
        where = paths.get(id(variable)) or bare.get(id(variable), (*path, last_name(variable)))
        yield where, variable, id(inner_variable(variable)) in trained
    for where, sub in layers:
        for step, state in leaves(states_of(sub), ("states",)):
            if is_variable(state):
                yield (*where, *step), state, False


def states_of(layer: Any) -> Any:
    """Return the states that a recurrent layer keeps between calls, nested; else an empty list."""
    if not (getattr(layer, "stateful", False) and hasattr(layer, "cell")):
        return []
    # Not its property: that of a bidirectional layer returns the states of two other layers.
    held = vars(layer)
    return held.get("states", held.get("_states", []))


def _is_complete(layer: Any) -> bool:
    """Whether all variables of a layer exist: it is built, or its class has none to build."""
    if layer.built:
        return True
    # Layers such as lookups, called by other layers, are never built and have nothing to build.
    kind: Any = type(layer)
    base: Any = next(each for each in reversed(kind.__mro__) if each.__name__ == "Layer")
    return (
        kind.__module__.startswith(("keras.", "tf_keras."))
        and kind.build is base.build
        # Attention layers of `tf_keras` are built when they are called.
        and not hasattr(layer, "_build_from_signature")
    )


def layers_by_path(layer: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield path and layer, once each, for ``layer`` and all layers in it."""
    entered: set[int] = set()

    def walk(current: Any, where: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
        if id(current) in entered:  # shared: it keeps the first of its names
            return
        entered.add(id(current))
        yield where, current
        for step, sub in _sublayers(current):
            yield from walk(sub, (*where, *step))

    return walk(layer, path)


def leaves(held: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the items in ``held``, through nested mappings, lists and tuples.

    A mapping that cannot be read is an item itself. What cannot say its class is left out.
    """
    none: frozenset[int] = frozenset()
    pending = [(path, held, none)]  # a list may be nested more deeply than calls may be
    while pending:
        where, value, within = pending.pop()
        try:
            value.__class__  # noqa: B018
        except Exception:  # a dead `weakref.proxy`, for example
            continue
        items = _items(value)
        if items is None:
            yield where, value
        elif id(value) not in within:
            inner = within | {id(value)}
            pending += [((*where, step), item, inner) for step, item in reversed(items)]


def _items(value: Any) -> list[tuple[str, Any]] | None:
    """Return what is in a mapping, list or tuple, with its name; None for anything else."""
    if isinstance(value, (list, tuple)):
        return [(str(i), item) for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return None
    try:
        items = list(value.items())
    except Exception:  # a closed file, for example
        return None
    return [*zip(key_texts(key for key, _ in items), (item for _, item in items), strict=True)]


def _own_variables(layer: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield path and variable for the layer's own; nameless ones take their attribute's name."""
    if is_of_keras_3(layer, "layers.TFSMLayer"):
        # They have the names, with the counters, of the process that exported the model.
        for kind in ("trainable_variables", "non_trainable_variables"):
            for i, variable in enumerate(getattr(layer, f"_{kind}")):
                yield (kind, str(i)), variable
        return
    if is_layer_of_keras_2(layer):
        own = [*layer._trainable_weights, *layer._non_trainable_weights]
        own = list(filter(is_variable, own))
    else:
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        own += [generator.state for generator in layer._seed_generators]
    names = [last_name(variable) for variable in own]
    nameless = {name for name in names if name.lower() == "variable"}
    attributes = _attributes_of(layer) if nameless else {}
    for name, variable in zip(names, own, strict=True):
        yield attributes.get(id(variable), (name,)) if name in nameless else (name,), variable


def _sublayers(layer: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield path and layer for each direct sublayer of ``layer``.

    The path is class and count in Sequential and functional models, elsewhere the attribute.
    Layers with a name of their own keep it; automatic numbers are counted anew.
    """
    attributes = {} if is_sequential_or_functional(layer) else _attributes_of(layer)
    counts: Counter[str] = Counter()
    for sublayer in layer._flatten_layers(recursive=False, include_self=False):
        automatic, name = _automatic_name(sublayer), sublayer.name
        if re.fullmatch(rf"{re.escape(automatic)}(_\d+)?", name):
            name = f"{automatic}_{counts[automatic]}" if counts[automatic] else automatic
            counts[automatic] += 1
        yield attributes.get(id(sublayer), (name,)), sublayer


def _automatic_name(layer: Any) -> str:
    """Return Keras's automatic name for a layer of this class (``conv2d``), without its number."""
    name = re.sub(r"\W+", "", type(layer).__name__)
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    name = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    if is_layer_of_keras_2(layer):
        if name == "functional":
            return "model"
        return f"private{name}" if name.startswith("_") else name
    return name


def _attributes_of(layer: Any) -> dict[int, KeyPath]:
    """Return the path of each item that ``layer`` holds in attributes, by identity."""
    # Skip the lists in which Keras and TensorFlow track objects of other attributes.
    attributes = [
        (name, held)
        for name, held in vars(layer).items()
        if name not in _LISTS_OF_KERAS and not name.startswith(("_self_", "_obj_"))
    ]
    paths: dict[int, KeyPath] = {}
    # A public attribute names a layer in preference to a private one.
    for name, held in sorted(attributes, key=lambda item: item[0].startswith("_")):
        for path, item in leaves(held, (name.lstrip("_"),)):
            paths.setdefault(id(item), path)
    return paths


_LISTS_OF_KERAS = frozenset(
    {
        *("_layers", "_callable_losses", "_trainable_variables", "_non_trainable_variables"),
        *("_trainable_weights", "_non_trainable_weights"),
    }
)
