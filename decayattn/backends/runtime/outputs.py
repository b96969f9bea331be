"""Outputs per row of a forward, for both backends."""

from typing import NamedTuple

import torch
from torch import Tensor

from decayattn.backends.runtime.strided import contiguous_like, uninitialised
from decayattn.problem import AttentionProblem, Precomputed, accumulator_dtype


class Outputs(NamedTuple):
    out: Tensor  # (B, T_q, H, D_v)
    row_lse2: Tensor  # (B, H, T_q): log-sum-exp of the tiles' scores, in base 2, for the backward
    lse: Tensor | None  # (B, H, T_q), if requested


# their values for rows that see no key
OF_NO_KEY = (0.0, torch.inf, -torch.inf)


def allocate(problem: AttentionProblem, q: Tensor, with_lse: bool, precomputed: Precomputed | None = None) -> Outputs:
    """Allocate the outputs, uninitialised; out is the given one, if there is one."""
    rows = problem.batch, problem.num_heads, problem.query_length
    row_lse2 = uninitialised(q, *rows, dtype=accumulator_dtype(problem.dtype))
    if precomputed is None:
        out = uninitialised(q, problem.batch, problem.query_length, problem.num_heads, problem.value_dim)
    else:
        out = precomputed.out
    return Outputs(out, row_lse2, contiguous_like(row_lse2) if with_lse else None)
