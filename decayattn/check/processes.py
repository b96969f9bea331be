"""Tasks in a process of their own, which a task may kill."""

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

# spawned: a forked process cannot use a GPU that its parent has touched
CONTEXT = multiprocessing.get_context("spawn")


def one_line(error: BaseException) -> str:
    """Type of an exception and the most informative line of its message."""
    name = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[-1] if name == "CompilationError" else lines[0]  # Triton prints the source first
    return f"{name}: {text[:200]}" if text else name


class Tasks:
    """Results of function(*task) for every task, in order; a str where it raised, died, or exceeded the time limit.

    The process starts at once. A kernel with an illegal memory access breaks the GPU context of its process, or kills
    the process, so the task after a failure gets a new one.
    """

    def __init__(self, function: Callable[..., Any], tasks: Iterable[tuple], seconds: float = 300.0) -> None:
        self.function, self.tasks, self.seconds = function, list(tasks), seconds
        self.start()

    def start(self) -> None:
        self.connection, theirs = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=_work, args=(self.function, self.tasks, theirs), daemon=True)
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: the parent ends this process
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
        theirs.close()

    def __iter__(self) -> Iterator[Any]:
        while self.tasks:
            answer = self.receive()
            del self.tasks[0]
            yield answer
            if isinstance(answer, str) and self.tasks:
                self.process.kill()
                self.start()
        self.process.kill()

    def receive(self) -> Any:
        try:
            if not self.connection.poll(self.seconds):
                return f"it took more than {self.seconds:.0f} s"
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return f"its process ended with exit status {self.process.exitcode}"


def _work(function: Callable[..., Any], tasks: Iterable[tuple], connection: Any) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):  # the parent is gone
        for task in tasks:
            try:
                answer = function(*task)
            except Exception as error:
                return connection.send(one_line(error))
            connection.send(answer)
