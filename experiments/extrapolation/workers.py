"""Runs on one device after the other or on several at once, each device by a process of its own."""

import multiprocessing
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from language_models import corpus as corpora

from extrapolation.reading import read
from extrapolation.settings import Run, Settings
from extrapolation.training import Diverged, Stopped, train


@dataclass(frozen=True)
class Job:
    """What a worker has to know. Checkpoints and the corpus lie in the folder; `deadline` is on time.time's clock."""

    settings: Settings
    folder: Path
    compiled: bool
    deadline: float | None


@dataclass
class Report:
    """What a worker says: progress of a run, its result, that it was stopped, or how it failed."""

    run: Run
    steps: int = 0
    seconds_per_step: float | None = None
    result: dict[str, Any] | None = None
    stopped: bool = False
    failure: str | None = None


def work(
    job: Job, device: str, take: Callable[[], Run | None], tell: Callable[[Report], None], stop: Callable[[], bool]
) -> None:
    """Take runs until there are none, or no time for another one, which may take as long as the longest so far."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    corpus = corpora.load(job.folder)
    text = corpus.text.to(device)
    longest = 0.0

    def should_stop() -> bool:
        return stop() or (job.deadline is not None and time.time() >= job.deadline)

    while not should_stop():
        if job.deadline is not None and time.time() + longest > job.deadline:
            return
        run = take()
        if run is None:
            return
        begun = time.time()
        try:
            tell(Report(run, result=one(job, run, corpus, text, tell, should_stop)))
        except Stopped:
            tell(Report(run, stopped=True))
            return
        longest = max(longest, time.time() - begun)


def one(
    job: Job, run: Run, corpus: corpora.Corpus, text: torch.Tensor, tell: Callable[[Report], None],
    should_stop: Callable[[], bool],
) -> dict[str, Any]:
    """The result of one run: its training, and its reading unless it diverged."""
    checkpoint = job.folder / "checkpoints" / f"{run.scheme}-{run.seed}.pt"
    said: dict[str, Any] = {"scheme": run.scheme, "seed": run.seed, "diverged": None}
    try:
        model, said["training"] = train(
            job.settings, run, corpus, text, checkpoint, compiled=job.compiled, should_stop=should_stop,
            on_look=lambda steps, seconds: tell(Report(run, steps, seconds)),
        )
    except Diverged as diverged:
        return said | {"diverged": diverged.step, "parameters": None, "training": None, "reading": []}
    begun = time.monotonic()
    said["parameters"] = sum(p.numel() for p in model.parameters())
    said["reading"] = read(model, run.scheme, job.settings, corpus, text)
    said["reading_seconds"] = round(time.monotonic() - begun, 2)
    checkpoint.unlink(missing_ok=True)
    return said


def reports(job: Job, runs: Sequence[Run], devices: Sequence[str]) -> Iterator[Report]:
    """What the workers say, until they have ended: one in this process for one device, else a process for each.

    Ctrl-C asks them to stop after the steps in progress; a second one ends everything at once.
    """
    with _asked_to_stop() as asked:
        if len(devices) == 1:
            yield from _here(job, runs, devices[0], asked)
        else:
            yield from _in_processes(job, runs, devices, asked)


def _here(job: Job, runs: Sequence[Run], device: str, asked: Callable[[], bool]) -> Iterator[Report]:
    waiting = list(runs)
    # in a thread of its own, so that its reports are heard while it works, and Ctrl-C is by the main one
    said: queue.SimpleQueue[Report | BaseException | None] = queue.SimpleQueue()

    def run_all() -> None:
        try:
            work(job, device, lambda: waiting.pop(0) if waiting else None, said.put, asked)
            said.put(None)
        except BaseException as error:
            said.put(error)

    thread = threading.Thread(target=run_all, daemon=True)
    thread.start()
    while (report := said.get()) is not None:
        if isinstance(report, BaseException):
            raise report
        yield report
    thread.join()


def _in_processes(job: Job, runs: Sequence[Run], devices: Sequence[str], asked: Callable[[], bool]) -> Iterator[Report]:
    context = multiprocessing.get_context("spawn")
    tasks, said, stop = context.Queue(), context.Queue(), context.Event()
    for run in [*runs, *[None] * len(devices)]:
        tasks.put(run)
    tasks.cancel_join_thread()  # what nobody took keeps nobody waiting
    workers = [context.Process(target=_process, args=(job, device, tasks, said, stop)) for device in devices]
    for worker in workers:
        worker.start()
    ended = 0
    try:
        while ended < len(workers):
            if asked():
                stop.set()
            try:
                report = said.get(timeout=0.5)
            except queue.Empty:
                if any(worker.exitcode not in (None, 0) for worker in workers):
                    raise RuntimeError("a worker process ended without a word; was memory short?") from None
                continue
            if report is None:
                ended += 1
            elif report.failure is not None:
                raise RuntimeError(f"{report.run}:\n{report.failure}")
            else:
                yield report
    finally:
        stop.set()
        for worker in workers:
            worker.join(timeout=30)
            if worker.is_alive():
                worker.kill()


def _process(job: Job, device: str, tasks: Any, said: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one hears it, and sets stop
    current: list[Run] = []

    def take() -> Run | None:
        run = tasks.get()
        current[:] = [run]
        return run

    try:
        work(job, device, take, said.put, stop.is_set)
        said.put(None)
    except Exception:
        said.put(Report(current[0] if current else Run("none", 0), failure=traceback.format_exc()))


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; pressed again, it is KeyboardInterrupt."""
    asked = []

    def hear(signum: int, frame: object) -> None:
        asked.append(signum)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        before = signal.signal(signal.SIGINT, hear)
    except ValueError:  # only the main thread hears signals
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)
