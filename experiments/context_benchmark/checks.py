"""Right before fast: several ranks against the error budget, and against one GPU."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from shared.cases import DTYPES
from torch import Tensor

from context_benchmark.whole import whole_attention
from decayattn.testing import Comparison, verify_attention, verify_attention_varlen

MODES = ("halo", "heads")
CASES = ("none", "scalar", "scalar, strong", "constant", "resets", "window", "packed")


def equality(
    group: dist.ProcessGroup, length: int, heads: int, kv_heads: int, head_dim: int, dtype: str, backend: str, seed: int
) -> Iterator[tuple[str, str, list[Comparison]]]:
    """(mode, case, comparisons): out, lse and every gradient of a sequence over all ranks within the budget of one
    process."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    ranks = dist.get_world_size(group)
    for case in CASES:
        for mode in MODES:
            generator = torch.Generator(device).manual_seed(seed)
            q, k, v = (
                torch.randn(1, length, number, head_dim, generator=generator, device=device).to(DTYPES[dtype])
                for number in (heads, kv_heads, kv_heads)
            )
            uniform = torch.rand(1, length, heads, generator=generator, device=device)
            log_decay: Tensor | None = -2 * uniform * (1.0 if case == "scalar, strong" else 0.02)
            options: dict[str, Any] = {}
            if case == "none":
                log_decay = None
            elif case == "constant":
                log_decay = torch.linspace(-0.5, 0.0, heads, device=device)
            elif case == "resets":
                log_decay = log_decay.masked_fill(uniform < 3 / length, -math.inf)
            elif case == "window":
                options["window_size"] = (length // 3, 0)
            lengths = [length // ranks] * (ranks - 1)
            attend = whole_attention(group, mode, [*lengths, length - sum(lengths)])
            given = {"backend": backend, "attend": attend, "heads": [(0, 0), (0, heads - 1)], **options}
            if case == "packed":
                third = length // 3
                offsets = torch.tensor([0, third, third, 2 * third + 5, length - 1], device=device, dtype=torch.int32)
                given["heads"] = [(0, 0), (2, heads - 1), (3, 1)]
                found = verify_attention_varlen(
                    q[0], k[0], v[0], log_decay[0], cu_seqlens_q=offsets, cu_seqlens_k=offsets, **given
                )
            else:
                found = verify_attention(q, k, v, log_decay, **given)
            yield mode, case, found


def table(results: list[tuple[str, str, list[Comparison]]]) -> str:
    """A line per mode and case: every tensor's error over its budget."""
    lines = [f"  {'error / budget':22}"]
    for mode, case, comparisons in results:
        errors = "  ".join(
            f"{c.name} {c.error / c.budget if c.budget else math.nan:.2f}{'' if c.passed else ' ' + c.verdict.upper()}"
            for c in comparisons
        )
        lines.append(f"  {mode:6}{case:16}{errors}")
    return "\n".join(lines)


def differences(found: dict[str, Tensor], expected: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, float]:
    """‖x − one GPU's‖ / ‖one GPU's‖ of the tensors, over the parts of all ranks."""
    result = {}
    for name, x in found.items():
        theirs = expected[name].float()
        squares = torch.stack([(x.float() - theirs).square().sum(), theirs.square().sum()]).double()
        if x.ndim > 1:  # what all ranks share was added up already
            dist.all_reduce(squares, group=group)
        result[name] = math.sqrt(float(squares[0]) / max(float(squares[1]), 1e-300))
    return result


def objection(errors: dict[str, float], dtype: str) -> str | None:
    """Both results are within eps of the truth, or nearly: they may differ by 2 eps of their dtype, and in float32 by
    what sums that cancel, as those of dλ, lose in any order."""
    allowed = 2 * max(torch.finfo(DTYPES[dtype]).eps, 16 * torch.finfo(torch.float32).eps)
    wrong = [f"{name} by {error:.1e}" for name, error in errors.items() if not error <= allowed]
    return f"differs from one GPU alone: {', '.join(wrong)}" if wrong else None
