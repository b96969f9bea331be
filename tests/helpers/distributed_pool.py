"""Processes that are the ranks of a group of torch.distributed, started once and fed with calls."""

import functools
import importlib
import inspect
import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# until every rank has started and imported a call's module: ten pools at once take two minutes on two cores
_START = 300
# longer than any call takes
_SECONDS = 120
DIED = "the process has ended"
_BEGUN = "a call begins"


class Failed(AssertionError):
    """Tracebacks of the ranks that raised."""


class Pool:
    """Processes with a group of all of them, which run calls. device: "cpu", with gloo and Triton's interpreter, or
    "cuda", with NCCL and a GPU for each. seconds: timeout of the group's collectives. Where a rank has failed or not
    answered in time, the next call has new processes."""

    def __init__(self, ranks, device="cpu", seconds=60):
        self.ranks, self.device, self.seconds = ranks, device, seconds
        self._start()

    def _start(self):
        context, self.broken = mp.get_context("spawn"), False
        self.folder = tempfile.TemporaryDirectory()
        self.calls = [context.SimpleQueue() for _ in range(self.ranks)]
        # a pipe for each, not a queue for all: a rank may die while it holds the queue's lock
        self.answers, writers = zip(*(context.Pipe(duplex=False) for _ in range(self.ranks)), strict=True)
        arguments = (self.ranks, self.device, self.seconds, str(Path(self.folder.name, "store")))
        self.processes = [
            context.Process(target=_work, args=(rank, *arguments, self.calls[rank], writers[rank]), daemon=True)
            for rank in range(self.ranks)
        ]
        for rank, process in enumerate(self.processes):
            # sets have another order on each rank, which must not be that of collectives
            with mock.patch.dict(os.environ, PYTHONHASHSEED=str(rank)):
                process.start()
            writers[rank].close()  # the rank has its own; its end ends the pipe

    def run(self, function, *args, seconds=_SECONDS, **kwargs):
        """Results of function(*args, **kwargs) on every rank, a function of a module, or its "module.name", which gets
        the group first. Raises what the ranks have raised."""
        results = self.outcomes(function, *args, seconds=seconds, **kwargs)
        errors = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(results) if error]
        if errors:
            self.broken = True
            raise Failed("\n".join(errors))
        return [result for _, result in results]

    __call__ = run

    def outcomes(self, function, *args, seconds=_SECONDS, **kwargs):
        """(traceback or None, result) of every rank; seconds: from when all ranks have begun the call."""
        if self.broken:
            self.close()
            self._start()
        self.broken = True  # until every rank has answered
        for calls in self.calls:
            calls.put((function, args, kwargs))
        ranks, begun, found, end = self.ranks, set(), {}, time.monotonic() + _START
        while len(found) < ranks:
            for reader in wait([self.answers[rank] for rank in range(ranks) if rank not in found], timeout=1):
                rank = self.answers.index(reader)
                try:
                    error, result = reader.recv()
                except (EOFError, ConnectionError):
                    error, result = DIED, None
                if error == _BEGUN:
                    begun.add(rank)
                    end = end if len(begun) < ranks else time.monotonic() + seconds
                else:
                    found[rank] = error, result
            if len(found) < ranks and time.monotonic() > end:
                answers = "\n".join(f"rank {rank}: {error or 'right'}" for rank, (error, _) in found.items())
                raise TimeoutError(f"{len(begun)} of {ranks} ranks have begun, {len(found)} have answered:\n{answers}")
        self.broken = any(error == DIED for error, _ in found.values())
        return [found[rank] for rank in range(ranks)]

    def close(self):
        for calls, process in zip(self.calls, self.processes, strict=True):
            if process.is_alive() and not self.broken:
                calls.put(None)
        for process in self.processes:
            process.join(0 if self.broken else 5)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def two_ranks(device):
    """A pool of two, or a skip where this machine has none."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = Pool(2, device)
    try:
        pool(_meet, device)
    except Failed as failure:
        pool.close()
        if "Unable to find interface" not in str(failure):
            raise
        pytest.skip("gloo finds no network interface here, not even 127.0.0.1")
    return pool


def on_ranks(test):
    """Run a test in every process of the fixture `ranks`. Its first argument is their device."""

    @functools.wraps(test)
    def run(ranks, **given):
        ranks(_unwrapped, run, ranks.device, given)

    _, *parameters = inspect.signature(test).parameters.values()
    ranks = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([ranks, *parameters])
    return run


def _unwrapped(test, device, given):
    test.__wrapped__(device, **given)


def _meet(device):
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert total == 2


def _work(rank, ranks, device, seconds, store, calls, answers):
    torch.set_num_threads(1)
    # init_device_mesh reads them; accelerate expects an address, and finds the group
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    backend, group, failed = "gloo", None, None
    if device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # also on a machine with GPUs, where other tests compile the kernels
    start, limit = timedelta(seconds=_START), timedelta(seconds=seconds)
    try:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=start)
        group = dist.new_group(timeout=limit)
    except RuntimeError:
        failed = traceback.format_exc()
    while (call := calls.get()) is not None:
        function, args, kwargs = call
        try:
            if isinstance(function, str):
                module, name = function.rsplit(".", 1)
                function = functools.partial(getattr(importlib.import_module(module), name), group)
            answers.send((_BEGUN, None))
            torch.manual_seed(0)
            answers.send((failed, None if failed else function(*args, **kwargs)))
        except (Exception, pytest.fail.Exception):
            answers.send((traceback.format_exc(), None))
    if failed is None:
        dist.destroy_process_group()
