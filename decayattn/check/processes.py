"""Tasks in separate processes, which a task may kill."""

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from typing import Any

import torch

# time limit of a task
TASK_SECONDS = 300.0
# imported once, by the server from which the processes are forked
_PRELOADED = "decayattn.check.preload"


def prepare() -> None:
    """Start the server, so that it imports in the background."""
    if _context().get_start_method() == "forkserver":
        forkserver.ensure_running()


@contextlib.contextmanager
def in_processes(
    function: Callable[..., Any], tasks: Iterable[tuple], count: int, seconds: float = TASK_SECONDS
) -> Iterator[Iterator[Any]]:
    """Results of function(*task) for every task, in order; a str if the process died or exceeded the time limit.

    All tasks start at once, in `count` processes, which end with the context. A kernel with an illegal memory access
    breaks its process's GPU context, or kills the process. So a result with an `error` also ends its process, and the
    next task gets a new one.
    """
    own, workers, over = threading.local(), [], threading.Event()

    def ask(task: tuple) -> Any:
        worker = getattr(own, "worker", None)
        if worker is None or worker.ended:
            worker = own.worker = _Worker(function)
            workers.append(worker)
        if over.is_set():
            worker.end()
        return worker.ask(task, seconds)

    with ThreadPoolExecutor(count) as threads:
        try:
            yield threads.map(ask, tasks)
        finally:
            over.set()
            threads.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.end()


class _Worker:
    """Process that answers tasks one by one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        context = _context()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_answer, args=(function, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.ended = False

    def ask(self, task: tuple, seconds: float) -> Any:
        try:
            self.connection.send(task)
            if not self.connection.poll(seconds):
                self.end()
                return f"it took more than {seconds:.0f} s"
            answer = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            self.end()
            return f"its process ended with exit status {self.process.exitcode}"
        if getattr(answer, "error", None) is not None:
            self.end()
        return answer

    def end(self) -> None:
        self.ended = True
        self.process.kill()


def _context() -> Any:
    """Processes forked from a server that has the imports and has not touched a GPU; without fork, spawned."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    return context


def _answer(function: Callable[..., Any], connection: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            connection.send(function(*connection.recv()))
