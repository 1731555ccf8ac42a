"""Members that die, stop, are late, leave, send NaN or other shapes, beside an oracle.

``python tests/ray/members/chaos_members.py --seed 1 --calls 2000``

Each member notes what it is about to give, and what it was given. Afterwards each outcome has to be
the same in all members, and the average of what its ranks gave, bit for bit.
"""

import argparse
import contextlib
import os
import pickle
import signal
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray

import flatweights as fw
from flatweights.ray import Member, WorkerError, join

TIMEOUT = 1.0


class Got(NamedTuple):
    """What a call has given a member; a tuple in its diary, for a process without this module."""

    k: int
    number: int
    late: bool
    used: tuple[int, ...]
    weights: bytes


def mood_of(seed: int, rank: int, life: int, k: int) -> float:
    return float(np.random.default_rng([seed, rank, life, k, 7]).random())


def model_of(seed: int, rank: int, life: int, k: int) -> dict[str, Any]:
    """Return what a member gives; with NaN it is skipped, of another shape it counts alone."""
    rng = np.random.default_rng([seed, rank, life, k])
    kernel = rng.normal(size=(50, 40)).astype(np.float32)
    model: dict[str, Any] = {"kernel": kernel, "bias": rng.normal(size=3)}
    mood = mood_of(seed, rank, life, k)
    if 0.012 <= mood < 0.03:
        model["bias"][1] = np.nan
    elif 0.03 <= mood < 0.034:
        model["bias"] = np.zeros(4)
    return model


def weight_of(rank: int, k: int) -> float:
    return 1.0 + (rank + k) % 3


def bits(model: dict[str, Any]) -> bytes:
    return b"".join(np.asarray(part).tobytes() for part in model.values())


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def live(name: str, rank: int, size: int, life: int, calls: int, seed: int, folder: str) -> None:
    """Call until ``calls`` calls are over; each life of a rank has a diary of its own."""
    os.environ["FLATWEIGHTS_RAY"] = "store" if rank == 0 and seed % 2 else ""
    over = Path(folder) / "over"
    try:
        member = join(name, rank=rank, size=size, timeout=60.0)
    except TimeoutError:
        assert over.exists()
        return
    with (Path(folder) / f"{rank}-{life}").open("ab") as diary:

        def note(what: Any) -> None:
            diary.write(pickle.dumps(what))
            diary.flush()

        note(f"meeting {member._host._actor._actor_id.hex()}")
        k = number = 0
        while number < calls:
            k += 1
            mood = mood_of(seed, rank, life, k)
            if len(member.ranks) < 3:  # the last one must not die: the meeting would end
                mood = max(mood, 0.008)
            model, dying = model_of(seed, rank, life, k), None
            if mood < 0.004:
                os.kill(os.getpid(), signal.SIGKILL)
            elif mood < 0.008:  # in the middle of the call, or soon after it
                dying = threading.Timer(mood, os.kill, (os.getpid(), signal.SIGKILL))
                dying.start()
            elif mood < 0.012:
                time.sleep(1.5 * TIMEOUT)
            note(k)
            number = max(number, call(member, model, rank, k, note))
        over.touch()
        member.leave()


def call(member: Member, model: dict[str, Any], rank: int, k: int, note: Any) -> int:
    """Average; return the number of the call, 0 after an error."""
    try:
        result = member.average(
            model, weight_of(rank, k), timeout=TIMEOUT, min_results=1, nonfinite="skip"
        )
    except (ValueError, WorkerError) as error:
        note(f"{type(error).__name__}")
        return 0
    assert result.number is not None
    note((k, result.number, rank in result.late, result.used, bits(result.weights)))
    return result.number


def run(size: int, calls: int, seed: int) -> Counter[str]:
    """Have ``size`` members live; return what has happened.

    Raises:
        AssertionError: If an outcome differs from what the oracle says.
    """
    with tempfile.TemporaryDirectory() as folder:
        name = f"chaos-{seed}-{os.getpid()}-{time.monotonic_ns()}"
        lives = Counter[int]()
        rng = np.random.default_rng(seed)

        def start(rank: int) -> Any:
            return live.remote(name, rank, size, lives[rank], calls, seed, folder)

        running = {start(rank): rank for rank in range(size)}
        happened = Counter[str]()
        while running:
            done, _ = ray.wait(list(running), timeout=1.0)
            for ref in done:
                rank = running.pop(ref)
                try:
                    ray.get(ref)
                except ray.exceptions.WorkerCrashedError:
                    happened["killed"] += 1
                    if not (Path(folder) / "over").exists():  # else nobody to come back to
                        lives[rank] += 1
                        running[start(rank)] = rank
            if rng.random() < 0.2:
                stop_one(name, rng)
                happened["stopped"] += 1
        happened += check(seed, Path(folder))
    return happened


def stop_one(name: str, rng: Any) -> None:
    """Stop a process of a member for longer than the others wait."""
    stopped = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.joinpath("cmdline").read_bytes().startswith(b"ray::live"):
                stopped.append(int(folder.name))
    if stopped:
        pid = int(rng.choice(stopped))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(1.5 * TIMEOUT)
            os.kill(pid, signal.SIGCONT)


def check(seed: int, folder: Path) -> Counter[str]:
    """Compare all that the members have noted with averages of what they gave."""
    outcomes: defaultdict[int, list[Got]] = defaultdict(list)
    gave: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    dangling: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    happened = Counter[str]()
    for path in folder.glob("*-*"):
        rank, life = map(int, path.name.split("-"))
        last: Any = None
        for entry in read(path):
            if isinstance(entry, Got):
                outcomes[entry.number].append(entry)
                happened["late" if entry.late else "calls"] += 1
                if not entry.late:
                    gave[entry.number, rank].append((life, entry.k))
            elif isinstance(entry, str):
                happened[entry] += 1
            last = entry
        if isinstance(last, int):  # it died in this call
            dangling[rank].append((life, last))
    meetings = [happened.pop(event) for event in [*happened] if event.startswith("meeting ")]
    assert len(meetings) == 1, f"{len(meetings)} meetings, each of which counts its calls from 1"
    for number, given in sorted(outcomes.items()):
        assert len({(got.used, got.weights) for got in given}) == 1, number
        used = given[0].used
        choices = [gave[number, rank] or dangling[rank] for rank in used]
        assert all(choices), (number, used)
        averages = (average_of(seed, used, choice) for choice in product(choices))
        assert given[0].weights in averages, (number, used, choices)
    happened["outcomes"] = len(outcomes)
    return happened


def average_of(seed: int, used: tuple[int, ...], choice: list[tuple[int, int]]) -> bytes:
    """Return the bits of the average, none of models of different shapes."""
    pairs = list(zip(used, choice, strict=True))
    models = [model_of(seed, rank, life, k) for rank, (life, k) in pairs]
    if len({model["bias"].shape for model in models}) > 1:
        return b""
    return bits(fw.average(models, [weight_of(rank, k) for rank, (_, k) in pairs]))


def product(choices: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    found: list[list[tuple[int, int]]] = [[]]
    for ways in choices:
        found = [[*before, way] for before in found for way in ways]
    return found


def read(path: Path) -> list[Any]:
    entries: list[Any] = []
    with path.open("rb") as diary:
        while True:
            try:
                entry = pickle.load(diary)
            except (EOFError, pickle.UnpicklingError):
                return entries
            entries.append(Got(*entry) if isinstance(entry, tuple) else entry)


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ray.init("local", include_dashboard=False, log_to_driver=False)
    print(dict(run(options.members, options.calls, options.seed)))


if __name__ == "__main__":
    main()
