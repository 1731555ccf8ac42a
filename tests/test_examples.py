"""What the programs of `flatweights.examples` share, and how they fail."""

import ast
import errno
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from reference import clean_environment, run_python

from flatweights import examples
from flatweights.examples import (
    Panel,
    Returns,
    explain,
    make_policy_parser,
    print_table,
    report,
)

PROGRAMS = sorted(Path(examples.__file__).parent.glob("[!_]*.py"))

ROWS = [
    {
        "server": "FedAvg",
        "accuracy": "0.93123456",
        "first 0.9": 1463,
        "rounds": 14631463,
        "raised": 28,
        "MB received": "1234567.8",
    },
    {
        "server": "FedAdam",
        "accuracy": "0.96987654",
        "first 0.9": "never",
        "rounds": 14631464,
        "raised": 123456,
        "MB received": "7654321.9",
    },
]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_imports_public_names_alone(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a copy elsewhere has no siblings"
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {name for name in imported if name.startswith("flatweights")}
    assert ours
    assert [name for name in ours if "._" in name] == []


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_no_width_cuts_a_number(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(ROWS)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert "…" not in out
    cells = [cell for line in out.splitlines() for cell in re.split(r"\s{2,}", line)]
    for row in ROWS:
        for cell in (*row, *map(str, row.values())):
            assert cell in cells or width == 20
    if width == 20:  # too narrow for a number and its title: all digits are there
        digits = re.sub(r"\D", "", out)
        assert all(d in digits for d in ("931234", "146", "765432"))


def test_a_narrow_table_is_one_for_each_row_and_a_file_has_no_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    print_table(ROWS)
    out = capsys.readouterr().out
    assert re.search(r"accuracy +0\.93123456 *\n(.*\n)+.*accuracy +0\.96987654 *\n", out)
    monkeypatch.delenv("COLUMNS")
    print_table([row | {title * 2: cell for title, cell in row.items()} for row in ROWS])
    assert re.search(r"FedAvg( +\S+){11}\s*\n", capsys.readouterr().out)


def test_curves_that_agree_are_both_seen(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    x = list(range(50))
    panel = Panel("loss", "step", dict.fromkeys("abc", (x, x)))
    axes = Figure().subplots()
    panel.draw(axes)
    widths = [line.get_linewidth() for line in axes.lines]
    assert np.max(np.diff(widths)) <= -2, "what is drawn later is narrower"
    report(ROWS, tmp_path / "plot.png", "Alike", panel)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_rounds_have_whole_numbers_and_seconds_have_fractions() -> None:
    from matplotlib.figure import Figure

    rounds, seconds = Figure().subplots(), Figure().subplots()
    Panel("loss", "round", {"": (range(1, 5), [4, 3, 2, 1])}).draw(rounds)
    assert set(range(1, 5)) <= set(rounds.get_xticks()) <= set(range(6))
    Panel("loss", "seconds", {"": ([0.1, 0.9], [2, 1])}).draw(seconds)
    assert len(seconds.get_xticks()) > 3


def test_a_policy_has_learned_once_its_last_hundred_episodes_reach_the_goal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    returns = Returns(make_policy_parser(None, updates=9).parse_args(["--goal=10"]), every=2)
    is_over = []
    for steps, ended in ((700, [5.0, *[10.0] * 98]), (20, []), (13, [10.0, 20.0])):
        returns.add(steps, ended)
        is_over.append(returns.is_over)
    assert is_over == [False, False, True], "there were 99 episodes before"
    returns.report("a test", {"one more": 7})
    first, second, *_, titles, _, row = capsys.readouterr().out.rstrip().splitlines()
    assert first == "update 2: 720 steps, mean return 9.9"
    assert second == "update 3: 733 steps, mean return 10.1"
    assert re.split(r"\s{2,}", titles.strip())[2:] == ["last 100 episodes", "one more"]
    assert row.split() == ["3", "733", "10.1", "7"]


def test_a_policy_that_has_not_learned_ends_the_program_after_all_updates() -> None:
    returns = Returns(make_policy_parser(None, updates=2).parse_args(["--goal=10"]), every=9)
    is_over = []
    for ended in ([9.0] * 100, []):
        returns.add(900, ended)
        is_over.append(returns.is_over)
    assert is_over == [False, True]
    with pytest.raises(SystemExit, match=r"^mean return 9\.0, not 10: it needs more --updates$"):
        returns.report("a test", {})


def test_a_full_disk_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "plot.png")
    assert explain(error) == (
        "plot.png: No space left on device: free some space, or choose another folder"
    )
    plot = tmp_path / "plot.png"
    plot.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space") as caught:
        report(ROWS, plot, "", Panel("", "", {"": ([1], [2])}))
    assert "free some space" in explain(caught.value)


def test_mistakes_of_the_program_keep_their_traceback() -> None:
    with pytest.raises(KeyError):
        explain(KeyError("name"))


def test_a_ray_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-m", "flatweights.cli", "examples", "linear"],
        env=clean_environment(RAY_TMPDIR=str(tmp_path / "file"), RAY_ADDRESS="local"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert re.match(r"Ray did not start: .*: it needs a folder to write to \(RAY_TMPDIR", line)


def test_tensorflow_greets_nobody() -> None:
    said = run_python(
        "import os; os.dup2(1, 2)\n"
        "from flatweights.examples import prepare_tensorflow\n"
        "prepare_tensorflow()\n"
        "import tensorflow as tf\n"
        "assert tf.config.threading.get_intra_op_parallelism_threads() == 1\n"
        "tf.constant(1) + 1\n"
        "prepare_tensorflow(threads=2)  # in use: nothing to be done\n"
    )
    assert said == ""


def test_drivers_that_need_no_tensorflow_import_none() -> None:
    run_python(
        "import sys\n"
        "import flatweights.examples\n"
        "assert not {'ray', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "import flatweights.examples.linear, flatweights.examples.resnet\n"
        "import flatweights.examples.keras_fit, flatweights.examples.digits_lbfgs\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
