"""What sequences over several GPUs gain and send, in both modes; correct first.

    python experiments/benchmark_context.py                           # on all GPUs of a machine: tables, JSON, a plot
    python experiments/benchmark_context.py --check                   # equality with one process alone, no speeds
    torchrun --nproc-per-node 2 experiments/benchmark_context.py      # the same, started by torchrun
    python experiments/benchmark_context.py --resume                  # after a run that had no time left

A causal layer's attention, forward and backward, over T tokens: "halo" and "heads" on all ranks beside one GPU alone,
without a decay, with one per token of a mean log-decay, and with ALiBi slopes. Results that leave their error budget
get no speed, and the exit status is 1. Without a GPU there are no speeds: two processes with gloo run the kernels in
Triton's interpreter on small shapes, for their errors and for the bytes that they send.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from context_benchmark import checks, figure, measure, report
from context_benchmark.workloads import RATES, Workload, workloads
from shared.cases import DTYPES
from shared.options import declare, declare_output, expect_interpreted_dtype, positive
from shared.provenance import ROOT, provenance
from shared.report import resumed, write
from shared.timing import interpret_kernels

from decayattn.backends import registry

GPU_DEFAULTS = {
    "lengths": [32768, 65536, 131072, 262144, 524288], "heads": 32, "kv_heads": 8, "head_dim": 128,
    "dtype": "bfloat16", "decays": ["none", "-0.01", "-0.1", "alibi"], "check_length": 4096, "alone_up_to": 524288,
    "backend": "auto", "output": ROOT / "results/benchmark_context.json",
}
CPU_DEFAULTS = {
    "ranks": 2, "lengths": [320], "heads": 2, "kv_heads": 1, "head_dim": 16, "dtype": "float32",
    "decays": ["-2"], "check_length": 40, "alone_up_to": 0, "backend": "triton",
}

# options that all rows of a report share
SAME = (
    "heads", "kv_heads", "head_dim", "dtype", "modes", "backend", "check_length", "alone_up_to", "rounds",
    "round_seconds", "seed",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if anything is wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    cuda = torch.cuda.is_available()
    options = parse(argv, cuda)
    if not cuda:
        interpret_kernels()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return work(rank, ranks, int(os.environ.get("LOCAL_RANK", rank)), "env://", options, argv)
    if cuda and torch.cuda.device_count() < options.ranks:
        print(f"--ranks: expected at most {torch.cuda.device_count()}, the GPUs that are here, got {options.ranks}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder, 'store')}"
        statuses = mp.get_context("spawn").Array("i", [1] * options.ranks)
        mp.spawn(_spawned, (options.ranks, store, options, argv, statuses), nprocs=options.ranks)
        return max(statuses)


def parse(argv: Sequence[str], cuda: bool) -> argparse.Namespace:
    """The options, defaults filled in for this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = GPU_DEFAULTS | {"ranks": max(1, torch.cuda.device_count())} if cuda else CPU_DEFAULTS
    option = declare(parser, defaults)
    parser.add_argument("--check", action="store_true", help="the equality tables alone")
    option("--ranks", "processes, one for each GPU; torchrun has its own number", type=positive)
    option("--lengths", "sequence lengths T over all ranks", type=positive, nargs="+", metavar="T")
    option("--heads", "query heads H", type=positive)
    option("--kv-heads", "key and value heads H_kv", type=positive)
    option("--head-dim", "head dimension D = D_v", type=positive)
    option("--dtype", "dtype of q, k, v", choices=tuple(DTYPES))
    option("--decays", "none, alibi, or mean log-decays per token, natural log", nargs="+", metavar="λ")
    option("--modes", "halo, heads", choices=checks.MODES, nargs="+", default=list(checks.MODES))
    option("--backend", "our backend", choices=registry.NAMES)
    option("--check-length", "tokens of the equality cases, judged in float64", type=positive)
    option("--alone-up-to", "longest sequence that one GPU runs alone, too", type=int)
    option("--rounds", "interleaved rounds", type=positive, default=3)
    option("--round-seconds", "seconds that a round gives every call", type=float, default=0.3)
    option("--resume", "reports of the same code, GPU and options but for lengths and decays to go on with; without a "
           "name that of --output. What they have is not measured again", type=Path, nargs="*", metavar="JSON")
    option("--limit", "seconds after which ranks that wait for another one end", type=positive, default=300)
    option("--seed", "seed of the random inputs", type=int, default=0)
    declare_output(option, plot=True)
    options = parser.parse_args(argv)
    for decay in options.decays:
        if decay not in RATES:
            try:
                float(decay)
            except ValueError:
                parser.error(f"--decays: expected none, alibi or a number, got {decay!r}")
    if not cuda:
        expect_interpreted_dtype(parser, options)
    if options.resume == []:
        options.resume = [options.output]
    for path in options.resume or []:
        if not (path and path.exists()):
            parser.error(f"--resume: there is no report in {path}")
    if options.output and not options.plot:
        options.plot = options.output.with_suffix(".png")
    return options


def joined(reports: Sequence[dict[str, Any]], command: str) -> dict[str, Any]:
    """One report of several, measured side by side, say, that a command goes on with."""
    whole, *others = reports
    for other in others:
        measured = cells(whole)
        whole["rows"] += [row for row in other["rows"] if (row["length"], row["decay"]) not in measured]
        whole["wrong"] += other["wrong"]
        whole["command"] += f"; {other['command']}"
    return whole | {"command": f"{whole['command']}; {command}"}


def cells(result: dict[str, Any]) -> set[tuple[int, str]]:
    """What a report has measured: (T, decay)."""
    return {(row["length"], row["decay"]) for row in result["rows"]}


def _spawned(rank: int, ranks: int, store: str, options: argparse.Namespace, argv: list[str], statuses: Any) -> None:
    statuses[rank] = work(rank, ranks, rank, store, options, argv)


def work(rank: int, ranks: int, device: int, store: str, options: argparse.Namespace, argv: list[str]) -> int:
    """What one rank does; the first one prints and writes."""
    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=store, rank=rank, world_size=ranks,
        timeout=timedelta(seconds=options.limit),
    )
    try:
        return run(options, argv, dist.group.WORLD, torch.device("cuda", device) if cuda else torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def run(options: argparse.Namespace, argv: list[str], group: dist.ProcessGroup, device: torch.device) -> int:
    """The equality tables, then every workload."""
    first, ranks = dist.get_rank(group) == 0, dist.get_world_size(group)

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    if device.type == "cpu":
        say("No GPU, so no speeds: errors of the kernels in Triton's interpreter, and what is sent.")
    result: dict[str, Any] = provenance("experiments/benchmark_context.py", argv, options.commit)
    result |= {"method": report.METHOD, "ranks": ranks, "rounds": options.rounds, "checks": [], "rows": [], "wrong": []}
    result["setup"] = {name: getattr(options, name) for name in SAME} | {"ranks": ranks}
    if options.resume:
        result = joined([resumed(result, path) for path in options.resume], result["command"])
    elif device.type == "cuda":
        result["bandwidth"] = measure.bandwidth(group)
        say(f"all-to-all: a rank receives {result['bandwidth'] / 1e9:.0f} GB/s")
    checked = {check["dtype"] for check in result["checks"]}
    for dtype in dict.fromkeys([options.dtype, "float32"]):
        if dtype in checked:
            continue
        found = list(
            checks.equality(
                group, options.check_length, options.heads, options.kv_heads, options.head_dim, dtype, options.backend,
                options.seed,
            )
        )
        say(f"\n{ranks} ranks and one process, T{options.check_length}, {dtype}\n{checks.table(found)}")
        for mode, case, comparisons in found:
            result["wrong"] += [f"{mode}, {case}, {dtype}: {c.name} {c.verdict}" for c in comparisons if not c.passed]
            errors = {
                c.name: {"over_budget": c.error / c.budget if c.budget else None, "relative": c.relative_error}
                for c in comparisons
            }
            result["checks"].append({"mode": mode, "case": case, "dtype": dtype, "errors": errors})
    if not options.check and not result["wrong"]:
        shapes = options.heads, options.kv_heads, options.head_dim, options.dtype
        measured = cells(result)
        for workload in workloads(options.lengths, *shapes, options.decays):
            if (workload.length, workload.decay) in measured:
                continue
            say(f"\n{workload}")
            measure_one(workload, options, result, group, device, say)
            if first and options.output:
                write(result, options.output)
    if first and options.output:
        write(result, options.output)
        if result["rows"]:
            figure.draw(result).savefig(options.plot)
            print(f"\nwrote {options.output} and {options.plot}")
    for line in result["wrong"]:
        say(f"wrong: {line}")
    return int(bool(result["wrong"]))


def measure_one(
    workload: Workload, options: argparse.Namespace, result: dict[str, Any], group: dist.ProcessGroup,
    device: torch.device, say: Any,
) -> None:
    """Check one workload against one GPU, count what is sent, then time it; wrong modes get no speed."""
    inputs = workload.inputs(device, options.seed)
    ranks = dist.get_world_size(group)
    whole = None
    if workload.length <= options.alone_up_to or device.type == "cpu":
        whole = measure.Call(measure.ALONE, inputs, group, options.backend).results()
    calls, received, differences = {}, {}, {}
    for mode in options.modes:
        if workload.length % ranks or (mode == "heads" and workload.heads % ranks):
            say(f"  {mode}: {ranks} ranks do not divide this")
            continue
        calls[mode] = measure.Call(mode, inputs, group, options.backend)
        # counted is the second call: the first one may have exchanged what calls before it had in common
        if whole is None:
            calls[mode].forward()
        else:
            differences[mode] = measure.errors(calls[mode], whole)
            why = checks.objection(differences[mode], workload.dtype)
            if why is not None:
                result["wrong"].append(f"{workload}: {mode} {why}")
                del calls[mode]
                continue
        received[mode] = measure.received_bytes(calls[mode])
    del whole
    timings = {}
    if device.type == "cuda":
        if workload.length <= options.alone_up_to:
            calls[measure.ALONE] = measure.Call(measure.ALONE, inputs, group, options.backend)
        del inputs
        timings = measure.time_rounds(calls, options.rounds, options.round_seconds)
    found = report.rows(workload, ranks, received, differences, timings)
    result["rows"] += found
    say(report.table(found))
    del calls
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
