"""Random calls of context_parallel_attention on several ranks, held to the error budget of one process. Usage::

    python experiments/tools/fuzz_context.py  # a process for each GPU; without any, two with gloo
    python experiments/tools/fuzz_context.py --ranks 3 --seed 7 --minutes 30 --calls 100000
    python experiments/tools/fuzz_context.py --ranks 3 --seed 7 --only 1234  # one call again, with all errors

The calls are those of fuzz_kernels.py, without the options that the function lacks, cut into slices of any lengths.
The results of the ranks' slices are joined, and judged as a call of one process is.

Every failure is a line with the fault and the command that repeats it; the exit status is 1 then. A rank that raises
ends the run, because others may wait for it in vain. Without a GPU the kernels run in Triton's interpreter.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from shared.options import parser_of
from shared.ranks import on_ranks

from decayattn.backends import registry
from tools.fuzzing import judge
from tools.fuzzing.slices import draw_slices, run_slices
from tools.fuzzing.summary import OPTIONS_OF_ALL, Summary

SCRIPT = "experiments/tools/fuzz_context.py"
NAMES = ("ranks", "seed", "longest", "family", "only", "backend", "device")
OPTIONS = OPTIONS_OF_ALL | {
    "calls": (1000, 100, "number of calls"), "longest": (2000, 120, "longest sequence; part of the draw"),
    "ranks": (torch.cuda.device_count(), 2, "processes, one for each GPU; part of the draw"),
    "backend": ("auto", "triton", "our backend", registry.NAMES),
    "device": ("cuda", "cpu", "cpu: gloo, and no bfloat16", ("cuda", "cpu")),
    "limit": (120, 120, "seconds that a rank waits for another one"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the fuzzer; the exit status is 1 if anything failed."""
    options = parse(sys.argv[1:] if argv is None else argv)
    return on_ranks(work, options.ranks, options.device, options.limit, options)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser, gpus = parser_of(__doc__, OPTIONS, torch.cuda.is_available()), torch.cuda.device_count()
    options = parser.parse_args(argv)
    if options.device == "cuda" and gpus < options.ranks:
        parser.error(f"--ranks: expected at most {gpus}, the GPUs of this machine, got {options.ranks}")
    return options


def work(rank: int, options: argparse.Namespace) -> int:
    # for what the ranks have raised: each may first have waited for another one
    control = dist.new_group(backend="gloo", timeout=3 * timedelta(seconds=options.limit))
    device = torch.device(options.device, rank if options.device == "cuda" else None)
    return fuzz(options, dist.group.WORLD, control, device)


def fuzz(
    options: argparse.Namespace, group: dist.ProcessGroup, control: dist.ProcessGroup, device: torch.device
) -> int:
    """All calls; the first rank judges and prints."""
    first, began = dist.get_rank(group) == 0, time.monotonic()
    summary = Summary(SCRIPT, options, NAMES)
    for number in range(options.calls) if options.only is None else [options.only]:
        late = [options.minutes is not None and time.monotonic() - began > 60 * options.minutes]
        dist.broadcast_object_list(late, group=control)  # the first rank's clock counts
        if late[0]:
            break
        call, division = draw_slices(
            options.seed, number, options.ranks, options.longest, device.type == "cuda", options.family
        )
        raised = found = None
        try:
            found = run_slices(call, division, group, device, options.backend)
        except Exception as error:
            raised = f"{type(error).__name__} {judge.described(error)}"
        of_ranks: list[Any] = [None] * options.ranks
        dist.all_gather_object(of_ranks, raised, group=control)
        raising = [f"rank {rank} {text}" for rank, text in enumerate(of_ranks) if text is not None]
        if first:
            verdict = judge.Verdict(failures=[("raised", text) for text in raising])
            if found is not None and not raising:
                judge.compare(found[0], {options.backend: found[1]}, verdict)
            if summary.verbose:
                print(f"{call}; {division}")
            lines = summary.add(number, {"call": f"{call}; {division}", **vars(verdict)})
            lines += [f"{summary.done} calls"] * (summary.done % 50 == 0)
            print("".join(f"{line}\n" for line in lines), end="", flush=True)
        if raising:
            break
    if first:
        print(*summary.lines(summary.done, time.monotonic() - began), sep="\n", flush=True)
    failed = [summary.failed]
    dist.broadcast_object_list(failed, group=control)
    return int(failed[0] > 0)


if __name__ == "__main__":
    sys.exit(main())
