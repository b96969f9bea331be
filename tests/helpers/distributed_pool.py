"""Processes that are the ranks of torch.distributed's groups, started once per file and fed with calls."""

import importlib
import os
import queue
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# longer than any call takes, shorter than pytest's patience
_SECONDS = 120
DIED = "the process has ended"


class Failed(AssertionError):
    """What a rank has raised, with its traceback."""


class Pool:
    """ranks processes; a call runs on the first `ranks` of them, which have a group of that size.

    device: "cpu", with gloo, or "cuda", with NCCL and a GPU for each. seconds: a collective waits no longer.
    """

    def __init__(self, ranks, device="cpu", sizes=None, seconds=60):
        self.ranks, self.device, context = ranks, device, mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.calls = [context.SimpleQueue() for _ in range(ranks)]
        self.results = context.Queue()
        arguments = (ranks, device, sizes or [ranks], seconds, str(Path(self.folder.name, "store")))
        self.processes = [
            context.Process(target=_work, args=(rank, *arguments, self.calls[rank], self.results), daemon=True)
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def __call__(self, function, *args):
        """What function(*args) returns on every rank, a function of a module. Raises what the ranks have raised."""
        return self.run(function, *args)

    def run(self, function, *args, ranks=None, seconds=_SECONDS, **kwargs):
        """What function(group, *args, **kwargs) returns on every rank; function is "module.name".

        Raises what the ranks have raised."""
        results = self.outcomes(function, *args, ranks=ranks, seconds=seconds, **kwargs)
        errors = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(results) if error]
        if errors:
            raise Failed("\n".join(errors))
        return [result for _, result in results]

    def outcomes(self, function, *args, ranks=None, seconds=_SECONDS, **kwargs):
        """(traceback or None, result) of every rank, within so many seconds."""
        ranks = ranks or self.ranks
        for calls in self.calls[:ranks]:
            calls.put((function, ranks, args, kwargs))
        found, end = {}, time.monotonic() + seconds
        while len(found) < ranks:
            try:
                rank, error, result = self.results.get(timeout=1)
                found[rank] = error, result
            except queue.Empty:
                dead = {n: (DIED, None) for n in range(ranks) if not self.processes[n].is_alive()}
                if len(found.keys() | dead.keys()) == ranks:
                    found = dead | found
                elif time.monotonic() > end:
                    answers = "\n".join(f"rank {rank}: {error or 'right'}" for rank, (error, _) in found.items())
                    raise TimeoutError(f"{len(found)} of {ranks} ranks have answered:\n{answers}") from None
        return [found[rank] for rank in range(ranks)]

    def close(self):
        for calls, process in zip(self.calls, self.processes, strict=True):
            if process.is_alive():
                calls.put(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
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


def _meet(device):
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert total == 2


def _work(rank, ranks, device, sizes, seconds, store, calls, results):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))  # init_device_mesh reads them
    backend, groups = "gloo", {}
    if device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
    limit = timedelta(seconds=seconds)
    begun = None
    try:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
        groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in sizes}
    except RuntimeError:
        begun = traceback.format_exc()
    while (call := calls.get()) is not None:
        function, size, args, kwargs = call
        if begun is not None:
            results.put((rank, begun, None))
            continue
        try:
            torch.manual_seed(0)
            if callable(function):
                result = function(*args, **kwargs)
            else:
                module, name = function.rsplit(".", 1)
                result = getattr(importlib.import_module(module), name)(groups[size], *args, **kwargs)
            results.put((rank, None, result))
        except Exception:
            results.put((rank, traceback.format_exc(), None))
