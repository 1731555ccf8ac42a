"""What programs there are, told without importing any."""

import ast
import pkgutil
from importlib import resources

from flatweights import examples


def find_programs() -> list[str]:
    """Return the names of the programs."""
    names = sorted(module.name for module in pkgutil.iter_modules(examples.__path__))
    return [name for name in names if not name.startswith("_")]


def read_catalogue() -> dict[str, str]:
    """Return, by the name of each program, the first line of its docstring."""
    return {name: _first_line(name) for name in find_programs()}


def _first_line(name: str) -> str:
    source = resources.files(examples).joinpath(f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
