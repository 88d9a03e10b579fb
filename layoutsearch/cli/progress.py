"""Progress on the terminal: what is being measured, the best so far, the time left."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from layoutsearch.search.budget import Budget


class ProgressReporter:
    """A `Reporter` that draws a bar on stderr. A context manager."""

    def __init__(self, console: Console, budget: Budget) -> None:
        self._console, self._budget = console, budget
        self._progress = Progress(
            TextColumn("[bold]{task.fields[stage]}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("[green]{task.fields[best]}"),
            TextColumn("{task.description}"),
            console=console,
            transient=False,
        )
        self._task: TaskID | None = None
        self._best = ""

    def __enter__(self) -> ProgressReporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, name: str, total: int) -> None:
        """A new bar."""
        if self._task is not None:
            self._progress.stop_task(self._task)
        self._task = self._progress.add_task("", total=total, stage=name, left=self._left(), best=self._best)

    def step(self, what: str, count: int = 1) -> None:
        """Advance the bar."""
        if self._task is not None:
            self._progress.update(self._task, advance=count, description=what[:80], left=self._left())

    def best(self, text: str) -> None:
        """Show the best so far."""
        self._best = f"best: {text}"
        if self._task is not None:
            self._progress.update(self._task, best=self._best)

    def note(self, text: str) -> None:
        """A line above the bars."""
        self._console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)

    def _left(self) -> str:
        left = self._budget.left_s
        return "" if left == float("inf") else f"{max(0.0, left):.0f} s left"
