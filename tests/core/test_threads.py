import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from reference import clean_environment, random_array, refusals, run_python, same_bits

import flatweights as fw

LARGE = 4_000_000


class Counter:
    """Counts in another thread whenever this thread may run Python code."""

    def __init__(self) -> None:
        self.count = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop:
            self.count += 1
            time.sleep(0)  # hands the GIL over, since no other thread takes it

    def __enter__(self) -> "Counter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()


@pytest.fixture
def counter() -> Iterator[Counter]:
    # No thread is forced to give up the GIL: a thread that runs beside a call was let go by it.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)
    try:
        with Counter() as running:
            yield running
    finally:
        sys.setswitchinterval(interval)


def goes_on_during(counter: Counter, call: Callable[[], Any], attempts: int) -> bool:
    for _ in range(attempts):
        before = counter.count
        call()
        if counter.count > before:
            return True
    return False


def calls_that_move_bytes() -> dict[str, Callable[[], Any]]:
    a, b, out = (np.ones(LARGE, np.float32) for _ in range(3))
    w, target = fw.FlatWeights({"a": a}), fw.FlatWeights({"a": a})
    running, other = fw.RunningAverage(), fw.RunningAverage()
    running.add(a)
    other.add(a)
    return {
        "flatten": lambda: fw.flatten([a], out=out),
        "unflatten_into": lambda: fw.unflatten_into([out], a),
        "average of arrays": lambda: fw.average_into(out, [a, b]),
        "average of FlatWeights": lambda: fw.average_into(target, [w, w]),
        "average of dicts": lambda: fw.average_into({"a": out}, [{"a": a}, {"a": b}]),
        "screening": lambda: fw._core.first_nonfinite(fw.Layout.of([a]).core, False, [a], 0),
        "FlatWeights": lambda: fw.FlatWeights({"a": a}),
        "FlatWeights.copy": w.copy,
        "FlatWeights.update": lambda: w.update(a=a),
        "RunningAverage.add": lambda: running.add(a),
        "RunningAverage.merge": lambda: running.merge(other),
        "RunningAverage.mean": lambda: running.mean(out=out),
    }


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", calls_that_move_bytes())
def test_python_goes_on_while_bytes_move(
    name: str, threads: int, counter: Counter, use_threads: Callable[[int], None]
) -> None:
    use_threads(threads)
    assert goes_on_during(counter, calls_that_move_bytes()[name], 100)


def test_python_stands_still_while_the_gil_is_held(counter: Counter) -> None:
    # Otherwise the test above would prove nothing.
    numbers = list(range(100_000))
    assert not goes_on_during(counter, lambda: sum(numbers), 50)


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Return the results of ``count`` threads that begin at the same time."""
    barrier = threading.Barrier(count)

    def run(k: int) -> Any:
        barrier.wait()
        return work(k)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.mark.parametrize("threads", [1, 3])
def test_calls_at_the_same_time_do_not_meet(
    threads: int, use_threads: Callable[[int], None], rng: np.random.Generator
) -> None:
    use_threads(threads)
    sources = [random_array(rng, 400_000, np.dtype(np.float32)) for _ in range(3)]
    expected = fw.average(sources, [1, 2, 3])
    flat = fw.flatten(sources)

    def work(k: int) -> bool:
        right = True
        for _ in range(2):
            right &= same_bits(fw.average(sources, [1, 2, 3]), expected)
            right &= same_bits(fw.flatten(sources), flat)
            right &= same_bits(fw.FlatWeights(sources).copy()["1"], sources[1])
        return right

    assert all(together(4, work))


def test_models_may_be_added_from_several_threads() -> None:
    # Integers: their sum is exact in every order.
    running, others = fw.RunningAverage(), [fw.RunningAverage() for _ in range(4)]

    def work(k: int) -> None:
        for i in range(50):
            running.add(np.full(1000, float(k * 50 + i)))
            others[k].add(np.full(1000, 2.0))
            assert running.mean().size == 1000

    together(4, work)
    assert running.total_weight == 200
    assert running.mean().tolist() == [199 / 2] * 1000
    together(4, lambda k: others[k].merge(others[(k + 1) % 4]))
    assert all(other.mean().tolist() == [2.0] * 1000 for other in others)


def test_merges_in_both_directions_do_not_wait_for_each_other() -> None:
    pair = [fw.RunningAverage() for _ in range(2)]
    for running in pair:
        running.add(np.full(50_000, 2.0))

    def work(k: int) -> None:
        for _ in range(200):
            pair[k].merge(pair[1 - k])

    # Daemons: if they wait for each other, the test fails instead of hanging.
    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    # The total weight grows past 2**53 and is rounded, at other places in each interleaving.
    assert all(np.allclose(running.mean(), 2.0, rtol=1e-12) for running in pair)


def test_layouts_are_unpickled_by_several_threads() -> None:
    pickles = [pickle.dumps(fw.Layout.of([np.zeros(i)])) for i in range(100)]

    def work(k: int) -> list[int]:
        return [pickle.loads(p).size for p in pickles for _ in range(3)]

    assert together(4, work) == [[i for i in range(100) for _ in range(3)]] * 4


def test_the_caller_may_let_go_while_the_call_runs(use_threads: Callable[[int], None]) -> None:
    use_threads(2)
    sources = [np.full(LARGE, v, np.float32) for v in (1, 3)]
    taken = threading.Event()

    def given() -> Iterator[np.ndarray]:
        yield from sources
        taken.set()

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(fw.average, given())
        taken.wait()
        sources.clear()
        assert np.all(result.result() == 2)


REPLACED = """
import threading
import time

import numpy as np

import flatweights as fw

fw.set_num_threads(1)
first, second = (np.full(4_000_000, 2, np.float32) for _ in range(2))
sources = [first] + [second] * 99  # many, so that the call takes long
del first, second
means, begun = [], threading.Event()


def average():
    begun.set()
    means.append(fw.average(sources))


thread = threading.Thread(target=average)
thread.start()
begun.wait()
time.sleep(0.01)
sources.clear()  # the only references to the arrays, except for those of the call
new = np.full(4_000_000, 7, np.float32)
thread.join()
assert means[0].min() == means[0].max() == 2
"""


def test_another_thread_may_change_the_list_while_the_call_runs() -> None:
    # In a process of its own: reading memory that was freed ends it.
    run_python(REPLACED)


# How many threads.


def test_set_num_threads_is_what_get_num_threads_gives(use_threads: Callable[[int], None]) -> None:
    for count in (1, 7, 1024):
        use_threads(count)
        assert fw.get_num_threads() == count
        assert fw.show_config()["threads"] == str(count)


@pytest.mark.parametrize("count", [0, -1, 1025, 2**40, 2**70])
def test_set_num_threads_refuses_other_numbers(count: int) -> None:
    before = fw.get_num_threads()
    with pytest.raises(ValueError, match=f"a number of threads from 1 to 1024, got {count}"):
        fw.set_num_threads(count)
    assert fw.get_num_threads() == before


@pytest.mark.parametrize("count", [2.0, "2", None])
def test_set_num_threads_refuses_what_is_no_number(count: Any) -> None:
    before = fw.get_num_threads()
    with pytest.raises(TypeError, match=f"count: expected an integer, got {count!r}"):
        fw.set_num_threads(count)
    assert fw.get_num_threads() == before


COUNT = "import flatweights; print(flatweights.get_num_threads())"
ONE_PROCESSOR = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"FLATWEIGHTS_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}, 3),
        ({"FLATWEIGHTS_NUM_THREADS": "", "OMP_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "none"}, 1),
        ({"OMP_NUM_THREADS": "0"}, 1),
        ({"FLATWEIGHTS_NUM_THREADS": "99999"}, 1024),
        ({}, 1),
    ],
)
def test_the_environment_decides_in_its_order(env: dict[str, str], expected: int) -> None:
    assert run_python(ONE_PROCESSOR + COUNT, clean_environment(**env)).split() == [str(expected)]


def test_without_a_word_the_processors_decide() -> None:
    assert 1 <= int(run_python(COUNT)) <= len(os.sched_getaffinity(0))


def test_the_number_is_decided_at_first_use() -> None:
    # Ray sets OMP_NUM_THREADS after a worker has started.
    code = """
import os
import flatweights as fw
os.environ["OMP_NUM_THREADS"] = "6"
print(fw.get_num_threads())
os.environ["OMP_NUM_THREADS"] = "7"
os.environ["FLATWEIGHTS_NUM_THREADS"] = "8"
print(fw.get_num_threads())
fw.set_num_threads(9)
print(fw.get_num_threads())
"""
    assert run_python(code).split() == ["6", "6", "9"]


def test_what_is_set_first_wins() -> None:
    code = "import flatweights as fw; fw.set_num_threads(2); print(fw.get_num_threads())"
    for text in ("5", "many"):
        env = clean_environment(FLATWEIGHTS_NUM_THREADS=text)
        assert run_python(code, env).split() == ["2"]


def test_a_malformed_number_is_an_error_before_anything_changes() -> None:
    texts = ["many", "0", "-2", "2.5", "3 threads", "9" * 30, " "]
    expected = "FLATWEIGHTS_NUM_THREADS: expected a positive number, got '{}'"
    printed = refusals("fw.get_num_threads", "FLATWEIGHTS_NUM_THREADS", texts)
    assert printed == [[expected.format(text)] * 6 for text in texts]
