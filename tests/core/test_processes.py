"""Interpreters that end, fork or have a sub-interpreter while threads are in calls."""

import subprocess
import sys
import weakref

import pytest
from reference import clean_environment, run_python

from flatweights import _forks
from flatweights._frameworks import holder_of

DAEMONS = """
import sys, threading
import numpy as np
import flatweights as fw
parts = [np.ones(1 << 20, np.float32)] * 2
mixed = [np.ones(1 << 20, np.int32), np.ones(1 << 20)]
fractions = np.full(1000, 2.4)
columns = np.ones((1000, 1000), order="F")
weights = fw.FlatWeights({{"a": np.zeros((1000, 1000)), "n": np.zeros(1000, int)}})
begun = threading.Barrier(5)
def loop():
    begun.wait()
    while True:
        {call}
for _ in range(4):
    threading.Thread(target=loop, daemon=True).start()
begun.wait()
for _ in range(3):
    fw.average(parts)
"""


@pytest.mark.parametrize(
    "call",
    [
        "fw.average(parts)",
        "fw.flatten(parts)",
        "fw.flatten(mixed)",
        "weights['a'] = columns",
        "weights['n'] = fractions",
        "fw.RunningAverage().add(parts)",
        "fw.norm(parts[0])",
    ],
)
def test_an_interpreter_ends_while_daemon_threads_are_in_calls(call: str) -> None:
    assert run_python(DAEMONS.format(call=call)) == ""


# From Python 3.12 on, a fork warns where there are other threads. A child that hangs is killed.
FORKS = """
import os, pickle, signal, threading, warnings
import numpy as np
import flatweights as fw
warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
def forked(call):
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        code = 1
        try:
            code = 0 if call() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def test_a_child_unpickles_layouts_that_threads_were_unpickling_at_the_fork() -> None:
    code = """
pickled = pickle.dumps(fw.FlatWeights({"a": np.ones(3)}))
stop = threading.Event()
def loop():
    while not stop.is_set():
        pickle.loads(pickled)
threads = [threading.Thread(target=loop) for _ in range(3)]
for thread in threads:
    thread.start()
print({forked(lambda: pickle.loads(pickled)["a"].sum() == 3) for _ in range(12)})
stop.set()
"""
    assert run_python(FORKS + code) == "{0}\n"


def test_a_child_does_not_wait_for_a_sum_that_a_lost_thread_was_adding_to() -> None:
    code = """
class Slow:
    def __array__(self, dtype=None, copy=None):
        reading.set()
        go_on.wait()
        return np.full(3, 5.0)
reading, go_on = threading.Event(), threading.Event()
running, other = fw.RunningAverage(), fw.RunningAverage()
for average in (running, other):
    average.add(np.ones(3))
thread = threading.Thread(target=running.add, args=(Slow(),))
thread.start()
reading.wait()
def refused():
    for call in (lambda: running.add(np.ones(3)), running.mean, lambda: other.merge(running)):
        try:
            call()
        except RuntimeError as error:
            assert "another thread was changing this object when the process forked" in str(error)
        else:
            return False
    other.add(np.full(3, 3.0))
    return other.mean().tolist() == [2.0] * 3
print(forked(refused))
go_on.set()
thread.join()
print(running.mean())
"""
    assert run_python(FORKS + code) == "0\n[3. 3. 3.]\n"


def test_a_copy_that_cannot_be_ended_leaves_no_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_forks, "_ends", weakref.WeakKeyDictionary())
    ended = []

    class Copy:
        def __init__(self, error: Exception | None) -> None:
            self.error = error

        def end(self) -> None:
            ended.append(self)
            if self.error:
                raise self.error

    copies = [_forks.in_forks(Copy(error), Copy.end) for error in (OSError(), KeyError("x"), None)]
    with pytest.raises(KeyError):
        _forks._end_copies()
    assert ended == copies


def test_a_framework_that_may_not_be_imported_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert holder_of(object()) is None


def test_a_sub_interpreter_refuses_the_import() -> None:
    code = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
try:
    failure = interpreters.run_string(interpreters.create(), "import flatweights._core")
except Exception as error:
    failure = error
print(failure)
"""
    # NumPy warns of sub-interpreters.
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "ImportError" in done.stdout, done.stderr
    assert "cannot be imported into a sub-interpreter" in done.stdout
