"""A grid of trainings: the cells that a report lacks, on several devices, for as long as there is time.

A study is a benchmark of harness.py, with OPTIONS of its own and these ones, that measures by `fill`.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from benchmarks.harness import Run
from shared import workers
from shared.options import above_zero

OPTIONS = {
    "devices": (1, 1, "GPUs; on a CPU, processes"),
    "processes": (1, 1, "cells that are trained at the same time on a device"),
    "minutes": (None, None, "begin no cell that would end later; None: all of them", above_zero),
}


def fill(
    run: Run, names: Sequence[str], cells: Sequence[tuple], train: Callable[..., dict[str, Any]], arguments: tuple,
    said: Callable[[dict[str, Any]], str],
) -> None:
    """Add the rows of the cells that the report lacks: train(cell, *arguments, device), and the names of the cell. A
    cell that fails is tried again by the next call. said: a line about a row."""
    report, options = run.report, run.options
    done = {tuple(row[name] for name in names) for row in report["rows"]}
    todo, report["missing"] = [cell for cell in cells if cell not in done], []
    print(f"{len(cells) - len(todo)} of {len(cells)} cells are there", flush=True)
    devices = [f"cuda:{n}" for n in range(options.devices)] if run.device == "cuda" else ["cpu"] * options.devices
    devices *= options.processes
    for cell, row in trained(train, todo, arguments, devices, options.minutes):
        where = dict(zip(names, cell, strict=True))
        if isinstance(row, Exception):
            run.missing("failed", str(row), **where)
        else:
            report["rows"].append(where | row)
            run.save()
            print(f"{', '.join(map(str, cell))}: {said(report['rows'][-1])}", flush=True)


def trained(
    train: Callable, cells: Sequence[tuple], arguments: tuple, devices: Sequence[str], minutes: float | None
) -> Iterator[tuple[tuple, Any]]:
    """Each cell with its row, or with an Exception; none begins that would end too late if it takes as long as the
    longest before it. A process for every entry of `devices`; this one if there is one entry."""
    given, lasted = (train, cells, arguments, devices), [0.0]
    numbers = workers.in_time(range(len(cells)), minutes, lasted)
    if len(devices) == 1:
        found = ((n, _attempt(n, *given)[0]) for n in numbers)
    else:
        found = workers.calls(_attempt, given, ([n] for n in numbers), len(devices))
    for number, result in found:
        row, seconds = (result, 0.0) if isinstance(result, Exception) else result
        lasted.append(seconds)
        yield cells[number], row


def _attempt(
    number: int, train: Callable, cells: Sequence[tuple], arguments: tuple, devices: Sequence[str]
) -> tuple[tuple[Any, float], bool]:
    """((a row or an Exception, seconds), True: the process may go on)."""
    begun, device = time.monotonic(), devices[int(os.environ.get("WORKER", 0))]
    is_gpu = device != "cpu"
    if is_gpu:
        torch.cuda.set_device(device)
        torch.set_num_threads(1)  # the host only launches
    try:
        row = train(cells[number], *arguments, device)
    except Exception as error:
        row = RuntimeError(workers.told(error))
    if is_gpu:
        torch.cuda.empty_cache()
    return (row, time.monotonic() - begun), True
