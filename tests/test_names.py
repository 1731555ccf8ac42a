"""The names of classes: each stands for one thing in the package."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "python" / "flatweights"


def statements_of(node: ast.AST) -> Iterator[ast.AST]:
    """The statements in a node, without their expressions: most of the tree."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        for statement in getattr(node, name, ()):
            yield statement
            yield from statements_of(statement)


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if "examples" in path.parts:  # each is a program by itself
            continue
        for node in statements_of(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.strip("_")].append(str(path.relative_to(PACKAGE)))
    assert len(places) > 100
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
