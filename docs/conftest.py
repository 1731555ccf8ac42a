"""Runs every Python block of these pages, and compares what it prints with what the page shows."""

from doctest import ELLIPSIS
from typing import Any

from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser


def _as_a_script(namespace: dict[str, Any]) -> None:
    namespace["__name__"] = "__main__"  # classes of a page travel to Ray's actors by value


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=ELLIPSIS), SkipParser()],
    patterns=["*.md"],
    setup=_as_a_script,
).pytest()
