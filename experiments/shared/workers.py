"""Calls that may end their process, and calls that have to end in time."""

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

STARTING_SECONDS = 240.0  # of a process' first call: it imports torch, and the GPU gets ready
Part = TypeVar("Part")


def in_time(parts: Sequence[Part], minutes: float | None) -> Iterator[Part]:
    """The parts, while another one as long as the longest before it ends within the minutes. None: all of them."""
    start, longest = time.monotonic(), 0.0
    for number, part in enumerate(parts):
        begun = time.monotonic()
        if minutes is not None and begun + longest > start + 60 * minutes:
            print(f"{len(parts) - number} of {len(parts)} are left; the same command goes on", flush=True)
            return
        yield part
        longest = max(longest, time.monotonic() - begun)


def calls(
    function: Callable[..., Any], arguments: tuple, tasks: Iterable[Sequence[int]], processes: int,
    limit: float = float("inf"),
) -> Iterator[tuple[int, Any]]:
    """(number, function(number, *arguments)) of all numbers of all tasks, as they come.

    The numbers of a task run one after the other in one process. If function raises, or the process dies or takes
    longer than limit seconds, the result is an Exception, and another process takes its place. function returns
    (result, True), or (result, False) if its process must not go on. The environment variable WORKER is the number of
    its process, below `processes`.
    """
    context, lock, results = multiprocessing.get_context("spawn"), threading.Lock(), queue.SimpleQueue()
    tasks, running, ended = iter(tasks), {}, threading.Event()

    def next_task() -> Sequence[int] | None:
        with lock:
            return None if ended.is_set() else next(tasks, None)

    def start(place: int) -> Connection:
        here, there = context.Pipe()
        with lock:
            if ended.is_set():
                raise EOFError
            running[place] = context.Process(target=_work, args=(there, function, arguments, place), daemon=True)
            running[place].start()
        there.close()
        return here

    def feed(place: int) -> None:
        """The calls of one process, and of those that take its place."""
        connection = None
        try:
            while (task := next_task()) is not None:
                for number in task:
                    seconds = limit if connection else limit + STARTING_SECONDS
                    connection = connection or start(place)
                    result, may_go_on = _ask(connection, running[place], number, seconds)
                    results.put((number, result))
                    if not may_go_on:
                        _end(running[place])
                        connection.close()
                        connection = None
        except Exception as error:
            results.put(error)
        if connection:
            _end(running[place])
        results.put(None)

    threads = [threading.Thread(target=feed, args=(place,), daemon=True) for place in range(processes)]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            while (result := results.get()) is not None:
                if isinstance(result, Exception):
                    raise result
                yield result
    finally:
        ended.set()
        with lock:
            for process in running.values():
                _end(process)


def _ask(connection: Connection, process: Any, number: int, seconds: float) -> tuple[Any, bool]:
    """(result, True if the process can go on) of a call."""
    try:
        connection.send(number)
        if connection.poll(None if seconds == float("inf") else seconds):
            return connection.recv()
    except (EOFError, OSError):
        process.join(10)
        names = {-number.value: number.name for number in signal.Signals}
        status = names.get(process.exitcode, f"status {process.exitcode}")
        return ChildProcessError(f"the process died ({status})"), False
    return TimeoutError(f"no result after {seconds:g} seconds"), False


def _end(process: Any) -> None:
    process.kill()
    process.join(30)  # no longer: one that hangs in a GPU's driver may never end


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
