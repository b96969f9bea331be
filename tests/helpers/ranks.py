"""Processes that form a process group and run the functions that a test file sends them, started once per file."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

SECONDS = 120  # after which ranks that have not answered hang


class Ranks:
    """`world` processes with torch.distributed initialised: gloo on the CPU, or NCCL with a GPU each."""

    def __init__(self, world: int, folder: Path, device: str = "cpu"):
        self.world, self.folder, self.device = world, folder, device
        self.connections: list[Connection] = []
        self.processes: list[BaseProcess] = []

    def __call__(self, function: Callable, *arguments: Any) -> list[Any]:
        """function(*arguments) on every rank; what each returns. A test fails with the traceback of a rank's error."""
        if not self.processes:
            self._start()
        for connection in self.connections:
            connection.send((function, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + SECONDS
        while len(answers) < self.world and time.monotonic() < deadline:
            for connection in wait(self.connections, max(0, deadline - time.monotonic())):
                rank = self.connections.index(connection)
                answers[rank] = self._receive(rank)
                if not answers[rank][0]:  # the others may wait for it
                    deadline = min(deadline, time.monotonic() + 5)
        failed = [f"rank {rank}: {answer}" for rank, (done, answer) in sorted(answers.items()) if not done]
        if len(answers) < self.world:
            failed.append(f"{function.__name__}: no answer from ranks {sorted({*range(self.world)} - answers.keys())}")
            self.close()
        if failed:
            pytest.fail("\n".join(failed))
        return [answers[rank][1] for rank in range(self.world)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.connections, self.processes = [], []

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return self.connections[rank].recv()
        except EOFError:
            self.processes[rank].join()
            status = self.processes[rank].exitcode
            self.close()
            pytest.fail(f"rank {rank}: the process ended with {status}")

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would take over threads
        store = tempfile.mktemp(dir=self.folder)
        for rank in range(self.world):
            connection, remote = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, store, self.device, remote), daemon=True)
            process.start()
            remote.close()
            self.connections.append(connection)
            self.processes.append(process)


def _serve(rank: int, world: int, store: str, device: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=world,
        )
    except RuntimeError:
        connection.recv()
        connection.send((False, traceback.format_exc()))
        return
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            answer = True, function(*arguments)
        except Exception:
            answer = False, traceback.format_exc()
        connection.send(answer)


def two_ranks(tmp_path_factory: pytest.TempPathFactory, device: str) -> Ranks:
    """Two ranks, or a skip where this machine has none."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(2, tmp_path_factory.mktemp("ranks"), device)
    try:
        ranks(_meet)
    except pytest.fail.Exception as failure:
        if "Unable to find interface" not in str(failure):
            raise
        pytest.skip("gloo finds no network interface here, not even 127.0.0.1")
    return ranks


def _meet() -> None:
    total = torch.ones(1, device="cuda" if distributed.get_backend() == "nccl" else "cpu")
    distributed.all_reduce(total)
    assert total == 2
