"""Runs schedules by seeds: `python -m tests.sim --help`."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.sim import fit_plans, group_plans, mutants, nodes_plans, orders, plans
from tests.sim.plans import Plan

# What imports the package is imported in functions, since a mutant changes the package before.

PROTOCOLS = ("members", "nodes", "group", "asynchronous", "fit")
ALL = "all"  # of the protocols, in turns
_COLLECT = 100  # schedules between two collections of garbage
_MANY = 1_000_000_000
_A_MINUTE = 6000  # schedules in which a wrong change has to be found


def main() -> None:
    """Run schedules, or replay one, or try mutants."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, help="schedules to run; with --mutants, for each")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--protocol", default=ALL, choices=(ALL, *PROTOCOLS))
    parser.add_argument("--mix", help="plans of this kind only")
    parser.add_argument("--seed", type=int, help="replay this schedule: print its transcript")
    parser.add_argument("--plan", type=Path, help="replay the plan in a file, made by a failure")
    parser.add_argument("--keep", type=int, default=5, help="stop after so many failures")
    parser.add_argument("--no-shrink", action="store_true", help="do not make plans smaller")
    parser.add_argument("--mutants", action="store_true", help="how soon wrong changes are found")
    parser.add_argument("names", nargs="*", help="with --mutants, only these")
    parser.add_argument("--scale", action="store_true", help="the time of one call: --scale --help")
    parser.add_argument(
        "--orders", action="store_true", help="all orders of a core: --orders --help"
    )
    parser.add_argument("--mutant", help="run schedules of this wrong change")
    if "--orders" in sys.argv:  # which has arguments of its own
        orders.main([one for one in sys.argv[1:] if one != "--orders"])
        return
    if "--scale" in sys.argv:  # which has arguments of its own
        from tests.sim import scale

        scale.main([one for one in sys.argv[1:] if one != "--scale"])
        return
    args = parser.parse_args()
    if args.mix is not None and args.protocol == ALL:
        parser.error("--mix: each protocol has kinds of its own: give --protocol, too")
    if args.mutants:
        found = mutants.try_all(args.seeds or _A_MINUTE, args.names, args.protocol)
        sys.exit(0 if found else 1)
    if args.mutant is not None:
        mutants.install(args.mutant)
    if args.plan is not None:
        saved = json.loads(args.plan.read_text())
        replay(saved["plan"], saved["seed"])
    elif args.seed is not None:
        replay(*schedule_at(args.protocol, args.seed, args.mix))
    else:
        sys.exit(1 if run(args) else 0)


def schedule_at(protocol: str, number: int, mix: str | None) -> tuple[Plan, int]:
    """Return plan and seed of a schedule: of all protocols together, each is the next one's."""
    seed = number
    if protocol == ALL:
        seed, turn = divmod(number, len(PROTOCOLS))
        protocol = PROTOCOLS[turn]
    return plan_of(protocol, seed, mix), seed


def plan_of(protocol: str, seed: int, mix: str | None) -> Plan:
    """Return the plan of a seed, of a mix if one is given."""
    if protocol == "members":
        return plans.plan_of(seed, mix or plans.mix_of(seed))
    if protocol == "nodes":
        return nodes_plans.plan_of(seed, mix or plans.mix_of(seed))
    if protocol == "fit":
        return fit_plans.plan_of(seed, mix or fit_plans.mix_of(seed))
    return group_plans.plan_of(seed, mix or group_plans.mix_of(seed), protocol)


def replay(plan: Plan, seed: int) -> None:
    """Print the transcript of one schedule."""
    from tests.sim.schedules import transcript_of

    print("\n".join(transcript_of(plan, seed)))


def run(args: Any) -> int:
    """Run schedules; return the number of those that fail."""
    from tests.sim.schedules import Failure, kind_of, schedule_of, shrunk, without_collector

    end = float("inf") if args.minutes is None else time.monotonic() + 60 * args.minutes
    last = _MANY if args.seeds is None else args.first + args.seeds
    if args.protocol in ("fit", ALL):
        import tests.sim.fit_programs  # noqa: F401  (Keras: before what there is, is frozen)
    began, used = time.monotonic(), time.process_time()
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    with without_collector():
        for number in range(args.first, last):
            plan, seed = schedule_at(args.protocol, number, args.mix)
            schedule = schedule_of(plan, seed)
            counts += schedule.oracle.counts
            counts["schedules"] += 1
            counts["steps"] += schedule.world.steps
            if schedule.world.failures:
                text = schedule.world.failures[0]
                kinds[kind_of(text)] += 1
                kind = f"{plan['protocol']}, {plan['mix']}, {plan['program']}"
                print(f"seed {seed} ({kind}): {text}", flush=True)
                if not args.no_shrink:
                    show(shrunk(Failure(plan, seed, text)), seed)
                if sum(kinds.values()) >= args.keep:
                    break
            if counts["schedules"] % _COLLECT == 0:
                gc.collect()
            if time.monotonic() > end:
                break
    seconds = max(1e-9, time.monotonic() - began)
    busy = max(1e-9, time.process_time() - used)
    count = counts.pop("schedules")
    by_second = f"{count / seconds:.0f} a second ({count / busy:.0f} by processor time)"
    print(f"{count} schedules in {busy:.1f} s, {by_second}: {sum(kinds.values())} violations")
    print(", ".join(f"{name}: {value:,}" for name, value in sorted(counts.items())))
    for kind, times in kinds.most_common():
        print(f"{times:5}  {kind}")
    return sum(kinds.values())


def show(failure: Any, seed: int) -> None:
    """Print the end of the transcript of a failure, and write its plan to a file."""
    from tests.sim.schedules import transcript_of

    file = Path(f"failure-{seed}.json")
    saved = {"plan": failure.plan, "seed": failure.seed, "text": failure.text}
    file.write_text(json.dumps(saved, indent=1))
    print(f"  made smaller; all of it: python -m tests.sim --plan {file}")
    for line in transcript_of(failure.plan, failure.seed)[-40:]:
        print(f"  {line}")


if __name__ == "__main__":
    main()
