"""The table that a program ends with."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print ``rows`` below ``titles``: the first column to the left, the others to the right."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in titles:
        table.add_column(title, justify="right" if table.columns else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a file has no edge to wrap at
    console.print(table)
