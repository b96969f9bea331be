"""A grid of trainings: the cells that a report lacks, on several devices, for as long as there is time.

A study is a module with a table of OPTIONS, CELL (the keys of a row that name its cell) and these functions:
`check_options(options)`, `begin(options) -> (setup of the report, cells, arguments of train)`,
`train(cell, *arguments, device) -> row`, `said(row)`, `table(report)` and `draw(report)`. Its docstring explains its
figures.
"""

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks import harness
from shared import workers
from shared.options import REPORT, above_zero, parser_of
from shared.provenance import ROOT, provenance
from shared.report import resumed, write
from tqdm import tqdm

COMMON = {
    "devices": (1, 1, "GPUs; on a CPU, processes"),
    "processes": (1, 1, "cells that are trained at the same time on a device"),
    "minutes": (None, None, "begin no cell that would end later; None: all of them", above_zero),
}


def parse(module: Any, argv: Sequence[str]) -> Namespace:
    """The options of a study, defaults filled in for this machine."""
    cuda = torch.cuda.is_available()
    parser = parser_of(module.__doc__, module.OPTIONS | COMMON | REPORT, cuda)
    options = parser.parse_args(argv)
    for wrong in module.check_options(options):
        parser.error(wrong)
    if cuda and options.devices > torch.cuda.device_count():
        parser.error(f"--devices: expected at most {torch.cuda.device_count()}, the GPUs of this machine")
    return options


def main(module: Any, argv: Sequence[str] | None = None) -> int:
    """Train the missing cells. The exit status is 1 if a cell fails, 2 for a bad option, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(module, argv)
    if options.draw:
        harness.draw(module, json.loads(options.draw.read_text(encoding="utf-8")), options.draw)
        return 0
    try:
        setup, cells, arguments = module.begin(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    script = str(Path(module.__file__).resolve().relative_to(ROOT))
    new = {**provenance(script, argv, options.commit), "method": module.__doc__, "rows": []} | setup
    report = resumed(json.loads(json.dumps(new)), options.output)
    done = {tuple(row[key] for key in module.CELL) for row in report["rows"]}
    todo = [cell for cell in cells if tuple(cell) not in done]
    print(f"{len(cells) - len(todo)} of {len(cells)} cells are there", flush=True)
    cuda = torch.cuda.is_available()
    devices = [f"cuda:{n}" for n in range(options.devices)] if cuda else ["cpu"] * options.devices
    failed, left = 0, len(todo)
    try:
        with tqdm(total=len(todo), unit="cell", disable=not sys.stderr.isatty()) as progress:
            for cell, row in trained(module.train, todo, arguments, devices * options.processes, options.minutes):
                progress.update()
                left -= 1
                name = ", ".join(map(str, cell))
                if isinstance(row, Exception):
                    failed += 1
                    progress.write(f"{name}: failed\n{row}")
                    continue
                report["rows"].append(dict(zip(module.CELL, cell, strict=True)) | row)
                if options.output:
                    write(report, options.output)
                progress.write(f"{name}: {module.said(report['rows'][-1])}")
    except KeyboardInterrupt:
        print("interrupted; the same command goes on")
        return 130
    if left:
        print(f"{left} cells are left; the same command goes on")
    if report["rows"]:
        print(f"\n{module.table(report)}")
        if options.output:
            print(f"wrote {options.output}")
            harness.draw(module, report, options.output)
    return int(failed > 0)


def trained(
    train: Any, cells: Sequence[tuple], arguments: tuple, devices: Sequence[str], minutes: float | None
) -> Iterator[tuple[tuple, Any]]:
    """Each cell with its row, or with an Exception; none begins that would end too late if it takes as long as the
    longest before it. A process for every entry of `devices`; this one if there is one entry."""
    start, longest = time.monotonic(), 0.0
    began: dict[int, float] = {}

    def tasks() -> Iterator[list[int]]:
        for number in range(len(cells)):
            began[number] = time.monotonic()
            if minutes is not None and began[number] + longest > start + 60 * minutes:
                return
            yield [number]

    if len(devices) == 1:
        found = ((n, _attempt(n, train, cells, arguments, devices)[0]) for task in tasks() for n in task)
    else:
        found = workers.calls(_attempt, (train, cells, arguments, devices), tasks(), len(devices))
    for number, row in found:
        longest = max(longest, time.monotonic() - began[number])
        yield cells[number], row


def _attempt(
    number: int, train: Any, cells: Sequence[tuple], arguments: tuple, devices: Sequence[str]
) -> tuple[Any, bool]:
    """(a row, or an Exception; True: the process may go on). A failing cell does not take the others with it."""
    device = devices[int(os.environ.get("WORKER", 0))]
    is_gpu = torch.device(device).type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
        torch.set_num_threads(1)  # the host only launches
    try:
        return train(cells[number], *arguments, device), True
    except Exception as error:
        return RuntimeError(workers.told(error)), True
    finally:
        if is_gpu:
            torch.cuda.empty_cache()
