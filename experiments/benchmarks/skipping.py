"""Gain and cost of skip_tolerance; correct first. Usage::

    python experiments/benchmarks/skipping.py                                # on a GPU: all of it; tables and JSON
    python experiments/benchmarks/skipping.py --studies pruning --head-dims 64       # part of it, quickly

Four studies. planning: shapes where no tile can be skipped, which show the cost of the plan; plan_us is that of one of
20 in a CUDA graph, the decay prefix being there. pruning: one decay per token at 32,768 tokens, with cuDNN without a
decay and the official Forgetting Transformer kernel, which prunes by another rule. constant: ALiBi slopes at 131,072
tokens. lengths: time over T. Timed in bursts. visited: tiles of 64 rows × 128 keys that are visited, per head; ideal:
the gain of a kernel with a time in proportion to them.

Up to 32,768 tokens all rows of two heads are held to the error budget; beyond, the last rows may be no more than twice
as wrong as without skipping, plus rounding.
"""

import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import harness, peers
from benchmarks.harness import Case, Prepared, Run, Timings
from benchmarks.peers import BASELINE
from decayattn import decay_attention, visited_fraction
from decayattn.backends import registry
from decayattn.normalize import tolerance_of
from decayattn.problem import AttentionProblem, Inputs
from decayattn.testing import format_table, verify_attention

STUDIES = ("planning", "pruning", "constant", "lengths")
SKIPPING, WHOLE, PRUNED = "skipping", "whole", peers.PRUNED.name
# the float64 oracle judges whole heads up to this length, and the last rows of longer ones
WHOLE_HEADS = 32768
# plans in one graph: launching it takes longer than one of them
COPIES = 20
OPTIONS = {
    "studies": (list(STUDIES), list(STUDIES), "what to run", STUDIES),
    "head_dims": ([128, 64], [16], "head dimensions D = D_v"),
    "heads": (16, 2, "heads H"),
    "dtype": harness.DTYPE,
    "backend": ("auto", "triton", "our backend", registry.NAMES),
    "mean_log_decay": (-0.01, -0.5, "mean log-decay per token, natural log (drawn from [2m, 0])", float),
    "planning": (8192, 200, "sequence length of the study"),
    "tokens": (32768, 200, "tokens in a batch of that study: B = max(1, tokens // T)"),
    "pruning": (32768, 700, "sequence length of the study"),
    "constant": (131072, 700, "sequence length of the study"),
    "lengths": ([2048, 8192, 32768, 131072, 524288], [300], "sequence lengths of the study"),
    "whole_up_to": (131072, 300, "longest length at which nothing is skipped for comparison"),
    "seconds": (0.015, 0.015, "time of one figure"),
    "rounds": (5, 5, "interleaved rounds"),
    "output": harness.output("benchmark_skipping.json"),
}


def workloads(options: Any) -> list[tuple[str, Case]]:
    """(study, causal problem) of the four studies."""

    def case(length: int, dim: int, decay: str = "scalar", batch: int = 1, **more: Any) -> Case:
        return Case(batch, options.heads, length, dim, options.dtype, decay, options.mean_log_decay, **more)

    found = []
    batch = max(1, options.tokens // options.planning)
    for dim in options.head_dims:
        found += [
            ("planning", case(options.planning, dim, batch=batch, rates="none to speak of")),
            ("planning", case(options.planning, dim, batch=batch, deviation=16.0)),
            ("pruning", case(options.pruning, dim)),
            ("constant", case(options.constant, dim, "constant", rates="alibi")),
        ]
    return found + [("lengths", case(length, max(options.head_dims))) for length in options.lengths]


def measure(run: Run) -> None:
    """Check every workload, then time all calls on it."""
    options = run.options
    for study, case in workloads(options):
        if study not in options.studies:
            continue
        print(f"\n{study}: {case}", flush=True)
        inputs = case.inputs(run.device, options.seed)
        visited = visited_fraction(inputs["q"], inputs["k"], inputs["log_decay"])
        print(f"  visits {float(visited.mean()):.3f} of the tiles (heads {visited.min():.3f} to {visited.max():.3f})")
        outside, lines = compared(case, inputs, options.backend)
        if run.right(outside, lines, case=f"{study}: {case}", peer=SKIPPING) and run.timed:
            run.add(timed(study, case, inputs, visited, run), "{peer} {direction}",
                    ("ms", "speed_over_whole", "ideal", "plan_us"))
            torch.cuda.empty_cache()


def timed(study: str, case: Case, inputs: dict[str, Tensor], visited: Tensor, run: Run) -> Iterator[dict[str, Any]]:
    """The rows of one case, which was right: without and with skipping, in "pruning" also of calls that compete."""
    options, timer = run.options, harness.burst_timer(run.options.seconds)
    chosen = {SKIPPING: peers.ours(options.backend, skip_tolerance="auto")}
    if case.length <= options.whole_up_to:
        chosen = {WHOLE: peers.ours(options.backend)} | chosen
    if study == "pruning":
        chosen = {BASELINE: peers.OTHERS[BASELINE], PRUNED: peers.PRUNED} | chosen
    prepared, where = {}, {}
    for name, peer in chosen.items():
        where[name] = {"ours": peer.backend is not None, "case": f"{study}: {case}", "peer": name}
        with run.attempt(**where[name]):
            call = peer.prepare(case, inputs)
            call.backward(call.forward())
            prepared[name] = call.parts
    timings = run.time(prepared, timer, where=where)
    plan_us = None
    if study == "planning" and run.device == "cuda" and (call := plan(case, inputs)):
        call()  # compiles
        torch.cuda.synchronize()
        replay = harness.captured(call, COPIES).replay
        plan_us = statistics.median(timer(replay) for _ in range(options.rounds)) * 1e3 / COPIES
    return rows(study, case, timings, visited, plan_us)


def plan(case: Case, inputs: dict[str, Tensor]) -> Callable[[], Tensor] | None:
    """The launches that a plan adds to a forward; None if the case is not planned."""
    from decayattn.backends.planning import prefix as decay_prefix  # imports Triton
    from decayattn.backends.planning import skipping

    q, k, log_decay = (inputs[name] for name in ("q", "k", "log_decay"))
    tolerance = tolerance_of("auto", q.dtype)
    problem = AttentionProblem.of(Inputs(q, k, k, log_decay), True, skip_tolerance=tolerance)
    if not skipping.is_planned(problem):
        return None
    prefix = decay_prefix.build(problem, log_decay) if problem.decay == "scalar" else decay_prefix.allocate(problem, q)
    return lambda: skipping.plan(problem, q, k, log_decay, case.head_dim**-0.5, prefix, None)


def rows(study: str, case: Case, timings: Timings, visited: Tensor, plan_us: float | None) -> Iterator[dict[str, Any]]:
    """One row per call and direction; speed_over_whole is a ratio of medians, above 1 is faster."""
    medians = {key: statistics.median(times) for key, times in timings.items()}
    for (name, direction), times in timings.items():
        whole, is_ours = medians.get((WHOLE, direction)), name == SKIPPING
        of_plan = plan_us if is_ours and direction == "forward" else None
        yield dataclasses.asdict(case) | harness.spread(times) | {
            "study": study, "peer": name, "direction": direction, "plan_us": of_plan,
            "speed_over_whole": whole / medians[name, direction] if whole else None,
            "visited": [float(x) for x in visited.mean(0)] if is_ours else None,
            "ideal": 1 / float(visited.mean()) if is_ours else None,
        }


def compared(case: Case, inputs: dict[str, Tensor], backend: str) -> tuple[list[str], list[str]]:
    """(tensors that are wrong with skip_tolerance="auto"; the comparison as lines)."""
    if case.length > WHOLE_HEADS:
        return _last_rows(case, inputs, backend)
    heads = [(0, 0), (case.batch - 1, case.heads - 1)]
    comparisons = verify_attention(**inputs, backend=backend, heads=heads, skip_tolerance="auto")
    return [c.name for c in comparisons if not c.passed], format_table(comparisons).splitlines()


def _last_rows(case: Case, inputs: dict[str, Tensor], backend: str) -> tuple[list[str], list[str]]:
    """‖x − x64‖ ≤ 2 ‖whole − x64‖ + eps ‖x64‖: whole is the same kernel without skipping, on the last rows alone."""
    rows = harness.oracle_rows(case)
    expected = harness.oracle(case, inputs, decay=True)
    of_rows = expected | {"dq": expected["dq"].view(case.length, -1)[-rows:].flatten()}
    whole = harness.relative_errors(case, _prepared(inputs, rows, None, backend), of_rows)
    skipping = harness.relative_errors(case, _prepared(inputs, case.length, "auto", backend), expected)
    eps = torch.finfo(inputs["q"].dtype).eps
    lines = [f"{name}: {skipping[name]:.2e}, without skipping {error:.2e}" for name, error in whole.items()]
    return [name for name, error in whole.items() if not skipping[name] <= 2 * error + eps], lines


def _prepared(inputs: dict[str, Tensor], rows: int, tolerance: str | None, backend: str) -> Prepared:
    attend = functools.partial(decay_attention, skip_tolerance=tolerance, backend=backend)
    return harness.prepare(attend, inputs | {name: inputs[name][:, -rows:] for name in ("q", "grad_out")})


if __name__ == "__main__":
    sys.exit(harness.main(sys.modules[__name__]))
