"""Progress of a run on standard error, and only to a terminal.

It draws when it is told of a step, never from a thread of its own: ranks are forked from this process.
"""

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """Called with a line of metrics: step, steps, loss, seconds."""

    def __init__(self, console: Console) -> None:
        loss = TextColumn("{task.fields[loss]}")
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), loss, TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, auto_refresh=False, transient=True)
        self.task = self.progress.add_task("training", total=None, loss="")
        self.progress.start()

    def __call__(self, line: Mapping[str, Any]) -> None:
        loss = f"loss {line['loss']:.3f}" if line.get("loss") is not None else ""
        self.progress.update(self.task, completed=line.get("step", 0), total=line.get("steps"), loss=loss)
        self.progress.refresh()

    def close(self) -> None:
        self.progress.stop()


def progress() -> Bar | None:
    """A bar if standard error is a terminal."""
    return Bar(Console(stderr=True)) if sys.stderr.isatty() else None
