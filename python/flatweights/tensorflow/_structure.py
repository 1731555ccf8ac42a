"""The variables that an eager model holds, named by their place in it."""

import functools
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import ProxyTypes

import tensorflow as tf

from flatweights.tensorflow._kinds import (
    KeyPath,
    inner_variable,
    is_layer,
    is_layer_of_keras_2,
    is_of_keras_3,
    is_optimizer,
    is_partitioned,
    is_variable,
    key_texts,
    own_name,
)
from flatweights.tensorflow._layers import layer_variables, layers_by_path, leaves, states_of
from flatweights.tensorflow._optimizers import optimizer_variables, owner_key

# Objects of these packages, and of Python's own, are searched for variables only if the user passes
# them directly.
_NO_HOLDERS = frozenset({"tensorflow", "keras", "tf_keras", "numpy", "ray", "flatweights"})
_HOLDERS = tf.__internal__.tracking.AutoTrackable, SimpleNamespace, Namespace
_STDLIB = Path(sysconfig.get_path("stdlib"))


_Item = tuple[KeyPath, Any, bool | None]
"""Path, variable, and whether it is trained; or path, optimizer, and None."""


class Held(NamedTuple):
    """A variable of a model, and where the model holds it.

    Attributes:
        path: Attribute names, keys and positions that lead to it, then its own name.
        wrapper: The variable as the model holds it: a `tf.Variable` or a Keras variable.
        variable: The `tf.Variable` itself.
        is_trained: Whether the model trains it.
        owner: The `owner_key` of the variable for which it is a slot of an optimizer; of TF1's
            optimizers in a graph, the graph and the name of this variable.
        is_state: Whether an optimizer in the model holds it, or a recurrent layer as its state: no
            step trains it, although `tf.Variable.trainable` may be true.
    """

    path: KeyPath
    wrapper: Any
    variable: tf.Variable
    is_trained: bool
    owner: Hashable = None
    is_state: bool = False


def find_variables(
    output: Any, beside: Iterable[Held] = (), layers: list[Any] | None = None
) -> list[Held]:
    """Return each variable that ``output`` holds, once, in order.

    Args:
        output: A variable, a model, layer or optimizer of Keras 3 or `tf_keras`, a
            `tf.Module`, an object with variables as attributes, or any nesting of these in
            lists, tuples and mappings. None holds nothing.
        beside: Variables that optimizers in ``output`` may have slots for.
        layers: Gets the layers that are entered.

    Raises:
        TypeError: If it holds anything else.
        ValueError: If a model, a layer or an optimizer in it is not built, or it has more levels
            than Python can nest calls.
    """
    entered = [] if layers is None else layers
    try:
        held = list(_Walk(entered).walk(output, ()))
    except RecursionError as error:
        raise ValueError("expected fewer levels of containers and layers, got too many") from error
    models = _once(held)
    # Slots are named after variables of models, which may come after their optimizer.
    owners = {owner_key(item.variable): item.path for item in (*beside, *models)}

    owned: dict[int, Hashable] = {}

    def expanded() -> Iterator[_Item]:
        for path, value, is_trained in held:
            if is_trained is not None:
                yield path, value, is_trained
                continue
            for where, variable, owner in optimizer_variables(value, path, owners):
                owned.setdefault(id(inner_variable(variable)), owner)
                yield where, variable, False

    found = _once(expanded())
    states = {
        id(inner_variable(state))
        for layer in entered
        for _, state in leaves(states_of(layer), ())
        if is_variable(state)
    }
    states |= owned.keys()
    return [
        item._replace(owner=owned.get(id(item.variable)), is_state=id(item.variable) in states)
        for item in found
    ]


def _once(items: Iterable[_Item]) -> list[Held]:
    """Return the variables of ``items``, once each, without the optimizers."""
    once: dict[int, Held] = {}
    for path, wrapper, is_trained in items:
        if is_trained is not None:
            variable = inner_variable(wrapper)
            once.setdefault(id(variable), Held(path, wrapper, variable, is_trained))
    return list(once.values())


class _Walk:
    """One walk through everything that the user passed; it enters each object once."""

    def __init__(self, layers: list[Any] | None = None) -> None:
        self._entered: set[int] = set()
        self._layers = [] if layers is None else layers

    def walk(
        self, value: Any, path: KeyPath, within: frozenset[int] = frozenset()
    ) -> Iterator[_Item]:
        """Yield each variable and optimizer that ``value`` holds, perhaps more than once.

        Args:
            value: Anything.
            path: Where it is.
            within: The identities of the containers around it, which are not entered again.
        """
        if value is None or id(value) in within:
            return
        if is_variable(value):
            yield from self._variable((*path, own_name(value)), value)
        elif isinstance(value, Mapping):
            for key, item in zip(key_texts(value), value.values(), strict=True):
                # The key is the whole name of a variable, but a prefix for anything else.
                if is_variable(item):
                    yield from self._variable((*path, key), item)
                else:
                    yield from self.walk(item, (*path, key), within | {id(value)})
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            for prefix, item in zip(_prefixes(value), value, strict=True):
                yield from self.walk(item, (*path, *prefix), within | {id(value)})
        elif self._is_holder(value) or _is_plain(value):
            yield from self._holder(value, path)
        else:
            # A Keras tensor refers to a layer, which is only a part of its model.
            hint = ": pass the model" if _is_symbolic_of_keras(value) else ""
            raise TypeError(
                "expected operations or tensors of a graph, variables, Keras models, layers or "
                "optimizers, tf.Modules, objects that hold variables, or a nesting of these, got "
                f"{type(value).__name__}{hint}"
            )

    def _variable(self, path: KeyPath, value: Any) -> Iterator[_Item]:
        if is_partitioned(value):
            for part in value:
                yield (*path, own_name(part)), part, bool(part.trainable)
        else:
            yield path, value, bool(value.trainable)

    @staticmethod
    def _is_holder(value: Any) -> bool:
        """Whether the walk looks for variables inside ``value``."""
        return (
            is_layer(value)
            or is_optimizer(value)
            or is_of_keras_3(value, "random.SeedGenerator")
            or isinstance(value, _HOLDERS)
            or (_is_plain(value) and _may_hold(type(value).__module__.partition(".")[0]))
        )

    def _holder(self, value: Any, path: KeyPath) -> Iterator[_Item]:
        pending = [(path, value)]  # a list of nodes may be longer than calls may be nested
        while pending:
            where, item = pending.pop()
            if is_variable(item):
                yield from self._variable(where, item)
            elif is_optimizer(item):
                yield where, item, None
            elif id(item) not in self._entered:
                self._entered.add(id(item))
                if is_layer(item):
                    yield from self._layer(item, where)
                    continue
                inside = [
                    leaf
                    for attribute, held in _attributes(item)
                    for leaf in leaves(held, (*where, attribute.lstrip("_")))
                    if is_variable(leaf[1]) or self._is_holder(leaf[1])
                ]
                pending += reversed(inside)

    def _layer(self, value: Any, path: KeyPath) -> Iterator[_Item]:
        layers = list(layers_by_path(value, path))
        bare = {
            id(variable): where
            for layer_path, layer in layers
            if is_layer_of_keras_2(layer)
            for where, variable, _ in _Walk()._bare(layer, layer_path)
        }
        yield from layer_variables(value, layers, bare)
        for layer_path, layer in layers:
            self._layers.append(layer)
            # Keras 3, unlike `tf_keras`, does not track these.
            if not is_layer_of_keras_2(layer):
                yield from self._bare(layer, layer_path)
            yield from self._in_objects(layer, layer_path)

    def _bare(self, layer: Any, path: KeyPath) -> Iterator[_Item]:
        """Walk the bare variables and the modules in the attributes of one layer."""
        for item_path, item in _held_by(layer, path):
            if isinstance(item, tf.Variable):
                yield from self._variable(item_path, item)
            elif isinstance(item, tf.Module) and not is_layer(item):
                yield from self._holder(item, item_path)

    def _in_objects(self, layer: Any, path: KeyPath) -> Iterator[_Item]:
        """Walk the objects in the attributes of one layer that Keras does not know.

        As in the layer's own attributes, optimizers are left out.
        """
        for item_path, item in _held_by(layer, path):
            if self._is_holder(item) and not _is_known_to_keras(item):
                for where, held, is_trained in self._holder(item, item_path):
                    if is_trained is not None:
                        yield where, held, is_trained


def _held_by(layer: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield what is in the attributes of ``layer``, except those that Keras sets itself."""
    for attribute, held in _by_name(layer):
        if not attribute.startswith(("_self_", "_obj_")) and attribute not in _OF_KERAS:
            yield from leaves(held, (*path, attribute.lstrip("_")))


def _is_known_to_keras(value: Any) -> bool:
    """Whether ``value`` is of a class of Keras or TensorFlow: a layer, a loss, a SavedModel."""
    packages = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    return not packages.isdisjoint(("keras", "tf_keras", "tensorflow"))


# Attributes of a layer or model that Keras sets itself.
_OF_KERAS = frozenset(
    {
        *("_layers", "_metrics", "_tracker", "_trainable_variables", "_non_trainable_variables"),
        *("_seed_generators", "optimizer", "_optimizer", "_compile_metrics", "_compile_loss"),
    }
)


def _prefixes(items: Sequence[Any]) -> list[KeyPath]:
    """Return the prefix of the names in each element of a list: usually its position.

    Variables get no prefix. Nor does the only element of a list, or the only model beside
    optimizers: so weights of ``[model, optimizer]`` can set the model alone.
    """
    optimizers = [is_optimizer(item) for item in items]
    alone = len(items) - sum(optimizers) == 1
    prefixes: list[KeyPath] = []
    for i, item in enumerate(items):
        if is_variable(item) or len(items) == 1 or (alone and not optimizers[i]):
            prefixes.append(())
        elif alone and sum(optimizers) == 1:
            prefixes.append(("optimizer",))
        else:
            prefixes.append((str(i),))
    return prefixes


def _by_name(holder: Any) -> list[tuple[str, Any]]:
    try:
        attributes = dict(holder.__dict__)
    except Exception:  # it has none, and its own `__getattr__` may raise anything
        attributes = {}
    for kind in type(holder).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            slot = vars(kind).get(name)
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # it is not set
                    attributes.setdefault(name, slot.__get__(holder))
    return sorted(attributes.items(), key=lambda item: item[0])


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    """Return the attributes of a module in `tf.Module`'s order, else public ones first."""
    if isinstance(holder, tf.__internal__.tracking.AutoTrackable):  # `tf.Module`s are
        ignored = getattr(type(holder), "_TF_MODULE_IGNORED_PROPERTIES", ())
        return [
            item
            for item in _by_name(holder)
            if item[0] not in ignored and not item[0].startswith("_self_")
        ]
    return sorted(_by_name(holder), key=lambda item: item[0].startswith("_"))


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is an object with attributes; classes, functions and tensors are not."""
    # Its own `__getattr__` may answer anything, so only its class is asked.
    kinds = [vars(kind) for kind in type(value).__mro__]
    return (
        (
            any("__dict__" in kind or "__slots__" in kind for kind in kinds)
            or isinstance(value, ProxyTypes)
        )
        and not isinstance(value, (type, ModuleType, tf.Tensor))
        and not any("__get__" in kind for kind in kinds)
        and not _is_symbolic_of_keras(value)
    )


def _is_symbolic_of_keras(value: Any) -> bool:
    return any(kind.__name__ == "KerasTensor" for kind in type(value).__mro__)


@functools.lru_cache(maxsize=256)
def _may_hold(package: str) -> bool:
    """Whether objects of a package are searched for variables."""
    if package in sys.stdlib_module_names:  # or of a user's, which is called like one of Python's
        file = getattr(sys.modules.get(package), "__file__", None)
        path = Path(file or _STDLIB)
        return not path.is_relative_to(_STDLIB) or "site-packages" in path.parts
    return package not in _NO_HOLDERS
