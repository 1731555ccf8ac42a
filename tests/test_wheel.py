"""The wheel installs and works without a compiler."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SMOKE = """
import shutil, sys
assert shutil.which("g++") is None and shutil.which("cmake") is None
import numpy as np
import flatweights as fw
assert "site-packages" in fw.__file__, fw.__file__
models = [fw.FlatWeights({"w": np.full((3, 2), v, np.float32), "n": np.int64(v)}) for v in (1, 3)]
mean = fw.average(models)
assert mean["w"].tolist() == [[2, 2]] * 3 and mean["n"] == 1
assert fw.flatten(mean).tolist() == [2] * 6 + [1]
assert not {"tensorflow", "ray"} & set(sys.modules)
print(fw.show_config()["flatweights"])
"""


BIND = """
import os
assert not os.environ["PATH"]
import tensorflow as tf
from flatweights.tensorflow import TensorFlowVariables
from flatweights.tensorflow.library import _load
variables = TensorFlowVariables([tf.Variable([1.0, 2.0])])
assert variables.unbound == {}
assert variables.get_flat().tolist() == [1, 2]
assert _load.status() == f"bound variables, by {_load.PACKAGED / '_tf.so'}"
print(_load.PACKAGED)
"""
LIBRARY = {"_tf.so", "_tf.json"}


def build_wheel(folder: Path, *options: str) -> Path:
    """Build the wheel in ``folder``, beside the files of earlier builds."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    (folder / "wheel").mkdir(exist_ok=True)
    for old in (folder / "wheel").iterdir():
        old.unlink()
    places = ["-w", folder / "wheel", f"-Cbuild-dir={folder / 'build'}"]
    subprocess.run([*pip, *places, *options, ROOT], check=True)  # type: ignore[list-item]
    (wheel,) = (folder / "wheel").glob("flatweights-*.whl")
    return wheel


def op_library(wheel: Path) -> set[str]:
    """The names of the op library's files in the wheel."""
    with zipfile.ZipFile(wheel) as file:
        paths = map(Path, file.namelist())
        return {path.name for path in paths if path.parent == Path("flatweights/_tf")}


def sources() -> set[str]:
    return {path.name for path in (ROOT / "csrc" / "tensorflow").iterdir()}


@pytest.mark.slow
def test_the_wheel_works_without_a_compiler(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    assert op_library(wheel) == sources()  # the build was isolated, and saw no TensorFlow
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    # Its requirements are wheels, too, so no compiler is needed from here on.
    environment = {"PATH": str(tmp_path / "venv" / "bin"), "HOME": str(tmp_path)}
    install = [python, "-m", "pip", "install", "--only-binary=:all:", wheel]
    subprocess.run(install, check=True)  # type: ignore[arg-type]
    smoke = [python, "-c", SMOKE]
    run = subprocess.run(
        smoke,  # type: ignore[arg-type]
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == wheel.name.split("-")[1]


@pytest.mark.slow
def test_wheel_that_is_built_beside_tensorflow_carries_the_op_library(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    pytest.importorskip("pybind11")
    wheel = build_wheel(tmp_path, "--no-build-isolation")
    assert op_library(wheel) == sources() | LIBRARY

    venv.create(tmp_path / "venv")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    # Everything else comes from here, except for entries of .pth files, such as the path of an
    # editable flatweights.
    (site / "here.pth").write_text(sysconfig.get_path("purelib"))
    run = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "-c", BIND],
        env={"PATH": "", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{site / 'flatweights' / '_tf'}\n"
    assert not (tmp_path / ".cache" / "flatweights").exists()

    off = "-Ccmake.define.FLATWEIGHTS_TENSORFLOW=OFF"
    assert op_library(build_wheel(tmp_path, "--no-build-isolation", off)) == sources()


def test_the_builder_says_what_it_expects_of_a_python() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / ".ci" / "wheels", "3.99"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "such as 3.11 or python3.11; python3.99 does not run" in run.stderr
