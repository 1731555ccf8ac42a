"""A process that publishes, and five processes that read the newest weights."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from bench.chaos import faults, members, oracle
from bench.chaos.oracle import Entry, Got, Log, Model
from bench.chaos.run import HANG, Plan
from flatweights.ray import Publisher, Subscriber

_LIVES = 1_000_000  # publications of one process, at most


def published(plan: Plan, life: int, k: int) -> Model:
    """Return the weights of a publication, which contain its number."""
    model = oracle.model_of(plan.elements, plan.seed, life, k)
    model["n"] = np.array(life * _LIVES + k)
    return model


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def live(folder: str, plan: Plan, rank: int) -> None:
    """Publish, as rank 0, or read."""
    log, over, name = Log(Path(folder), rank), Path(folder) / "over", f"chaos {folder}"
    if rank == plan.size - 1:
        os.environ["FLATWEIGHTS_RAY"] = "store"
    if rank == 0:
        k = 0
        publisher = Publisher(name, published(plan, log.life, k))
        while not over.exists():
            k += 1
            faults.obey(log)
            time.sleep(plan.pace)
            publisher.publish(published(plan, log.life, k))
        publisher.close()
        return
    weights = published(plan, 0, 0)
    while not over.exists():
        try:
            subscriber = Subscriber(name, weights, timeout=HANG / 2)
            break
        except (TimeoutError, ConnectionError, ray.exceptions.RayError) as error:
            log.note(type(error).__name__)
    while not over.exists():
        faults.obey(log)
        if subscriber.update():
            key = divmod(int(weights["n"]), _LIVES)
            log.got(subscriber.version, (0, rank), range(plan.size), weights, key)
        else:
            time.sleep(1e-3)


class Mode(members.Mode):
    """Tasks that are started again when they die; a step is a read of one of them."""

    kinds = (
        faults.KILLED,
        faults.STOPPED,
        faults.EXCEPTION,
        faults.LATE,
        faults.STORE,
        faults.PUBLISHER,
        "relay killed",
    )
    in_turns = True
    task: Any = live

    def check(self, entries: Sequence[Entry]) -> tuple[int, list[str]]:
        """Compute all read weights again, and check that no reader goes back."""
        wrong, count = list[str](), 0
        keys: dict[int, tuple[int, ...]] = {}
        digests: dict[tuple[int, ...], bytes] = {}
        last: dict[tuple[int, int], Got] = {}
        for entry in entries:
            if not isinstance(entry, Got):
                continue
            count += 1
            life, k = entry.key
            if entry.key not in digests:
                digests[entry.key] = oracle.digest_of(published(self.plan, life, k))
            if entry.digest != digests[entry.key]:
                wrong.append(f"rank {entry.rank}: version {entry.number} is torn")
            if keys.setdefault(entry.number, entry.key) != entry.key:
                wrong.append(f"version {entry.number} is of two publications")
            before = last.get((entry.rank, entry.life))
            if before and (before.number >= entry.number or before.key >= entry.key):
                wrong.append(f"rank {entry.rank}: {entry.number} after {before.number}")
            last[entry.rank, entry.life] = entry
        return count, wrong
