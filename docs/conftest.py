"""Runs every Python block of these pages, and compares what it prints with what the page shows.

A block below the comment ``slow`` starts workers in a way that other blocks already test. It runs
only with ``-m slow``, together with all other blocks of its page, which it may need.
"""

from doctest import ELLIPSIS
from typing import Any

import pytest
from ray_cluster import ray_folder, shared_ray
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

__all__ = ["ray_folder", "shared_ray"]


def _begin_page(namespace: dict[str, Any]) -> None:
    namespace["__name__"] = "__main__"  # Ray sends classes of such a module by value


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the blocks that are slow; with ``-m slow``, their pages."""
    slow = "<!-- slow -->"
    for item in items:
        if example := getattr(item, "example", None):
            text: str = example.document.text
            before = text[: example.start]
            if before.count("```") % 2:  # a line of a doctest: look above its block
                before = before.rpartition("```")[0]
            is_slow = before.rstrip().endswith(slow)
            if is_slow or (config.option.markexpr == "slow" and slow in text):
                item.add_marker(pytest.mark.slow)


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=ELLIPSIS), SkipParser()],
    patterns=["*.md"],
    setup=_begin_page,
    fixtures=["shared_ray"],
).pytest()
