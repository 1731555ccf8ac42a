"""Matches a mapping of weights to the slots of a model."""

import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flatweights._choice import first_of
from flatweights._layout import Layout
from flatweights._trees import as_array
from flatweights._weights import FlatWeights


def names_of(weights: Mapping[str, Any], rename: Mapping[str, str] | None) -> dict[str, str]:
    """Return the name that each of ``weights`` has after ``rename``.

    Raises:
        TypeError: If ``weights`` or ``rename`` are not a mapping.
        ValueError: If ``rename`` maps a name that is not in ``weights``, or two names to one.
    """
    if not isinstance(weights, (dict, Mapping)):
        raise TypeError(
            "expected a mapping from name to array, such as TensorFlowVariables(model)"
            f".get_weights(), got {type(weights).__name__}"
        )
    if rename is not None and not isinstance(rename, Mapping):
        raise TypeError(f"rename: expected a mapping of names, got {type(rename).__name__}")
    rename = rename or {}
    keys = list(weights)
    absent = [key for key in rename if key not in keys]
    if absent:
        raise ValueError(f"rename: expected names in the weights, got {absent}")
    names = {key: rename.get(key, key) for key in keys}
    counts = Counter(names.values()) if rename else {}
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"rename: expected one name for each slot, got several for {twice}")
    return names


def match_slots(
    weights: Mapping[str, Any],
    layout: Layout,
    *,
    strict: bool = False,
    rename: Mapping[str, str] | None = None,
    ignored: Collection[str] = (),
) -> dict[int, str]:
    """Return the slots that ``weights`` are meant for.

    The first rule that applies decides:

    1. All names are known: by name.
    2. The weights are a full set whose shapes and dtypes agree in order: by position, unless
       the names show that they are in another order.
    3. Some names are known: only those, with a warning that lists the others.

    Args:
        weights: By name.
        layout: Slots of the model.
        strict: Accept only exactly the model's names.
        rename: Maps names in ``weights`` to names of the model.
        ignored: Names of the model that have no slot. Unless ``strict``, weights of these names
            are ignored, and then nothing is set by position.

    Returns:
        By position of the slot, the name in ``weights``.

    Raises:
        TypeError: As `names_of`.
        AssertionError: If nothing matches, as with Ray's class.
        ValueError: If ``strict`` and a name is missing or unknown, or as `names_of`.
    """
    names = names_of(weights, rename)
    known = {layout.index(name): key for key, name in names.items() if name in layout}
    unknown = [key for key, name in names.items() if name not in layout]
    if strict:
        missing = [name for i, name in enumerate(layout.names) if i not in known]
        if missing or unknown:
            raise ValueError(
                f"strict: expected the names of the model; missing {missing}, unknown {unknown}"
            )
    others = [key for key in unknown if names[key] not in ignored]
    if known and not others:
        return known
    if (
        len(others) == len(unknown)
        and len(weights) == len(layout)
        and all(isinstance(name, str) for name in names.values())
        and _layout_of(weights).signature == layout.signature
        and not _are_shuffled(list(names.values()), layout.names)
    ):
        return dict(enumerate(weights))
    if not known:
        raise AssertionError(
            "No variables in the input matched those in the network: expected "
            f"{first_of(layout.names)}, got {first_of([*names.values()])}. Possible causes: "
            "weights of another model; or two networks in one TensorFlow graph: place each network "
            "definition in its own tf.Graph"
        )
    warnings.warn(
        f"set_weights ignores {len(others)} weights that the model does not have: {others}",
        stacklevel=3,
    )
    return known


def _are_shuffled(keys: Sequence[str], own: Sequence[str]) -> bool:
    """Whether both lists have the same parts of names, without numbers, in different order.

    Weights that were sorted by name must not be set by position: ``actor/beta``,
    ``actor/gamma`` do not match ``gamma``, ``beta``. The last parts of the names are compared
    first, then those before them, and so on. A part that only one list has was renamed.
    """
    key_parts, own_parts = ([_parts(name) for name in names] for names in (keys, own))
    depth = min(len(parts) for parts in (*key_parts, *own_parts))
    for k in range(depth):
        both = {parts[k] for parts in key_parts} & {parts[k] for parts in own_parts}
        for theirs, ours in zip(key_parts, own_parts, strict=True):
            if theirs[k] != ours[k] and {theirs[k], ours[k]} <= both:
                return True
    return False


def _parts(name: str) -> list[str]:
    """Return the parts of a name, last first, without the numbers at their ends."""
    return [re.sub(r"_?\d+$", "", part) for part in reversed(name.split("/"))]


def _layout_of(weights: Mapping[str, Any]) -> Layout:
    if isinstance(weights, FlatWeights):
        return weights.layout
    arrays = [as_array(value, f"weights, {key!r}") for key, value in weights.items()]
    return Layout.of_arrays([str(i) for i in range(len(arrays))], arrays)
