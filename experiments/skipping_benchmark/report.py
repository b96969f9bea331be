"""What was measured, as rows and as text."""

from dataclasses import asdict
from typing import Any

from shared.cases import DIRECTIONS
from shared.peers import BASELINE
from shared.timing import MILLISECONDS, Timing
from torch import Tensor

from skipping_benchmark.planning import COPIES
from skipping_benchmark.workloads import PRUNED, SKIPPING, WHOLE, Workload

METHOD = {
    "forward": "a whole call on tensors that require gradients, with its preparation kernels (the plan among them) and "
    "allocations",
    "backward": "torch.autograd.grad of that call for all of them, with its preparation kernels and allocations",
    "ms": MILLISECONDS,
    "plan_us": "of the study planning, microseconds of the plan alone (forward) and of its mirror alone (backward): a "
    f"CUDA graph of {COPIES} in a row, which begins with a cleared L2 cache, median over rounds, for one of them; the "
    "decay prefix is there. plan_share: over ms",
    "visited": "decayattn.visited_fraction: tiles of 64 rows × 128 keys that are visited, per head; ideal is what the "
    "whole kernel would gain if its time were in proportion to them",
    "studies": "planning: nothing can be skipped (because of the decay alone; because of the norms), so that only the "
    "plan's cost is seen. pruning: one decay per token, beside cuDNN without a decay and the official kernel that "
    "prunes at e⁻¹⁰. constant: ALiBi slopes and RetNet rates. lengths: time over T",
    "checks": "up to 32,768 tokens decayattn.testing.verify_attention, all rows of the first and last (batch entry, "
    "head); beyond, the last rows against float64, no more than twice as wrong as without skipping, plus rounding",
}


def rows(
    workload: Workload, timings: dict[tuple[str, str], Timing], visited: Tensor, plan_us: dict[str, float]
) -> list[dict[str, Any]]:
    """One row per call and direction; speeds are ratios of medians, above 1 is faster than the one it names.

    plan_us: planning.times, or empty.
    """
    found = []
    for (name, direction), timing in timings.items():
        ms = timing.median
        of_plan = plan_us.get(direction) if name == SKIPPING else None

        def speed_over(other: str, direction: str = direction, ms: float = ms) -> float | None:
            against = timings.get((other, direction))
            return against.median / ms if against else None

        found.append(
            {"study": workload.study, **asdict(workload.case), "rates": workload.rates, "gain": workload.gain}
            | {
                "peer": name, "direction": direction, "ms": ms, "ms_range": [min(timing.rounds), max(timing.rounds)],
                "speed_over_whole": speed_over(WHOLE), "speed_over_cudnn": speed_over(BASELINE),
                "speed_over_fox_pruned": speed_over(PRUNED),
                "plan_us": of_plan, "plan_share": None if of_plan is None else of_plan / (1e3 * ms),
                "visited": [float(x) for x in visited.mean(0)] if name == SKIPPING else None,
                "ideal": 1 / float(visited.mean()) if name == SKIPPING else None,
            }
        )
    return found


def table(found: list[dict[str, Any]]) -> str:
    """A line per call and direction."""
    headings = f"{'/whole':>7} {'ideal':>6} {'/cuDNN':>7} {'/fox pruned':>12} {'plan µs (share)':>16}"
    lines = [f"  {'':22}{'ms':>10} {'[range]':>21} {headings}"]
    for direction in DIRECTIONS:
        for row in found:
            if row["direction"] == direction:
                low, high = row["ms_range"]
                name, ms_range = f"{row['peer']} {direction}", f"[{low:.3f}–{high:.3f}]"
                whole, ideal = _ratio(row["speed_over_whole"]), _ratio(row["ideal"])
                cudnn, pruned = _ratio(row["speed_over_cudnn"]), _ratio(row["speed_over_fox_pruned"])
                us = row["plan_us"]
                plan = "–" if us is None else f"{us:.1f} ({row['plan_share']:.1%})"
                figures = f"{whole:>7} {ideal:>6} {cudnn:>7} {pruned:>12} {plan:>16}"
                lines.append(f"  {name:22}{row['ms']:10.3f} {ms_range:>21} {figures}")
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
