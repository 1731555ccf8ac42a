import ast
import doctest
import importlib
import os
import re
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import surface
from numpy.typing import DTypeLike, NDArray
from reference import run_python

import flatweights as fw
import flatweights.robust
import flatweights.server
import flatweights.wire
from flatweights import _core

REPOSITORY = Path(__file__).parents[1]
STUB = ast.parse(Path(fw.__file__).with_name("_core.pyi").read_text())
MODULES = [
    "_average",
    "_choice",
    "_config",
    "_daemon",
    "_dtypes",
    "_flatten",
    "_forks",
    "_frameworks",
    "_inplace",
    "_layout",
    "_locks",
    "_match",
    "_numbers",
    "_running_average",
    "_safetensors",
    "_settings",
    "_sources",
    "_trees",
    "_weights",
]


def test_versions_agree() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    (written,) = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)
    assert fw.__version__ == _core.__version__ == metadata.version("flatweights") == written
    assert fw.show_config()["flatweights"] == written
    assert f"\nversion: {written}\n" in (REPOSITORY / "docs" / "CITATION.cff").read_text()


def test_workflows_call_what_there_is() -> None:
    workflows = list((REPOSITORY / ".github" / "workflows").glob("*.yml"))
    called = {name for w in workflows for name in re.findall(r"\.ci/[\w-]+", w.read_text())}
    assert ".ci/run" in called
    assert [name for name in called if not os.access(REPOSITORY / name, os.X_OK)] == []


def test_the_address_stands_local_reduce() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    (address,) = re.findall(r'^Repository = "https://(.*)"$', project, re.MULTILINE)
    texts = list(REPOSITORY.glob("*.md"))
    for folder in (".github", "docs", "python"):
        texts += [f for f in (REPOSITORY / folder).rglob("*.*") if f.suffix != ".pyc"]
    assert [file for file in texts if address in file.read_text(errors="replace")] == []


def test_the_configuration_names_versions_and_choices() -> None:
    config = fw.show_config()
    assert config["numpy"] == np.__version__
    assert config["ml_dtypes"] == metadata.version("ml_dtypes")
    assert {"python", "machine", "tensorflow", "ray", "instruction set"} <= set(config)
    assert all(isinstance(text, str) and text for text in config.values())


PUBLIC = [flatweights.robust, flatweights.server, flatweights.wire, fw]


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_what_is_exported_exists_and_is_described(package: ModuleType) -> None:
    assert sorted(set(package.__all__)) == sorted(package.__all__)
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
    assert surface.undescribed(package) == []


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_signatures_are_made_of_short_names(package: ModuleType) -> None:
    assert surface.unreadable_signatures(package) == []


def test_the_line_of_the_signature_that_pybind11_writes_is_no_description() -> None:
    assert (_core.clear_pool.__doc__ or "").strip() == "clear_pool() -> None"
    bare = ModuleType("bare")
    vars(bare).update(__all__=["clear_pool"], clear_pool=_core.clear_pool)
    assert surface.undescribed(bare) == ["clear_pool"]


def test_unions_that_are_written_out_are_found() -> None:
    def shift(x: NDArray[Any], dtype: DTypeLike = float) -> None: ...

    bare = ModuleType("bare")
    vars(bare).update(__all__=["shift"], shift=shift)
    found = surface.unreadable_signatures(bare)
    assert [line.partition("[")[0] for line in found] == ["shift: numpy.ndarray", "shift: Union"]


def names_in(tree: ast.Module | ast.ClassDef) -> set[str]:
    named = {n.name for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))}
    return named | {
        n.target.id
        for n in tree.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }


def public(owner: object) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


def test_the_stub_names_what_the_module_has() -> None:
    assert names_in(STUB) == public(_core) | {"__version__"}
    for cls in STUB.body:
        if isinstance(cls, ast.ClassDef):
            special = {"__init__", "__enter__", "__exit__"}
            assert names_in(cls) - special == public(getattr(_core, cls.name)), cls.name


def functions() -> list[tuple[object, ast.FunctionDef]]:
    found: list[tuple[object, ast.FunctionDef]] = []
    for node in STUB.body:
        owner: object = _core
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        if isinstance(node, ast.ClassDef):
            owner = getattr(_core, node.name)
        found += [
            (getattr(owner, f.name), f)
            for f in inner
            if isinstance(f, ast.FunctionDef) and not f.decorator_list
        ]
    return found


@pytest.mark.parametrize(("function", "stub"), functions(), ids=lambda f: getattr(f, "name", ""))
def test_the_stub_has_the_parameters_of_the_module(function: object, stub: ast.FunctionDef) -> None:
    # pybind11 writes the signature into the first line of the docstring.
    signature = (function.__doc__ or "").splitlines()[0]
    parameters = re.findall(r"[(,] *(\w+): ", signature)
    expected = [a.arg for a in stub.args.args]
    assert [p for p in parameters if p != "self"] == [p for p in expected if p != "self"]


def test_import_needs_neither_tensorflow_nor_ray() -> None:
    code = """
import sys
import flatweights
flatweights.show_config()
heavy = {"tensorflow", "keras", "ray", "torch", "sklearn", "matplotlib", "rich", "cloudpickle"}
print(sorted(heavy & set(sys.modules)))
"""
    assert run_python(code).split() == ["[]"]


def test_parts_import_only_public_names_of_others() -> None:
    root = Path(fw.__file__).parent
    private = set()
    for path in root.glob("*/**/*.py"):
        part = path.relative_to(root).parts[0]
        for imported in re.findall(
            r"^ *(?:from|import) (flatweights\.[\w.]+)", path.read_text(), re.MULTILINE
        ):
            other = imported.removeprefix("flatweights.").partition("._")
            if other[1] and not other[0].startswith("_") and other[0].split(".")[0] != part:
                private.add((part, imported))
    assert private == {("keras", "flatweights.tensorflow._python_op")}


def module(name: str) -> ModuleType:
    return importlib.import_module(f"flatweights.{name}")


def test_every_module_of_the_core_is_listed() -> None:
    files = {path.stem for path in Path(fw.__file__).parent.glob("_*.py")}
    assert files == {"__init__", "__main__", *MODULES}


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_right(name: str) -> None:
    globs = {"np": np, **{n: getattr(fw, n) for n in fw.__all__}}
    failed, _ = doctest.testmod(module(name), extraglobs=globs)
    assert failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    found = {n: sum(bool(t.examples) for t in finder.find(module(n))) for n in MODULES}
    assert all(found[n] for n in ("_average", "_flatten", "_layout", "_weights"))
