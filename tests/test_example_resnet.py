"""The example `resnet`, run as a user runs it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from reference import clean_environment, run_example
from test_demo import Process, family, still_running

from flatweights import FlatWeights
from flatweights.examples import resnet

ROUNDS = 10  # so many that each has its line
SMALL = ("--num-residual-units=1", "--batch-size=16", f"--rounds={ROUNDS}", "--eval-every=1")
ENOUGH = 0.3
BROKEN_OFF = 4
PROGRESS = re.compile(r"round (\d+) of \d+: loss (\d+\.\d+)")


class Run:
    """The program, started in a session of its own.

    Attributes:
        losses: Of each round that was printed.
        output: What it has printed.
        errors: What it has printed to the standard error, once it has ended.
    """

    def __init__(self, *options: str, cwd: Path) -> None:
        self.losses: dict[int, float] = {}
        self.output = self.errors = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flatweights.examples.resnet", *SMALL, *options],
            cwd=cwd,
            env=clean_environment(),
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        for left in family(self.process.pid):
            os.kill(left.id, signal.SIGKILL)
        self.process.wait()

    def read(self, number: int = 0) -> bool:
        """Read until a round is done, that one or a later one; False at the end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if found := PROGRESS.match(line):
                self.losses[int(found[1])] = float(found[2])
                if int(found[1]) >= number:
                    return True
        return False

    def end(self) -> int:
        """Read to the end; return the exit code."""
        while self.read():
            pass
        self.errors = self.process.communicate(timeout=240)[1]
        return self.process.returncode

    def processes(self, name: str = "") -> set[Process]:
        return {process for process in family(self.process.pid) if process.name.startswith(name)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resnet")


@pytest.fixture(scope="module")
def interrupted(folder: Path) -> Run:
    """Run eagerly, and interrupted in the middle."""
    with Run(cwd=folder) as run:
        assert run.read(BROKEN_OFF), run.end()
        before = run.processes()
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.end() == 130, run.errors
        deadline = time.monotonic() + 30
        while still_running(before) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not still_running(before)
    return run


@pytest.fixture(scope="module")
def resumed(interrupted: Run, folder: Path) -> Run:
    """Resumed in a session of TF1; one of its workers is killed."""
    options = ("--resume", "--mode=graph", "--log-dir=logs", "--plot=plot.png")
    with Run(*options, f"--enough={ENOUGH}", cwd=folder) as run:
        assert run.read(), run.end()
        _, victim = run.processes("ray::Trainer")
        os.kill(victim.id, signal.SIGKILL)
        assert run.end() == 0, run.errors
    return run


def test_interrupt_saves_the_last_complete_round(interrupted: Run, folder: Path) -> None:
    *_, saved, last = interrupted.errors.splitlines()
    assert last == "interrupted"
    assert interrupted.losses[BROKEN_OFF] < interrupted.losses[1] - 0.3
    assert "Traceback" not in interrupted.errors
    found = re.fullmatch(
        r"round (\d+) is saved: (resnet-checkpoints/round-\d+\.safetensors)", saved
    )
    assert found, saved
    assert int(found[1]) - max(interrupted.losses) in (0, 1)


def test_it_goes_on_after_that_round_in_the_other_mode(interrupted: Run, resumed: Run) -> None:
    first = min(resumed.losses)
    assert first - max(interrupted.losses) in (1, 2)
    assert list(resumed.losses) == list(range(first, ROUNDS + 1))
    assert resumed.losses[first] < interrupted.losses[1] - 0.3, "it has not begun again"


def last_accuracy(run: Run) -> float:
    (row,) = [line for line in run.output.splitlines() if re.match(r"\s+\d+ to \d+ ", line)]
    return float(row.split()[-1])


def test_it_learns_though_a_worker_dies(resumed: Run) -> None:
    assert re.search(r"rank [01] is left out", resumed.errors)
    assert re.search(r"round \d+ of 10: .*, without rank [01]\n", resumed.output)
    assert last_accuracy(resumed) > ENOUGH
    assert re.search(r"exchange per round: \S+ ms as one buffer, \S+ ms as a dict", resumed.output)


def test_plot_and_weights_are_there_at_the_end(resumed: Run, folder: Path) -> None:
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    found = sorted((folder / "resnet-checkpoints").iterdir())
    assert [path.name for path in found] == ["checkpoint.json", f"round-{ROUNDS:06}.safetensors"]
    weights = FlatWeights.load(found[1])
    assert all(np.isfinite(value).all() for value in weights.values())


def test_tensorboard_gets_its_numbers(resumed: Run, folder: Path) -> None:
    import tensorflow as tf

    (file,) = (folder / "logs").glob("events.out.tfevents.*")
    found: dict[str, dict[int, float]] = {}
    for event in tf.compat.v1.train.summary_iterator(str(file)):
        for value in event.summary.value:
            assert value.metadata.plugin_data.plugin_name == "scalars"
            found.setdefault(value.tag, {})[event.step] = float(tf.make_ndarray(value.tensor))
    names = ("training/loss", "training/accuracy", "training/seconds", "images per second")
    for name in names:
        assert list(found[name]) == list(resumed.losses)
        assert all(value > 0 for value in found[name].values())
    assert found["training/loss"] == pytest.approx(resumed.losses, abs=6e-4)
    rates = {n: 0.05 if n <= 5 else 0.005 if n <= 8 else 0.0005 for n in resumed.losses}
    assert found["learning rate"] == pytest.approx(rates)
    assert found["evaluation/accuracy"][ROUNDS] == pytest.approx(last_accuracy(resumed), abs=6e-5)


def refused(
    *options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the program says, before it starts Ray."""
    monkeypatch.setattr(sys, "argv", ["resnet", *SMALL, *options])
    with pytest.raises(SystemExit) as error:
        resnet.main()
    return f"{error.value} {capsys.readouterr().err}"


def test_what_cannot_be_resumed_is_refused(
    resumed: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(*options: str) -> str:
        return refused(*options, monkeypatch=monkeypatch, capsys=capsys)

    monkeypatch.chdir(folder)
    assert "all 10 rounds are done" in say("--resume")
    assert "another training: --num-residual-units: 1 there, 5 here" in say(
        "--resume", "--num-residual-units=5"
    )
    assert "nowhere: no checkpoint to resume" in say("--resume", "--checkpoint-dir=nowhere")
    assert "another training, or of a part" in say("--seed=1")
    assert "File exists: 'plot.png'" in say("--checkpoint-dir=plot.png")


def test_wrong_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("batch_1.bin").write_bytes(bytes(3073 * 2))
    Path("batch_2.bin").write_bytes(bytes(3073 * 2 - 1))
    paths = ("--train-data-path=batch*", "--eval-data-path=batch_1.bin")
    said = refused(*paths, monkeypatch=monkeypatch, capsys=capsys)
    assert "batch_2.bin: expected records of 3073 bytes (cifar10), got 6145 bytes" in said
    said = refused(paths[0], monkeypatch=monkeypatch, capsys=capsys)
    assert "--train-data-path, --eval-data-path: expected both or none" in said
    paths = ("--train-data-path=batch_1*", "--eval-data-path=batch_1.bin")
    said = refused(*paths, "--num-workers=3", monkeypatch=monkeypatch, capsys=capsys)
    assert "expected an image for each of 3 workers, got 2" in said


def test_more_gpus_than_there_are_are_refused(tmp_path: Path) -> None:
    done = run_example("resnet", "--num-gpus=99", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "expected a GPU for each of 99 workers, got 0: that is what Ray has\n"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_defaults_learn_the_digits(tmp_path: Path, mode: str) -> None:
    done = run_example("resnet", f"--mode={mode}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
