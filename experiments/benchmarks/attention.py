"""Speed of attention with a decay compared with cuDNN and others; correct first. Usage::

    python experiments/benchmarks/attention.py                                   # on a GPU: six shapes, some minutes
    python experiments/benchmarks/attention.py --regime captured --peers cudnn   # on a host too slow for T = 2,048
    git worktree add ../before COMMIT
    python experiments/benchmarks/attention.py --before ../before --peers cudnn  # two versions, in one process

Regimes: "sustained" times whole calls back to back, the power limit reached, as in training; "captured" replays them
from CUDA graphs, without the host. ratio_to_cudnn is the median of the rounds' ratios. Both directions include
preparation kernels and allocations. TFLOP/s count 2·B·H·T²·(D + D_v) forward and 2·B·H·T²·(3 D + 2 D_v) backward;
causal: half. relative_error is ‖x − x64‖ / ‖x64‖ on the timed inputs: last head of the last batch entry; of sequences
over 8,192 tokens the last 2²⁶ / T query rows.

Ours: every backend with every decay, called "ours" (the backend "auto") or by the backend's name. They skip nothing.
--deterministic adds the same under torch.use_deterministic_algorithms. --before adds the same of another version of the
package; its errors are reported only.
"""

import argparse
import contextlib
import dataclasses
import functools
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shared.options import positive
from shared.provenance import commit_of

from benchmarks import harness, peers
from benchmarks.harness import DECAYS, DIRECTIONS, Case, Prepared, Run, Timings
from decayattn.backends import registry
from decayattn.testing import Comparison, verify_attention

REGIMES = {"sustained": harness.sustained_timer, "captured": harness.captured_timer}
OPTIONS = {
    "shapes": ([(16, 2048, 16, 64), (4, 8192, 16, 64), (1, 32768, 16, 64), (16, 2048, 16, 128), (4, 8192, 16, 128),
                (1, 32768, 16, 128)], [(1, 65, 2, 16), (1, 130, 1, 16)],
               "B,T,H,D: batch, tokens, heads, head dimension; and D_v if it is another", lambda text: shape(text)),
    "regime": ("sustained", "sustained", "how calls are timed", REGIMES),
    "dtype": harness.DTYPE,
    "not_causal": (False, False, "queries see the keys after their own, too"),
    "deviation": (1.0, 1.0, "standard deviation of the logits q·k / √D"),
    "row_scales": (False, False, "every row of ours has a scale of its own"),
    "mean_log_decay": (-0.01, -0.01, "mean log-decay per token, natural log (drawn from [2m, 0])", float),
    "backends": (["auto"], ["triton"], "our backends", registry.NAMES),
    "decays": (["scalar", "none"], ["scalar", "none"], "decays of ours", DECAYS),
    "deterministic": (False, False, "ours under deterministic algorithms, too"),
    "peers": (["cudnn", "flash_attn", "fla", "fox"], [], "kernels to compare with", peers.OTHERS),
    "seconds": (0.3, 0.3, "time of one figure"),
    "rounds": (3, 3, "interleaved rounds"),
    "output": harness.output("benchmark_sustained.json"),
    "before": (None, None, "a checkout of another commit, to measure in the same rounds", lambda text: tree(text)),
}
# above this length one head is judged, not two: a matrix of a head's float64 scores takes seconds per evaluation
_TWO_HEADS_UP_TO = 8192


class Kernel(NamedTuple):
    """A peer that is timed under a name, ours with a decay or another library's, on the inputs of its case."""

    name: str
    case: Case
    peer: peers.Peer
    deterministic: bool = False

    @property
    def where(self) -> dict[str, Any]:
        """Its place in a report."""
        return {"ours": self.peer.backend is not None, "case": str(self.case), "kernel": self.name}


def tree(text: str) -> Path:
    """Type of an option that is a checkout."""
    if not Path(text, "decayattn/__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} holds no decayattn/__init__.py")
    return Path(text)


def shape(text: str) -> tuple[int, ...]:
    """Type of an option that is B,T,H,D or B,T,H,D,D_v."""
    numbers = tuple(map(positive, text.split(",")))
    if len(numbers) not in (4, 5):
        raise argparse.ArgumentTypeError(f"expected B,T,H,D or B,T,H,D,D_v, got {text}")
    return numbers


def measure(run: Run) -> None:
    """Check all kernels on every shape, then time those that passed."""
    options = run.options
    run.report |= {
        "before": options.before and commit_of(options.before), "regime": options.regime,
        "captured": options.regime == "captured", "seconds": options.seconds,
    }
    for size in options.shapes:
        kernels = {kernel.name: kernel for kernel in kernels_of(size, options)}
        case = next(iter(kernels.values())).case
        print(f"\n{case}", flush=True)
        prepared, errors = check(list(kernels.values()), run)
        if run.timed:
            torch.cuda.empty_cache()
            # a backward runs on its forward's stream, and a graph is not captured on the default one
            aside = options.regime == "captured"
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()) if aside else contextlib.nullcontext():
                timer, calls = REGIMES[options.regime](options.seconds), {name: x.parts for name, x in prepared.items()}
                timings = run.time(calls, timer, where={name: kernels[name].where for name in calls})
            found = list(rows(case, timings, errors))
            run.report["rows"] += found
            lines = ({"name": name, "direction": row["direction"]} | figures
                     for row in found for name, figures in row["kernels"].items())
            print(harness.table(lines, "{name}, {direction}", ("ms", "tflops", "ratio_to_cudnn")), flush=True)
            run.save()
        torch._dynamo.reset()  # the next shape compiles again, without the cache of this one
    torch.use_deterministic_algorithms(False)


def kernels_of(size: tuple[int, ...], options: argparse.Namespace) -> list[Kernel]:
    """cuDNN first, the measure; then the other peers, and ours with every decay that was asked for."""
    batch, length, heads, head_dim, *value_dim = size
    case = Case(
        batch, heads, length, head_dim, options.dtype, "scalar", options.mean_log_decay, not options.not_causal,
        options.deviation, *(value_dim or [None]), options.row_scales,
    )
    others = sorted(dict.fromkeys(options.peers), key=lambda name: name != peers.BASELINE)
    kernels = [Kernel(name, case, peers.OTHERS[name]) for name in others]
    for backend in dict.fromkeys(options.backends):
        for decay in dict.fromkeys(options.decays):
            own, has = dataclasses.replace(case, decay=decay), decay != "none"
            what = {"scalar": "", "constant": ", constant", "none": ", no decay"}[decay]
            name = ("ours" if backend == "auto" else backend) + what
            kernels.append(Kernel(name, own, peers.ours(backend, has)))
            if options.deterministic:
                kernels.append(kernels[-1]._replace(name=f"{name}, deterministic", deterministic=True))
            if options.before:
                before = peers.ours(backend, has, version=peers.other_version(options.before))
                kernels.append(Kernel(f"{name} before", own, before))
    return kernels


def check(kernels: Sequence[Kernel], run: Run) -> tuple[dict[str, Prepared], dict[str, dict[str, float]]]:
    """(calls to time, their relative errors), by name; ours are held to the error budget, and what fails is missing."""
    prepared, errors = {}, {}
    for decay in dict.fromkeys(kernel.case.decay for kernel in kernels):
        same = [kernel for kernel in kernels if kernel.case.decay == decay]
        inputs = same[0].case.inputs(run.device, run.options.seed)
        expected = functools.cache(functools.partial(harness.oracle, same[0].case, inputs))
        for kernel in same:
            name, case, peer, deterministic = kernel
            with run.attempt(**kernel.where):
                torch.use_deterministic_algorithms(deterministic)
                if peer.backend and not run.passed(verify_ours(case, inputs, peer.backend), **kernel.where):
                    continue
                call = dataclasses.replace(peer.prepare(case, inputs), deterministic=deterministic)
                own = case.decay != "none" and peer.decay != "none"
                errors[name] = harness.relative_errors(case, call, expected(own, peer.row_scales))
                prepared[name] = call
    return prepared, errors


def verify_ours(case: Case, inputs: dict[str, Any], backend: str) -> list[Comparison]:
    """decay_attention on the inputs that are timed: the first head and the last one, or the last one of long ones."""
    heads = [(0, 0)] * (case.length <= _TWO_HEADS_UP_TO) + [(case.batch - 1, case.heads - 1)]
    return verify_attention(
        *(inputs.get(name) for name in ("q", "k", "v", "log_decay")), scale=inputs.get("scale"), heads=heads,
        grad_out=inputs["grad_out"], backend=backend, causal=case.causal, skip_tolerance=None,
    )


def rows(case: Case, timings: Timings, errors: dict[str, dict[str, float]]) -> Iterator[dict[str, Any]]:
    """One row per direction: the shape, and of every kernel time, speed, and speed relative to cuDNN's."""
    about = dataclasses.asdict(case)
    del about["decay"]  # the kernels' names say it
    for direction in DIRECTIONS if timings else ():
        baseline, figures = timings.get((peers.BASELINE, direction)), {}
        for name, times in ((name, times) for (name, way), times in timings.items() if way == direction):
            ratios = [b / t for b, t in zip(baseline, times, strict=True)] if baseline else []
            figures[name] = harness.spread(times) | {
                "tflops": case.tflops(direction, statistics.median(times)), "relative_error": errors[name],
                "ratio_to_cudnn": statistics.median(ratios) if ratios else None,
            }
        yield about | {"direction": direction, "kernels": figures}


if __name__ == "__main__":
    sys.exit(harness.main(sys.modules[__name__]))
