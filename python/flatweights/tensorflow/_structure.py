"""The variables that an eager model holds, named by where it holds them."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from flatweights.tensorflow._names import layer_names

Path = tuple[str, ...]


class Found(NamedTuple):
    """A variable and where it was found.

    Attributes:
        path: Attribute names, keys and positions that lead to it, then its own name.
        given: The variable as the model holds it: a `tf.Variable` or a Keras variable.
        variable: The `tf.Variable` itself.
    """

    path: Path
    given: Any
    variable: tf.Variable


def find_variables(output: Any) -> list[Found]:
    """Return each variable that ``output`` holds, once, in order.

    Args:
        output: A variable, a Keras 3 model or layer, a `tf.Module`, or any nesting of
            these in lists, tuples and mappings. None holds nothing.

    Raises:
        TypeError: If it holds anything else.
        ValueError: If a model or a layer in it is not built.
    """
    seen: set[int] = set()
    found = []
    for path, given in _walk(output, (), set()):
        variable = inner_variable(given)
        if id(variable) not in seen:
            seen.add(id(variable))
            found.append(Found(path, given, variable))
    return found


def keras_type(name: str) -> tuple[type, ...]:
    """Return the class of this name of Keras 3, for `isinstance`; nothing if not imported."""
    keras = sys.modules.get("keras")
    kind = getattr(keras, name, None)
    return (kind,) if isinstance(kind, type) else ()


def is_variable(value: Any) -> bool:
    """Whether ``value`` is a `tf.Variable` or a Keras 3 variable."""
    return isinstance(value, (tf.Variable, *keras_type("Variable")))


def is_held_by_keras(value: Any) -> bool:
    """Whether ``value`` is a model or layer of Keras 3."""
    return isinstance(value, keras_type("Layer"))


def inner_variable(given: Any) -> tf.Variable:
    """Return the `tf.Variable` of a variable of TensorFlow or Keras 3.

    Raises:
        TypeError: If it is distributed over replicas, or kept by another backend of Keras.
        ValueError: If it has no value yet.
    """
    variable = given if isinstance(given, tf.Variable) else given._value
    if variable is None:
        raise ValueError(f"variable {own_name(given)!r} has no value yet: build the model first")
    if isinstance(variable, tf.distribute.DistributedValues):
        raise TypeError(
            f"variable {own_name(given)!r} is distributed over replicas, which is not supported; "
            "pass strategy.experimental_local_results(variable)[0]"
        )
    if not isinstance(variable, tf.Variable):
        raise TypeError(
            f"variable {own_name(given)!r}: expected a variable of TensorFlow, got "
            f"{type(variable).__name__}: Keras runs on another backend"
        )
    return variable


def own_name(given: Any) -> str:
    """Return the name that a variable was given, without TensorFlow's output number."""
    return str(given.name).partition(":")[0]


def _walk(value: Any, path: Path, entered: set[int]) -> Iterator[tuple[Path, Any]]:
    if value is None:
        return
    if is_variable(value):
        yield (*path, own_name(value)), value
    elif is_held_by_keras(value):
        yield from _walk_layer(value, path)
    elif _is_keras_2(value) or isinstance(value, keras_type("Optimizer")):
        raise TypeError(
            f"{type(value).__module__}.{type(value).__name__} is not supported: "
            "pass its list of variables instead"
        )
    elif isinstance(value, tf.Module):
        if id(value) not in entered:
            entered.add(id(value))
            yield from _walk_module(value, path, entered)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            # The key is the whole name of a variable, and a prefix for all else.
            if is_variable(item):
                yield (*path, str(key)), item
            else:
                yield from _walk(item, (*path, str(key)), entered)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for i, item in enumerate(value):
            # Variables in a list keep their names; so does the only thing in a list.
            prefix = () if is_variable(item) or len(value) == 1 else (str(i),)
            yield from _walk(item, (*path, *prefix), entered)
    else:
        raise TypeError(
            "expected operations or tensors of a graph, variables, Keras 3 models or layers, "
            f"tf.Modules, or a nesting of these, got {type(value).__name__}"
        )


def _is_keras_2(value: Any) -> bool:
    # tf_keras, and the Keras that TensorFlow still carries for its own use.
    modules = {kind.__module__ for kind in type(value).__mro__}
    return any(m.startswith(("tf_keras.", "tensorflow.python.keras.")) for m in modules)


def _walk_module(module: tf.Module, path: Path, entered: set[int]) -> Iterator[tuple[Path, Any]]:
    """Walk the attributes of a module in the order of their names, as `tf.Module` does."""
    ignored = module._TF_MODULE_IGNORED_PROPERTIES
    for attribute, held in sorted(vars(module).items()):
        if attribute not in ignored:
            yield from _walk_held(held, (*path, attribute.lstrip("_")), entered)


def _walk_held(held: Any, path: Path, entered: set[int]) -> Iterator[tuple[Path, Any]]:
    """Walk what an attribute holds, passing over all that holds no variables."""
    if is_variable(held):
        yield path, held
    elif isinstance(held, tf.Module) or is_held_by_keras(held):
        yield from _walk(held, path, entered)
    elif isinstance(held, Mapping):
        for key, item in held.items():
            yield from _walk_held(item, (*path, str(key)), entered)
    elif isinstance(held, (list, tuple)):
        for i, item in enumerate(held):
            yield from _walk_held(item, (*path, str(i)), entered)


def _walk_layer(layer: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the variables of a Keras 3 layer in Keras's order, named by structure."""
    unbuilt = [sub.name for sub in layer._flatten_layers() if not sub.built]
    if unbuilt:
        raise ValueError(
            f"{type(layer).__name__} {layer.name!r} is not built, so it has not all of its "
            f"variables: call build() or call it on data first (unbuilt: {', '.join(unbuilt)})"
        )
    paths = {id(variable): where for where, variable in _layer_paths(layer, path, set())}
    for variable in layer.variables:
        yield paths.get(id(variable), (*path, own_name(variable))), variable


def _layer_paths(layer: Any, path: Path, entered: set[int]) -> Iterator[tuple[Path, Any]]:
    if id(layer) in entered:  # shared: it keeps the first of its names
        return
    entered.add(id(layer))
    own = [*layer._trainable_variables, *layer._non_trainable_variables]
    own += [generator.state for generator in layer._seed_generators]
    for variable in own:
        yield (*path, own_name(variable)), variable
    for where, sublayer in _sublayers(layer):
        yield from _layer_paths(sublayer, (*path, *where), entered)


def _sublayers(layer: Any) -> Iterator[tuple[Path, Any]]:
    """Yield each layer directly within ``layer`` and where it is held.

    In Sequential and functional models that is class and count; elsewhere the attribute.
    """
    sublayers = layer._layers
    names = layer_names([(type(sub).__name__, sub.name) for sub in sublayers])
    is_container = isinstance(layer, keras_type("Sequential")) or hasattr(layer, "_operations")
    attributes = {} if is_container else _attributes_of(layer)
    for name, sublayer in zip(names, sublayers, strict=True):
        yield attributes.get(id(sublayer), (name,)), sublayer


def _attributes_of(layer: Any) -> dict[int, Path]:
    """Return the attribute, and the position within it, that holds each layer in ``layer``."""
    found: dict[int, Path] = {}

    def note(held: Any, path: Path) -> None:
        if is_held_by_keras(held):
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
        if name != "_layers" and not name.startswith("_self_")
    ]
    # A public attribute names a layer in preference to a private one.
    for name, held in sorted(attributes, key=lambda item: item[0].startswith("_")):
        note(held, (name.lstrip("_"),))
    return found
