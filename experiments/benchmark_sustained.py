"""Sustained speed, the power limit reached, as in training: ours beside cuDNN and others; correct first.

    python experiments/benchmark_sustained.py                            # on a GPU: six shapes, some minutes; JSON
    python experiments/benchmark_sustained.py --shapes 4,8192,16,128 --peers cudnn --decays scalar none constant
    python experiments/benchmark_sustained.py --not-causal --shapes 4,8192,16,64 4,8192,16,128
    python experiments/benchmark_sustained.py --row-scales --decays scalar none constant --peers cudnn    # of ours only
    python experiments/benchmark_sustained.py --deviation 16 --shapes 4,8192,16,64 4,8192,16,128    # large logits
    git worktree add ../before COMMIT
    python experiments/benchmark_sustained.py --before ../before --peers cudnn    # two versions, in one process
    python experiments/benchmark_sustained.py --captured --peers cudnn            # on a host too slow for T = 2,048

Every figure is the time of whole calls back to back for --seconds, between two CUDA events, after a quarter of that to
reach the power limit. benchmark_attention.py times short bursts with a cleared L2 cache instead; a GPU at its limit is
slower, and ratios differ by up to 0.1. All kernels run in one process, in interleaved rounds; a number is the median
over the rounds, with its range. forward is a call on tensors that require gradients, backward torch.autograd.grad for
all of them. --captured replays both from CUDA graphs, without the host.
TFLOP/s count 4·B·H·T²·D/2 for a causal forward, and 2.5 times that for a backward.

Ours: every backend with every decay, called "ours" (the backend "auto") or by the backend's name: "ours",
"ours, no decay", "triton, constant". They skip nothing. A kernel of ours that leaves the error budget of
decayattn.testing gets no speed, and the exit status is 1. --before adds the same of another version of the package,
"ours before", whose errors are reported only. Peers that cannot be imported are left out, and named.
Without a GPU there are no speeds: our kernels run in Triton's interpreter on small shapes, for their errors alone.
"""

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shared import checks, peers
from shared.calls import Prepared, prepare
from shared.cases import DECAYS, DIRECTIONS, DTYPES, Case, random_inputs
from shared.options import (
    before_commit,
    declare,
    declare_before,
    declare_output,
    expect_interpreted_dtype,
    expect_positive,
    positive,
)
from shared.progress import Progress
from shared.provenance import ROOT, provenance
from shared.report import write
from shared.timing import Timing, captured_timer, interpret_kernels, sustained_timer, time_rounds

from decayattn.backends import registry
from decayattn.testing import format_table

METHOD = {
    "regime": "sustained",
    "forward": "a whole call on tensors that require gradients, with its preparation kernels and allocations; ours "
    "with skip_tolerance=None, which does all the work that is counted",
    "backward": "torch.autograd.grad of that call for all of them, with its preparation kernels and allocations",
    "ms": "calls back to back for `seconds` between two CUDA events, after a quarter of that, so that the power limit "
    "is reached: median over interleaved rounds; ms_range: min, max",
    "tflops": "2·B·H·T²·(D + D_v) operations forward, 2·B·H·T²·(3 D + 2 D_v) backward, half of that if causal",
    "ratio_to_cudnn": "speed relative to SDPA on cuDNN without decay: median over the rounds, each with its own cuDNN",
    "relative_error": "‖x − x64‖ / ‖x64‖ against float64 on the timed inputs: last head of the last batch entry; of "
    "sequences over 8192 tokens the last 2^26 / T query rows",
    "checks": "decayattn.testing.verify_attention on the timed inputs, all rows of the first and last (batch entry, "
    "head), of the last one alone above 8192 tokens; a kernel of ours outside its error budget gets no speed",
}
# the shapes B, T, H, D of a call without options
GPU_DEFAULTS = {
    "shapes": [(16, 2048, 16, 64), (4, 8192, 16, 64), (1, 32768, 16, 64), (16, 2048, 16, 128), (4, 8192, 16, 128),
               (1, 32768, 16, 128)],
    "dtype": "bfloat16", "backends": ["auto"], "peers": ["cudnn", "flash_attn", "fla", "fox"],
    "output": ROOT / "results/benchmark_sustained.json",
}
CPU_DEFAULTS = {
    "shapes": [(1, 65, 2, 16), (1, 130, 1, 16)], "dtype": "float32", "backends": ["triton"], "peers": [],
}
# above this length one head is judged, not two: a matrix of a head's float64 scores takes seconds per evaluation
_TWO_HEADS_UP_TO = 8192


@dataclass(frozen=True)
class Kernel:
    """What is timed under one name: a peer, ours with a decay or somebody else's, on the inputs of its case."""

    name: str
    case: Case
    peer: peers.Peer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if a kernel of ours is wrong or fails."""
    argv = sys.argv[1:] if argv is None else list(argv)
    cuda = torch.cuda.is_available()
    options = parse(argv, cuda)
    if not cuda:
        interpret_kernels()
        print("No GPU, so no speeds: errors of our kernels in Triton's interpreter, against their budget.")
    return run(options, argv, "cuda" if cuda else "cpu")


def parse(argv: Sequence[str], cuda: bool) -> argparse.Namespace:
    """The options, defaults filled in for this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = declare(parser, GPU_DEFAULTS if cuda else CPU_DEFAULTS)
    option("--shapes", "shapes: batch, tokens, heads, head dimension, and D_v if it is another", type=shape, nargs="+",
           metavar="B,T,H,D")
    option("--dtype", "dtype of q, k, v", choices=tuple(DTYPES))
    option("--not-causal", "queries see the keys after their own, too", action="store_true", default=False)
    option("--deviation", "standard deviation of the logits q·k / √D", type=float, default=1.0)
    option("--row-scales", "every row of ours has a scale of its own", action="store_true", default=False)
    option("--mean-log-decay", "mean log-decay per token, natural log (drawn from [2m, 0])", type=float, default=-0.01)
    option("--backends", "our backends", choices=registry.NAMES, nargs="+")
    option("--decays", "decays of ours", choices=DECAYS, nargs="+", default=["scalar", "none"])
    option("--peers", "kernels to compare with", choices=tuple(peers.OTHERS), nargs="*")
    declare_before(option)
    option("--captured", "calls are replayed from CUDA graphs", action="store_true", default=False)
    option("--rounds", "interleaved rounds", type=positive, default=3)
    option("--seconds", "how long calls follow one another for one figure", type=float, default=0.3)
    option("--seed", "seed of the random inputs", type=int, default=0)
    declare_output(option)
    options = parser.parse_args(argv)
    if not cuda:
        expect_interpreted_dtype(parser, options)
    if not cuda and options.output:
        parser.error("--output: no GPU here, so there is no speed to write")
    expect_positive(parser, options, "seconds", "deviation")
    return options


def shape(text: str) -> tuple[int, ...]:
    """The type of an option that is B,T,H,D or B,T,H,D,D_v."""
    numbers = tuple(map(positive, text.split(",")))
    if len(numbers) not in (4, 5):
        raise argparse.ArgumentTypeError(f"expected B,T,H,D or B,T,H,D,D_v, got {text}")
    return numbers


def run(options: argparse.Namespace, argv: Sequence[str], device: str) -> int:
    """Every shape: check everybody, then time those that passed; the report is written after each."""
    start = time.perf_counter()
    result: dict[str, Any] = provenance("experiments/benchmark_sustained.py", argv, options.commit) | {
        "before": before_commit(options),
        "method": METHOD, "captured": options.captured, "rounds": options.rounds, "seconds": options.seconds,
        "kernels": {}, "missing": [], "checks": [], "rows": [],
    }
    about = ("gpu", "driver", "torch", "triton", "cudnn", "commit")
    print(" · ".join(f"{key} {result[key]}" for key in about), flush=True)
    per_shape = len(kernels_of(options.shapes[0], options)) * (1 + 2 * options.rounds * (device == "cuda"))
    progress = Progress(len(options.shapes) * per_shape)
    for number, size in enumerate(options.shapes, start=1):
        kernels = kernels_of(size, options)
        prepared, errors = check(kernels, options, result, progress, device)
        if device == "cuda":
            torch.cuda.empty_cache()
            found = time_kernels(kernels, prepared, errors, options, result, progress)
            result["rows"] += found
            progress.print(table(found))
            write(result, options.output)
        progress.step("", number * per_shape - progress.done)  # a kernel that failed has fewer steps
        torch._dynamo.reset()  # the next shape compiles anew, without the cache of this one
    progress.close()
    wrong = any(entry["ours"] for entry in result["missing"])
    if device == "cuda":
        print(f"\nwrote {options.output}, {time.perf_counter() - start:.0f} s")
    else:
        print("\n" + ("FAILED: results outside the error budget" if wrong else "all within the error budget"))
    return int(wrong)


def kernels_of(size: tuple[int, ...], options: argparse.Namespace) -> list[Kernel]:
    """cuDNN first, it is the measure; then the other peers, and ours with every decay that was asked for."""
    batch, length, heads, head_dim, *value_dim = size
    case = Case(
        batch, heads, length, head_dim, options.dtype, "scalar", options.mean_log_decay, not options.not_causal,
        options.deviation, *(value_dim or [None]), options.row_scales,
    )
    others = sorted(dict.fromkeys(options.peers), key=lambda name: name != peers.BASELINE)
    kernels = [Kernel(name, case, peers.OTHERS[name]) for name in others]
    for backend in dict.fromkeys(options.backends):
        for decay in dict.fromkeys(options.decays):
            own = dataclasses.replace(case, decay=decay)
            kernels.append(Kernel(name_of(backend, decay), own, peers.ours(backend, decay != "none")))
            if options.before:
                peer = peers.before(options.before, backend, decay != "none")
                kernels.append(Kernel(f"{name_of(backend, decay)} before", own, peer))
    return kernels


def name_of(backend: str, decay: str) -> str:
    """ "ours" is the library as one calls it, with a decay per token."""
    what = {"scalar": "", "constant": ", constant", "none": ", no decay"}[decay]
    return ("ours" if backend == "auto" else backend) + what


def check(
    kernels: Sequence[Kernel], options: argparse.Namespace, result: dict[str, Any], progress: Progress, device: str
) -> tuple[dict[str, Prepared], dict[str, dict[str, float]]]:
    """(calls to time, their relative errors), by name; ours are held to the error budget, and what fails is missing."""
    prepared, errors = {}, {}
    for decay in dict.fromkeys(kernel.case.decay for kernel in kernels):
        same = [kernel for kernel in kernels if kernel.case.decay == decay]
        inputs = random_inputs(same[0].case, device, options.seed)
        expected = checks.oracles(same[0].case, inputs)
        for kernel in same:
            try:
                if kernel.peer.backend and not within_budget(kernel, inputs, result, progress):
                    continue
                call = prepare(kernel.peer, kernel.case, inputs)
                errors[kernel.name] = checks.relative_errors(
                    kernel.case, call,
                    expected(kernel.case.decay != "none" and kernel.peer.decay != "none", kernel.peer.row_scales),
                )
                prepared[kernel.name] = call
                result["kernels"][kernel.name] = kernel.peer.label
            except peers.Absent as error:
                missing(result, kernel, "absent", str(error), progress)
            except Exception as error:  # one that fails must not take the others with it; ours fails the run
                missing(result, kernel, "failed", peers.reason(error), progress)
            finally:
                progress.step(f"checked {kernel.name}, {kernel.case}")
    return {kernel.name: prepared[kernel.name] for kernel in kernels if kernel.name in prepared}, errors


def within_budget(kernel: Kernel, inputs: dict[str, torch.Tensor], result: dict[str, Any], progress: Progress) -> bool:
    """Whether a kernel of ours is right on the very inputs that are timed."""
    case = kernel.case
    heads = [(0, 0)] * (case.length <= _TWO_HEADS_UP_TO) + [(case.batch - 1, case.heads - 1)]
    comparisons = checks.verify_ours(case, inputs, kernel.peer.backend, heads)
    lines = format_table(comparisons).splitlines()
    result["checks"].append({"case": str(case), "kernel": kernel.name, "table": lines})
    passed = all(c.passed for c in comparisons)
    if not passed:
        progress.print("\n".join(lines))
        missing(result, kernel, "wrong", "results outside the error budget: no speed is reported", progress)
    else:
        progress.print(f"{kernel.name}: {', '.join(c.name for c in comparisons)} within the error budget, {case}")
    return passed


def missing(result: dict[str, Any], kernel: Kernel, kind: str, why: str, progress: Progress) -> None:
    """A kernel without a speed, and why."""
    entry = {"case": str(kernel.case), "kernel": kernel.name, "ours": kernel.peer.backend is not None, "kind": kind}
    result["missing"].append(entry | {"reason": why})
    progress.print(f"{kernel.name}: {kind}: {why}")


def time_kernels(
    kernels: Sequence[Kernel], prepared: dict[str, Prepared], errors: dict[str, dict[str, float]],
    options: argparse.Namespace, result: dict[str, Any], progress: Progress,
) -> list[dict[str, Any]]:
    """A row per direction of one shape, with every kernel's figures."""
    timer = (captured_timer if options.captured else sustained_timer)(options.seconds)

    def timed(call: Any) -> float:
        ms = timer(call)
        progress.step(f"timed, {kernels[0].case}")
        return ms

    # a backward runs on its forward's stream, and a graph is not captured on the default one
    stream = torch.cuda.stream(torch.cuda.Stream()) if options.captured else contextlib.nullcontext()
    torch.cuda.synchronize()
    with stream:
        timings, failed = time_rounds(prepared, options.rounds, timed)
    for kernel in kernels:
        if kernel.name in failed:
            missing(result, kernel, "failed", failed[kernel.name], progress)
    return list(rows(kernels[0].case, timings, errors))


def rows(
    case: Case, timings: dict[tuple[str, str], Timing], errors: dict[str, dict[str, float]]
) -> Iterator[dict[str, Any]]:
    """One row per direction: the shape, and of every kernel time, speed, and speed relative to cuDNN's."""
    about = dataclasses.asdict(case)
    del about["decay"]  # the kernels' names tell
    for direction in DIRECTIONS:
        baseline = timings.get((peers.BASELINE, direction))
        figures = {}
        for (name, way), timing in timings.items():
            if way != direction:
                continue
            ratios = [b / t for b, t in zip(baseline.rounds, timing.rounds, strict=True)] if baseline else []
            figures[name] = {
                "ms": timing.median,
                "ms_range": [min(timing.rounds), max(timing.rounds)],
                "tflops": case.tflops(direction, timing.median),
                "ratio_to_cudnn": statistics.median(ratios) if ratios else None,
                "relative_error": errors[name],
            }
        if figures:
            yield about | {"direction": direction, "kernels": figures}


def table(found: Sequence[dict[str, Any]]) -> str:
    """The rows of one shape: a line per kernel, forward beside backward."""
    if not found:
        return "nothing to time"
    size = "B{batch} T{length} H{heads} D{head_dim} {dtype}".format(**found[0])
    size += "" if found[0]["value_dim"] is None else f", D_v{found[0]['value_dim']}"
    head = "".join(f"{row['direction'] + ' ms':>16} {'TFLOP/s':>8} {'/cuDNN':>7}" for row in found)
    lines = [f"\n{size}{'' if found[0]['causal'] else ', not causal'}", f"  {'':18}{head}"]
    for name in found[0]["kernels"]:
        cells = (row["kernels"][name] for row in found)
        lines.append(f"  {name:18}" + "".join(map(_cell, cells)))
    return "\n".join(lines)


def _cell(figures: dict[str, Any]) -> str:
    ratio = figures["ratio_to_cudnn"]
    return f"{figures['ms']:16.3f} {figures['tflops']:8.0f} {'–' if ratio is None else f'{ratio:.2f}':>7}"


if __name__ == "__main__":
    sys.exit(main())
