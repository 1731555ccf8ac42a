"""Observing rounds: their records, Ray's metrics, the log, the progress bar."""

import collections
import json
import logging
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import ray
from interrupts import handlers_end
from ray.util.metrics import Counter, Gauge, Histogram
from ray_cluster import start_lean_ray
from ray_pool import Actors, Lend, only_late
from ray_workers import PlainWorker, weights_of
from reference import clean_environment

from flatweights._numbers import readable_bytes
from flatweights.ray import Round, WorkerError, WorkerGroup, average
from flatweights.ray.results._report import METRICS, ROUND, Metrics, report, rounds_bar

pytestmark = pytest.mark.ray

HELPERS = str(Path(__file__).parents[2] / "helpers")
SIZE = 40_000
NBYTES = weights_of(0.0, SIZE).buffer.nbytes


@pytest.fixture(scope="module", params=[4, 2], ids=["one pass", "running sum"])
def group(request: pytest.FixtureRequest, way: str, all_actors: Actors) -> Iterator[WorkerGroup]:
    with all_actors.loan() as lend:
        made = lend(PlainWorker, 3, SIZE, max_inflight=request.param)
        made.broadcast(weights_of(1.0, SIZE))
        yield made


def again(record: dict[str, Any]) -> Any:
    return json.loads(json.dumps(record))


def values_in(text: str, name: str, **tags: str) -> list[float]:
    """Return the values of all series with this name and these tags."""
    values = []
    for line in text.splitlines():
        series = re.fullmatch(r"ray_(\w+)\{(.*)\} (\S+)", line)
        if series and series[1] == name:
            found = dict(re.findall(r'(\w+)="(.*?)"', series[2]))
            if tags.items() <= found.items():
                values.append(float(series[3]))
    return values


def scrape(node: dict[str, Any], name: str, value: float) -> str:
    """Return the text that Prometheus would read from ``node``, once a metric has this value."""
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    text = ""
    for _ in range(1200):
        try:
            with urllib.request.urlopen(url, timeout=60) as reply:
                text = reply.read().decode()
        except OSError:
            text = ""  # the agent is still starting
        if values_in(text, name) == [value]:
            return text
        time.sleep(0.1)
    raise AssertionError(f"{name} is not {value}: {text}")


def scrape_all(node: dict[str, Any]) -> str:
    """Return the text that Prometheus would read once it contains all counts.

    A report may be made while counts are handed over, and be read while it arrives. So this waits
    for a number in one report, for another number in a later report, and for a third one after
    that.
    """
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()  # it hands counts over
    number = Gauge("flatweights_tests_number", "A number that grows.")
    for value in (1.0, 2.0, 3.0):
        number.set(value)
        text = scrape(node, "flatweights_tests_number", value)
    return text


def some_rounds(folder: str) -> None:
    """Four rounds of which one fails: a program of its own, whose counters begin at zero."""
    start_lean_ray(without=[], _system_config={"metrics_report_interval_ms": 200})
    group = WorkerGroup.create(PlainWorker, 3, arguments=lambda rank: (rank, SIZE), num_cpus=0)
    group.broadcast(weights_of(1.0, SIZE))
    records = [found.record() for found in group.run(1, "train", progress=True)]
    for found in group.run(1, "act", {1: "nan"}, nonfinite="skip", progress=True):
        records.append(found.record())
    try:
        group.average("act", {0: "raise"})
    except WorkerError:
        records.append({})
    late = {"timeout": 1.0, "min_results": 2, "progress": True}  # also to take the average
    with only_late():
        for found in group.run(1, "act", {2: "hang"}, folder, **late):  # type: ignore[arg-type]
            records.append(found.record())
    text = scrape_all(ray.nodes()[0])
    (Path(folder) / "seen.json").write_text(json.dumps({"records": records, "text": text}))
    ray.shutdown()


def run_on_a_terminal(function: Callable[..., None], *arguments: str) -> str:
    """Run a function of this file in a process whose output is a terminal; return the output."""
    code = (
        "import importlib.util, sys; sys.path.insert(0, sys.argv[1]);"
        "spec = importlib.util.spec_from_file_location('seen', sys.argv[2]);"
        "seen = importlib.util.module_from_spec(spec); spec.loader.exec_module(seen);"
        "getattr(seen, sys.argv[3])(*sys.argv[4:])"
    )
    terminal, its_end = pty.openpty()
    session = tempfile.mkdtemp(prefix="fw-", dir="/tmp")
    try:
        with subprocess.Popen(
            [sys.executable, "-c", code, HELPERS, __file__, function.__name__, *arguments],
            env=clean_environment(PYTHONPATH=HELPERS, RAY_TMPDIR=session, TERM="xterm"),
            stdout=its_end,
            stderr=subprocess.PIPE,
        ) as process:
            os.close(its_end)
            shown = b""
            try:
                while some := os.read(terminal, 4096):
                    shown += some
            except OSError:
                pass  # on Linux, the other end has been closed
            _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors.decode()[-5000:]
    finally:
        os.close(terminal)
        shutil.rmtree(session, ignore_errors=True)
    return shown.decode()


class Seen:
    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.shown = run_on_a_terminal(some_rounds, folder)
            found = json.loads((Path(folder) / "seen.json").read_text())
        self.records: list[dict[str, Any]] = found["records"]
        self.text: str = found["text"]

    def metric(self, name: str, **tags: str) -> float:
        """Return the value of the only series with this name and these tags."""
        (value,) = values_in(self.text, name, **tags)
        return value


@pytest.fixture(scope="module")
def seen() -> Seen:
    pytest.importorskip("prometheus_client", reason="Ray serves metrics with ray[default]")
    return Seen()


@pytest.mark.slow
def test_prometheus_reads_rounds_ranks_bytes_and_times(seen: Seen) -> None:
    assert seen.metric("flatweights_rounds_total") == 3
    assert seen.metric("flatweights_failed_rounds_total") == 1
    assert seen.metric("flatweights_ranks_used") == 2
    assert seen.metric("flatweights_ranks_left_out_total", reason="quarantined") == 1
    assert seen.metric("flatweights_ranks_left_out_total", reason="late") == 1
    assert 'reason="failed"' not in seen.text
    assert seen.metric("flatweights_bytes_total", direction="in") == (3 + 3 + 2) * NBYTES
    assert seen.metric("flatweights_bytes_total", direction="out") == (3 + 3 + 3 + 2) * NBYTES
    for step, times in {"wait": 3, "average": 3, "round": 3, "put": 4, "broadcast": 4}.items():
        assert seen.metric("flatweights_round_seconds_count", step=step) == times
        total = seen.metric("flatweights_step_seconds_total", step=step)
        recorded = sum(record["seconds"][step] for record in seen.records if record)
        # The weights to begin with were put and sent outside of a round.
        assert total > recorded if times == 4 else total == pytest.approx(recorded)


@pytest.mark.slow
def test_the_bar_and_the_records_show_who_is_left_out(seen: Seen) -> None:
    assert " 3 ranks" in seen.shown
    assert "2 of 3 ranks, without 1" in seen.shown
    assert "2 of 3 ranks, without 2" in seen.shown
    first, skipped, _, hung = seen.records
    used = [record["used"] for record in (first, skipped, hung)]
    assert used == [[0, 1, 2], [0, 2], [0, 1]]
    assert [record["late"] for record in (first, skipped, hung)] == [[], [], [2]]
    assert skipped["quarantined"] == [1]
    assert first["bytes"] == skipped["bytes"] == {"in": 3 * NBYTES, "out": 3 * NBYTES}
    assert hung["bytes"] == {"in": 2 * NBYTES, "out": 2 * NBYTES}
    assert hung["seconds"]["round"] >= hung["seconds"]["wait"]


Given: TypeAlias = collections.defaultdict[tuple[str, ...], float]


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Given]:
    """Returns what Ray's instruments were given: sums, the last value, and numbers of values."""

    def wait() -> None:
        thread = METRICS._thread
        if thread is not None:
            thread.join()

    def key_of(one: Any, tags: Any) -> tuple[str, ...]:
        return (one.info["name"], *(tags or {}).values())

    wait()  # for counts of other tests
    given: Given = collections.defaultdict(float)
    add, assign, observe = Counter.inc, Gauge.set, Histogram.observe

    def noted_add(one: Any, value: float, tags: Any = None) -> None:
        given[key_of(one, tags)] += value
        add(one, value, tags)

    def noted_assign(one: Any, value: float, tags: Any = None) -> None:
        given[key_of(one, tags)] = value
        assign(one, value, tags)

    def noted_observe(one: Any, value: float, tags: Any = None) -> None:
        given[key_of(one, tags)] += 1
        observe(one, value, tags)

    monkeypatch.setattr(Counter, "inc", noted_add)
    monkeypatch.setattr(Gauge, "set", noted_assign)
    monkeypatch.setattr(Histogram, "observe", noted_observe)

    def result() -> Given:
        wait()
        return given

    return result


def test_ray_is_given_all_counts(
    handed_over: Callable[[], Given], way: str, lend: Lend, tmp_path: Path
) -> None:
    group = lend(PlainWorker, 3, SIZE)
    group.broadcast(weights_of(1.0, SIZE))
    rounds = [*group.run(1, "train"), *group.run(1, "act", {1: "nan"}, nonfinite="skip")]
    with pytest.raises(WorkerError):
        group.average("act", {0: "raise"})
    with only_late():
        hang: Any = ({2: "hang"}, str(tmp_path))
        rounds += group.run(1, "act", *hang, timeout=0.2, min_results=2)
    (tmp_path / "go on").touch()
    given = handed_over()
    times = {
        ("flatweights_round_seconds", step): count
        for step, count in (("wait", 3), ("average", 3), ("round", 3), ("put", 4), ("broadcast", 4))
    }
    for step in ("wait", "average", "round"):
        spent = sum(found.seconds[step] for found in rounds)
        assert given.pop(("flatweights_step_seconds", step)) == pytest.approx(spent)
    for step in ("put", "broadcast"):  # the first weights were sent outside of a round
        spent = sum(found.seconds[step] for found in rounds)
        assert given.pop(("flatweights_step_seconds", step)) > spent
    ways = [key for key in given if key[0] == "flatweights_ranks_by_transport"]
    assert sum(map(given.pop, ways)) == 9
    assert given == times | {
        ("flatweights_rounds",): 3,
        ("flatweights_failed_rounds",): 1,
        ("flatweights_ranks_used",): 2,
        ("flatweights_ranks_left_out", "quarantined"): 1,
        ("flatweights_ranks_left_out", "late"): 1,
        ("flatweights_bytes", "in"): (3 + 3 + 2) * NBYTES,
        ("flatweights_bytes", "out"): (3 + 3 + 3 + 2) * NBYTES,
    }


def test_the_bar_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, its_end = pty.openpty()
    with os.fdopen(its_end, "w") as output, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", output)
        patched.setenv("TERM", "xterm")
        with rounds_bar(2) as show:
            show(Round(None, (0, 1), {}))
            show(Round(None, (0,), {}, late=[1]))
        output.flush()
        shown = ""
        while "without 1" not in shown:
            shown += os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert "2/2" in shown
    assert "1 of 2 ranks, without 1" in shown


def test_a_record_is_what_json_gives_back(group: WorkerGroup) -> None:
    for number, found in enumerate(group.run(2, "act", {1: "nan"}, nonfinite="skip"), 1):
        record = found.record()
        assert again(record) == record
        assert record["round"] == number
        assert (record["used"], record["late"]) == ([0, 2], [])
        assert record["quarantined"] == [1] == list(found.failed)
        assert record["failed"] == {"1": "ValueError: rank 1, slot 0 'w': holds NaN or infinity"}
        assert record["bytes"] == {"in": 3 * NBYTES, "out": 3 * NBYTES}
        steps = record["seconds"]
        assert set(steps) == {"wait", "average", "put", "broadcast", "round"}
        whole = steps.pop("round")
        assert 0 <= sum(steps.values()) <= whole


@pytest.mark.starts_actors
def test_a_round_by_hand_has_no_number(group: WorkerGroup) -> None:
    found = group.average("train")
    assert again(found.record()) == found.record()
    assert found.record()["round"] is None
    assert found.record()["bytes"] == {"in": 3 * NBYTES, "out": 0}
    assert set(found.seconds) == {"wait", "average"}
    group.broadcast(found)
    assert found.record()["bytes"] == {"in": 3 * NBYTES, "out": 3 * NBYTES}
    assert set(found.seconds) == {"wait", "average", "put", "broadcast"}

    @ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
    def diverge() -> None:
        raise ArithmeticError("diverged\nat step 3")

    found = average([ray.put(np.arange(3.0)), diverge.remote()], min_results=1)
    assert found.record()["failed"] == {"1": "ArithmeticError: diverged"}, "in one line"
    assert found.quarantined == ()
    assert set(found.seconds) == {"wait", "average"}
    assert found.ref
    assert set(found.seconds) == {"wait", "average", "put"}


LINE = re.compile(
    r"round 1: (.*), \d+\.\d{3} s "
    r"\(wait \d+\.\d{3}, average \d+\.\d{3}, put \d+\.\d{3}, broadcast \d+\.\d{3}\), (.*)"
)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_the_log_has_a_line_for_each_round(
    group: WorkerGroup, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "flatweights"):
        list(group.run(1, "train"))
        list(group.run(1, "act", {1: "nan"}, nonfinite="skip"))
    (level, line), (level_of_skipped, skipped) = lines(caplog)
    assert (level, level_of_skipped) == ("INFO", "WARNING")
    found = LINE.fullmatch(line)
    assert found, line
    by = " by shm" if way == "shm" else ""
    assert found.groups() == ("3 of 3 ranks", f"960 kB in, 960 kB out{by}")
    found = LINE.fullmatch(skipped)
    assert found, skipped
    assert found[1] == "2 of 3 ranks, 1 quarantined (1)"
    assert found[2].endswith("; rank 1: ValueError: rank 1, slot 0 'w': holds NaN or infinity")


def test_the_log_counts_the_ranks_that_a_rule_has_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = Round(None, used=[0, 4], failed={1: ValueError("NaN")}, quarantined=[1, 2, 3])
    with caplog.at_level(logging.INFO, "flatweights"):
        report(found, already_named=[1])
        report(Round(None, used=[0, 4], quarantined=[1, 2, 3]))
    for level, line in lines(caplog):
        assert level == "INFO"
        assert line.startswith("average: 2 of 5 ranks, 3 quarantined (1, 2, 3), ")


def test_the_log_warns_once_of_who_has_died(
    way: str, lend: Lend, caplog: pytest.LogCaptureFixture
) -> None:
    group = lend(PlainWorker, 2, SIZE)
    group.broadcast(weights_of(1.0, SIZE))
    with caplog.at_level(logging.INFO, "flatweights"):
        list(group.run(1, "act", {1: "die before"}, min_results=1))
        group.average("train", min_results=1)
    said, first, second = lines(caplog)
    assert said[0] == "WARNING"
    assert said[1].startswith("rank 1 is left out: ActorDiedError")
    assert first[0] == second[0] == "INFO"
    assert first[1].startswith("round 1: 1 of 2 ranks, 1 failed (1), ")
    assert second[1].startswith("average: 1 of 2 ranks, 1 failed (1), ")
    assert "Died" not in first[1] + second[1]


def test_the_log_warns_of_late_references(
    lend: Lend, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    worker = lend(PlainWorker, 1, SIZE).actors()[0]
    refs = [ray.put(weights_of(1.0, SIZE)), worker.act.remote({0: "hang"}, str(tmp_path))]
    with caplog.at_level(logging.INFO, "flatweights"):
        average(refs, timeout=0.5, min_results=1)
    (tmp_path / "go on").touch()
    ((level, line),) = lines(caplog)
    assert level == "WARNING"
    assert line.startswith("average: 1 of 2 ranks, 1 late (1), ")
    assert line.endswith("), 320 kB")


@pytest.mark.starts_actors
def test_nothing_is_drawn_without_a_terminal(
    group: WorkerGroup, capfd: pytest.CaptureFixture[str]
) -> None:
    assert len(list(group.run(2, "train", progress=True))) == 2
    assert capfd.readouterr().out == ""


@pytest.mark.filterwarnings('ignore:install "ipywidgets"')
def test_a_saved_notebook_has_the_last_state_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda _, text: shown.append(text))
    with rounds_bar(2) as show:
        show(Round(None, (0, 1), {}))
        show(Round(None, (0,), {1: TimeoutError()}, quarantined=[2], joined=[3, 5], left=[4]))
    assert "2/2" in shown[-1]
    assert "1 of 3 ranks, without 1, 2; 3, 5 joined; 4 left" in shown[-1]


@pytest.mark.starts_actors
def test_an_error_of_the_metrics_does_not_break_a_round(
    group: WorkerGroup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no agent")

    monkeypatch.setattr(METRICS, "works", True)  # and again afterwards
    monkeypatch.setattr(Counter, "inc", refuse)
    with caplog.at_level(logging.WARNING, "flatweights"):
        rounds = list(group.run(2, "train"))
        METRICS.hand_over()
    assert [found.used for found in rounds] == [(0, 1, 2)] * 2
    assert lines(caplog) == [("WARNING", "no metrics of rounds from now on: OSError: no agent")]


def test_metrics_wait_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    metrics = Metrics()
    handed_over: list[Any] = []
    monkeypatch.setattr(metrics, "_record", lambda *args: handed_over.append(args))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        metrics.add({ROUND: 1})
    metrics.add({ROUND: 2})
    first = metrics._thread
    assert first is not None
    first.join()
    assert handed_over == [({ROUND: 3}, [], None)]
    metrics.add({ROUND: 4})
    assert metrics._thread not in (first, None)


def test_rounds_without_a_pause_have_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    threads: list[threading.Thread] = []

    def record(counts: Any, *_: Any) -> None:
        threads.append(threading.current_thread())
        if len(threads) < 4:
            metrics.add({ROUND: 1})

    monkeypatch.setattr(metrics, "_record", record)
    metrics.add({ROUND: 1})
    thread = metrics._thread
    assert thread is not None
    thread.join()
    assert threads == [thread] * 4
    assert metrics._thread is None


def test_a_round_of_nothing_but_weights_has_a_record() -> None:
    found = Round([1.0], [0], stale=[1, 1])
    assert again(found.record()) == {
        "round": None,
        "used": [0],
        "late": [],
        "failed": {},
        "quarantined": [],
        "seconds": {},
        "bytes": {"in": 0, "out": 0},
        "transports": {},
        "scores": {},
        "staleness": {},
        "stale": [1, 1],
        "joined": [],
        "left": [],
        "healed": [],
        "groups": [],
        "links": {},
    }


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (102_400, "102 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (4 * 10**8, "400 MB"),
        (1_234_000_000, "1.23 GB"),
        (5 * 10**15, "5,000 TB"),
    ],
)
def test_bytes_are_readable(nbytes: int, text: str) -> None:
    assert readable_bytes(nbytes) == text


def test_a_signal_handler_may_add_while_the_thread_starts() -> None:
    metrics = Metrics()

    def add_first() -> None:
        nonlocal metrics
        metrics = Metrics()
        metrics.add()

    assert handlers_end(add_first, lambda: metrics.add())
