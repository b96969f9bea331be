"""Calls in many processes. One that dies or hangs takes nobody with it: it is told, and another one takes its place."""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

# of a process' first call: it imports torch, and the GPU gets ready
STARTING_SECONDS = 240.0


@dataclass
class _Worker:
    process: Any
    connection: Connection
    left: list[int]  # the numbers of its task that have not come back, the first one in progress
    since: float  # when that began


def calls(
    function: Callable[..., Any], arguments: tuple, tasks: Sequence[Sequence[int]], processes: int, limit: float
) -> Iterator[tuple[int, Any]]:
    """(number, function(number, *arguments)) of all numbers of all tasks, as they come; the numbers of a task run one
    after the other in one process. Where function raised, the process died or took longer than limit seconds, an
    Exception stands for the result.

    function may return (result, False) to say that its process must not go on; else (result, True).
    """
    context = multiprocessing.get_context("spawn")
    waiting = [list(task) for task in reversed(tasks) if task]
    workers: list[_Worker] = []

    def start(left: list[int]) -> None:
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there, function, arguments, list(left)), daemon=True)
        process.start()
        there.close()
        workers.append(_Worker(process, here, left, time.monotonic() + STARTING_SECONDS))

    def stop(worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join(30)  # no longer: one that hangs in a GPU's driver may never end
        worker.connection.close()
        workers.remove(worker)
        if worker.left:
            waiting.append(worker.left)

    try:
        for _ in range(min(processes, len(waiting))):
            start(waiting.pop())
        while workers:
            ready = wait([worker.connection for worker in workers], timeout=1.0)
            for worker in list(workers):
                if worker.connection in ready:
                    try:
                        number, result, may_go_on = worker.connection.recv()
                    except (EOFError, OSError):  # it died
                        worker.process.join(10)
                        number = worker.left.pop(0) if worker.left else None
                        stop(worker)
                        if number is not None:
                            yield number, ChildProcessError(f"the process died ({_status(worker.process.exitcode)})")
                    else:
                        worker.left.remove(number)
                        worker.since = time.monotonic()
                        if not may_go_on:
                            stop(worker)
                        elif not worker.left:
                            if waiting:
                                worker.left = waiting.pop()
                                with contextlib.suppress(OSError):  # it is noticed when it is read from
                                    worker.connection.send(list(worker.left))
                            else:
                                stop(worker)
                        yield number, result
                elif time.monotonic() - worker.since > limit:
                    number = worker.left.pop(0)
                    stop(worker)
                    yield number, TimeoutError(f"no result after {limit:g} seconds")
            while waiting and len(workers) < processes:
                start(waiting.pop())
    finally:
        for worker in list(workers):
            stop(worker)


def _status(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"status {code}"


def _work(connection: Connection, function: Callable[..., Any], arguments: tuple, numbers: list[int]) -> None:
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            for number in numbers:
                try:
                    result, may_go_on = function(number, *arguments)
                except Exception as error:
                    told = "".join(traceback.format_exception(error)[-4:])
                    result, may_go_on = RuntimeError(told), False
                connection.send((number, result, may_go_on))
                if not may_go_on:
                    connection.close()
                    os._exit(0)  # a lost GPU context may hang an ordinary exit
            numbers = connection.recv()
