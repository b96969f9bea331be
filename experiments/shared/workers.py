"""Calls that may take their process with them, and calls that have to end in time."""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

# of a process' first call: it imports torch, and the GPU gets ready
STARTING_SECONDS = 240.0
Part = TypeVar("Part")


def in_time(parts: Sequence[Part], minutes: float | None) -> Iterator[Part]:
    """The parts, as long as another one ends within the minutes if it takes as long as the longest before it. None: all
    of them."""
    start, longest = time.monotonic(), 0.0
    for number, part in enumerate(parts):
        begun = time.monotonic()
        if minutes is not None and begun + longest > start + 60 * minutes:
            print(f"{len(parts) - number} of {len(parts)} are left; the same command goes on", flush=True)
            return
        yield part
        longest = max(longest, time.monotonic() - begun)


@dataclass
class _Worker:
    process: Any
    connection: Connection
    left: list[int]  # the numbers of its task that have not come back, the first one in progress
    since: float  # when that began


def calls(
    function: Callable[..., Any], arguments: tuple, tasks: Iterator[Sequence[int]] | Sequence[Sequence[int]],
    processes: int, limit: float = float("inf"),
) -> Iterator[tuple[int, Any]]:
    """(number, function(number, *arguments)) of all numbers of all tasks, as they come; the numbers of a task run one
    after the other in one process. Where function raised, the process died or took longer than limit seconds, an
    Exception stands for the result, and another process takes its place.

    function may return (result, False) to say that its process must not go on; else (result, True). It may read the
    number of its process, below `processes`, from the environment variable WORKER.
    """
    context = multiprocessing.get_context("spawn")
    tasks, again = iter(tasks), []
    workers: dict[int, _Worker] = {}

    def next_task() -> list[int] | None:
        return again.pop() if again else next((list(task) for task in tasks if task), None)

    def start(place: int, left: list[int]) -> None:
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there, function, arguments, left, place), daemon=True)
        process.start()
        there.close()
        workers[place] = _Worker(process, here, list(left), time.monotonic() + STARTING_SECONDS)

    def stop(place: int) -> _Worker:
        worker = workers.pop(place)
        worker.process.kill()
        worker.process.join(30)  # no longer: one that hangs in a GPU's driver may never end
        worker.connection.close()
        if worker.left:
            again.append(worker.left)
        return worker

    try:
        while True:
            for place in range(processes):
                if place not in workers and (task := next_task()):
                    start(place, task)
            if not workers:
                return
            ready = wait([worker.connection for worker in workers.values()], timeout=1.0)
            for place, worker in list(workers.items()):
                number = worker.left[0] if worker.left else None
                if worker.connection in ready:
                    try:
                        number, result, may_go_on = worker.connection.recv()
                    except (EOFError, OSError):  # it died
                        worker.process.join(10)
                        result = ChildProcessError(f"the process died ({_status(worker.process.exitcode)})")
                        may_go_on = False
                elif time.monotonic() - worker.since > limit:
                    result, may_go_on = TimeoutError(f"no result after {limit:g} seconds"), False
                else:
                    continue
                if number is not None:
                    worker.left.remove(number)
                worker.since = time.monotonic()
                if may_go_on and not worker.left and (task := next_task()):
                    worker.left = task
                    with contextlib.suppress(OSError):  # it is noticed when it is read from
                        worker.connection.send(list(task))
                elif not (may_go_on and worker.left):
                    stop(place)
                if number is not None:
                    yield number, result
    finally:
        for place in list(workers):
            stop(place)


def told(error: Exception) -> str:
    """An exception as text, which goes from process to process: its message and where it was raised."""
    return "".join(traceback.format_exception(error)[-4:])


def _status(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"status {code}"


def _work(
    connection: Connection, function: Callable[..., Any], arguments: tuple, numbers: list[int], place: int
) -> None:
    os.environ["WORKER"] = str(place)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            for number in numbers:
                try:
                    result, may_go_on = function(number, *arguments)
                except Exception as error:
                    result, may_go_on = RuntimeError(told(error)), False
                connection.send((number, result, may_go_on))
                if not may_go_on:
                    connection.close()
                    os._exit(0)  # a lost GPU context may hang an ordinary exit
            numbers = connection.recv()
