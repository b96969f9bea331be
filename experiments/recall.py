"""Multi-query associative recall: what a decay of attention can look up, and whether it prefers what came last.

    python experiments/recall.py                                    # the whole grid on a GPU; on a CPU a small one
    python experiments/recall.py --minutes 9                        # as much as fits; the next call goes on from there
    python experiments/recall.py --devices 2                        # on two GPUs
    python experiments/recall.py --tasks forgetting --modes scalar rotary --output forgetting.json

The task is Zoology's (arXiv 2312.04927, two layers without an MLP), and a variant in which every key is assigned twice
and the later value counts. A model is trained on sequences of all shapes (tokens, pairs) at once, most of them short,
and tested on each. A cell of the grid (task, width, mode) trains one model per learning rate and seed, side by side,
and is done or not: --output keeps those that are, and a later call with the same options and commit goes on. The
reported learning rate of a cell is the one with the best accuracy on validation sequences, over all seeds.
"""

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from associative_recall import report
from associative_recall.model import MODES
from associative_recall.task import TASKS
from associative_recall.training import Cell, Setup, Shape, train
from shared.options import declare, declare_output, expect_positive, positive
from shared.plots import save_beside
from shared.progress import Progress
from shared.provenance import ROOT, provenance
from shared.report import resumed, write

from decayattn.backends import registry

GPU_DEFAULTS = {
    # most of the sequences are of the easier kinds, in which models find what they need; a step has 19,584 tokens
    "shapes": [Shape(64, 4, 36), Shape(64, 8, 36), Shape(64, 16, 18), Shape(256, 64, 18), Shape(1024, 256, 9)],
    "widths": [64, 128], "vocabulary": 1024, "learning_rates": [5e-4, 2e-3, 8e-3], "seeds": 3, "steps": 8000,
    "queries": 2048, "processes": 2, "backend": "auto", "output": ROOT / "results/recall.json",
}
CPU_DEFAULTS = {
    "shapes": [Shape(16, 2, 20), Shape(16, 4, 12)], "widths": [32], "vocabulary": 32,
    "learning_rates": [3e-3, 1e-2], "seeds": 1, "steps": 100, "queries": 256, "processes": 1, "backend": "reference",
}
DEFAULT_MODES = [mode for mode in MODES if mode != "alibi"]


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing; the exit status is 1 if a cell fails, 2 for a wrong option."""
    argv = sys.argv[1:] if argv is None else list(argv)
    cuda = torch.cuda.is_available()
    options = parse(argv, cuda)
    result = begin(options, argv)
    failed = run(options, result, "cuda" if cuda else "cpu")
    if result["rows"]:
        print(report.table(result))
        if options.output:
            save_beside(report.draw(result), options.output)
    return int(failed)


def parse(argv: Sequence[str], cuda: bool) -> argparse.Namespace:
    """The options, defaults filled in for this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = declare(parser, GPU_DEFAULTS if cuda else CPU_DEFAULTS)
    option("--tasks", "what to learn", choices=TASKS, nargs="+", default=list(TASKS))
    option("--modes", "how the model knows order", choices=tuple(MODES), nargs="+", default=DEFAULT_MODES)
    option("--shapes", "tokens and pairs of a sequence, and how many of those a step has", type=shape, nargs="+",
           metavar="T,PAIRS,SEQUENCES")
    option("--widths", "widths of the models", type=positive, nargs="+", metavar="D")
    option("--heads", "heads of each layer", type=positive, default=2)
    option("--vocabulary", "tokens, half of them keys, half values", type=positive)
    option("--learning-rates", "swept for every mode alike", type=float, nargs="+", metavar="LR")
    option("--seeds", "how many seeds of weights and data", type=positive)
    option("--steps", "optimiser steps", type=positive)
    option("--queries", "test queries per shape, at least", type=positive)
    option("--weight-decay", "of the projections", type=float, default=0.1)
    option("--backend", "of decay_attention", choices=registry.NAMES)
    option("--eager", "launch every kernel of a step, where a GPU would replay a CUDA graph", action="store_true",
           default=False)
    option("--processes", "cells that are trained at the same time on a device", type=positive)
    option("--devices", "GPUs", type=positive, default=1)
    option("--minutes", "stop so that the last cell is done by then; None: when all are", type=float, default=None)
    declare_output(option, "JSON file that results are kept in; None: printed only")
    options = parser.parse_args(argv)
    expect_positive(parser, options, "minutes")
    if any(rate <= 0 for rate in options.learning_rates):
        parser.error(f"--learning-rates: expected positive numbers, got {options.learning_rates}")
    if any(width % (2 * options.heads) for width in options.widths):
        parser.error(f"--widths: expected multiples of 2 · heads = {2 * options.heads}, got {options.widths}")
    if cuda and options.devices > torch.cuda.device_count():
        parser.error(f"--devices: expected at most {torch.cuda.device_count()}, the GPUs of this machine")
    if not cuda and options.devices > 1:
        parser.error(f"--devices: expected 1 where there is no GPU, got {options.devices}")
    return options


def shape(text: str) -> Shape:
    """The type of --shapes."""
    try:
        length, pairs, sequences = map(positive, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected tokens,pairs,sequences, got {text!r}") from None
    if not 2 <= pairs <= length / 4 or pairs % 2:
        raise argparse.ArgumentTypeError(f"expected an even number of pairs, 4 tokens or more for each, got {text!r}")
    return Shape(length, pairs, sequences)


def setup_of(options: argparse.Namespace) -> Setup:
    """What all cells have in common."""
    return Setup(
        shapes=tuple(options.shapes), heads=options.heads, vocabulary=options.vocabulary,
        learning_rates=tuple(options.learning_rates), seeds=tuple(range(options.seeds)), steps=options.steps,
        queries=options.queries, weight_decay=options.weight_decay, backend=options.backend,
        graph=torch.cuda.is_available() and not options.eager,
    )


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """The grid, all modes of a setting behind one another: a grid that is cut off compares what it has."""
    settings = itertools.product(options.widths, options.tasks, options.modes)
    return (Cell(task, mode, width) for width, task, mode in settings)


def begin(options: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """The report to go on with."""
    setup = json.loads(json.dumps(vars(setup_of(options))))  # as it is read back
    new: dict[str, Any] = provenance("experiments/recall.py", argv, options.commit)
    new |= {"method": report.METHOD, "setup": setup, "rows": []}
    return resumed(new, options.output)


def run(options: argparse.Namespace, result: dict[str, Any], device: str) -> bool:
    """Every cell that is not in the report yet, as far as the minutes reach; whether one has failed."""
    start = time.perf_counter()
    setup = setup_of(options)
    done = {tuple(row[key] for key in Cell.__match_args__) for row in result["rows"]}
    todo = [cell for cell in cells(options) if (cell.task, cell.mode, cell.width) not in done]
    print(f"{len(todo)} cells of {len(setup.learning_rates) * len(setup.seeds)} models, {len(done)} cells known")
    progress, failed = Progress(len(todo)), False
    devices = [f"cuda:{number}" for number in range(options.devices)] if device == "cuda" else [device]
    for cell, found in trained(todo, setup, devices * options.processes, deadline(options.minutes, start)):
        if isinstance(found, str):
            failed = True
            progress.print(f"{cell}: failed\n{found}")
            continue
        result["rows"].append(vars(cell) | found)
        if options.output:
            write(result, options.output)
        chosen = report.selected(result["rows"][-1])
        right = statistics.fmean(chosen.mean)
        progress.print(f"{cell}: {right:.3f} right at {chosen.rate:g}, {found['seconds']:.1f} s")
        progress.step(str(cell))
    progress.close()
    left = len(todo) - progress.done
    print(f"{progress.done} cells in {time.perf_counter() - start:.0f} s" + (f", {left} left" if left else ""))
    return failed


def deadline(minutes: float | None, start: float) -> float:
    return float("inf") if minutes is None else start + 60 * minutes


def trained(
    todo: Sequence[Cell], setup: Setup, devices: Sequence[str], until: float
) -> Iterator[tuple[Cell, dict[str, Any] | str]]:
    """Each cell with its row, or with the traceback of its failure; none begins that would end too late. A process for
    every entry of `devices`."""
    if len(devices) == 1:
        longest = 0.0
        for cell in todo:
            begun = time.perf_counter()
            if begun + longest > until:
                return
            yield cell, attempt(cell, setup, devices[0])
            longest = max(longest, time.perf_counter() - begun)
        return
    waiting, longest = iter(todo), 0.0
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    own = context.SimpleQueue()
    for device in devices:
        own.put(device)
    with concurrent.futures.ProcessPoolExecutor(len(devices), context, _take_device, (own,)) as pool:
        running: dict[concurrent.futures.Future, tuple[Cell, float]] = {}
        while True:
            while len(running) < len(devices) and time.perf_counter() + longest <= until:
                cell = next(waiting, None)
                if cell is None:
                    break
                running[pool.submit(_attempt_here, cell, setup)] = (cell, time.perf_counter())
            if not running:
                return
            ready, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in ready:
                cell, begun = running.pop(future)
                longest = max(longest, time.perf_counter() - begun)
                yield cell, future.result()


# the device of a process of the pool
_device: list[str] = []


def _take_device(devices: Any) -> None:
    _device.append(devices.get())


def _attempt_here(cell: Cell, setup: Setup) -> dict[str, Any] | str:
    return attempt(cell, setup, _device[0])


def attempt(cell: Cell, setup: Setup, device: str) -> dict[str, Any] | str:
    """A row, or a traceback: one cell that fails must not take the others with it."""
    is_gpu = torch.device(device).type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
        torch.set_num_threads(1)  # the host only launches
    try:
        return train(cell, setup, device)
    except Exception:
        return traceback.format_exc()
    finally:
        if is_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    # processes that wait for a GPU do not spin; before they start
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.exit(main())
