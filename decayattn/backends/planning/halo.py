"""The plan of a halo: which keys that come before all rows of a slice weigh enough to be fetched.

A slice is some of the tokens of a longer sequence. Of a row i of slice r and a key j of a slice s before it, with a the
sum of λ within a slice, A its total, and the bound of skipping.py:

    log P_ij ≤ u_i |k_j| + e_i + (A_s + … + A_{r−1}) − a_j            u_i = |s_i| |q_i|     e_i = a_i − s_i q_i·k_i

All that concerns the row is known in its slice, its own key included. Of the keys, K and W per block and the sums of λ
are enough. α leaves out the first λ of a slice: it acts between the slices, and is exchanged beside the sum of others.

The host waits for this plan, so it is few launches: behind skipping.summaries one for what a slice exchanges, and then
two for what a rank fetches.
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
    MOST_TOGETHER,
    ROWS,
    first_visited,
)
from decayattn.backends.runtime import launching
from decayattn.backends.runtime.arguments import strided
from decayattn.backends.runtime.integers import cdiv
from decayattn.backends.runtime.launching import COMPILER_OPTIONS, Launch
from decayattn.backends.tiles.scores import RESET_BELOW, base2_log_decay
from decayattn.problem import GRANULE, AttentionProblem


class KeySummary(NamedTuple):
    """What other slices need to know of a slice's keys; float64, in base 2.

    Blocks count from the slice's first token, and those behind its last one have no key. Slices exchange the fields one
    behind the other, as `_join` reads them.
    """

    longest: Tensor  # (B, H_kv, blocks): K, 0 where there is no key
    weight: Tensor  # (B, H, blocks): W, −inf where there is no key
    total: Tensor  # (B, H): α of the last token, and what β may be too small by
    first: Tensor  # (B, H): the first token's λ, 0 for a reset
    last_reset: Tensor  # (B, H): the last token whose λ resets, −1 without one; a constant rate has none

    def flat(self) -> Tensor:
        return torch.cat([x.reshape(-1) for x in self])

    @staticmethod
    def last_resets(everyone: Tensor, problem: AttentionProblem) -> Tensor:
        """(ranks, B, H), of what `flat` gave on every rank, (ranks, ·)."""
        heads = (problem.batch, problem.num_heads)
        return everyone[:, everyone.shape[1] - math.prod(heads) :].unflatten(1, heads)


class RowSummary(NamedTuple):
    """What a slice needs to know of its own rows."""

    granules: Tensor  # (B, H, granules, 2): U and E
    first_reset: Tensor  # (B, H) int64: the first token whose λ resets, or the number of tokens


class SliceSummary(NamedTuple):
    """What the plan knows of a slice."""

    keys: KeySummary
    rows: RowSummary
    blocks: Tensor  # (B, H, its own blocks, 2): K and W

    @property
    def terms(self) -> tuple[Tensor, Tensor]:
        """skipping.summaries of the slice."""
        return self.blocks, self.rows.granules


def launch_for(problem: AttentionProblem, blocks: int, rank: int, *tensors: Tensor | None) -> Launch:
    """The launch for the slice's summary and search; the tensors are the caller's."""
    return launching.of_call(problem.device, tensors, problem, blocks, rank)


def summarise(
    problem: AttentionProblem, q: Tensor, k: Tensor, log_decay: Tensor, scale: Tensor | float, blocks: int,
    launch: Launch = launching.uncached,
) -> SliceSummary:
    """A slice's keys, in at least as many blocks as there are, and its rows.

    problem is the slice on its own: dense, causal, with as many rows as keys.
    """
    heads, length = (problem.batch, problem.num_heads), problem.query_length
    if problem.decay == "scalar" and not problem.is_empty:
        prefix = decay_prefix.build(problem, log_decay, launch=launch)
    else:
        prefix = decay_prefix.allocate(problem, q)
    granules = cdiv(length, GRANULE)
    if problem.is_empty:
        of_blocks, of_granules = (q.new_empty(*heads, 0, 2, dtype=torch.float64) for _ in range(2))
    else:
        of_blocks, of_granules = skipping.summaries(
            problem, q, k, log_decay, scale, prefix, None, granules, False, launch
        )
    longest = q.new_empty(problem.batch, problem.num_kv_heads, blocks, dtype=torch.float64)
    weight = q.new_empty(*heads, blocks, dtype=torch.float64)
    of_heads = q.new_empty(3, *heads, dtype=torch.float64)
    first_reset = q.new_empty(heads, dtype=torch.int64)
    if first_reset.numel():
        group = problem.num_heads // problem.num_kv_heads
        launch(
            _complete, first_reset.numel(),
            of_blocks, prefix, strided(log_decay), longest, weight, of_heads, first_reset, of_blocks.shape[2], blocks,
            length, problem.num_heads, GROUP=group, DECAY=problem.decay, CHUNK=CHUNK, num_warps=1, **COMPILER_OPTIONS,
        )
    return SliceSummary(KeySummary(longest, weight, *of_heads), RowSummary(of_granules, first_reset), of_blocks)


def find_first_blocks(
    problem: AttentionProblem, everyone: Tensor, blocks: int, rank: int, of_granules: Tensor, begin: Tensor,
    rows: Tensor, tolerance: float, launch: Launch = launching.uncached,
) -> tuple[Tensor, Tensor]:
    """(B, H) int64: the first block that a rank has to fetch of those of the ranks before it, counted from the first
    rank's first one, their number where it needs none; and (B, H) int64: the rows from this one on need none.

    Args:
        everyone: what KeySummary.flat gave on every rank, (ranks, ·), contiguous.
        blocks: of every rank.
        of_granules: the rank's.
        begin: (B, H) int64, the first block of which a row sees a key.
        rows: (B, H) int64: the rows from this one on see nothing before their slice.
        tolerance: the probability that what is not fetched has in any row, at most.
    """
    batch, heads, granules = problem.batch, problem.num_heads, of_granules.shape[2]
    of_blocks = begin.new_empty(batch, heads, rank * blocks, 2, dtype=torch.float64)
    first_block = begin.new_empty(batch, heads)
    needed = torch.empty_like(first_block)
    if batch * heads:
        launch(
            _join, batch * heads,
            everyone, everyone.shape[1], of_blocks, first_block, needed, rank, blocks, batch * heads,
            GROUP=heads // problem.num_kv_heads, CHUNK=CHUNK, num_warps=1, **COMPILER_OPTIONS,
        )
    together = skipping.programs_together(batch * heads * granules, MOST_TOGETHER)
    programs = batch * heads * cdiv(granules, together)
    if programs and blocks:
        launch(
            _find_first_fetched, programs,
            of_blocks, of_granules, begin, rows, first_block, needed, math.log2(tolerance), rank * blocks, granules,
            CHUNK=CHUNK, TOGETHER=together, num_warps=1, **COMPILER_OPTIONS,
        )
    return first_block, needed


@triton.jit
def _complete(
    of_blocks, prefix, log_decay, longest, weight, of_heads, first_reset, own_blocks, blocks, length, heads,
    GROUP: tl.constexpr, DECAY: tl.constexpr, CHUNK: tl.constexpr,
):
    """A head's part of KeySummary and of RowSummary; blocks from own_blocks on have no key."""
    head = tl.program_id(0).to(tl.int64)  # of all batch entries
    for chunk in range(0, blocks, CHUNK):
        block = chunk + tl.arange(0, CHUNK)
        terms = of_blocks + 2 * (head * own_blocks + block)
        of_keys = tl.load(terms, mask=block < own_blocks, other=0.0)
        growth = tl.load(terms + 1, mask=block < own_blocks, other=float("-inf"))
        if head % GROUP == 0:
            tl.store(longest + head // GROUP * blocks + block, of_keys, mask=block < blocks)
        tl.store(weight + head * blocks + block, growth, mask=block < blocks)
    there, last = length > 0, length - 1
    strides = log_decay.strides
    if DECAY == "scalar":
        entry = head // heads
        first = tl.load(log_decay.data + entry * strides[0] + head % heads * strides[2], mask=there, other=0.0)
        begins_anew = first < RESET_BELOW
        beta = tl.load(prefix.beta + head * length + last, mask=there, other=0.0).to(tl.float64)
        total = tl.load(prefix.base + head * own_blocks + own_blocks - 1, mask=there, other=0.0) + beta
        total += tl.abs(beta) * BETA_MARGIN
        # the prefix has 0 for a reset of the first token, and where there is none
        last_reset = tl.load(prefix.last_reset + head * length + last, mask=there, other=0)
        last_reset = tl.where((last_reset > 0) | begins_anew, last_reset, -1)
        next_reset = tl.load(prefix.next_reset + head * length, mask=there, other=0)
        next_reset = tl.where(begins_anew, 0, next_reset)
    else:
        first = tl.load(log_decay.data + head % heads * strides[0], mask=there, other=0.0)
        total = base2_log_decay(first, tl.float64) * last
        last_reset, next_reset = -1, length
    count = tl.num_programs(0)
    tl.store(of_heads + head, total)
    tl.store(of_heads + count + head, base2_log_decay(first, tl.float64))
    tl.store(of_heads + 2 * count + head, last_reset)
    tl.store(first_reset + head, next_reset)


@triton.jit
def _join(
    everyone, stride, of_blocks, first_block, needed, rank, blocks, heads, GROUP: tl.constexpr, CHUNK: tl.constexpr
):
    """K and W of a head in all slices before a rank's, W counted from its first row; and that no row needs a key."""
    head = tl.program_id(0).to(tl.int64)  # of all batch entries
    # as KeySummary lists them; pointers of their own need not be aligned
    longest = everyone + head // GROUP * blocks
    weight = everyone + heads // GROUP * blocks + head * blocks
    total = everyone + heads // GROUP * blocks + heads * blocks + head
    first = total + heads
    own, behind = of_blocks + 2 * head * rank * blocks, tl.full([], 0.0, tl.float64)
    for after in range(0, rank):
        slice_ = rank - 1 - after
        at = tl.cast(slice_, tl.int64) * stride
        of_slice, step = tl.load(total + at), tl.load(first + at + stride)
        # of the keys of a slice: to the first row
        behind += of_slice + step + (tl.abs(of_slice) + tl.abs(step)) * ALPHA_MARGIN
        for chunk in range(0, blocks, CHUNK):
            block = chunk + tl.arange(0, CHUNK)
            inside = block < blocks
            of_keys = tl.load(longest + at + block, mask=inside)
            growth = tl.load(weight + at + block, mask=inside)
            terms = own + 2 * (slice_ * blocks + block)
            tl.store(terms, of_keys, mask=inside)
            tl.store(terms + 1, growth + behind, mask=inside)
    tl.store(first_block + head, rank * blocks)
    tl.store(needed + head, 0)


@triton.jit
def _find_first_fetched(
    of_blocks, of_granules, begins, rows, first_block, needed, log_tolerance: tl.float64, blocks, granules,
    CHUNK: tl.constexpr, TOGETHER: tl.constexpr,
):
    """Of the blocks that TOGETHER granules of a head visit, the first one, and of the granules that visit one, the end
    of the last one. All of their rows come after all blocks."""
    programs = tl.cdiv(granules, TOGETHER)
    head = (tl.program_id(0) // programs).to(tl.int64)  # of all batch entries
    # granules past the end repeat the last one
    granule = tl.minimum(tl.program_id(0) % programs * TOGETHER + tl.arange(0, TOGETHER), granules - 1)
    rows_of_head = tl.load(rows + head)
    begin = tl.where(granule * ROWS < rows_of_head, tl.load(begins + head).to(tl.int32), blocks)
    found = first_visited(
        of_granules + 2 * head * granules, granule, log_tolerance, of_blocks + 2 * head * blocks, begin,
        granule * 0 + blocks, CHUNK, TOGETHER,
    )
    end = tl.max(tl.where(found < blocks, (granule + 1) * ROWS, 0), 0).to(tl.int64)
    tl.atomic_min(first_block + head, tl.min(found, 0).to(tl.int64), sem="relaxed")
    tl.atomic_max(needed + head, tl.minimum(end, rows_of_head), sem="relaxed")
