"""`flatweights demo`, small, in the Ray of these tests."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from flatweights import demo

pytestmark = [pytest.mark.ray, pytest.mark.starts_actors]

LAST_LINE = re.compile(r"test accuracy (\d\.\d{4}), SHA-256 of the weights ([0-9a-f]{64})")
SHORT = ("--size=small", "--rounds=3", "--local-steps=30", "--seed=1")


class Finished(NamedTuple):
    accuracy: float
    digest: str
    output: str


Demo = Callable[..., Finished]


@pytest.fixture
def run_demo(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Demo:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Finished:
        parser = argparse.ArgumentParser()
        demo.add_options(parser)
        options = parser.parse_args(arguments)
        demo.check_options(parser, options)
        demo.run(options)
        output = capsys.readouterr().out
        last = LAST_LINE.fullmatch(output.splitlines()[-1])
        assert last, output
        return Finished(float(last[1]), last[2], output)

    return run


def cells(output: str, row: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if line.strip().startswith(row + "  ")]
    return re.split(r"\s{2,}", line.strip())[1:]


def milliseconds(output: str, row: str) -> list[float]:
    return [float(cell.removesuffix(" ms")) for cell in cells(output, row)]


class Between(NamedTuple):
    """The range of a number before it was rounded for printing."""

    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, float) and self.low - 1e-9 <= value <= self.high + 1e-9

    def meets(self, other: "Between") -> bool:
        return self.low in other or other.low in self


def printed(number: str) -> Between:
    _, _, decimals = number.partition(".")
    half = 0.5 * 10.0 ** -len(decimals)
    return Between(float(number) - half, float(number) + half)


def percent(number: str) -> Between:
    return Between(*(each / 100 for each in printed(number)))


def times(output: str, row: str) -> list[Between]:
    return [printed(cell.removesuffix(" ms")) for cell in cells(output, row)]


def check_exchange(output: str) -> None:
    """Check that steps add up, ratios are those of the times, and every way has all its lines."""
    assert cells(output, "per round") == ["flatweights", "object store", "Ray's guide"]
    total = times(output, "exchange of 0.0903 MB")
    steps = ("collect results", "average", "hand it over", "set variables")
    for parts in zip(*(times(output, step) for step in steps), total, strict=True):
        *each, whole = parts
        assert min(part.high for part in each) > 0
        assert sum(part.low for part in each) <= whole.high
        assert sum(part.high for part in each) >= whole.low
    for size in ("0.1", "1"):
        assert min(milliseconds(output, f"exchange of {size} MB")) > 0
    ratios = [line.split()[-2:] for line in output.splitlines() if "times as long" in line]
    assert len(ratios) == 3
    ours, *others = total
    for ratio, other in zip(ratios[0], others, strict=True):
        assert printed(ratio).meets(Between(other.low / ours.high, other.high / ours.low))
    sizes = cells(output, "bytes of a model as sent")
    flat, store, guide = (int(cell.replace(",", "")) for cell in sizes)
    assert 89_728 < flat == store <= guide
    assert cells(output, "in how many arrays") == ["1", "1", "20"]
    computing = times(output, "computing")
    shares = cells(output, "share of the round")
    for share, trains, exchange in zip(shares, computing, total, strict=True):
        low = trains.low / (trains.low + exchange.high)
        high = trains.high / (trains.high + exchange.low)
        assert percent(share.removesuffix("%")).meets(Between(low, high))
    rounds = [
        Between(trains.low + exchange.low, trains.high + exchange.high)
        for trains, exchange in zip(computing, total, strict=True)
    ]
    saved = re.search(r"A whole round takes (-?\d+)% less time than with", output)
    assert saved
    low, high = 1 - rounds[0].high / rounds[2].low, 1 - rounds[0].low / rounds[2].high
    assert percent(saved[1]).meets(Between(low, high))


def test_a_worker_alone_compares_both_ways(run_demo: Demo) -> None:
    found = run_demo("--workers=1", "--size=small", "--rounds=2", "--local-steps=30")
    assert found.accuracy > 0.2
    check_exchange(found.output)
    assert "digits to train on: 1438 per worker" in found.output
    assert Path("flatweights-demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_both_ways_are_compared(run_demo: Demo) -> None:
    from matplotlib.image import imread

    found = run_demo(*SHORT)
    assert found.accuracy > 0.5
    check_exchange(found.output)
    assert "\npicture: flatweights-demo.png\n" in found.output
    assert "\x1b" not in found.output
    assert "round 3 of 3: test accuracy" in found.output
    gap = re.search(r"difference between the averages: (\S+)", found.output)
    assert gap
    assert float(gap[1]) < 1e-6
    pixels = imread("flatweights-demo.png")
    assert min(pixels.shape[:2]) > 500
    assert pixels.std() > 0


@pytest.mark.slow
def test_gradients_of_more_workers_than_cpus_are_compared(run_demo: Demo) -> None:
    found = run_demo("--size=small", "--mode=gradients", "--workers=3", "--rounds=3")
    check_exchange(found.output)
    assert "digits to train on: 479 per worker" in found.output
    assert "All exchange the same gradients, in turn" in found.output


@pytest.mark.slow
def test_seed_fixes_the_weights(run_demo: Demo) -> None:
    one, same, other = (run_demo(*SHORT[:-1], f"--seed={seed}") for seed in (1, 1, 2))
    assert one.digest == same.digest != other.digest


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["weights", "gradients"])
def test_defaults_reach_the_promised_accuracy(run_demo: Demo, mode: str) -> None:
    assert run_demo("--mode", mode).accuracy > 0.95


@pytest.mark.slow
def test_training_survives_a_worker(run_demo: Demo) -> None:
    from matplotlib.image import imread

    small = ("--size=small", "--rounds=4", "--local-steps=30")
    found = run_demo("--kill-worker", *small, "--plot=kill.png")
    assert found.accuracy > 0.5
    # Ray reports that it died, that it cannot be reached, or that it has restarted already.
    died = r"^round 2: rank 1 died: \w+Error: .+; averaged over 1 of 2$"
    back = r"^round 3: rank 1 is back; averaged over 2 of 2$"
    (before,) = re.finditer(died, found.output, re.MULTILINE)
    (after,) = re.finditer(back, found.output, re.MULTILINE)
    assert before.start() < after.start()
    assert "\nrounds with all workers: 3, without rank 1: 1\n" in found.output
    assert "Traceback" not in found.output
    pixels = imread("kill.png")[..., :3]
    red = (0xF9 / 255, 0xE8 / 255, 0xEA / 255)
    assert (abs(pixels - red).max(axis=2) < 0.01).any(), "rounds without it"
