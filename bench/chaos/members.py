"""Members of a process group without a driver: each calls in a loop, in its own process."""

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import ray

from bench.chaos import faults, oracle
from bench.chaos.oracle import Entry, Got, Log, Model, Sent
from bench.chaos.run import HANG, Plan
from bench.chaos.run import Mode as AnyMode
from flatweights.ray import MemberError, WorkerError, join
from flatweights.ray.support import _failpoints

Call = tuple[int, int]  # the life of the process, and the number of the call in that life


def weight_of(rank: int, k: int) -> float:
    """Return the weight of a call: a power of two, so that products and ratios are exact."""
    return 2.0 ** ((rank + k) % 3)


def coordinator_of(name: str) -> str:
    """Return the id of a process group's coordinator: a new one counts calls from 1 again."""
    space = f"flatweights-{ray.get_runtime_context().get_job_id()}"
    coordinator: str = ray.get_actor(f"flatweights:{name}", space)._actor_id.hex()
    return coordinator


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def live(folder: str, plan: Plan, rank: int) -> None:
    """Call again and again; join again if the coordinator dies."""
    log, over = Log(Path(folder), rank), Path(folder) / "over"
    if rank == 0 and plan.seed % 2:
        os.environ["FLATWEIGHTS_RAY"] = "store"
    k = 0
    while not over.exists():
        try:
            with join(f"chaos {folder}", rank=rank, size=plan.size, timeout=HANG) as member:
                group = coordinator_of(member.name)
                while not over.exists():
                    k += 1
                    fault = faults.obey(log)
                    time.sleep(plan.pace)
                    model = oracle.model_of(plan.elements, plan.seed, rank, log.life, k)
                    if fault == faults.NAN:
                        faults.spoil(model)
                    elif fault == faults.LAYOUT:
                        model["bias"] = np.zeros(4, np.float32)
                    log.sent((k,), model)
                    try:
                        result = member.average(
                            model,
                            weight_of(rank, k),
                            timeout=plan.timeout,
                            min_results=1,
                            nonfinite="skip",
                        )
                    except (ValueError, WorkerError) as error:
                        log.note(f"{type(error).__name__}: {error}")
                        continue
                    assert result.number is not None
                    log.got(
                        result.number,
                        result.used,
                        range(plan.size),
                        result.weights,
                        (k,),
                        group,
                        rank in result.late,
                    )
        except (MemberError, TimeoutError) as error:
            log.note(f"{type(error).__name__}: {error}")


class Mode(AnyMode):
    """Tasks that are started again when they die."""

    kinds: ClassVar[tuple[str, ...]] = (
        faults.KILLED,
        faults.STOPPED,
        faults.AT_POINT,
        faults.NAN,
        faults.LAYOUT,
        faults.EXCEPTION,
        faults.LATE,
        faults.STORE,
        "coordinator killed",
        "agent killed",
    )
    points: ClassVar[tuple[str, ...]] = _failpoints.MEMBER
    task: Any = live

    def start(self) -> None:
        """Start all members."""
        self.running = {self.begin(rank): rank for rank in range(self.plan.size)}

    def begin(self, rank: int) -> Any:
        """Start one member."""
        task = self.task.options(**faults.place(rank))
        return task.remote(str(self.folder), self.plan, rank)

    def tend(self) -> None:
        """Start members again that have died."""
        done, _ = ray.wait([*self.running], num_returns=len(self.running), timeout=0)
        for ref in done:
            rank = self.running.pop(ref)
            try:
                ray.get(ref)
            except ray.exceptions.WorkerCrashedError:
                pass
            except ray.exceptions.RayTaskError as error:
                if not isinstance(error.cause, faults.InjectedError):
                    self.failure = error
            self.running[self.begin(rank)] = rank

    def end(self) -> None:
        """Wait for all members; they leave together."""
        _, alive = ray.wait([*self.running], num_returns=len(self.running), timeout=HANG)
        for ref in alive:
            self.failure = self.failure or TimeoutError(f"rank {self.running[ref]} does not end")

    def check(self, entries: Sequence[Entry]) -> tuple[int, list[str]]:
        """Compare each response with the average of the weights that its ranks sent for it."""
        responses: defaultdict[tuple[str, int], list[Got]] = defaultdict(list)
        gave: defaultdict[tuple[str, int, int], list[Call]] = defaultdict(list)
        over: set[tuple[int, Call]] = set()
        for entry in entries:
            if isinstance(entry, Got):
                call = entry.life, entry.key[0]
                responses[entry.group, entry.number].append(entry)
                over.add((entry.rank, call))
                if not entry.is_late:
                    gave[entry.group, entry.number, entry.rank].append(call)
        # Calls in which the process or the coordinator died: their response was not noted.
        dangling: defaultdict[int, list[tuple[float, Call]]] = defaultdict(list)
        for entry in entries:
            if isinstance(entry, Sent):
                call = entry.life, entry.key[0]
                if (entry.rank, call) not in over:
                    dangling[entry.rank].append((entry.at, call))
        wrong = []
        for (group, number), given in sorted(responses.items()):
            used, digest = given[0].used, given[0].digest
            if any((got.used, got.digest) != (used, digest) for got in given):
                wrong.append(f"call {number}: members were given different responses")
            end = min(got.at for got in given)
            ways = [
                gave[group, number, rank]
                or [call for at, call in sorted(dangling[rank]) if at < end][-2:]
                for rank in used
            ]
            if all(digest != self.average(used, choice) for choice in itertools.product(*ways)):
                wrong.append(
                    f"call {number} of {dict(zip(used, ways, strict=True))}: another average"
                )
        return len(responses), wrong

    def average(self, used: Sequence[int], choice: Sequence[Call]) -> bytes:
        """Return the digest of the average of some calls."""
        calls = [(rank, life, k) for rank, (life, k) in zip(used, choice, strict=True)]
        models: list[Model] = [
            oracle.model_of(self.plan.elements, self.plan.seed, *call) for call in calls
        ]
        weights = [weight_of(rank, k) for rank, _, k in calls]
        return oracle.digest_of(oracle.mean_of(models, weights))
