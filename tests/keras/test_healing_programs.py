"""Random trainings whose members die and sleep, against one optimizer that gets the means."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_programs import prepare
from numpy.typing import NDArray
from process_groups import LocalProcessGroup, kill

from flatweights.keras import average_gradients
from flatweights.keras._gradients import averaging_of_optimizer
from flatweights.ray import Member
from flatweights.ray.support import _failpoints

SEEDS = 2, 3, 11, 16  # deaths and sleeps, with each optimizer; `tests/sim` tries other orders
STEPS = 60
SIZE = 37
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.01),
}


class Program(NamedTuple):
    """A training, and the faults of its members.

    Attributes:
        faults: By rank and step, the number of calls for which it sleeps before that step; 0: it
            dies.
    """

    size: int
    optimizer: str
    dtype: str
    min_results: int
    timeout: float
    faults: dict[int, dict[int, int]]


def program_of(seed: int) -> Program:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 6))
    min_results = int(rng.integers(1, size))
    # Even if all of them are away at once, enough members for a step are left.
    faulty = rng.permutation(size)[: int(rng.integers(1, size - min_results + 1))]
    faults = {
        int(rank): {
            int(step): int(rng.choice([0, 1, 2, 7]))
            for step in rng.choice(np.arange(5, STEPS - 15), int(rng.integers(1, 4)), False)
        }
        for rank in faulty
    }
    optimizer, dtype = str(rng.choice([*OPTIMIZERS])), str(rng.choice(["float32", "float64"]))
    return Program(size, optimizer, dtype, min_results, float(rng.choice([0.5, 1.0])), faults)


def gradient(data: NDArray[Any], weights: Any) -> Any:
    return 2.0 * (weights - data)


class Run:
    """One program, run by threads.

    Attributes:
        used: By step, the ranks whose gradients were applied, according to each member.
    """

    def __init__(self, program: Program, seed: int) -> None:
        self.program = program
        self.group = LocalProcessGroup(program.size)
        self.data = np.random.default_rng(seed).normal(size=(program.size, STEPS, SIZE))
        self.data = self.data.astype(program.dtype)
        self.used: dict[int, set[tuple[int, ...]]] = {step: set() for step in range(STEPS)}
        self.faults = {rank: dict(faults) for rank, faults in program.faults.items()}
        self.away: set[int] = set()
        self._lock = threading.Lock()

    def optimizer(self, start: float) -> tuple[Any, Any]:
        weights = keras.Variable(np.full(SIZE, start), dtype=self.program.dtype)
        return weights, OPTIMIZERS[self.program.optimizer]()

    def train(self, member: Member) -> list[NDArray[Any]]:
        """Train; after a death, train as another member."""
        while (state := self.live(member)) is None:
            member = self.group.join(member.rank)
        return state

    def live(self, member: Member) -> list[NDArray[Any]] | None:
        """Return the state at the end; None, if the member has died."""
        weights, optimizer = self.optimizer(0.0)
        rank, needed = member.rank, self.program.min_results
        average_gradients(optimizer, member=member, min_results=needed, timeout=60.0)
        averaging = averaging_of_optimizer(optimizer)
        assert averaging is not None
        optimizer.build([weights])
        results: list[Any] = []
        average = member.average_variables

        def noted(*args: Any, **options: Any) -> Any:
            results.append(average(*args, **options))
            return results[-1]

        vars(member)["average_variables"] = noted
        data = tf.constant(self.data[rank])

        @tf.function  # type: ignore[untyped-decorator]
        def step(k: Any) -> None:
            optimizer.apply([gradient(data[k], weights.value)], [weights])

        while (done := int(optimizer.iterations)) < STEPS:
            faults = self.faults.get(rank, {})
            due = [at for at in faults if at <= done < STEPS - 12]
            if due:
                sleeps = faults.pop(due[0])
                with self._lock:
                    self.away.add(rank)
                if sleeps == 0:
                    kill(member)
                    return None
                # While all members repeat a call, the group's core does not count.
                number = results[-1].number if results else self.group.last_call()
                self.sleep_until(number + sleeps)
            if done == STEPS - 2:
                self.until_all_are_back(rank)
            step(tf.constant(min(done, STEPS - 1)))
            averaging.handle.timeout = self.program.timeout  # the first step was traced
            self.used[int(optimizer.iterations) - 1].add(results[-1].used)
            with self._lock:
                self.away.discard(rank)
        return [np.asarray(one) for one in [weights, *optimizer.variables]]

    def sleep_until(self, number: int) -> None:
        self.group.wait_until(lambda inside: inside.calls.number >= number)

    def until_all_are_back(self, rank: int) -> None:
        """Wait until absent members have asked, so that the next steps heal them."""
        group = self.group.group
        while True:
            with self._lock:
                away = {*self.away} - {rank}
            recovering = group.queue.call(lambda: [*group.calls.waiting.recovering])
            if away <= {session.rank for session in recovering}:
                return
            time.sleep(0.005)

    def oracle(self) -> list[NDArray[Any]]:
        weights, optimizer = self.optimizer(0.0)
        optimizer.build([weights])
        for step, told in self.used.items():
            assert len(told) == 1, f"step {step}: members were told of different ranks: {told}"
            gradients = [gradient(self.data[rank, step], np.asarray(weights)) for rank in min(told)]
            mean = np.mean(gradients, axis=0, dtype=np.float64).astype(self.program.dtype)
            optimizer.apply([tf.constant(mean)], [weights])
        return [np.asarray(one) for one in [weights, *optimizer.variables]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_result_is_that_of_an_optimizer_that_applies_the_means_of_those_used(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A step that needs no Python does not tell who took part; `killed_members` tries these.
    monkeypatch.setattr(_failpoints, "hook", lambda point: None)
    prepare()
    program = program_of(seed)
    run = Run(program, seed)
    with ThreadPoolExecutor(program.size) as pool:
        running = [pool.submit(run.train, member) for member in run.group.join_all()]
        ended = [one.result(120) for one in running]
    oracle = run.oracle()
    for state in ended:
        for ours, others, expected in zip(state, ended[0], oracle, strict=True):
            np.testing.assert_array_equal(ours, others)
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    assert min(map(len, (next(iter(told)) for told in run.used.values()))) < program.size
