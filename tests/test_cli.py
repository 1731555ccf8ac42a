"""The command's arguments, and `flatweights info`."""

import contextlib
import importlib.metadata
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reference import numpy_forks

import flatweights
from flatweights.cli import _of_tensorflow, main


def in_fresh_interpreter(code: str) -> subprocess.CompletedProcess[str]:
    return numpy_forks().run(code)


def test_command_is_installed() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="flatweights")
    assert script.value == "flatweights_command:main"
    assert script.load().__module__ == "flatweights_command"


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"flatweights {flatweights.__version__}\n"


def rows_of_info(printed: str) -> dict[str, str]:
    names = (*flatweights.show_config(), "tensorflow path", "GPUs")
    width = max(map(len, names)) + 2
    return {line[:width].strip(): line[width:] for line in printed.splitlines()}


def test_the_paths_to_tensorflow_are_those_of_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorflow")

    def run_here(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        """Run the program in this process, which has imported TensorFlow already."""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(command[-1], {})
        return subprocess.CompletedProcess(command, 0, printed.getvalue(), "")

    monkeypatch.setattr(subprocess, "run", run_here)
    monkeypatch.setenv("FLATWEIGHTS_TENSORFLOW", "ops")
    assert _of_tensorflow() == {
        "tensorflow path": "TensorFlow's operations, since FLATWEIGHTS_TENSORFLOW=ops",
        "GPUs": "TensorFlow sees none",
    }


def test_a_process_that_fails_after_its_last_word_has_told_the_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        said = "TensorFlow says this\nflatweights: one\nflatweights: two\n"
        return subprocess.CompletedProcess(command, -11, said, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert _of_tensorflow() == {"tensorflow path": "one", "GPUs": "two"}


@pytest.mark.slow
def test_info_tells_the_configuration_and_the_path_to_tensorflow_without_importing_the_extras() -> (
    None
):
    run = in_fresh_interpreter(
        "import os, sys; os.environ['FLATWEIGHTS_TENSORFLOW'] = 'ops'\n"
        "from flatweights.cli import main; code = main(['info'])\n"
        "extras = {'tensorflow', 'keras', 'ray', 'rich', 'sklearn', 'matplotlib'}\n"
        "sys.exit(str(extras & set(sys.modules)) if extras & set(sys.modules) else code)"
    )
    assert (run.returncode, run.stderr) == (0, "")
    config = flatweights.show_config()
    config["tensorflow path"] = "TensorFlow's operations, since FLATWEIGHTS_TENSORFLOW=ops"
    config["GPUs"] = "TensorFlow sees none"
    assert rows_of_info(run.stdout) == config


def test_info_works_on_the_base_install() -> None:
    run = in_fresh_interpreter(
        "import sys; sys.modules.update(dict.fromkeys(['tensorflow', 'ray', 'rich', 'sklearn']))\n"
        "from flatweights.cli import main; sys.exit(main(['info']))"
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "none, since tensorflow is not installed" in run.stdout


def test_info_tells_the_configuration_and_that_tensorflow_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorflow.py").write_text("raise ImportError('libcudart: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = in_fresh_interpreter(
        "import sys; from flatweights.cli import main; code = main(['info'])\n"
        "extras = {'tensorflow', 'keras', 'ray', 'rich', 'sklearn', 'matplotlib'}\n"
        "sys.exit(str(extras & set(sys.modules)) if extras & set(sys.modules) else code)"
    )
    assert (run.returncode, run.stderr) == (0, "")
    config = flatweights.show_config()
    why = "tensorflow cannot be imported: ImportError: libcudart: no such file"
    config["tensorflow path"] = f"none, since {why}"
    assert rows_of_info(run.stdout) == config


def test_demo_on_the_base_install_says_what_to_install() -> None:
    run = in_fresh_interpreter(
        "import sys; sys.modules.update(dict.fromkeys(['ray', 'rich']))\n"
        "from flatweights.cli import main; sys.exit(main(['demo']))"
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "flatweights demo: ray, rich not installed: pip install 'flatweights[all]'\n"
    )


PROGRAMS = sorted(Path(flatweights.__file__).parent.joinpath("examples").glob("[!_]*.py"))


@pytest.mark.parametrize("option", [[], ["--list"]])
def test_examples_are_listed_with_a_line_each(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["examples", *option]) == 0
    *lines, empty, _ = capsys.readouterr().out.splitlines()
    assert empty == ""
    assert [line.split()[0] for line in lines] == [path.stem for path in PROGRAMS]
    for line, path in zip(lines, PROGRAMS, strict=True):
        first = path.read_text().splitlines()[0].removeprefix('"""')
        assert 0 < len(first) < 90
        assert line.partition(" ")[2].lstrip() == first


@pytest.mark.parametrize("program", [path.stem for path in PROGRAMS])
def test_the_documentation_names_each_example(program: Any) -> None:
    page = (Path(__file__).parents[1] / "docs" / "start.md").read_text()
    assert re.search(rf"^\| `{program}` \| \w", page, re.MULTILINE)


@pytest.mark.parametrize("program", [path.stem for path in PROGRAMS])
def test_the_source_of_an_example_is_shown(
    program: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["examples", "--path", program]) == 0
    path = Path(capsys.readouterr().out.rstrip("\n"))
    assert path in PROGRAMS
    assert main(["examples", "--show", program]) == 0
    assert capsys.readouterr().out == path.read_text()


def test_python_runs_the_package_as_the_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "flatweights", "--help"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert run.stdout.startswith("usage: flatweights ")
    for part in ("tensorflow", "ray", "keras", "robust", "server", "wire"):
        assert f"`flatweights.{part}`" in run.stdout.replace("\n", " ")


def test_examples_are_listed_on_the_base_install() -> None:
    run = in_fresh_interpreter(
        "import sys; sys.modules.update(dict.fromkeys(['tensorflow', 'ray', 'rich', 'scipy']))\n"
        "from flatweights.cli import main; sys.exit(main(['examples']))"
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "one_code" in run.stdout


def test_example_on_the_base_install_says_what_to_install() -> None:
    run = in_fresh_interpreter(
        "import sys; sys.modules.update(dict.fromkeys(['ray', 'scipy']))\n"
        "from flatweights.cli import main; sys.exit(main(['examples', 'one_code']))"
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "flatweights examples: ray, scipy not installed: pip install 'flatweights[all]'\n"
    )


def test_example_is_run_with_its_options() -> None:
    run = in_fresh_interpreter(
        "from flatweights.cli import main\n"
        "main(['examples', 'linear', '--graph', '--workers', '0'])"
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("usage: flatweights examples linear [-h]")
    assert "error: expected at least 1 worker and 1 step, got {'workers': 0, " in run.stderr


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that stands in for a compiler, for sources without a library and an empty cache."""
    from flatweights.tensorflow.library import _load

    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "library.cc").touch()
    monkeypatch.setattr(_load, "PACKAGED", sources)
    monkeypatch.setenv("FLATWEIGHTS_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "compiler"
    script.touch(0o755)
    monkeypatch.setenv("CXX", str(script))
    return script


COMPILES = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; touch "$2"\n'
FAILS = "#!/bin/sh\necho 'error: too old' >&2; exit 1\n"


def test_build_tf_prints_where_the_library_is(
    compiler: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler.write_text(COMPILES)
    assert main(["build-tf"]) == 0
    built = Path(capsys.readouterr().out.rstrip("\n"))
    assert built.is_file()
    assert built.is_relative_to(compiler.parent / "cache")
    compiler.unlink()  # once is enough
    assert main(["build-tf"]) == 0
    assert capsys.readouterr().out == f"{built}\n"


def test_build_tf_says_why_it_fails_and_tries_again(
    compiler: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler.write_text(FAILS)
    for _ in range(2):
        assert main(["build-tf"]) == 1
        out, err = capsys.readouterr()
        assert (out, err) == ("", f"flatweights build-tf: {compiler} failed: error: too old\n")
    compiler.write_text(COMPILES)
    assert main(["build-tf"]) == 0


def test_build_tf_without_tensorflow_says_what_to_install() -> None:
    run = in_fresh_interpreter(
        "import sys; sys.modules['tensorflow'] = None\n"
        "from flatweights.cli import main; sys.exit(main(['build-tf']))"
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "flatweights build-tf: tensorflow not installed: pip install 'flatweights[tensorflow]'\n"
    )


def in_a_shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command.replace("flatweights", f"{sys.executable} -m flatweights"),
        shell=True,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_reader_that_left_is_no_traceback() -> None:
    assert in_a_shell("flatweights examples | true").stderr == ""


# If output is not buffered, argparse drops text that it cannot write.
@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [("info", ""), ("examples", "1"), pytest.param("--help", "", marks=pytest.mark.slow)],
)
def test_output_that_cannot_be_written_is_told(
    command: str, unbuffered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorflow.py").write_text("raise ImportError")  # found before TensorFlow
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    full = in_a_shell(f"flatweights {command} > /dev/full")
    reason = "flatweights: the output cannot be written: No space left on device\n"
    assert (full.returncode, full.stderr) == (1, reason)
    closed = in_a_shell(f"flatweights {command} >&-")
    assert (closed.returncode, closed.stderr) == (1, "flatweights: the standard output is closed\n")


PLAN = ["plan", "--nodes", "4", "--workers", "8", "--model", "500MB"]


def test_plan_prints_what_ray_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    from flatweights.ray import plan

    assert main([*PLAN, "--link", "10Gbit"]) == 0
    expected = plan(nodes=4, workers=8, model=500_000_000, link=10e9)
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "the following arguments are required: command"),
        (["train"], "invalid choice: 'train'"),
        (
            ["examples", "--show"],
            "flatweights examples: error: --show: expected the NAME of an example",
        ),
        (["examples", "--list", "linear"], "--list: expected no NAME, got 'linear'"),
        (["examples", "--show", "linear", "--bogus"], "expected nothing after NAME, got '--bogus'"),
        (["examples", "--plot", "a.png"], "--plot: expected the NAME of a program to run"),
        (["examples", "lines"], "NAME: invalid choice: 'lines'"),
        (["demo", "--workers", "0"], "--workers: expected an integer from 1 to 64, got '0'"),
        (["demo", "--workers", "65"], "--workers: expected an integer from 1 to 64, got '65'"),
        (["demo", "--rounds", "-1"], "--rounds: expected an integer from 1 to 100000, got '-1'"),
        (["demo", "--rounds", "0"], "--rounds: expected an integer from 1 to 100000, got '0'"),
        (["demo", "--local-steps", "0"], "--local-steps: expected an integer from 1"),
        (["demo", "--local-steps", "1.5"], "--local-steps: expected an integer from 1"),
        (["demo", "--seed", "-1"], "--seed: expected an integer from 0 to 4294967295, got '-1'"),
        (["demo", "--seed", "4294967296"], "--seed: expected an integer from 0 to 4294967295"),
        (["demo", "--mode", "both"], "--mode: invalid choice: 'both'"),
        (["demo", "--size", "huge"], "--size: invalid choice: 'huge'"),
        (["demo", "--kill-worker", "--workers", "1"], "--kill-worker: expected at least 2 workers"),
        (["demo", "--kill-worker", "--rounds", "1"], "--kill-worker: expected at least 2 rounds"),
        (
            ["demo", "--kill-worker", "--mode", "gradients"],
            "expected --mode weights",
        ),
        (["plan", "--nodes", "0"], "--nodes: expected an integer from 1 to 1000000, got '0'"),
        (PLAN, "flatweights plan: error: link: expected bits per second, such as 10e9 or '10Gbit'"),
        ([*PLAN, "--link", "10"], "link: expected bits per second, such as 10e9 or '10Gbit'"),
        ([*PLAN, "--link", "10GB"], "link: expected bits per second, such as 10e9 or '10Gbit'"),
        ([*PLAN, "--link", "1Gbit", "--dtype", "int8"], "dtype: expected one that has a mean"),
    ],
)
def test_bad_arguments_say_what_was_expected(
    arguments: Any, expected: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("missing/plot.png", "No such file or directory"),
        ("file/plot.png", "Not a directory"),
        ("directory.png", "Is a directory"),
        ("plot.doc", "expected a file name ending in .png, .svg, .pdf"),
        ("plot", "expected a file name ending in .png, .svg, .pdf"),
        (300 * "n" + ".png", "File name too long"),
    ],
)
def test_plot_that_cannot_be_written_is_refused_before_training(
    name: Any, expected: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory.png").mkdir()
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--plot", str(tmp_path / name)])
    assert exit_.value.code == 2
    assert expected in capsys.readouterr().err


def test_refused_arguments_leave_no_plot_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old.png"
    old.write_bytes(b"kept")
    link = tmp_path / "link.png"
    link.symlink_to("nowhere.png")
    for plot in (old, tmp_path / "new.png", link):
        with pytest.raises(SystemExit):
            main(["demo", "--plot", str(plot), "--workers", "0"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.png", "old.png"]
    assert old.read_bytes() == b"kept"
