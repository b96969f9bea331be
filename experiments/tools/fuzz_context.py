"""Random calls of context_parallel_attention on several ranks, held to the error budget of one process. Usage::

    python experiments/tools/fuzz_context.py  # a process for each GPU; without any, two with gloo
    python experiments/tools/fuzz_context.py --ranks 3 --seed 7 --minutes 30 --calls 100000
    python experiments/tools/fuzz_context.py --ranks 3 --seed 7 --only 1234  # one call again, with all errors

The calls are those of fuzz_kernels.py, without the options that the function lacks, cut into slices of any lengths.
The results of the ranks' slices are joined, and judged as a call of one process is.

Every failure is a line with the fault and the options that repeat it; the exit status is 1 then. If a rank raises,
others may wait for it in vain, so that ends the run. Without a GPU the kernels run in Triton's interpreter.
"""

import argparse
import functools
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from shared.options import positive

from decayattn.backends import registry
from tools.fuzzing import judge
from tools.fuzzing.draws import CALLS_PER_FAMILY
from tools.fuzzing.slices import draw_slices, run_slices
from tools.fuzzing.summary import Summary

SCRIPT = "experiments/tools/fuzz_context.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the fuzzer; the exit status is 1 if anything failed."""
    options = parse(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory() as folder:
        statuses = mp.get_context("spawn").Array("i", [1] * options.ranks)
        mp.spawn(_rank, (options, str(Path(folder, "store")), statuses), nprocs=options.ranks)
        return max(statuses)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    cuda, gpus = torch.cuda.is_available(), torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--ranks", type=positive, default=gpus or 2, help="processes, one for each GPU")
    option("--calls", type=positive, default=1000 if cuda else 100, help="how many calls")
    option("--seed", type=int, default=0, help="what calls are drawn from, with their numbers and the ranks")
    option("--only", type=int, metavar="NUMBER", help="this call only")
    option("--family", type=positive, metavar="CALLS", default=CALLS_PER_FAMILY, help="calls that share what kernels "
           "are compiled for; part of what is drawn from")
    option("--longest", type=positive, default=2000 if cuda else 120, help="longest sequence; part of what is drawn "
           "from")
    option("--backend", choices=registry.NAMES, default="auto" if cuda else "triton", help="our backend")
    option("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu", help="cpu: gloo, and no bfloat16")
    option("--minutes", type=float, help="stop after so long")
    option("--limit", type=positive, default=120, help="seconds that a rank waits for another one")
    options = parser.parse_args(argv)
    if options.device == "cuda" and gpus < options.ranks:
        parser.error(f"--ranks: expected at most {gpus}, the GPUs that are here, got {options.ranks}")
    return options


def _rank(rank: int, options: argparse.Namespace, store: str, statuses: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device(options.device, rank if options.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=options.limit)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{store}", rank=rank,
        world_size=options.ranks, timeout=limit,
    )
    # where ranks tell one another what they have raised: each may first have waited for another one
    tells = dist.new_group(backend="gloo", timeout=3 * limit)
    statuses[rank] = fuzz(options, dist.group.WORLD, tells, device)
    dist.destroy_process_group()


def fuzz(options: argparse.Namespace, group: dist.ProcessGroup, tells: dist.ProcessGroup, device: torch.device) -> int:
    """All calls; the first rank judges and prints."""
    first, began = dist.get_rank(group) == 0, time.monotonic()
    summary = Summary(functools.partial(command, options=options), options.only is not None)
    for number in _numbers(options, began, tells):
        call, division = draw_slices(
            options.seed, number, options.ranks, options.longest, device.type == "cuda", options.family
        )
        raised = found = None
        try:
            found = run_slices(call, division, group, device, options.backend)
        except Exception as error:
            raised = f"{type(error).__name__} {judge.described(error)}"
        everybody: list[Any] = [None] * options.ranks
        dist.all_gather_object(everybody, raised, group=tells)
        raising = [f"rank {rank} {what}" for rank, what in enumerate(everybody) if what is not None]
        if first:
            verdict = judge.Verdict(failures=[("raised", what) for what in raising])
            if found is not None and not raising:
                case, results = found
                judge.compare(case, {options.backend: results}, verdict)
            described = f"{call}; {division}"
            if summary.told:
                print(described)
            for line in summary.add(number, {"call": described, **vars(verdict)}):
                print(line, flush=True)
            if summary.done % 50 == 0:
                print(f"{summary.done} calls", flush=True)
        if raising:
            break
    if first:
        print(summary.text(summary.done, time.monotonic() - began), flush=True)
    failed = [len(summary.failures)]
    dist.broadcast_object_list(failed, group=tells)
    return int(failed[0] > 0)


def _numbers(options: argparse.Namespace, began: float, tells: dist.ProcessGroup) -> Iterator[int]:
    """Numbers of the calls, until the first rank says that time is up."""
    if options.only is not None:
        yield options.only
        return
    for number in itertools.count():
        ends = [
            number == options.calls
            or (options.minutes is not None and time.monotonic() - began > 60 * options.minutes)
        ]
        dist.broadcast_object_list(ends, group=tells)
        if ends[0]:
            return
        yield number


def command(number: int, options: argparse.Namespace) -> str:
    """Command that repeats a call."""
    shared = f" --family {options.family}" if options.family != CALLS_PER_FAMILY else ""
    return (
        f"python {SCRIPT} --ranks {options.ranks} --seed {options.seed} --longest {options.longest}{shared} "
        f"--only {number} --backend {options.backend} --device {options.device}"
    )


if __name__ == "__main__":
    sys.exit(main())
