"""One line that tells how far a benchmark is, and parts of it that end in time."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TextIO, TypeVar

_WIDTH = 30
Part = TypeVar("Part")


class Progress:
    """A bar on a terminal, redrawn in place; nothing where the output goes to a file."""

    def __init__(self, total: int, stream: TextIO | None = None):
        self.total, self.done, self.start = total, 0, time.perf_counter()
        self.stream = sys.stderr if stream is None else stream
        self.shown = self.stream.isatty()

    def step(self, what: str, steps: int = 1) -> None:
        """So many steps are done, of which the last one was this."""
        self.done = min(self.total, self.done + steps)
        filled = _WIDTH * self.done // max(1, self.total)
        seconds = time.perf_counter() - self.start
        bar = "#" * filled + "·" * (_WIDTH - filled)
        self._write(f"[{bar}] {self.done}/{self.total} {seconds:.0f} s {what}")

    def print(self, text: str) -> None:
        """A line above the bar."""
        self._write("")
        print(text, flush=True)

    def close(self) -> None:
        self._write("")

    def _write(self, line: str) -> None:
        if self.shown:
            self.stream.write(f"\r\x1b[K{line}")
            self.stream.flush()


def in_time(parts: Sequence[Part], minutes: float | None, progress: Progress, what: str) -> Iterator[Part]:
    """The parts, as long as another one ends within the minutes if it takes as long as the longest before it; then a
    line that says how many are left. None: all of them."""
    start, longest = time.perf_counter(), 0.0
    for number, part in enumerate(parts):
        begun = time.perf_counter()
        if minutes is not None and begun + longest > start + 60 * minutes:
            progress.print(f"{len(parts) - number} {what} left")
            return
        yield part
        longest = max(longest, time.perf_counter() - begun)
