"""Runs every Python block of these pages, and compares what it prints with what the page shows."""

import sys
from doctest import ELLIPSIS
from typing import Any

from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser


def _begin_page(namespace: dict[str, Any]) -> None:
    namespace["__name__"] = "__main__"  # Ray sends classes of such a module by value
    namespace["_uses_the_tests_ray"] = _ray_is_running()


def _end_page(namespace: dict[str, Any]) -> None:
    if _ray_is_running() and not namespace["_uses_the_tests_ray"]:
        sys.modules["ray"].shutdown()


def _ray_is_running() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=ELLIPSIS), SkipParser()],
    patterns=["*.md"],
    setup=_begin_page,
    teardown=_end_page,
).pytest()
