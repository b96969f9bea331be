"""Speed of decay attention, forward and backward, against the public kernels; correct first.

    python experiments/benchmark_attention.py                       # on a GPU: every peer; a table, JSON, a plot
    python experiments/benchmark_attention.py --lengths 8192 --head-dims 128 --peers cudnn flex    # part of it, quickly
    python experiments/benchmark_attention.py --not-causal --peers cudnn --backends hopper triton
    python experiments/benchmark_attention.py --without-decay --peers cudnn    # what a decay costs, in the same rounds

Whole calls are timed as training makes them: forward is decay_attention(...) with tensors that require gradients,
backward is torch.autograd.grad for all of them, so every preparation kernel and every allocation counts. TFLOP/s count
4·B·H·T²·D/2 for a causal forward, twice that for one that is not causal, and 2.5 times a forward for a backward. All
peers run in one process, in interleaved rounds; a number is the median over the rounds, with its range. A kernel of
ours that leaves the error budget of decayattn.testing gets no speed, and the exit status is 1. Without a GPU there are
no speeds: our kernels run in Triton's interpreter on small shapes, for their errors alone.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from attention_benchmark import figure, report
from attention_benchmark.launches import count_launches
from shared import checks, peers
from shared.calls import Prepared, prepare
from shared.cases import DECAYS, DTYPES, Case, cases, random_inputs
from shared.options import declare, declare_output, parse_speeds, positive
from shared.provenance import ROOT, provenance
from shared.report import write
from shared.timing import cuda_timer, interpret_kernels, time_rounds

from decayattn.backends import registry
from decayattn.problem import AttentionProblem, Inputs
from decayattn.testing import format_table

# What a call without options measures: the first on a GPU; the second is what the interpreter does in seconds
GPU_DEFAULTS = {
    "head_dims": [64, 128], "lengths": [2048, 8192, 32768], "tokens": 32768, "heads": 16, "dtype": "bfloat16",
    "output": ROOT / "results/benchmark_attention.json",
}
CPU_DEFAULTS = {
    "head_dims": [16, 64], "lengths": [65, 130], "tokens": 130, "heads": 2, "dtype": "float32",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if a kernel of ours is wrong or fails."""
    argv = sys.argv[1:] if argv is None else list(argv)
    cuda = torch.cuda.is_available()
    options = parse(argv, cuda)
    measured = cases(
        options.head_dims, options.lengths, options.tokens, options.heads, options.dtype, options.decay,
        options.mean_log_decay, not options.not_causal,
    )
    return run(measured, options, argv, "cuda") if cuda else check_on_cpu(measured, options)


def run(measured: Sequence[Case], options: argparse.Namespace, argv: Sequence[str], device: str) -> int:
    """Measure every case; the JSON is written after each, so that a run cut short keeps what it has."""
    chosen = choose_peers(options, measured[0], device)
    result = provenance("experiments/benchmark_attention.py", argv, options.commit) | {
        "method": report.METHOD,
        "rounds": options.rounds,
        "peers": {peer.name: peer.label.split(",")[0] if options.decay == "none" else peer.label for peer in chosen},
        "missing": [],
        "checks": [],
        "rows": [],
    }
    print(" · ".join(f"{key} {result[key]}" for key in ("gpu", "driver", "torch", "cudnn", "commit")), flush=True)
    for case in measured:
        benchmark(case, chosen, options, result, device)
        write(result, options.output)
    if result["rows"]:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        figure.draw(result).savefig(options.plot)
        print(f"\nwrote {options.output} and {options.plot}")
    return int(any(entry["ours"] for entry in result["missing"]) or not result["rows"])


def parse(argv: Sequence[str], cuda: bool) -> argparse.Namespace:
    """The options, defaults filled in for this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = declare(parser, GPU_DEFAULTS if cuda else CPU_DEFAULTS)
    option("--head-dims", "head dimensions D = D_v", type=positive, nargs="+", metavar="D")
    option("--lengths", "sequence lengths T", type=positive, nargs="+", metavar="T")
    option("--tokens", "tokens in a batch: B = max(1, tokens // T)", type=positive)
    option("--heads", "heads H", type=positive)
    option("--dtype", "dtype of q, k, v", choices=tuple(DTYPES))
    option("--decay", "kind of log-decay", choices=DECAYS, default="scalar")
    option("--mean-log-decay", "mean log-decay per token, natural log (drawn from [2m, 0])", type=float, default=-0.01)
    option("--not-causal", "queries see the keys after their own, too", action="store_true", default=False)
    option("--backends", "our backends", choices=registry.NAMES, nargs="+", default=["auto" if cuda else "triton"])
    option("--peers", "kernels to compare with", choices=tuple(peers.OTHERS), nargs="*", default=list(peers.OTHERS))
    option("--without-decay", "ours without a decay, too: what it costs", action="store_true", default=False)
    option("--rounds", "interleaved rounds", type=positive, default=5)
    option("--round-ms", "milliseconds that a round gives every call", type=float, default=15.0)
    option("--seed", "seed of the random inputs", type=int, default=0)
    declare_output(option, plot=True)
    return parse_speeds(parser, argv, cuda)


def choose_peers(options: argparse.Namespace, case: Case, device: str) -> list[peers.Peer]:
    """cuDNN first, it is the measure, and ours under the names of the backends that run."""
    inputs = random_inputs(dataclasses.replace(case, batch=1, heads=1, length=1), device, seed=0)
    problem = AttentionProblem.of(inputs["q"], inputs["v"], inputs.get("log_decay"), row_scale=None, causal=case.causal)
    ours = dict.fromkeys(launched(problem, name, inputs) for name in options.backends)
    others = sorted(options.peers, key=lambda name: name != peers.BASELINE)
    chosen = [*(peers.OTHERS[name] for name in dict.fromkeys(others)), *map(peers.ours, ours)]
    if options.without_decay and options.decay != "none":
        chosen += [peers.ours(name, decay=False) for name in ours]
    return chosen


def launched(problem: AttentionProblem, name: str, inputs: dict[str, Any]) -> str:
    """The backend that a name stands for."""
    name = registry.select(problem, name)
    call = Inputs(*(inputs[x] for x in ("q", "k", "v")), scale=inputs["q"].shape[-1] ** -0.5)
    return name if name == "reference" else registry.resolve(problem, name, call)


def benchmark(
    case: Case, chosen: Sequence[peers.Peer], options: argparse.Namespace, result: dict[str, Any], device: str
) -> None:
    """Check every peer on one case, then time those that ran; rows and everything missing go into the report."""
    print(f"\n{case}", flush=True)
    start = time.perf_counter()
    inputs = random_inputs(case, device, options.seed)
    expected = checks.oracles(case, inputs)
    prepared, errors, launches = {}, {}, {}

    def missing(peer: peers.Peer, kind: str, why: str) -> None:
        entry = {"case": str(case), "peer": peer.name, "ours": peer.backend is not None, "kind": kind, "reason": why}
        result["missing"].append(entry)
        print(f"  {peer.name}: {kind}: {why}", flush=True)

    by_name = {peer.name: peer for peer in chosen}
    for peer in chosen:
        try:
            if peer.backend:
                given = {name: x for name, x in inputs.items() if name != "log_decay" or peer.decay != "none"}
                comparisons = checks.verify_ours(case, given, peer.backend)
                result["checks"].append(
                    {"case": str(case), "peer": peer.name, "table": format_table(comparisons).splitlines()}
                )
                if not all(c.passed for c in comparisons):
                    print(format_table(comparisons))
                    missing(peer, "wrong", "results outside the error budget: no speed is reported")
                    continue
                print(f"  {peer.name}: {', '.join(c.name for c in comparisons)} within the error budget", flush=True)
            call = prepare(peer, case, inputs)
            errors[peer.name] = checks.relative_errors(case, call, expected(peer.decay != "none"))
            if peer.backend:
                launches |= our_launches(peer.name, call)
            prepared[peer.name] = call
        except peers.Absent as error:
            missing(peer, "absent", str(error))
        except Exception as error:  # one peer that fails must not take the others with it; ours fails the run
            missing(peer, "failed", peers.reason(error))
    del expected
    torch.cuda.empty_cache()
    checked = time.perf_counter()
    timer = cuda_timer(warmup=options.round_ms / 3, duration=options.round_ms)
    timings, failed = time_rounds(prepared, options.rounds, timer)
    for name, why in failed.items():
        missing(by_name[name], "failed", why)
    case_rows = report.rows(case, timings, errors, launches)
    result["rows"] += case_rows
    if case_rows:
        print(report.table(case_rows))
    for (name, direction), names in launches.items():
        print(f"  {name}: {len(names)} launches {direction}: {', '.join(names)}")
    print(f"  {checked - start:.0f} s to check and compile, {time.perf_counter() - checked:.0f} s to time", flush=True)
    torch._dynamo.reset()  # the next shape compiles anew, without the cache of this one


def our_launches(name: str, call: Prepared) -> dict[tuple[str, str], list[str]]:
    """What one forward and one backward put on the device."""
    out = call.forward()
    return {
        (name, "forward"): count_launches(call.forward),
        (name, "backward"): count_launches(lambda: call.backward(out)),
    }


def check_on_cpu(measured: Sequence[Case], options: argparse.Namespace) -> int:
    """No GPU: hold our kernels, interpreted, against the error budget."""
    interpret_kernels()
    print("No GPU, so no speeds: errors of the kernels in Triton's interpreter, against decayattn.testing's budget.")
    wrong = False
    for case in measured:
        inputs = random_inputs(case, "cpu", options.seed)
        for backend in options.backends:
            comparisons = checks.verify_ours(case, inputs, backend)
            wrong |= not all(c.passed for c in comparisons)
            print(f"\n{case}, backend {backend}\n{format_table(comparisons)}", flush=True)
    print("\n" + ("FAILED: results outside the error budget" if wrong else "all within the error budget"))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
