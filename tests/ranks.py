"""Processes that form a process group and run the functions that a test file sends them, started once per file."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

SECONDS = 120  # after which ranks that have not answered hang


class Ranks:
    """`world` processes with torch.distributed initialised: gloo on the CPU, or NCCL with a GPU each."""

    def __init__(self, world: int, folder: Path, device: str = "cpu"):
        context = multiprocessing.get_context("spawn")  # a fork would take over threads
        self.connections, self.processes = [], []
        for rank in range(world):
            connection, remote = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, str(folder), device, remote), daemon=True)
            process.start()
            remote.close()
            self.connections.append(connection)
            self.processes.append(process)
        self.device = device

    def __call__(self, function: Callable, *arguments: Any) -> list[Any]:
        """function(*arguments) on every rank; what each returns. A test fails with the traceback of a rank's error."""
        for connection in self.connections:
            connection.send((function, arguments))
        answers = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(SECONDS):
                self.close()
                pytest.fail(f"rank {rank} does not answer {function.__name__} within {SECONDS} s")
            answers.append(connection.recv())
        failed = "\n".join(f"rank {rank}: {answer}" for rank, (done, answer) in enumerate(answers) if not done)
        if failed:
            self.close()  # the other ranks may wait for it
            pytest.fail(failed)
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank: int, world: int, folder: str, device: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world,
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
