"""Progress of a run on standard error: a bar on a terminal, else a line now and then. Never on stdout."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from collimate_ray.cli import streams

#: Seconds between two lines where there is no terminal: a log stays readable over hours.
LINE_EVERY_S = 10.0


class Progress(Protocol):
    """Shows how many grades are done; a context manager."""

    def __enter__(self) -> Progress: ...

    def __exit__(self, *exc: object) -> None: ...

    def update(self, done: int) -> None:
        """Say how many grades are done, of the total that was given."""


def progress(total: int, bar: bool) -> Progress:
    """Make a display for ``total`` grades: a bar, if asked for and stderr is a terminal, else lines."""
    return Bar(total) if bar and sys.stderr.isatty() else Lines(total)


class Lines:
    """A line at most every ``LINE_EVERY_S``."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._began = self._said = time.monotonic()
        #: grades done, and how many the last line told of
        self._done = self._told = 0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._done == self.total != self._told:
            self._say(time.monotonic())

    def update(self, done: int) -> None:
        """Say it, unless a line was written just now."""
        self._done = done
        now = time.monotonic()
        if now - self._said >= LINE_EVERY_S:
            self._say(now)

    def _say(self, now: float) -> None:
        self._said, self._told = now, self._done
        rate = self._done / max(now - self._began, 1e-3)
        note(f"graded {self._done} of {self.total}, {rate:.1f}/s")


class Bar:
    """A bar with the rate and the time that is left."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar: Any = RichProgress(TextColumn("grading"), *columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("grading", total=total)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def update(self, done: int) -> None:
        """Draw it."""
        self._bar.update(self._task, completed=done)


def note(text: str) -> None:
    """Print one line to standard error."""
    streams.say(f"collimate-ray: {text}")
