"""Helper threads: when they start, what they do between calls, and how forks affect them."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from reference import run_python

import flatweights as fw

LARGE = 4_000_000

# Programs, because a pool lasts as long as its process. From Python 3.12 on, a fork warns
# where there are other threads.
PRELUDE = """
import os, threading, time, warnings
import numpy as np
import flatweights as fw
warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
tasks = lambda: {int(name) for name in os.listdir("/proc/self/task")}
sources = [np.full(2_000_000, v, np.float32) for v in (1, 3)]  # 8 MB each
is_right = lambda: bool(np.all(fw.average(sources) == 2))
def forked(call):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if call() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def run(code: str) -> list[str]:
    return run_python(PRELUDE + code).split()


def test_threads_start_with_the_first_large_call() -> None:
    code = """
before = tasks()
fw.set_num_threads(3)
fw.average([np.ones(1000), np.ones(1000)])
fw.flatten([np.ones(10), np.ones(10)])
print(len(tasks() - before))
assert is_right()
print(len(tasks() - before))
"""
    assert run(code) == ["0", "2"]


@pytest.mark.parametrize("processors", ["all", "one"])
def test_threads_may_run_where_the_caller_may(processors: str) -> None:
    code = f"""
allowed = sorted(os.sched_getaffinity(0))[: None if {processors == "all"} else 1]
os.sched_setaffinity(0, allowed)
before = tasks()
fw.set_num_threads(3)
assert is_right()
helpers = tasks() - before
deadline = time.monotonic() + 60
while any(os.sched_getaffinity(helper) != set(allowed) for helper in helpers):
    assert time.monotonic() < deadline
    time.sleep(0.01)
print(len(helpers))
"""
    assert run(code) == ["2"]


def test_one_thread_is_the_callers() -> None:
    code = """
before = tasks()
fw.set_num_threads(1)
print(is_right(), len(tasks() - before))
"""
    assert run(code) == ["True", "0"]


def test_calls_start_no_threads_once_there_are_enough() -> None:
    code = """
fw.set_num_threads(2)
out = np.empty(2_000_000, np.float32)
fw.average(sources, out=out)
first = tasks()
for _ in range(50):
    fw.average(sources, out=out)
    assert tasks() == first
fw.set_num_threads(3)
fw.average(sources, out=out)
print(len(tasks() - first), first < tasks())
"""
    assert run(code) == ["1", "True"]


def test_idle_threads_take_no_time() -> None:
    code = """
fw.set_num_threads(3)
assert is_right()
time.sleep(0.05)
before = time.process_time()  # of all threads
time.sleep(0.5)
print(time.process_time() - before < 0.1)
"""
    assert run(code) == ["True"]


def test_a_child_has_threads_of_its_own() -> None:
    code = """
fw.set_num_threads(2)
assert is_right()
def call():
    begun = len(tasks())
    return begun == 1 and is_right() and len(tasks()) == 2
print(forked(call), forked(lambda: forked(call) == 0 and call()), is_right())
"""
    assert run(code) == ["0", "0", "True"]


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""),
    reason="a child of AddressSanitizer hangs where another thread was allocating",
)
def test_a_child_may_call_whatever_its_parent_was_doing() -> None:
    code = """
fw.set_num_threads(2)
done = False
def work():
    while not done:
        assert is_right()
workers = [threading.Thread(target=work) for _ in range(2)]
for worker in workers:
    worker.start()
print(*(forked(lambda: all(is_right() for _ in range(2))) for _ in range(8)))
done = True
for worker in workers:
    worker.join()
"""
    assert run(code) == ["0"] * 8


def test_calls_that_share_the_helpers_are_right(use_threads: Callable[[int], None]) -> None:
    use_threads(2)

    def work(k: int) -> bool:
        # Each job has its own length and values, so results of another job would be wrong.
        sources = [np.full(LARGE + 1000 * k, v + k, np.float32) for v in (1, 3)]
        return all(bool(np.all(fw.average(sources) == 2 + k)) for _ in range(6))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, range(2)))
