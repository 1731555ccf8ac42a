"""Writes the tables of ``bench/README.md``: ``python -m bench.tables out.json``.

``out.json`` is the file that was passed to ``python -m bench --json``. Each table stands between
two comments, ``<!-- average -->`` and ``<!-- end -->``, and is replaced as a whole. A table that
was not measured stays.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import bench_nodes, runner

README = Path(__file__).with_name("README.md")


def table_of(record: dict[str, Any]) -> str:
    """Return one bench's table as Markdown, below the commit and the sweeps of its run."""
    commit = f"Commit {record['machine']['commit']}."
    if "nodes" in record:
        return f"{commit}\n\n{_nodes(record['nodes'])}"
    if "limits" not in record:
        return f"{commit}\n\n{_processes(record['rows'])}"
    limits = record["limits"]
    rows = [runner.Row(**row) for row in record["rows"]]
    best = runner.best_rate(rows, limits)
    sweeps = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in limits.items())
    lines = [f"{commit} Sweeps, GB/s: {sweeps}." if sweeps else commit, ""]
    lines += _cases(runner.COLUMNS, [(r.case, r.contender, runner.cells(r, best)) for r in rows])
    return "\n".join(lines)


def _nodes(rows: Sequence[dict[str, Any]]) -> str:
    found = [bench_nodes.Row(**row) for row in rows]
    lines = [(row.case, row.contender, row.cells()) for row in found]
    return "\n".join(_cases(bench_nodes.COLUMNS, lines))


def _cases(columns: Sequence[str], rows: Sequence[tuple[str, str, Sequence[str]]]) -> list[str]:
    """Return the lines of a table whose rows consist of a case, a contender, and cells."""
    lines, last = _head(columns, texts=2), None
    for case, name, cells in rows:
        bold = f"**{name}**" if name.startswith(runner.OURS) else name
        lines.append(_line(["" if case == last else case, bold, *cells]))
        last = case
    return lines


def _processes(rows: Sequence[dict[str, Any]]) -> str:
    found = {(row["processes"], row["contender"]): row["rate"] for row in rows}
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    lines = _head(["processes", *contenders], texts=0)
    for count in dict.fromkeys(row["processes"] for row in rows):
        lines.append(_line([str(count), *(f"{found[count, c] / 1e9:.1f}" for c in contenders)]))
    return "\n".join(lines)


def _head(columns: Sequence[str], texts: int) -> list[str]:
    rules = ["---" if i < texts else "---:" for i in range(len(columns))]
    return [_line(columns), _line(rules)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Replace the tables of the measured benches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, help="the file given to `python -m bench --json`")
    given: Path = parser.parse_args().json
    text, found = README.read_text(encoding="utf-8"), 0
    for name in re.findall(r"<!-- (?!end\b)(\w+) -->", text):
        file = given.with_suffix(f".{name}{given.suffix}")
        if file.exists():
            table = table_of(json.loads(file.read_text()))
            head, _, rest = text.partition(f"<!-- {name} -->")
            _, end, tail = rest.partition("<!-- end -->")
            assert end, f"{README.name}: {name} has no end"
            found += 1
            text = f"{head}<!-- {name} -->\n\n{table}\n\n<!-- end -->{tail}"
    if not found:
        parser.error(f"{given}: no bench has written {given.stem}.NAME{given.suffix}")
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
