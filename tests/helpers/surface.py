"""The public surface: every callable that a module exports, its docstring and signature."""

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_LONGEST = 80  # characters of one annotation: what help() shows on a line
_EXPANDED = ("typing.", "numpy.", "collections.abc.", "flatweights.", "Union[", "Literal[")


def public_callables(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the exports of ``module``, with the methods and properties of its classes."""
    for name in module.__all__:
        item = getattr(module, name)
        if inspect.isclass(item):
            yield name, item
            yield from _members(name, item)
        elif inspect.isroutine(item):
            yield name, item


def _members(owner: str, cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for base in cls.__mro__:
        if not base.__module__.startswith("flatweights"):
            continue
        for name, item in vars(base).items():
            if name.startswith("_"):
                continue
            function = item.fget if isinstance(item, property) else getattr(base, name)
            if callable(function):
                yield f"{owner}.{name}", function


def undescribed(module: ModuleType) -> list[str]:
    """Return names without a docstring; pybind11's line with the signature does not count."""
    return [name for name, item in public_callables(module) if not _description(item)]


def _description(item: Callable[..., Any]) -> str:
    text = item.__doc__ or ""
    if inspect.isbuiltin(item):
        text = text.partition("\n")[2]
    return text.strip()


def unreadable_signatures(module: ModuleType) -> list[str]:
    """Return names without a signature, or with annotations that are not short names."""
    wrong = []
    for name, item in public_callables(module):
        if inspect.isclass(item) and "__init__" not in vars(item):
            continue  # inherited members are not its own
        try:
            signature = inspect.signature(item)
        except ValueError:
            wrong.append(f"{name}: no signature")
            continue
        annotations = [p.annotation for p in signature.parameters.values()]
        for annotation in (*annotations, signature.return_annotation):
            text = inspect.formatannotation(annotation)
            if len(text) > _LONGEST or any(path in text for path in _EXPANDED):
                wrong.append(f"{name}: {text}")
    return wrong
