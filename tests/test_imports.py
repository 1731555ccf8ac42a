"""The imports between parts of the package, read from the source, including functions."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import flatweights

PACKAGE = Path(flatweights.__file__).parent
FRAMEWORKS = ("tensorflow", "keras", "tf_keras", "torch", "jax")


def imports(file: Path) -> Iterator[str]:
    """The modules that a file imports, anywhere in it."""
    yield from imports_of(file.read_text(), file)


@functools.cache
def imports_of(text: str, file: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            constants = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
            if constants and "import" in ast.unparse(node.func):
                found += constants
    return found


def test_a_file_in_functions_is_read_too(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("def f():\n    from flatweights.tensorflow import TensorFlowVariables\n")
    assert list(imports(file)) == ["flatweights.tensorflow.TensorFlowVariables"]
    file.write_text("def f():\n    return importlib.import_module('tensorflow')\n")
    assert list(imports(file)) == ["tensorflow"]


@pytest.mark.parametrize("part", ["ray", "server", "wire", "robust"])
def test_no_part_but_tensorflow_and_keras_imports_a_framework(part: str) -> None:
    files = sorted(PACKAGE.joinpath(part).rglob("*.py"))
    assert files
    for file in files:
        for name in imports(file):
            parts = name.split(".")
            framework = parts[1] if parts[0] == "flatweights" and len(parts) > 1 else parts[0]
            assert framework not in FRAMEWORKS, f"{file.relative_to(PACKAGE)} imports {name}"


def test_one_file_reads_the_clock_of_members_and_groups() -> None:
    clock = PACKAGE / "ray" / "_clock.py"
    assert {"time", "collections.abc.Callable"} == {*imports(clock)}
    parts = (PACKAGE / part for part in ("ray", "keras"))
    for file in sorted({file for part in parts for file in part.rglob("*.py")} - {clock}):
        names = {name.split(".")[0] for name in imports(file)}
        assert "time" not in names, f"{file.relative_to(PACKAGE)} has a clock of its own"
        own = [name for name in imports(file) if name.startswith("flatweights.ray._clock.")]
        assert not own, f"{file.relative_to(PACKAGE)} would keep {own} if a test replaces the clock"


def test_the_core_decides_without_clocks_ray_sockets_and_threads() -> None:
    files = sorted(PACKAGE.joinpath("ray", "core").glob("*.py"))
    assert files
    for file in files:
        for name in imports(file):
            first = name.split(".")[0]
            assert first not in {"ray", "socket", "threading", "time", "os", "asyncio"}, (
                f"core/{file.name} imports {name}"
            )
            assert not name.startswith("flatweights.ray._"), f"core/{file.name} imports {name}"


@pytest.mark.parametrize(
    ("folder", "below"),
    [
        ("core", set()),
        ("support", set()),
        ("results", {"support"}),
        ("channels", {"core", "results", "support"}),
        ("nodes", {"support"}),
        ("peers", {"core", "results", "support", "channels", "nodes"}),
        ("rounds", {"core", "results", "support", "channels", "nodes", "peers"}),
        ("publishing", {"results", "support", "channels", "peers"}),
        ("members", {"core", "results", "support", "channels", "nodes", "peers", "rounds"}),
    ],
)
def test_folders_of_ray_import_only_those_below(folder: str, below: set[str]) -> None:
    files = sorted(PACKAGE.joinpath("ray", folder).glob("*.py"))
    assert files
    for file in files:
        for name in imports(file):
            parts = name.split(".")
            if parts[:2] == ["flatweights", "ray"] and not parts[2].startswith("_"):
                assert parts[2] in below | {folder}, f"{folder}/{file.name} imports {name}"


def folders_of_ray() -> dict[str, set[str]]:
    """Return, by folder of `ray/` or module beside, those that it imports from."""
    home = PACKAGE / "ray"
    folders: dict[str, set[str]] = {}
    for file in home.rglob("*.py"):
        folder = file.relative_to(home).parts[0].removesuffix(".py")
        if folder == "__init__":
            continue
        below = folders.setdefault(folder, set())
        for name in imports(file):
            parts = name.split(".")
            if parts[:2] == ["flatweights", "ray"] and parts[2] not in (folder, "_clock"):
                below.add(parts[2])
    return folders


def test_ray_has_few_dependencies_and_levels() -> None:
    folders = folders_of_ray()
    assert sum(map(len, folders.values())) <= 39

    def level(folder: str) -> int:
        return 1 + max(map(level, folders[folder]), default=0)

    assert max(map(level, folders)) <= 6


def test_the_states_of_a_fit_know_no_keras_no_clock_and_no_member() -> None:
    modules = {name.partition(".")[0] for name in imports(PACKAGE / "keras" / "_fit_states.py")}
    assert modules == {"__future__", "collections", "dataclasses", "enum", "typing"}
