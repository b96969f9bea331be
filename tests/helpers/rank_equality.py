"""Sequences over several ranks and on one process: every kind of call, in both modes."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.context import MODES
from benchmarks.harness import Case
from shared.ranks import whole_attention

from decayattn.testing import Comparison, verify_attention, verify_attention_varlen

CASES = ("none", "scalar", "scalar, strong", "constant", "resets", "window", "packed")


def equality(
    group: dist.ProcessGroup, length: int, heads: int, kv_heads: int, head_dim: int, dtype: str, backend: str, seed: int
) -> Iterator[tuple[str, str, list[Comparison]]]:
    """(mode, case, comparisons): out, lse and every gradient of a sequence over all ranks within the budget of one
    process."""
    device, ranks = "cuda" if torch.cuda.is_available() else "cpu", dist.get_world_size(group)
    lengths = [length // ranks] * (ranks - 1) + [length - length // ranks * (ranks - 1)]
    for case, mode in itertools.product(CASES, MODES):
        decay, mean = "none" if case == "none" else "scalar", -1.0 if case == "scalar, strong" else -0.02
        inputs = Case(1, heads, length, head_dim, dtype, decay, mean, kv_heads=kv_heads).inputs(device, seed)
        options: dict[str, Any] = {"backend": backend, "heads": [(0, 0), (0, heads - 1)]}
        if case == "constant":
            inputs["log_decay"] = torch.linspace(-0.5, 0.0, heads, device=device)
        elif case == "resets":  # three per head, on average
            inputs["log_decay"].masked_fill_(inputs["log_decay"] > -0.04 * 3 / length, -math.inf)
        elif case == "window":
            options["window_size"] = (length // 3, 0)
        elif case == "packed":
            third = length // 3
            offsets = torch.tensor([0, third, third, 2 * third + 5, length - 1], device=device, dtype=torch.int32)
            options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "heads": [(0, 0), (2, heads - 1), (3, 1)]}
            inputs = {name: x[0] for name, x in inputs.items()}
        verify = verify_attention_varlen if case == "packed" else verify_attention
        yield mode, case, verify(**inputs, attend=whole_attention(group, mode, lengths), **options)
