"""The command `flatweights examples`: its options, and the failures of programs."""

import ast
import errno
import re
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import clean_environment, numpy_forks, run_python

from flatweights import examples
from flatweights.demo._results import print_rows
from flatweights.examples import draw, explain, plot

PROGRAMS = sorted(Path(examples.__file__).parent.glob("[!_]*.py"))

TITLES = ["per round, median", "flatweights", "object store", "Ray's guide"]
ROWS: list[tuple[object, ...]] = [
    ("exchange of 21.8 MB", "1463 ms", "14631 ms", "146314 ms"),
    ("  share of the round", "98%", "100%", "7%"),
    ("bytes of a model as sent", "21,801,234", "121,801,234", "921,801,234"),
    ("  in how many arrays", 1, 1, 100),
]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_is_one_file_that_imports_public_names_alone(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a copy elsewhere has no siblings"
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {name for name in imported if name.startswith("flatweights")}
    assert ours
    assert [name for name in ours if "._" in name or "examples" in name] == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cartpole_async", ["--save=no/policy"], "expected a file in a folder that exists"),
        ("cartpole_evolution", ["--save=."], "expected a file in a folder that exists"),
        ("cartpole_policy_gradient", ["--save=no/p"], "expected a file in a folder that exists"),
        ("resnet", ["--checkpoint=no/file"], "expected a file in a folder that exists"),
        ("resnet", ["--num-gpus=0"], "--num-gpus: expected at least 1, got 0"),
        ("digits_lbfgs", ["--actors=-1"], "no fewer than 0 actors"),
        ("linear", ["--seed=-1"], "--seed: expected 0 to 2147483647, got -1"),
        ("cartpole_replay", ["--seed=4294967296"], "--seed: expected 0 to 2147483647"),
    ],
)
def test_options_that_cannot_work_are_refused_before_training(
    name: str,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = import_module(f"flatweights.examples.{name}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        program.main(options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_no_width_cuts_a_number(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_rows(TITLES, ROWS)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= max(60, width), "lines that a terminal may wrap"
    assert "…" not in out
    cells = [cell for line in out.splitlines() for cell in re.split(r"\s{2,}", line)]
    for _, *numbers in (TITLES, *ROWS):
        assert {str(number) for number in numbers} <= set(cells)
    assert all(word in out for row in ROWS for word in str(row[0]).split())


def test_a_file_has_no_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_rows([*TITLES, *TITLES[1:]], [(*row, *row[1:]) for row in ROWS])
    assert re.search(r"exchange of 21.8 MB( +\S+ ms){6}\s*\n", capsys.readouterr().out)


def widths_of(curves: dict[str, Any]) -> list[float]:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plot(axes, "loss", "step", curves)
    return [line.get_linewidth() for line in axes.lines]


def test_curves_that_agree_are_both_seen_and_others_are_of_one_width() -> None:
    x = list(range(50))
    alike = widths_of(dict.fromkeys("abc", (x, x)))
    assert np.max(np.diff(alike)) <= -2, "what is drawn later is narrower"
    others = widths_of({"a": (x, x), "b": (x, [2 * y for y in x]), "c": (x[:9], x[:9])})
    assert others == alike[-1:] * 3


def test_logarithmic_axes_have_numbers_within_a_decade() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plot(axes, "ms", "MB", {"": ([1, 2, 3], [12.0, 30.0, 70.0])}, "log")
    texts = [text.get_text() for text in axes.get_yticklabels()]
    assert {"20", "50"} <= set(texts)
    assert not [tick for tick in axes.yaxis.get_minorticklocs() if 12 < tick < 70]


def test_what_a_program_returns_is_drawn(tmp_path: Path) -> None:
    from matplotlib.image import imread

    plots = []
    curves: Any
    for curves in (
        {"loss by round": {"a": [3.0, 2.0, 0.01]}},
        {"loss by seconds": {"a": ((0.1, 0.2), [1.0, 2.0])}, "accuracy by round": {"": [0.5, 0.7]}},
    ):
        draw(tmp_path / "plot.png", "A program.", curves)
        plots.append(imread(tmp_path / "plot.png").shape[1])
    assert plots[1] > 1.5 * plots[0], "one panel for each title"


def test_rounds_have_whole_numbers_and_seconds_have_fractions() -> None:
    from matplotlib.figure import Figure

    rounds, seconds = Figure().subplots(), Figure().subplots()
    plot(rounds, "loss", "round", {"": (range(1, 5), [4, 3, 2, 1])})
    assert set(range(1, 5)) <= set(rounds.get_xticks()) <= set(range(6))
    plot(seconds, "loss", "seconds", {"": ([0.1, 0.9], [2, 1])})
    assert len(seconds.get_xticks()) > 3


def test_a_full_disk_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "plot.png")
    assert explain(error) == (
        "plot.png: No space left on device: free some space, or choose another folder"
    )
    full = tmp_path / "plot.png"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space") as caught:
        draw(full, "", {"loss by round": {"": [1]}})
    assert "free some space" in explain(caught.value)


def test_mistakes_of_the_program_keep_their_traceback() -> None:
    with pytest.raises(KeyError):
        explain(KeyError("name"))


def test_a_ray_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-m", "flatweights", "examples", "linear"],
        env=clean_environment(RAY_TMPDIR=str(tmp_path / "file"), RAY_ADDRESS="local"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert re.match(r"Ray did not start: .*: it needs a folder to write to \(RAY_TMPDIR", line)


def test_a_cluster_that_has_ended_is_told_before_ray_waits_for_it(tmp_path: Path) -> None:
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()

    def errors(**environment: str) -> str:
        done = numpy_forks().run(
            "from flatweights.examples import run\nrun(lambda: None)",
            environment=clean_environment(RAY_TMPDIR=str(tmp_path), **environment),
        )
        assert done.returncode == 0
        return done.stderr

    with socket.create_server(("127.0.0.1", 0)) as server:
        file.write_text(f"127.0.0.1:{server.getsockname()[1]}")
        assert errors(RAY_ADDRESS="") == ""
    line = f"no Ray answers at the address in {file}: delete that file, or set RAY_ADDRESS=local\n"
    assert errors(RAY_ADDRESS="") == line
    assert errors(RAY_ADDRESS="local") == ""


def test_the_command_imports_no_framework() -> None:
    run_python(
        "import sys\n"
        "import flatweights.examples\n"
        "assert not {'ray', 'rich', 'matplotlib', 'tensorflow'} & set(sys.modules)\n"
    )


WITHOUT_TENSORFLOW = ("linear", "resnet", "keras_fit", "digits_lbfgs")


@pytest.mark.parametrize("name", WITHOUT_TENSORFLOW)
def test_drivers_that_need_no_tensorflow_name_none_outside_of_functions(name: str) -> None:
    # tests/test_imports.py finds that flatweights.ray imports none.
    tree = ast.parse(PROGRAMS[0].with_stem(name).read_text())
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(str(node.module))
    assert "ray" in names
    for imported in names:
        part = imported.removeprefix("flatweights.").partition(".")[0]
        assert part not in ("tensorflow", "keras"), imported


@pytest.mark.slow
def test_drivers_that_need_no_tensorflow_import_none() -> None:
    run_python(
        "import sys\n"
        "import flatweights.examples.linear, flatweights.examples.resnet\n"
        "import flatweights.examples.keras_fit, flatweights.examples.digits_lbfgs\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
