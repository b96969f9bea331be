"""What was measured, as rows and as text, with everything needed to repeat it."""

import math
import statistics
from dataclasses import asdict
from typing import Any

from shared.cases import DIRECTIONS, Case
from shared.peers import BASELINE, without_decay
from shared.timing import MILLISECONDS, Timing

METHOD = {
    "forward": "a whole call on tensors that require gradients, with its preparation kernels and allocations; ours "
    "with skip_tolerance=None, which does all the work that is counted",
    "backward": "torch.autograd.grad of that call for all of them, with its preparation kernels and allocations",
    "ms": MILLISECONDS,
    "tflops": "4·B·H·T²·D/2 operations forward, 2.5 times that backward",
    "ratio_to_cudnn": "speed relative to SDPA on cuDNN without decay, same process, same rounds",
    "time_over_no_decay": "time relative to the same backend of ours without a decay: median over the rounds",
    "relative_error": "‖x − x64‖ / ‖x64‖ against float64 on the timed inputs: last head of the last batch entry; of "
    "sequences over 8192 tokens the last 2^26 / T query rows",
    "checks": "decayattn.testing.verify_attention on the timed inputs: all rows of the first and last (batch entry, "
    "head); a kernel of ours outside its error budget gets no speed",
    "launches": "kernels, memsets and copies of one call, counted by torch.profiler",
}


def rows(
    case: Case,
    timings: dict[tuple[str, str], Timing],
    errors: dict[str, dict[str, float]],
    launches: dict[tuple[str, str], list[str]],
) -> list[dict[str, Any]]:
    """One row per peer and direction; ratio_to_cudnn is the speed relative to cuDNN's, above 1 is faster."""
    result = []
    for (name, direction), timing in timings.items():
        baseline = timings.get((BASELINE, direction))
        row = asdict(case) | {
            "peer": name,
            "direction": direction,
            "ms": timing.median,
            "ms_range": [min(timing.rounds), max(timing.rounds)],
            "tflops": case.tflops(direction, timing.median),
            "tflops_range": [case.tflops(direction, ms) for ms in (max(timing.rounds), min(timing.rounds))],
            "ratio_to_cudnn": baseline.median / timing.median if baseline else None,
            "relative_error": errors[name],
        }
        without = timings.get((without_decay(name), direction))
        if without:
            ratios = (own / other for own, other in zip(timing.rounds, without.rounds, strict=True))
            row["time_over_no_decay"] = statistics.median(ratios)
        if (name, direction) in launches:
            row["launches"] = launches[name, direction]
        result.append(row)
    return result


_HEADER = f"  {'':22}" + "".join(f"{f'── {direction} ──':>45}" for direction in DIRECTIONS)
_UNITS = f"  {'peer':22}" + f"{'ms':>10} {'[range]':>17} {'TFLOP/s':>8} {'/cuDNN':>7}" * len(DIRECTIONS)


def table(case_rows: list[dict[str, Any]]) -> str:
    """The rows of one case, a line per peer, forward beside backward."""
    lines = [_HEADER, _UNITS + "   worst relative error"]
    for name in dict.fromkeys(row["peer"] for row in case_rows):
        cells = {row["direction"]: row for row in case_rows if row["peer"] == name}
        errors = cells[DIRECTIONS[0]]["relative_error"]
        worst = max(errors, key=lambda key: math.inf if math.isnan(errors[key]) else errors[key])
        line = f"  {name:22}" + "".join(_cell(cells[direction]) for direction in DIRECTIONS)
        lines.append(f"{line}   {errors[worst]:.1e} ({worst})")
        costs = {direction: row.get("time_over_no_decay") for direction, row in cells.items()}
        if all(costs.values()):
            said = ", ".join(f"{cost - 1:.1%} {direction}" for direction, cost in costs.items())
            lines.append(f"  {name}: the decay costs {said}")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    low, high = row["ms_range"]
    ratio = row["ratio_to_cudnn"]
    ratio = f"{ratio:.2f}" if ratio else "–"
    return f"{row['ms']:10.3f} {f'[{low:.3f}–{high:.3f}]':>17} {row['tflops']:8.0f} {ratio:>7}"
