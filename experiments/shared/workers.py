"""Calls that may end their process, and calls that have to end in time."""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

STARTING_SECONDS = 240.0  # of a process' first call: it imports torch, and the GPU gets ready
Part = TypeVar("Part")


def in_time(parts: Sequence[Part], minutes: float | None, seconds: list[float] | None = None) -> Iterator[Part]:
    """The parts, while another one as long as the longest before it ends within the minutes. None: all of them.
    seconds: those of each part that has ended, from a caller that begins several at a time."""
    start, lasted = time.monotonic(), [] if seconds is None else seconds
    for number, part in enumerate(parts):
        begun = time.monotonic()
        if minutes is not None and begun + max(lasted, default=0.0) > start + 60 * minutes:
            print(f"{len(parts) - number} of {len(parts)} are left; the same command goes on", flush=True)
            return
        yield part
        if seconds is None:
            lasted.append(time.monotonic() - begun)


def calls(
    function: Callable[..., Any], arguments: tuple, tasks: Iterable[Sequence[int]], processes: int,
    limit: float = float("inf"),
) -> Iterator[tuple[int, Any]]:
    """(number, function(number, *arguments)) of all numbers of all tasks, as they come.

    If function raises, or the process dies or takes longer than limit seconds, the result is an Exception, and another
    process takes its place. function returns (result, True), or (result, False) if its process must not go on. The
    environment variable WORKER is the number of its process, below `processes`.
    """
    tasks = iter(tasks)
    places = [_Place((number for task in tasks for number in task), (function, arguments, n), limit)
              for n in range(processes)]
    try:
        busy = [place for place in places if place.begin()]
        while busy:
            seconds = min(place.deadline for place in busy) - time.monotonic()
            wait([place.connection for place in busy], None if seconds == float("inf") else max(0.0, seconds))
            for place in list(busy):
                if place.connection.poll() or place.deadline <= time.monotonic():
                    yield place.number, place.answer()
                    if not place.begin():
                        busy.remove(place)
    finally:
        for place in places:
            place.end()


class _Place:
    """A process that makes one call after the other, and those that take its place."""

    def __init__(self, numbers: Iterator[int], arguments: tuple, limit: float):
        self.numbers, self.arguments, self.limit = numbers, arguments, limit
        self.process: Any = None

    def begin(self) -> bool:
        """Begin the next call; False if there is none."""
        number = next(self.numbers, None)
        if number is None:
            return False
        self.number, self.deadline = number, time.monotonic() + self.limit
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, there = context.Pipe()
            self.process = context.Process(target=_work, args=(there, *self.arguments), daemon=True)
            self.process.start()
            there.close()
            self.deadline += STARTING_SECONDS
        with contextlib.suppress(OSError):  # it died: its answer says so
            self.connection.send(number)
        return True

    def answer(self) -> Any:
        """Result of the call, which has ended or is overdue."""
        result: Any = TimeoutError(f"no result after {self.limit:g} seconds")
        may_go_on = False
        try:
            if self.connection.poll():
                result, may_go_on = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(10)
            names = {-number.value: number.name for number in signal.Signals}
            status = names.get(self.process.exitcode, f"status {self.process.exitcode}")
            result = ChildProcessError(f"the process died ({status})")
        if not may_go_on:
            self.end()
        return result

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join(30)  # no longer: one that hangs in a GPU's driver may never end
            self.connection.close()
            self.process = None


def _work(connection: Connection, function: Callable[..., Any], arguments: tuple, place: int) -> None:
    os.environ["WORKER"] = str(place)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            number = connection.recv()
            try:
                result, may_go_on = function(number, *arguments)
            except Exception as error:
                result, may_go_on = RuntimeError(told(error)), False
            connection.send((result, may_go_on))


def told(error: Exception) -> str:
    """An exception as text, for another process: its message and the place that raised it."""
    return "".join(traceback.format_exception(error)[-4:])
