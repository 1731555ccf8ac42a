"""Finds the variables of a framework's objects, for modules that import no framework.

`flatweights.ray` works with any holder of arrays. An actor's ``build`` often returns a framework's
own object, such as a model. One part of this package per framework can hold such objects. It
registers itself here when it is imported, which happens once the process has imported the
framework.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

# By framework, the part of this package that registers a holder for its objects.
_PARTS = {"tensorflow": "flatweights.tensorflow"}

_makers: dict[str, Callable[[Any], Any]] = {}


def register(framework: str, make: Callable[[Any], Any]) -> None:
    """Have ``make`` hold the objects of ``framework``."""
    _makers[framework] = make


def holder_of(built: Any) -> Any:
    """Return a holder of the variables of ``built``, an object of an imported framework.

    Returns:
        None if no framework is imported.

    Raises:
        Exception: As the holder of the framework raises.
    """
    for framework, part in _PARTS.items():
        if sys.modules.get(framework) is not None:  # None keeps a program from importing it
            importlib.import_module(part)
            return _makers[framework](built)
    return None
