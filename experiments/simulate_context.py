"""A sequence of a million tokens on 8, 64 and 512 GPUs: on paper, from what benchmark_context.py measured.

    python experiments/benchmark_context.py       # on two GPUs or more, first
    python experiments/simulate_context.py        # a second, anywhere: a table, JSON
    python experiments/simulate_context.py --ranks 16 --network 25

For one layer, forward and backward, in both modes. Nothing here was run on so many GPUs; the model is:

    time of P ranks = compute + transfer + rest, one after the other, as the library runs them
    compute  = time of one GPU at T, which grows as T^e between the two longest lengths that were measured, times the
               share of the rank with the most to do: 1 − ((P − 1) / P)^e of a halo, whose last slice sees the most, and
               1 / P of heads
    transfer = bytes / bandwidth. A halo has as many tokens as at the longest length measured, or all before the last
               slice if that was so there; heads send a token's numbers in proportion to (P − 1) / P² of T. Up to
               --node ranks the bandwidth is taken to be that between those measured, beyond them --network for each GPU
    rest     = what the measured ranks took beyond compute and transfer at the shortest length: plans, launches, waits

Left out: that a halo grows with log T, congestion, and ranks that are slower than others.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from context_benchmark.measure import ALONE, BOTH
from shared.options import declare, positive
from shared.provenance import ROOT, command_line
from shared.report import write

DEFAULTS = {
    "measured": ROOT / "results/benchmark_context.json", "output": ROOT / "results/simulate_context.json",
    "length": 2**20, "ranks": [8, 64, 512],
}


@dataclass(frozen=True)
class Measured:
    """One mode with one decay in one direction, by increasing length: lengths, milliseconds and bytes of the ranks, and
    milliseconds of one GPU (lengths_alone, alone)."""

    decay: str
    mode: str
    direction: str
    ranks: int
    heads: int
    lengths: list[int]
    ms: list[float]
    received: list[int]
    everything: list[int]
    lengths_alone: list[int]
    alone: list[float]

    def exponent(self) -> float:
        """e of T^e for the time of one GPU."""
        (t1, t2), (ms1, ms2) = self.lengths_alone[-2:], self.alone[-2:]
        return math.log(ms2 / ms1) / math.log(t2 / t1)

    def alone_ms(self, length: int) -> float:
        """Measured, or beyond what was measured by the exponent."""
        if length in self.lengths_alone:
            return self.alone[self.lengths_alone.index(length)]
        return self.alone[-1] * (length / self.lengths_alone[-1]) ** self.exponent()

    def share(self, ranks: int) -> float:
        """Of the work, the most that one rank has."""
        return 1 / ranks if self.mode == "heads" else 1 - ((ranks - 1) / ranks) ** self.exponent()

    def bytes_received(self, length: int, ranks: int) -> float:
        """By the rank that receives the most."""
        if self.mode == "heads":
            measured = self.lengths[-1] * (self.ranks - 1) / self.ranks**2
            return self.received[-1] / measured * length * (ranks - 1) / ranks**2
        per_token = self.everything[-1] / (self.lengths[-1] * (self.ranks - 1) / self.ranks)
        before = per_token * length * (ranks - 1) / ranks
        return before if self.received[-1] > 0.99 * self.everything[-1] else min(before, self.received[-1])

    def rest_ms(self, bandwidth: float) -> float:
        compute = self.share(self.ranks) * self.alone_ms(self.lengths[0])
        return max(0.0, self.ms[0] - compute - 1e3 * self.received[0] / bandwidth)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    if not options.measured.exists():
        print(f"error: {options.measured} is not there: benchmark_context.py writes it, on two GPUs", file=sys.stderr)
        return 2
    report = json.loads(options.measured.read_text(encoding="utf-8"))
    rows = [
        simulate(measured, options.length, ranks, report["bandwidth"], options.network * 1e9, options.node)
        for measured in read(report)
        for ranks in options.ranks
    ]
    origin = {key: report[key] for key in ("gpu", "torch", "triton", "cudnn", "commit", "dirty", "date")}
    result = {
        **origin, "command": command_line("experiments/simulate_context.py", argv), "method": __doc__,
        "measured": options.measured.name, "bandwidth": report["bandwidth"], "network": options.network * 1e9,
        "node": options.node, "measured_ranks": report["ranks"], "length": options.length, "rows": rows,
    }
    print(table(rows))
    if options.output:
        write(result, options.output)
        print(f"wrote {options.output}")
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = declare(parser, DEFAULTS)
    option("--measured", "JSON file of benchmark_context.py", type=Path)
    option("--length", "tokens T", type=positive)
    option("--ranks", "numbers of GPUs", type=positive, nargs="+")
    option("--node", "GPUs that the measured bandwidth is taken to be between", type=positive, default=8)
    option("--network", "GB/s that a GPU receives from other machines; 50 is 400 Gb/s", type=float, default=50.0)
    option("--output", "JSON file", type=Path)
    options = parser.parse_args(argv)
    if not options.network > 0:
        parser.error(f"--network: expected a number above 0, got {options.network}")
    return options


def read(report: dict[str, Any]) -> list[Measured]:
    """What was measured at two lengths or more, also on one GPU."""
    several = [row for row in report["rows"] if row["mode"] != ALONE and row["direction"] != BOTH]
    keys = dict.fromkeys((row["decay"], row["mode"], row["direction"]) for row in several)
    found = []
    for decay, mode, direction in keys:
        own, alone = (
            sorted(
                (row for row in report["rows"]
                 if (row["decay"], row["mode"], row["direction"]) == (decay, name, direction) and row["ms"]),
                key=lambda row: row["length"],
            )
            for name in (mode, ALONE)
        )
        if own and len(alone) > 1:
            found.append(Measured(
                decay, mode, direction, own[0]["ranks"], own[0]["heads"], [row["length"] for row in own],
                [row["ms"] for row in own], [max(row["received"]) for row in own], [row["everything"] for row in own],
                [row["length"] for row in alone], [row["ms"] for row in alone],
            ))
    return found


def simulate(
    measured: Measured, length: int, ranks: int, bandwidth: float, network: float, node: int
) -> dict[str, Any]:
    """One row; its times are None where the heads cannot be dealt out."""
    row = {"decay": measured.decay, "mode": measured.mode, "direction": measured.direction, "ranks": ranks,
           "length": length, "exponent": measured.exponent(), "one_gpu_ms": measured.alone_ms(length)}
    if measured.mode == "heads" and measured.heads % ranks:
        return row | dict.fromkeys(("bytes", "compute_ms", "transfer_ms", "rest_ms", "ms", "speed_over_one"))
    received = measured.bytes_received(length, ranks)
    compute = measured.share(ranks) * measured.alone_ms(length)
    transfer = 1e3 * received / (bandwidth if ranks <= node else network)
    rest = measured.rest_ms(bandwidth)
    total = compute + transfer + rest
    return row | {"bytes": received, "compute_ms": compute, "transfer_ms": transfer, "rest_ms": rest, "ms": total,
                  "speed_over_one": measured.alone_ms(length) / total}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line per decay, mode, direction and number of ranks."""
    lines = [f"{'':28}{'GPUs':>6}{'MB':>10}{'compute ms':>12}{'transfer':>10}{'rest':>8}{'total':>10}{'× one GPU':>11}"]
    for row in rows:
        name = f"{row['decay']}, {row['mode']}, {row['direction']}"
        if row["ms"] is None:
            lines.append(f"{name:28}{row['ranks']:>6}  the heads are fewer, or no multiple")
            continue
        lines.append(
            f"{name:28}{row['ranks']:>6}{row['bytes'] / 1e6:10.1f}{row['compute_ms']:12.2f}{row['transfer_ms']:10.2f}"
            f"{row['rest_ms']:8.2f}{row['ms']:10.2f}{row['speed_over_one']:11.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
