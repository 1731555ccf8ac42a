"""The report of a run: tables, JSON, and a picture of steps over time with the faults.

``python -m bench.chaos.report out.json`` writes the tables of ``docs/reliability.md`` from the file
that was passed to ``python -m bench.chaos --json``.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import machine
from bench.chaos import faults
from bench.chaos.run import Injected, Record, Usage

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
_BEGIN, _BETWEEN, _END = "<!-- figures -->", "<!-- seconds -->", "<!-- end -->"

_ACTORS = (name for names in faults.ACTORS.values() for name in names)
OURS = ("driver", "ray::Trainer", "ray::live", *(f"ray::{name}" for name in _ACTORS))
"""Roles of processes that run this package."""


def failures_of(record: Record) -> list[str]:
    """Return the failures of a run."""
    failures = [*record.wrong[:10], *record.hangs]
    failures += [f"left at the end: {name}" for name in record.left]
    failures += [
        f"no full step after {f.kind} at {f.at:.0f} s" for f in record.faults if not f.seconds
    ]
    return failures + leaks_of(record)


def leaks_of(record: Record) -> list[str]:
    """Return our processes that have more descriptors or memory at the end than before.

    The process of a role that has the most is compared with the one that had the most, with as many
    processes as then. Ray opens a connection now and then, a few in each run. A leak at each fault
    would be more. A driver has a memory file for each of the models that are on their way.
    """
    leaks = []
    first, last = (record.usage[0], record.usage[-1]) if record.usage else ({}, {})
    for role in first.keys() & last.keys() & {*OURS}:
        before, after = first[role], last[role]
        if after.descriptors - before.descriptors > max(12, len(record.faults) / 4):
            leaks.append(f"{role}: {before.descriptors} descriptors, then {after.descriptors}")
        if after.shared - before.shared > record.plan["size"]:
            leaks.append(f"{role}: {before.shared} files and sockets, then {after.shared}")
        if after.megabytes > 1.1 * before.megabytes + 20 + record.megabytes_kept:
            leaks.append(f"{role}: {before.megabytes:.0f} MB, then {after.megabytes:.0f}")
        if role != "driver" and after.processes > before.processes:
            leaks.append(f"{role}: {before.processes} processes, then {after.processes}")
    return sorted(leaks)


def by_kind(record: Record) -> list[tuple[str, int, float, float]]:
    """Return each kind of fault, its number, and median and longest time to a full step."""
    rows = []
    for kind in sorted({fault.kind for fault in record.faults}):
        seconds = [f.seconds for f in record.faults if f.kind == kind and f.seconds is not None]
        count = sum(fault.kind == kind for fault in record.faults)
        if seconds:
            rows.append((kind, count, statistics.median(seconds), max(seconds)))
    return rows


def show(record: Record) -> None:
    """Print everything."""
    console = Console(width=110)
    quiet, loud, between = record.rates
    kept, kept_between = record.kept
    console.print(f"[bold]chaos: {record.mode}, seed {record.plan['seed']}[/bold]")
    console.print("  ".join(f"{k}: {v}" for k, v in machine.describe().items()), highlight=False)
    console.print(
        f"{len(record.faults)} faults, {sum(record.steps)} steps, {record.checked} compared with "
        f"the oracle: {len(record.wrong)} wrong, {len(record.hangs)} hangs"
    )
    console.print(
        f"steps a second: {quiet:.1f} without faults, {loud:.1f} with them ({100 * kept:.1f} %), "
        f"{between:.1f} between recovery and the next fault ({100 * kept_between:.1f} %)"
    )
    table = Table("fault", "times", "full step after, median", "longest")
    for kind, count, median, longest in by_kind(record):
        table.add_row(kind, str(count), f"{median:.2f} s", f"{longest:.2f} s")
    console.print(table)
    table = Table("fault at", "what", "rank", "full step after")
    for fault in record.faults:
        after = "never" if fault.seconds is None else f"{fault.seconds:.2f} s"
        rank = str(fault.rank) if fault.rank >= 0 else ""
        table.add_row(f"{fault.at:.1f} s", fault.kind, rank, after)
    console.print(table)
    table = Table(
        "role", *(f"{when}: processes; most of one" for when in ("before", "middle", "after"))
    )
    for role in sorted({role for usage in record.usage for role in usage}):
        cells = [usage.get(role, Usage()) for usage in record.usage]
        table.add_row(role, *(f"{n}; {fds} ({own}), {mb:.0f} MB" for n, fds, own, mb in cells))
    console.print(table)
    console.print(record.events)


def write_json(record: Record, path: Path) -> None:
    """Write the record and the machine; records of other modes stay in the file."""
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    data[record.mode] = {"machine": machine.describe(), **record.as_json()}
    path.write_text(json.dumps(data))


def plot(record: Record, path: Path) -> None:
    """Draw the steps of each second, and a line for each fault."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 3.5), layout="constrained")
    axes.fill_between(range(len(record.steps)), record.steps, step="post", alpha=0.4)
    kinds = sorted({fault.kind for fault in record.faults})
    for number, kind in enumerate(kinds):
        times = [fault.at for fault in record.faults if fault.kind == kind]
        axes.vlines(times, 0, max(record.steps), color=f"C{number + 1}", lw=1, label=kind)
    axes.set_xlabel("seconds")
    axes.set_ylabel("steps a second")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def tables_of(data: dict[str, Any]) -> tuple[str, str]:
    """Return the tables of the runs in a JSON file as Markdown: the runs, and their faults."""
    runs = "| mode | commit | minutes | faults | compared | wrong, hangs | steps/s | with faults "
    runs += "| after recovery |\n| --- | --- |" + " ---: |" * 7
    seconds: dict[str, dict[str, str]] = {}
    for mode, kept in data.items():
        quiet, loud, between = kept["rates"]
        cells = [
            mode,
            kept["machine"]["commit"],
            f"{kept['plan']['seconds'] / 60:g}",
            str(len(kept["faults"])),
            f"{kept['checked']:,}",
            f"{len(kept['wrong'])}, {len(kept['hangs'])}",
            f"{quiet:.1f}",
            f"{100 * loud / quiet:.1f} %",
            f"{100 * between / quiet:.1f} %",
        ]
        runs += f"\n| {' | '.join(cells)} |"
        record = Record(mode, kept["plan"], faults=[Injected(**fault) for fault in kept["faults"]])
        for kind, _, median, longest in by_kind(record):
            seconds.setdefault(kind, {})[mode] = f"{median:.1f}, {longest:.1f}"
    times = f"| fault | {' | '.join(data)} |\n| --- |" + " ---: |" * len(data)
    for kind, by_mode in sorted(seconds.items()):
        times += f"\n| {kind} | {' | '.join(by_mode.get(mode, '') for mode in data)} |"
    return runs, times


def main() -> None:
    """Replace the tables of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, help="the file given to `python -m bench.chaos --json`")
    runs, times = tables_of(json.loads(parser.parse_args().json.read_text()))
    text = PAGE.read_text(encoding="utf-8")
    for marker, table in ((_BEGIN, runs), (_BETWEEN, times)):
        head, _, rest = text.partition(marker)
        _, end, tail = rest.partition(_END)
        assert end, f"{PAGE.name}: {marker} has no end"
        text = f"{head}{marker}\n\n{table}\n\n{_END}{tail}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
