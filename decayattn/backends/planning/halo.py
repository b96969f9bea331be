"""The plan of a halo: which keys that come before all rows of a slice weigh enough to be fetched.

A slice is some of the tokens of a longer sequence. Of a row i of slice r and a key j of a slice s before it, with a the
sum of λ within a slice, A its total, and the bound of skipping.py:

    log P_ij ≤ u_i |k_j| + e_i + (A_s + … + A_{r−1}) − a_j            u_i = |s_i| |q_i|     e_i = a_i − s_i q_i·k_i

All that concerns the row is known in its slice, its own key included. Of the keys, K and W per block and the sums of λ
are enough. α leaves out the first λ of a slice: it acts between the slices, and is exchanged beside the sum of others.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decayattn.backends.planning import prefix as decay_prefix
from decayattn.backends.planning import skipping
from decayattn.backends.planning.skipping import (
    ALPHA_MARGIN,
    BETA_MARGIN,
    CHUNK,
    GRANULE,
    MOST_TOGETHER,
    ROWS,
    first_visited,
)
from decayattn.backends.runtime import launching
from decayattn.backends.runtime.integers import cdiv
from decayattn.backends.runtime.launching import COMPILER_OPTIONS
from decayattn.backends.tiles.scores import LOG2E
from decayattn.problem import AttentionProblem, is_reset

_LOG2E = float(LOG2E.value)
_ALPHA_MARGIN, _BETA_MARGIN = float(ALPHA_MARGIN.value), float(BETA_MARGIN.value)


class KeySummary(NamedTuple):
    """What other slices need to know of a slice's keys; float64, in base 2.

    Blocks count from the slice's first token, and those behind its last one have no key. Gathered from all slices, each
    has their number as its first dimension.
    """

    longest: Tensor  # (B, H_kv, blocks): K
    weight: Tensor  # (B, H, blocks): W, −inf where there is no key
    total: Tensor  # (B, H): α of the last token, and what β may be too small by
    first: Tensor  # (B, H): the first token's λ, 0 for a reset
    last_reset: Tensor  # (B, H): the last token whose λ resets, −1 without one; a constant rate has none

    def flat(self) -> Tensor:
        return torch.cat([x.reshape(-1) for x in self])

    @classmethod
    def gathered(cls, flat: Tensor, problem: AttentionProblem, blocks: int) -> "KeySummary":
        """Of what `flat` gave on every rank, (ranks, ·)."""
        heads = (problem.batch, problem.num_heads)
        shapes = (problem.batch, problem.num_kv_heads, blocks), (*heads, blocks), heads, heads, heads
        parts = flat.split([math.prod(shape) for shape in shapes], 1)
        return cls(*(x.unflatten(1, shape) for x, shape in zip(parts, shapes, strict=True)))


class RowSummary(NamedTuple):
    """What a slice needs to know of its own rows."""

    granules: Tensor  # (B, H, granules, 2): U and E
    first_reset: Tensor  # (B, H) int64: the first token whose λ resets, or the number of tokens


def summarise(
    problem: AttentionProblem, q: Tensor, k: Tensor, log_decay: Tensor, scale: Tensor | float, blocks: int
) -> tuple[KeySummary, RowSummary]:
    """A slice's keys, in at least as many blocks as there are, and its rows.

    problem is the slice on its own: dense, causal, with as many rows as keys.
    """
    heads, length = (problem.batch, problem.num_heads), problem.query_length
    group = problem.num_heads // problem.num_kv_heads
    longest = q.new_zeros(problem.batch, problem.num_kv_heads, blocks, dtype=torch.float64)
    weight = torch.full((*heads, blocks), -math.inf, dtype=torch.float64, device=q.device)
    nothing = q.new_zeros(heads, dtype=torch.float64)
    never = torch.full(heads, length, device=q.device)
    if problem.is_empty:
        no_rows = RowSummary(q.new_empty(*heads, 0, 2, dtype=torch.float64), never)
        return KeySummary(longest, weight, nothing, nothing, nothing - 1), no_rows
    scalar = problem.decay == "scalar"
    prefix = decay_prefix.build(problem, log_decay) if scalar else decay_prefix.allocate(problem, q)
    granules = cdiv(length, GRANULE)
    of_blocks, of_granules = skipping.summaries(
        problem, q, k, log_decay, scale, prefix, None, granules, False, launching.uncached
    )
    there = of_blocks.shape[2]
    longest[..., :there] = of_blocks[:, ::group, :, 0]
    weight[..., :there] = of_blocks[..., 1]
    if scalar:
        beta = prefix.beta[..., -1].double()
        total = prefix.base[..., -1] + beta
        slack = beta.abs() * _BETA_MARGIN
        begins_anew = is_reset(log_decay[:, 0])
        first = torch.where(begins_anew, 0.0, log_decay[:, 0].double() * _LOG2E)
        # the prefix has 0 for a reset of the first token, and where there is none
        last_reset = prefix.last_reset[..., -1].double()
        last_reset = torch.where((last_reset > 0) | begins_anew, last_reset, -1.0)
        first_reset = torch.where(begins_anew, 0, prefix.next_reset[..., 0]).long()
    else:
        first = (log_decay.double() * _LOG2E).expand(heads)
        total, slack, last_reset, first_reset = first * (length - 1), nothing, nothing - 1, never
    return KeySummary(longest, weight, total + slack, first, last_reset), RowSummary(of_granules, first_reset)


def find_first_blocks(
    keys: KeySummary, rank: int, of_granules: Tensor, begin: Tensor, rows: Tensor, tolerance: float
) -> tuple[Tensor, Tensor]:
    """(B, H) int64: the first block that a rank has to fetch of those of the ranks before it, counted from the first
    rank's first one, their number where it needs none; and (B, H) int64: the rows from this one on need none.

    Args:
        keys: of all ranks.
        of_granules: the rank's.
        begin: (B, H), the first block of which a row sees a key.
        rows: (B, H): the rows from this one on see nothing before their slice.
        tolerance: the probability that what is not fetched has in any row, at most.
    """
    steps = keys.total[:rank] + keys.first[1 : rank + 1]
    steps = steps + (keys.total[:rank].abs() + keys.first[1 : rank + 1].abs()) * _ALPHA_MARGIN
    behind = steps.flip(0).cumsum(0).flip(0)  # of the keys of a slice: to the first row
    weight = (keys.weight[:rank] + behind[..., None]).permute(1, 2, 0, 3).flatten(2)
    group = weight.shape[1] // max(1, keys.longest.shape[2])
    longest = keys.longest[:rank].permute(1, 2, 0, 3).flatten(2).repeat_interleave(group, 1)
    of_blocks = torch.stack([longest, weight], -1)
    (batch, heads, blocks), granules = weight.shape, of_granules.shape[2]
    # a granule more: none may be there
    first_block = torch.full((batch, heads, granules + 1), blocks, dtype=torch.int32, device=weight.device)
    together = skipping.programs_together(batch * heads * granules, MOST_TOGETHER)
    programs = batch * heads * cdiv(granules, together)
    if programs and blocks:
        launching.uncached(
            _find_first_fetched, programs,
            of_blocks, of_granules, begin.int().contiguous(), rows.int().contiguous(), first_block,
            math.log2(tolerance), blocks, granules, CHUNK=CHUNK, TOGETHER=together, num_warps=1, **COMPILER_OPTIONS,
        )
    behind_granule = torch.arange(GRANULE, GRANULE * (granules + 2), GRANULE, device=weight.device)
    needed = torch.where(first_block < blocks, behind_granule, 0).amax(-1)
    return first_block.amin(-1).long(), torch.minimum(needed, rows)


@triton.jit
def _find_first_fetched(
    of_blocks, of_granules, begins, rows, first_block, log_tolerance: tl.float64, blocks, granules,
    CHUNK: tl.constexpr, TOGETHER: tl.constexpr,
):
    """The first blocks that TOGETHER granules of a head visit, all of whose rows come after all blocks."""
    programs = tl.cdiv(granules, TOGETHER)
    head = (tl.program_id(0) // programs).to(tl.int64)  # of all batch entries
    # granules past the end repeat the last one
    granule = tl.minimum(tl.program_id(0) % programs * TOGETHER + tl.arange(0, TOGETHER), granules - 1)
    begin = tl.where(granule * ROWS < tl.load(rows + head), tl.load(begins + head), blocks)
    found = first_visited(
        of_granules + 2 * head * granules, granule, log_tolerance, of_blocks + 2 * head * blocks, begin,
        granule * 0 + blocks, CHUNK, TOGETHER,
    )
    tl.store(first_block + head * (granules + 1) + granule, found)
