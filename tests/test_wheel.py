"""The wheel installs and works where there is no compiler."""

import subprocess
import sys
import venv
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


@pytest.mark.slow
def test_the_wheel_works_without_a_compiler(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("flatweights-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    # What it needs comes as wheels too, so no compiler is wanted from here on.
    environment = {"PATH": str(tmp_path / "venv" / "bin"), "HOME": str(tmp_path)}
    install = [python, "-m", "pip", "install", "--only-binary=:all:", wheel]
    subprocess.run(install, check=True)
    smoke = [python, "-c", SMOKE]
    run = subprocess.run(
        smoke, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == wheel.name.split("-")[1]
