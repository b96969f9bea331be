"""What was measured, as rows and as text."""

from dataclasses import asdict
from typing import Any

from context_benchmark.measure import ALONE, DIRECTIONS, median
from context_benchmark.workloads import Workload

METHOD = {
    "forward": "a whole call on tensors that require gradients, with its plan, exchanges and allocations",
    "backward": "torch.autograd.grad of that call for all of them, with its exchanges and allocations",
    "both": "a forward and its backward in turns",
    "ms": "median over interleaved rounds, each the slowest rank's mean of calls back to back by CUDA events, "
    "of one call where that is longer than a round; ms_range: min, max",
    "speed_over_alone": "time of one GPU with the whole sequence over that of all ranks, same process, same rounds, "
    "skip_tolerance='auto' for both",
    "received": "bytes that all_to_all_single brings to each rank from others; summaries of the plan (gathered) are "
    "not counted; everything: what the last rank would receive if it fetched all keys before its slice",
    "bandwidth": "bytes per second that the slowest rank receives in an all-to-all of 256 MiB",
    "checks": "before any time: verify_attention and verify_attention_varlen on the equality cases, every tensor "
    "within the error budget; then out and every gradient of the timed inputs within 2 eps of one GPU's",
}


def rows(
    workload: Workload, ranks: int, received: dict[str, dict[str, list[int]]], differences: dict[str, dict[str, float]],
    timings: dict[tuple[str, str], list[float]],
) -> list[dict[str, Any]]:
    """One row per mode and direction."""
    found = []
    for name in [*received, ALONE]:
        for direction in DIRECTIONS:
            times = timings.get((name, direction))
            ms, alone = median(timings, name, direction), median(timings, ALONE, direction)
            if name == ALONE and ms is None:
                continue
            found.append(
                asdict(workload) | {
                    "ranks": 1 if name == ALONE else ranks, "mode": name, "direction": direction, "ms": ms,
                    "ms_range": [min(times), max(times)] if times else None,
                    "speed_over_alone": alone / ms if alone and ms else None,
                    "received": received.get(name, {}).get(direction),
                    "everything": workload.everything(ranks),
                    "difference": differences.get(name),
                }
            )
    return found


def table(found: list[dict[str, Any]]) -> str:
    """A line per mode and direction."""
    lines = [f"  {'':18}{'ms':>10} {'[range]':>21} {'/one GPU':>9} {'MB received':>12} {'of all':>8}"]
    for row in found:
        low_high = "[{:.3f}–{:.3f}]".format(*row["ms_range"]) if row["ms_range"] else "–"
        ms = "–" if row["ms"] is None else f"{row['ms']:.3f}"
        speed = "–" if row["speed_over_alone"] is None else f"{row['speed_over_alone']:.2f}"
        most = None if row["received"] is None else max(row["received"])
        megabytes = "–" if most is None else f"{most / 1e6:.3g}"
        share = "–" if most is None else f"{most / row['everything']:.2%}"
        name = f"{row['mode']} {row['direction']}"
        lines.append(f"  {name:18}{ms:>10} {low_high:>21} {speed:>9} {megabytes:>12} {share:>8}")
    return "\n".join(lines)
