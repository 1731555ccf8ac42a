"""The progress bar of `WorkerGroup.run`."""

from types import TracebackType
from typing import Any

from flatweights.ray._round import Round


class RoundsBar:
    """How many rounds are done, and which ranks the last average is not of.

    Drawn on a terminal or in a notebook, and nowhere else: a file would get its remains.
    """

    def __init__(self, rounds: int) -> None:
        """Show nothing yet.

        Raises:
            ImportError: If ``rich`` is not installed.
        """
        try:
            from rich import progress
            from rich.console import Console
        except ImportError as error:
            raise ImportError("progress=True needs rich: pip install rich") from error
        console = Console()
        self._bar: Any = progress.Progress(
            progress.TextColumn("rounds"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}"),
            console=console,
            disable=not (console.is_terminal or console.is_jupyter),
        )
        self._task = self._bar.add_task("", total=rounds)

    def __enter__(self) -> "RoundsBar":
        """Begin to draw."""
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the bar as it is."""
        self._bar.stop()

    def advance(self, found: Round) -> None:
        """Show that one more round is done."""
        self._bar.update(self._task, advance=1, description=_ranks(found))


def _ranks(found: Round) -> str:
    lost = sorted({*found.late, *found.failed})
    if not lost:
        return f"{len(found.used)} ranks"
    without = ", ".join(map(str, lost))
    return f"[yellow]{len(found.used)} of {len(found.used) + len(lost)} ranks, without {without}[/]"
