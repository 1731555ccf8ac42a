"""The variables of an optimizer, with slots named after the variables they belong to."""

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from flatweights.tensorflow._kinds import (
    KeyPath,
    inner_variable,
    is_of_keras_3,
    is_optimizer,
    is_variable,
    last_name,
    unique_names,
)


def optimizer_variables(
    optimizer: Any, path: KeyPath, owners: Mapping[str, KeyPath], holders: tuple[Any, ...] = ()
) -> Iterator[tuple[KeyPath, Any, Hashable]]:
    """Yield path, variable, and the `owner_key` of a slot's owner, in the optimizer's own order.

    A slot is named after its variable and the attribute that keeps it, such as
    ``dense/kernel/momentums``. Others (``iteration``, ``learning_rate``) keep their own names, or
    take that of their attribute if they have none. Slots of a variable that is not among ``owners``
    use its own name, with repeats numbered. What `tf_keras` does not list follows at the end.
    TF1's optimizers have graph and name of an owner in a graph in place of its `owner_key`.

    Args:
        optimizer: An optimizer of Keras 3, `tf_keras` or TF1, with its slots.
        path: Path of the optimizer.
        owners: Paths of the variables of the models beside it, by `owner_key`.
        holders: The optimizers that hold this one.

    Raises:
        ValueError: If it has no slots yet.
    """
    parts = _innermost(optimizer)
    if not _is_whole(optimizer, parts):
        raise ValueError(
            f"{type(optimizer).__name__} is not built, so some of its variables do not exist: call "
            "build(model.trainable_variables), or apply gradients once, first"
        )
    whole = [optimizer, *(part for part in parts if part is not optimizer)]
    slots: dict[int, _Place] = {}
    for part in whole:
        slots |= _slot_paths(part, owners)
    variables = optimizer.variables
    if callable(variables) and not isinstance(variables, Sequence):
        variables = variables()
    if isinstance(optimizer, tf.compat.v1.train.Optimizer) and tf.executing_eagerly():
        # Sorted by name, their order would depend on what else the process has built.
        places = {slot: place for place, slot in enumerate(slots)}
        variables = sorted(variables, key=lambda variable: places.get(id(variable), -1))
    attributes = {id(held): name for part in parts for name, held in _in_attributes(part)}
    for variable in variables:
        name = last_name(variable)
        if name == "variable":
            name = attributes.get(id(variable), name)
        step, owner = slots.get(id(variable), ((name,), None))
        yield (*path, *step), variable, owner
    known = {*owners, *map(_inner_key, variables)}
    for part in whole:
        # What they train, by the variables in Keras 3, by their keys in `tf_keras`.
        known |= {_inner_key(one) for one in getattr(part, "_trainable_variables", ())}
        known |= {*getattr(part, "_index_dict", ())}
        for step, variable, owner in _unlisted(part, owners, (*holders, *whole)):
            if _inner_key(variable) not in known:
                known.add(_inner_key(variable))
                place, owner = slots.get(id(variable), (step, owner))
                yield (*path, *place), variable, owner
    loss_scale = getattr(optimizer, "_loss_scale", None)  # of `tf_keras`, which does not list it
    for variable in getattr(loss_scale, "_weights", {}).values():
        yield (*path, "loss_scale", last_name(variable)), variable, None


def owner_key(variable: tf.Variable) -> str:
    """Return the key by which optimizers of all kinds know a variable."""
    return str(getattr(variable, "_unique_id", id(variable)))


def _inner_key(variable: Any) -> str:
    return owner_key(inner_variable(variable))


def _innermost(optimizer: Any) -> list[Any]:
    """Return the optimizers inside wrappers: a loss scale, or one optimizer per variable."""
    wrapped = getattr(optimizer, "inner_optimizer", None)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):  # loss scaling, or replicas in step
        wrapped = getattr(optimizer, "_optimizer", None) or getattr(optimizer, "_opt", None)
    several = [wrapped] if wrapped is not None else getattr(optimizer, "_inner_optimizers", [])
    return [part for inner in several for part in _innermost(inner)] or [optimizer]


def _in_attributes(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and variable for each attribute that is one."""
    for attribute, held in vars(optimizer).items():
        if is_variable(held):
            yield attribute.lstrip("_"), held


def _unlisted(
    optimizer: Any, owners: Mapping[str, KeyPath], holders: tuple[Any, ...]
) -> Iterator[tuple[KeyPath, Any, Hashable]]:
    """Yield path, variable and owner for the state in attributes; Keras lists some of it, too.

    It does not list, in `tf_keras`, the learning rate and, of the older optimizers, all other
    numbers that can be set, which `tf.train.Checkpoint` has; in Keras 3, a variable that an
    optimizer makes in ``build`` within a `LossScaleOptimizer`, such as Nadam's ``u_product``; in
    both, a `tf.Variable` in a list, tuple or dict, and what belongs to an optimizer that this one
    holds, if that is built.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return
    for name, held in (*_in_attributes(optimizer), *getattr(optimizer, "_hyper", {}).items()):
        # That of a schedule follows from the steps.
        if is_variable(held) and name != "current_learning_rate":
            yield (name,), held, None
    for attribute, held in vars(optimizer).items():
        name = attribute.lstrip("_")
        # Neither Keras' lists, nor TensorFlow's records of attributes.
        if name in ("variables", "trainable_variables") or name.startswith("self_"):
            continue
        for step, one in _in_containers(held):
            if is_variable(one):
                yield (name, *step), one, None
            elif all(one is not other for other in holders) and _is_whole(one, _innermost(one)):
                yield from optimizer_variables(one, (name, *step), owners, holders)


def _in_containers(held: Any, depth: int = 3) -> Iterator[tuple[KeyPath, Any]]:
    """Yield place and object for each variable and optimizer in lists, tuples and dicts.

    The place in a dict is the key, if that is a text, else the position: other keys may be
    identities, which other processes do not have.
    """
    if is_optimizer(held):
        yield (), held
    elif isinstance(held, (list, tuple, dict)) and depth:
        items = held.items() if isinstance(held, dict) else enumerate(held)
        for k, (key, one) in enumerate(items):
            step = key if isinstance(key, str) else str(k)
            if is_variable(one):
                yield (step,), one
            for steps, inside in _in_containers(one, depth - 1):
                yield (step, *steps), inside


def _is_whole(optimizer: Any, parts: Sequence[Any]) -> bool:
    """Whether all slots of an optimizer exist, which consists of ``parts``.

    A `keras.optimizers.MultiOptimizer` builds no part that trains no variable.
    """
    is_outer = is_of_keras_3(optimizer, "Optimizer") and parts[0] is not optimizer
    return (is_outer and _is_built(optimizer)) or all(map(_is_built, parts))


def _is_built(optimizer: Any) -> bool:
    if is_of_keras_3(optimizer, "Optimizer"):
        return bool(optimizer.built)
    if hasattr(optimizer, "build"):
        # One of a SavedModel, of which only that class is left, comes with all of its variables.
        is_restored = type(optimizer).__name__ == "RestoredOptimizer"
        return is_restored or bool(getattr(optimizer, "_built", False))
    # The older optimizers of `tf_keras` make their slots at the first step.
    return bool(getattr(optimizer, "_hypers_created", True))


_Place = tuple[KeyPath, Hashable]
"""The path of a slot within the optimizer, and the `owner_key` of the variable it is for."""


def _slot_paths(optimizer: Any, owners: Mapping[str, KeyPath]) -> dict[int, _Place]:
    """Return the place of each slot, by the slot variable's identity."""
    by_owner = {} if hasattr(optimizer, "_variables") else getattr(optimizer, "_slots", {})
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if not tf.executing_eagerly():  # a graph names and orders slots well
            return {
                id(slot): ((last_name(slot),), owner)
                for slots in by_owner.values()
                for owner, slot in slots.items()
            }
        by_kind, by_owner = by_owner, {}
        for kind, slots in by_kind.items():
            for owner, slot in slots.items():
                by_owner.setdefault(owner, {})[kind] = slot
    keys, names = _owners_of(optimizer, by_owner)
    paths = [
        (owners.get(key, (name,)), key) for key, name in zip(keys, unique_names(names), strict=True)
    ]
    slot_paths: dict[int, _Place] = {}
    # Older optimizers keep a dict of slots for each variable.
    if by_owner:
        for (owner, key), slots in zip(paths, by_owner.values(), strict=True):
            slot_paths |= {id(slot): ((*owner, kind), key) for kind, slot in slots.items()}
        return slot_paths
    for attribute, held in vars(optimizer).items():
        if attribute in ("_variables", "_trainable_variables"):
            continue
        # Others keep slots of one kind in a list, in the order of the variables they belong to.
        if isinstance(held, (list, tuple)) and len(held) == len(paths):
            for (owner, key), slot in zip(paths, held, strict=True):
                if is_variable(slot):
                    slot_paths.setdefault(id(slot), ((*owner, attribute.lstrip("_")), key))
    return slot_paths


def _owners_of(optimizer: Any, by_owner: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return key and own name of each variable that has slots, in the order of the slots."""
    if is_of_keras_3(optimizer, "Optimizer"):
        variables = list(optimizer._trainable_variables)
        return [owner_key(inner_variable(v)) for v in variables], [last_name(v) for v in variables]
    index = getattr(optimizer, "_index_dict", {})
    keys = list(by_owner) or sorted(index, key=index.__getitem__)
    # The key is a unique id such as ``dense/kernel_333``.
    return keys, [re.sub(r"_\d+$", "", key).rpartition("/")[2] for key in keys]
