"""Keras's `fit` in six processes that average their gradients and heal each other."""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from bench.chaos import faults, members, oracle
from bench.chaos.oracle import Entry, Log, Note, Sent
from bench.chaos.run import HANG, Plan
from flatweights.ray import Member, MemberError, WorkerError, join

_BATCH, _STEPS = 8, 50  # samples, and steps of an epoch
_FINE = np.float32(2.0**20)
_KEPT = 5.0  # megabytes that Keras keeps for each `compile` and `fit`; measured: 4 without a member


class Gradients:
    """The gradients that a member averages. It notes them, and replaces the variables of the call.

    Gradients are rounded to multiples of 2^-20, so that there is one right average.

    Attributes:
        calls: The number of averages that this process has asked for.
        averaged: The number of averages that it got, without calls at which the others were
            elsewhere.
        fault: The fault of the next average.
        layout: The layout of the gradients.
    """

    def __init__(self, log: Log, size: int) -> None:
        """Note in ``log``."""
        self._log, self._size = log, size
        self.calls, self.averaged, self.fault = 0, 0, ""

    def note(self, member: Member, group: str) -> None:
        """Note all averages of a member."""
        average = member.average_variables

        def average_variables(variables: Any, weight: float = 1.0, **options: Any) -> Any:
            self.calls += 1
            self._variables, self.layout = variables, variables.layout
            result = average(self, weight, **options)
            assert result.number is not None
            outcome = result.number, result.used, range(self._size), self._mean
            late = member.rank not in result.used
            self._log.got(*outcome, (self.calls,), group, late)
            self.averaged += 1
            return result

        vars(member)["average_variables"] = average_variables

    def gather_into(self, buffer: Any) -> None:
        """Note the gradients that are sent."""
        self._variables.gather_into(buffer)
        views = self.layout.packed_views(buffer)
        for view in views:
            view[...] = np.rint(view * _FINE) / _FINE
        if self.fault == faults.NAN:
            views[0][0] = np.nan
        self._log.sent((self.calls,), np.concatenate(views).tobytes())

    def scatter(self, buffer: Any) -> None:
        """Keep the received average."""
        self._mean = {"mean": np.concatenate(self.layout.packed_views(buffer))}
        self._variables.scatter(buffer)


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def live(folder: str, plan: Plan, rank: int) -> None:
    """Train until the run is over; join again if the coordinator dies."""
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    log, over = Log(Path(folder), rank), Path(folder) / "over"
    layers = keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((8,)), *layers])
    gradients = Gradients(log, plan.size)
    while not over.exists():
        try:
            with join(f"chaos {folder}", rank=rank, size=plan.size, timeout=5 * HANG) as member:
                _fit(model, member, gradients, log, plan, over)
        except (MemberError, WorkerError, TimeoutError) as error:
            log.note(f"{type(error).__name__}:{log.life}: {error}")


def _fit(
    model: Any, member: Member, gradients: Gradients, log: Log, plan: Plan, over: Path
) -> None:
    """Train; note the state after each step that was averaged."""
    import keras

    from flatweights.keras import AverageLogs, average_gradients

    group = members.coordinator_of(member.name)
    gradients.note(member, group)
    averaged = 0

    def begin(batch: int, logs: Any) -> None:
        nonlocal averaged
        averaged = gradients.averaged
        gradients.fault = faults.obey(log)
        time.sleep(plan.pace)

    def end(batch: int, logs: Any) -> None:
        if gradients.averaged > averaged:  # else it was apart from the others
            arrays = enumerate((*model.trainable_weights, *optimizer.variables))
            digest = oracle.digest_of({str(k): np.asarray(array) for k, array in arrays})
            log.note(f"state:{group}:{int(optimizer.iterations)}:{digest.hex()}")
        if over.exists():
            model.stop_training = True

    rng = np.random.default_rng([plan.seed, member.rank])
    x = rng.normal(size=(_BATCH * _STEPS, 8)).astype(np.float32)
    optimizer = average_gradients(
        keras.optimizers.Adam(0.01),
        member=member,
        min_results=1,
        timeout=plan.timeout,
        nonfinite="skip",
    )
    model.compile(optimizer, "mse")
    spy = keras.callbacks.LambdaCallback(on_train_batch_begin=begin, on_train_batch_end=end)
    callbacks = [AverageLogs(), spy]
    model.fit(x, x[:, :2] ** 2, _BATCH, epochs=10**6, verbose=0, callbacks=callbacks)


class Mode(members.Mode):
    """Tasks that are started again when they die, and then join the epoch of the others."""

    kinds = tuple(kind for kind in members.Mode.kinds if kind != faults.LAYOUT)
    task: Any = live

    def check(self, entries: Sequence[Entry]) -> tuple[int, list[str]]:
        """Compare averages of gradients like those of members, and the states after each step."""
        self.sent = {
            (entry.rank, entry.life, entry.key[0]): entry.digest
            for entry in entries
            if isinstance(entry, Sent)
        }
        count, wrong = super().check(entries)
        states: defaultdict[str, set[str]] = defaultdict(set)
        for entry in entries:
            if isinstance(entry, Note) and entry.text.startswith("state:"):
                step, _, digest = entry.text.rpartition(":")
                states[step].add(digest)
        wrong += [f"members differ after {step}" for step, ways in states.items() if len(ways) > 1]
        return count, wrong

    def megabytes_kept(self, entries: Sequence[Entry]) -> float:
        """Return what Keras keeps in the process that has begun `fit` again most often."""
        again: Counter[tuple[int, str]] = Counter()
        for entry in entries:
            if isinstance(entry, Note):
                kind, _, rest = entry.text.partition(":")
                if kind.endswith("Error"):
                    again[entry.rank, rest.partition(":")[0]] += 1
        return _KEPT * max(again.values(), default=0)

    def average(self, used: Sequence[int], choice: Sequence[members.Call]) -> bytes:
        """Return the digest of the average of the sent gradients."""
        calls = [(rank, *call) for rank, call in zip(used, choice, strict=True)]
        gradients = [{"mean": np.frombuffer(self.sent[call], np.float32)} for call in calls]
        return oracle.digest_of(oracle.mean_of(gradients))
