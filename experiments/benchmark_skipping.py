"""What skip_tolerance gains and costs; correct first.

    python experiments/benchmark_skipping.py                                # on a GPU: all of it; tables, JSON, a plot
    python experiments/benchmark_skipping.py --studies pruning --head-dims 64       # part of it, quickly

Four studies. planning: shapes where no tile can be skipped, which show what the plan costs; the plan alone is timed
too. pruning: one decay per token at 32,768 tokens, beside cuDNN without a decay and the official Forgetting Transformer
kernel, which prunes by another rule. constant: ALiBi slopes and RetNet rates at 131,072 tokens, beside what the visited
tiles promise. lengths: time over T. Timed as in benchmark_attention.py. Results that leave their error budget get no
speed, and the exit status is 1. Without a GPU there are no speeds: the kernels run in Triton's interpreter on small
shapes, for their errors and for how much they skip.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from shared.calls import prepare
from shared.cases import DTYPES
from shared.options import declare, declare_output, parse_speeds, positive
from shared.peers import Absent, reason
from shared.provenance import ROOT, provenance
from shared.report import write
from shared.timing import device_and_timer, time_rounds
from skipping_benchmark import checks, figure, planning, report
from skipping_benchmark.workloads import SKIPPING, WHOLE, Workload, peers_of, studies

from decayattn import visited_fraction
from decayattn.backends import registry

STUDIES = ("planning", "pruning", "constant", "lengths")
GPU_DEFAULTS = {
    "head_dims": [128, 64], "heads": 16, "dtype": "bfloat16", "backend": "auto", "planning": 8192, "tokens": 32768,
    "pruning": 32768, "constant": 131072, "lengths": [2048, 8192, 32768, 131072, 524288], "whole_up_to": 131072,
    "mean_log_decay": -0.01, "output": ROOT / "results/benchmark_skipping.json",
}
CPU_DEFAULTS = {
    "head_dims": [16], "heads": 2, "dtype": "float32", "backend": "triton", "planning": 200, "tokens": 200,
    "pruning": 700, "constant": 700, "lengths": [300], "whole_up_to": 300, "mean_log_decay": -0.5,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if anything is wrong or fails."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv, torch.cuda.is_available())
    without_gpu = "No GPU, so no speeds: errors of the kernels in Triton's interpreter, and how much they skip."
    return run(options, argv, *device_and_timer(options.round_ms, without_gpu))


def parse(argv: Sequence[str], cuda: bool) -> argparse.Namespace:
    """The options, defaults filled in for this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = declare(parser, GPU_DEFAULTS if cuda else CPU_DEFAULTS)
    option("--studies", "what to run", choices=STUDIES, nargs="+", default=list(STUDIES))
    option("--head-dims", "head dimensions D = D_v", type=positive, nargs="+", metavar="D")
    option("--heads", "heads H", type=positive)
    option("--dtype", "dtype of q, k, v", choices=tuple(DTYPES))
    option("--backend", "our backend", choices=registry.NAMES)
    option("--mean-log-decay", "mean log-decay per token, natural log (drawn from [2m, 0])", type=float)
    option("--planning", "sequence length of the study", type=positive)
    option("--tokens", "tokens in a batch of that study: B = max(1, tokens // T)", type=positive)
    option("--pruning", "sequence length of the study", type=positive)
    option("--constant", "sequence length of the study", type=positive)
    option("--lengths", "sequence lengths of the study", type=positive, nargs="+", metavar="T")
    option("--whole-up-to", "longest length at which nothing is skipped for comparison", type=positive)
    option("--rounds", "interleaved rounds", type=positive, default=5)
    option("--round-ms", "milliseconds that a round gives every call", type=float, default=15.0)
    option("--seed", "seed of the random inputs", type=int, default=0)
    declare_output(option, plot=True)
    return parse_speeds(parser, argv, cuda)


def run(
    options: argparse.Namespace, argv: Sequence[str], device: str, timer: Callable[[Callable[[], object]], float] | None
) -> int:
    """Every study that was asked for; without a timer, no speeds."""
    result: dict[str, Any] = provenance("experiments/benchmark_skipping.py", argv, options.commit)
    result |= {"method": report.METHOD, "rounds": options.rounds, "checks": [], "missing": [], "rows": []}
    chosen = studies(
        options.head_dims, options.heads, options.dtype, options.mean_log_decay, options.planning, options.pruning,
        options.constant, options.lengths, options.tokens,
    )
    for workload in chosen:
        if workload.study in options.studies:
            measure_one(workload, options, result, device, timer)
            if options.output:
                write(result, options.output)
            if device == "cuda":
                torch.cuda.empty_cache()
    if options.plot and result["rows"]:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        figure.draw(result).savefig(options.plot)
        print(f"\nwrote {options.output} and {options.plot}")
    return int(any(entry["ours"] for entry in result["missing"]))


def measure_one(
    workload: Workload, options: argparse.Namespace, result: dict[str, Any], device: str,
    timer: Callable[[Callable[[], object]], float] | None,
) -> None:
    """Check one workload, then time everybody on it; rows and everything missing go into the report."""
    print(f"\n{workload}", flush=True)

    def missing(peer: str, kind: str, why: str) -> None:
        ours = peer in (SKIPPING, WHOLE)
        result["missing"].append({"case": str(workload), "peer": peer, "ours": ours, "kind": kind, "reason": why})
        print(f"  {peer}: {kind}: {why}", flush=True)

    inputs = workload.inputs(device, options.seed)
    visited = visited_fraction(inputs["q"], inputs["k"], inputs["log_decay"])
    print(f"  visits {float(visited.mean()):.3f} of the tiles (heads {visited.min():.3f} to {visited.max():.3f})")
    why, compared = checks.objection(workload, inputs, options.backend)
    result["checks"].append({"case": str(workload), "compared": compared})
    if why is not None:
        print("\n".join(compared))
        missing(SKIPPING, "wrong", f"{why}: no speed is reported")
        return
    print("  right", flush=True)
    if timer is None:
        return
    prepared = {}
    for peer in peers_of(workload.study, options.backend):
        if peer.name == WHOLE and workload.case.length > options.whole_up_to:
            continue
        try:
            prepared[peer.name] = prepare(peer, workload.case, inputs)
            prepared[peer.name].backward(prepared[peer.name].forward())
        except Absent as error:
            missing(peer.name, "absent", str(error))
        except Exception as error:  # one peer that fails must not take the others with it; ours fails the run
            missing(peer.name, "failed", reason(error))
    timings, failed = time_rounds(
        {name: call for name, call in prepared.items() if name not in _failed(result, workload)}, options.rounds, timer
    )
    for name, why in failed.items():
        missing(name, "failed", why)
    # without a GPU there is no graph of the plan alone, and the reference makes no plan
    planned = workload.study == "planning" and device == "cuda" and options.backend != "reference"
    plan_us = planning.times(workload, inputs, options.rounds, timer) if planned else {}
    found = report.rows(workload, timings, visited, plan_us)
    result["rows"] += found
    print(report.table(found), flush=True)


def _failed(result: dict[str, Any], workload: Workload) -> set[str]:
    return {entry["peer"] for entry in result["missing"] if entry["case"] == str(workload)}


if __name__ == "__main__":
    sys.exit(main())
