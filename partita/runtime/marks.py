"""When the parts of a step began and ended on this rank: the measured side of a timeline."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

Mark = tuple[str, str, float, float]  # name, phase, start and end in seconds from the start of the step


class Marks:
    """The marks of the newest step."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.marks: list[Mark] = []

    def begin(self) -> None:
        """A new step starts here."""
        self.began, self.marks = time.perf_counter(), []

    @contextmanager
    def __call__(self, name: str, phase: str) -> Iterator[None]:
        """Mark what runs inside."""
        start = time.perf_counter() - self.began
        try:
            yield
        finally:
            self.marks.append((name, phase, start, time.perf_counter() - self.began))
