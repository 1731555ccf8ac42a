"""Names that are unique, and the same in every process that builds the same model.

TensorFlow and Keras repeat names (every layer has a ``kernel``) and number automatic ones by
counters of the process (``dense_7`` in one, ``dense`` in the other). Names here depend only
on the structure.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence


def unique_names(names: Iterable[str]) -> list[str]:
    """Return ``names`` with repeats numbered in order: ``w, w, w`` become ``w, w_1, w_2``."""
    listed = list(names)
    taken = set(listed)
    repeats: Counter[str] = Counter()
    seen: set[str] = set()
    unique = []
    for name in listed:
        candidate = name
        while candidate in seen or (candidate != name and candidate in taken):
            repeats[name] += 1
            candidate = f"{name}_{repeats[name]}"
        seen.add(candidate)
        unique.append(candidate)
    return unique


def snake_case(class_name: str) -> str:
    """Return the base of the automatic names of a Keras class: ``Conv2D`` gives ``conv2d``."""
    name = re.sub(r"\W+", "", class_name)
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


def layer_names(layers: Sequence[tuple[str, str]]) -> list[str]:
    """Return names for the layers of one container, with automatic numbers counted anew.

    Args:
        layers: Automatic name and actual name of each layer. Actual names that equal the
            automatic one, with or without a number, are renumbered; others are kept.
    """
    counts: Counter[str] = Counter()
    names = []
    for base, name in layers:
        if not re.fullmatch(rf"{re.escape(base)}(_\d+)?", name):
            names.append(name)
            continue
        names.append(f"{base}_{counts[base]}" if counts[base] else base)
        counts[base] += 1
    return names
