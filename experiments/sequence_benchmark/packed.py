"""Packed documents and a sliding window beside the dense kernel: their work, their check, their speed."""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from shared.calls import Prepared
from shared.cases import BACKWARD_WORK, DIRECTIONS, Case, random_inputs
from shared.peers import Attend, reason
from shared.timing import Timing, time_rounds
from torch import Tensor

from decayattn import decay_attention, decay_attention_varlen
from decayattn.testing import Comparison, verify_attention, verify_attention_varlen
from sequence_benchmark.report import missing, passed, spread

SECTION = "packed"
# the workloads that the others are compared with: a dense batch of long sequences, and one of as many tokens with as
# many visible pairs as the packed documents have
DENSE, ALIKE = "dense", "dense alike"


@dataclass(frozen=True)
class Workload:
    """Causal self-attention of sequences of the given lengths, with D_v = D and one log-decay per token and head.

    Packed sequences lie behind one another, (total, H, D). The others have one length, and lie in a batch (B, T, H, D).
    left is window_size's; −1 is no limit.
    """

    name: str
    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    dtype: str
    mean_log_decay: float
    left: int = -1
    packed: bool = False

    def __str__(self) -> str:
        shape = f"{len(self.lengths)} sequences of {min(self.lengths)} to {max(self.lengths)}"
        if not self.packed:
            shape = f"B{len(self.lengths)} T{self.lengths[0]}"
        window = "" if self.left < 0 else f", window ({self.left}, 0)"
        return f"{self.name}: {shape}, H{self.heads} D{self.head_dim} {self.dtype}{window}"

    def flops(self, direction: str) -> float:
        """4·D·H operations forward per visible pair of query and key, 2.5 times that backward."""
        forward = 4.0 * self.head_dim * self.heads * sum(visible_pairs(length, self.left) for length in self.lengths)
        return forward * BACKWARD_WORK if direction == "backward" else forward

    def inputs(self, device: str, seed: int) -> dict[str, Tensor]:
        """q, k, v, grad_out and log_decay, as shared.cases draws them."""
        batch, length = (1, sum(self.lengths)) if self.packed else (len(self.lengths), self.lengths[0])
        case = Case(batch, self.heads, length, self.head_dim, self.dtype, "scalar", self.mean_log_decay)
        inputs = random_inputs(case, device, seed)
        return {name: x[0] for name, x in inputs.items()} if self.packed else inputs

    def places(self, device: str) -> dict[str, Any]:
        """decay_attention_varlen's arguments that say where the sequences are."""
        ends = torch.tensor([0, *self.lengths]).cumsum(0).to(device, torch.int32)
        longest = max(self.lengths)
        return {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def attend(self, backend: str, device: str) -> Attend:
        """The call that is timed."""
        window_size = None if self.left < 0 else (self.left, 0)
        if not self.packed:
            return lambda q, k, v, log_decay: decay_attention(
                q, k, v, log_decay, window_size=window_size, skip_tolerance=None, backend=backend
            )
        places = self.places(device)
        return lambda q, k, v, log_decay: decay_attention_varlen(
            q, k, v, log_decay, window_size=window_size, skip_tolerance=None, backend=backend, **places
        )

    def verify(self, inputs: dict[str, Tensor], backend: str) -> list[Comparison]:
        """Three (sequence, head) pairs against the error budget, the longest and the shortest sequence among them."""
        by_length = sorted(range(len(self.lengths)), key=lambda n: self.lengths[n])
        judged = {(by_length[-1], 0), (by_length[0], self.heads - 1), (len(self.lengths) - 1, self.heads // 2)}
        options: dict[str, Any] = {
            "window_size": None if self.left < 0 else (self.left, 0), "grad_out": inputs["grad_out"],
            "skip_tolerance": None, "backend": backend, "heads": sorted(judged),
        }
        tensors = (inputs[name] for name in ("q", "k", "v", "log_decay"))
        if not self.packed:
            return verify_attention(*tensors, **options)
        return verify_attention_varlen(*tensors, **options, **self.places(inputs["q"].device.type))

    def prepare(self, inputs: dict[str, Tensor], backend: str, device: str) -> Prepared:
        """The call with its tensors, those that require gradients."""
        wanted = {name: inputs[name].detach().requires_grad_() for name in ("q", "k", "v", "log_decay")}
        return Prepared(self.attend(backend, device), wanted, wanted, inputs["grad_out"], "BTHD")


def visible_pairs(length: int, left: int = -1) -> int:
    """Pairs of query i and key j of a sequence with i − left ≤ j ≤ i; left −1 is no limit."""
    full = length if left < 0 else min(length, left + 1)  # rows that see everything up to themselves
    return full * (full + 1) // 2 + (length - full) * full


def document_lengths(count: int, shortest: int, longest: int, seed: int) -> tuple[int, ...]:
    """Random lengths, uniform in their logarithm, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    lengths = (math.log(shortest) + uniform * math.log(longest / shortest)).exp().round()
    return tuple(int(length) for length in lengths.clamp(shortest, longest))


def workloads(options: argparse.Namespace, head_dim: int) -> list[Workload]:
    """The dense call, the packed one beside a dense one of the same work, and the one with a window."""
    shape = (options.packed_heads, head_dim, options.dtype, options.mean_log_decay)
    dense = (options.packed_length,) * options.packed_batch
    documents = document_lengths(options.packed_documents, *options.packed_document_lengths, options.seed)
    length = round(sum(length**2 for length in documents) / sum(documents))
    alike = (length,) * max(1, round(sum(documents) / length))
    return [
        Workload(DENSE, dense, *shape),
        Workload("packed", documents, *shape, packed=True),
        Workload(ALIKE, alike, *shape),
        Workload("window", dense, *shape, left=options.packed_window),
    ]


def run(
    options: argparse.Namespace, device: str, timer: Callable[[Callable[[], object]], float] | None,
    report: dict[str, Any],
) -> None:
    """Check every workload, then time those that are right; without a timer the checks are all."""
    for head_dim in options.packed_head_dims:
        print(f"\npacked sequences and a sliding window, D {head_dim}", flush=True)
        chosen = {workload.name: workload for workload in workloads(options, head_dim)}
        prepared: dict[str, Prepared] = {}
        for name, workload in chosen.items():
            try:
                inputs = workload.inputs(device, options.seed)
                if passed(report, SECTION, str(workload), workload.verify(inputs, options.backend)):
                    prepared[name] = workload.prepare(inputs, options.backend, device)
            except Exception as error:  # the other workloads go on, and the run fails in the end
                missing(report, SECTION, str(workload), "failed", reason(error))
        if timer is None:
            continue
        timings, failed = time_rounds(prepared, options.rounds, timer)
        for name, why in failed.items():
            missing(report, SECTION, str(chosen[name]), "failed", why)
        found = rows(chosen, timings)
        report["packed"] += found
        print(table(found))


def rows(chosen: dict[str, Workload], timings: dict[tuple[str, str], Timing]) -> list[dict[str, Any]]:
    """One row per workload and direction; ratios compare TFLOP/s, above 1 is faster than the dense call."""

    def speed_of(name: str, direction: str) -> float | None:
        timing = timings.get((name, direction))
        return chosen[name].flops(direction) / timing.median / 1e9 if timing else None

    result = []
    for (name, direction), timing in timings.items():
        workload = chosen[name]
        flops = workload.flops(direction)
        ms, ms_range = spread(timing.rounds)
        speed = flops / ms / 1e9
        dense, alike = speed_of(DENSE, direction), speed_of(ALIKE, direction)
        result.append(
            {
                "workload": name, "case": str(workload), "direction": direction, "heads": workload.heads,
                "head_dim": workload.head_dim, "dtype": workload.dtype, "sequences": len(workload.lengths),
                "tokens": sum(workload.lengths), "left": workload.left, "flops": flops, "ms": ms, "ms_range": ms_range,
                "tflops": speed, "tflops_range": [flops / bound / 1e9 for bound in reversed(ms_range)],
                "ratio_to_dense": speed / dense if dense else None,
                "ratio_to_alike": speed / alike if alike and workload.packed else None,
            }
        )
    return result


def table(found: list[dict[str, Any]]) -> str:
    """A line per workload and direction."""
    lines = [f"  {'':22}{'ms':>10} {'[range]':>19} {'TFLOP/s':>8} {'/dense':>7} {'/alike':>7}"]
    for direction in DIRECTIONS:
        for row in found:
            if row["direction"] == direction:
                low, high = row["ms_range"]
                dense, alike = _ratio(row["ratio_to_dense"]), _ratio(row["ratio_to_alike"])
                where, ms_range = f"{row['workload']} {direction}", f"[{low:.3f}–{high:.3f}]"
                lines.append(f"  {where:22}{row['ms']:10.3f} {ms_range:>19} {row['tflops']:8.1f} {dense:>7} {alike:>7}")
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
