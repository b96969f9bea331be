"""The plan of a halo: the keys before all rows of a slice that weigh enough to be fetched.

A slice is a part of the tokens of a longer sequence. Take a row i of slice r and a key j of an earlier slice s. Let a
be the sum of λ within a slice and A its total. The bound of skipping.py is then::

    log P_ij ≤ u_i |k_j| + e_i + (A_s + … + A_{r−1}) − a_j            u_i = |s_i| |q_i|     e_i = a_i − s_i q_i·k_i

The row's slice knows all terms of the row, its own key included. Of the keys, K and W per block and the sums of λ are
enough. a leaves out the first λ of a slice: it acts between the slices, and ranks exchange it with the sum of the
others.

The host synchronises to read this plan, so it uses few launches: after skipping.summaries, one for the data that slices
exchange and two for the keys that a rank fetches.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decayattn.backends.planning import prefix as decay_prefix
from decayattn.backends.planning import skipping
from decayattn.backends.planning.skipping import ALPHA_MARGIN, BETA_MARGIN, CHUNK, MOST_TOGETHER, first_visited
from decayattn.backends.runtime import launching
from decayattn.backends.runtime.integers import cdiv
from decayattn.backends.runtime.launching import Launch
from decayattn.backends.runtime.strided import strided
from decayattn.backends.tiles.decay import DECAY_BLOCK
from decayattn.backends.tiles.scores import RESET_BELOW, base2_log_decay
from decayattn.backends.tiles.visibility import GRANULE
from decayattn.problem import DECAY_BLOCK as _DECAY_BLOCK
from decayattn.problem import GRANULE as _GRANULE
from decayattn.problem import AttentionProblem


class Place(NamedTuple):
    """Position of a slice in the whole sequence, and the limits of its rows' view other than decay and resets."""

    lengths: tuple[int, ...]  # of all ranks' slices
    rank: int
    offsets: Tensor  # (ranks + 1,) int64: starts of the slices, and the end of the last one
    lowest: int  # no row sees a token before this one of the whole sequence
    rows: int  # the rows from this one on see nothing before their slice
    sequence: Tensor | None  # (2,) int64, packed: start and end of the sequence with the slice's first token

    @property
    def blocks(self) -> int:
        """Blocks of the longest slice; every slice is given as many."""
        return cdiv(max(self.lengths), _DECAY_BLOCK)


class SliceSummary(NamedTuple):
    """Data of a slice that the plan reads."""

    # Float64, flat, the same layout for all slices, in base 2:
    #   (B, H_kv, blocks) K, 0 without a key; (B, H, blocks) W, −inf without a key
    #   (B, H) α of the last token plus the error bound of β; (B, H) the first token's λ, 0 for a reset
    #   (B, H) index of the last token with a reset, −1 without one or for a constant rate
    # Blocks count from the slice's first token; those after its last token have no key
    keys: Tensor
    first_reset: Tensor  # (B, H) int64: the first token with a reset, or the number of tokens
    terms: tuple[Tensor, Tensor]  # skipping.summaries of the slice


def summarise(
    problem: AttentionProblem, q: Tensor, k: Tensor, log_decay: Tensor, scale: Tensor | float, blocks: int,
    launch: Launch = launching.uncached,
) -> SliceSummary:
    """Summarise the rows of a slice alone (dense, causal), and its keys in `blocks` blocks, no fewer than it has."""
    heads, length = problem.batch * problem.num_heads, problem.query_length
    with launching.on_device(problem.device):
        if problem.decay == "scalar" and not problem.is_empty:
            prefix = decay_prefix.build(problem, log_decay, launch=launch)
        else:
            prefix = decay_prefix.allocate(problem, q)
        granules = cdiv(length, _GRANULE)
        terms = skipping.summaries(problem, q, k, log_decay, scale, prefix, None, granules, False, launch)
        group = problem.num_heads // problem.num_kv_heads
        keys = q.new_empty((heads // group + heads) * blocks + 3 * heads, dtype=torch.float64)
        first_reset = q.new_empty(problem.batch, problem.num_heads, dtype=torch.int64)
        if heads:
            launch(
                _complete, heads,
                terms[0], prefix, strided(log_decay), keys, first_reset, terms[0].shape[2], blocks, length,
                problem.num_heads, GROUP=group, DECAY=problem.decay, CHUNK=CHUNK, num_warps=1,
            )
    return SliceSummary(keys, first_reset, terms)


def first_keys(
    problem: AttentionProblem, place: Place, everyone: Tensor, summary: SliceSummary, tolerance: float,
    launch: Launch = launching.uncached,
) -> Tensor:
    """First tokens to fetch, for a rank that has others before it; flat int64.

    For every (B, H_kv), the first token to fetch on the axis of all slices, or the rank's own first one if it needs
    none. Then one number of rows: the rows from it on see nothing before their slice.

    Args:
        everyone: SliceSummary.keys of every rank, (ranks, ·), contiguous.
        summary: the rank's own.
        tolerance: upper bound on the probability that the keys not fetched have in any row.
    """
    rank, blocks, heads = place.rank, place.blocks, problem.batch * problem.num_heads
    _, of_granules = summary.terms
    granules, group = of_granules.shape[2], problem.num_heads // problem.num_kv_heads
    with launching.on_device(problem.device):
        of_blocks = everyone.new_empty(heads, rank * blocks, 2)
        limits = everyone.new_empty(heads, 3, dtype=torch.int64)
        found = everyone.new_empty(heads // group + 1, dtype=torch.int64)
        launch(
            _join, heads,
            everyone, everyone.shape[1], place.offsets, summary.first_reset, place.sequence, place.lowest, place.rows,
            of_blocks, limits, found, rank, blocks, heads, GROUP=group, CHUNK=CHUNK, num_warps=1,
        )
        together = skipping.programs_together(heads * granules, MOST_TOGETHER)
        if granules:
            launch(
                _find_first_fetched, heads * cdiv(granules, together),
                of_blocks, of_granules, limits, place.offsets, found, math.log2(tolerance), rank, blocks, granules,
                heads, GROUP=group, CHUNK=CHUNK, TOGETHER=together, num_warps=1,
            )
    return found


@triton.jit
def _of_head(keys, head, heads, blocks, GROUP: tl.constexpr):
    """Pointers, maybe unaligned, to K and W of a head in SliceSummary.keys, and to its three values, `heads` apart."""
    weight = keys + heads // GROUP * blocks
    return keys + head // GROUP * blocks, weight + head * blocks, weight + heads * blocks + head


@triton.jit
def _complete(
    of_blocks, prefix, log_decay, keys, first_reset, own_blocks, blocks, length, heads,
    GROUP: tl.constexpr, DECAY: tl.constexpr, CHUNK: tl.constexpr,
):
    """Write a head's part of SliceSummary; blocks from own_blocks on have no key."""
    head, count = tl.program_id(0).to(tl.int64), tl.num_programs(0)  # of all batch entries
    longest, weight, of_head = _of_head(keys, head, count, blocks, GROUP)
    for chunk in range(0, blocks, CHUNK):
        block = chunk + tl.arange(0, CHUNK)
        terms = of_blocks + 2 * (head * own_blocks + block)
        of_keys = tl.load(terms, mask=block < own_blocks, other=0.0)
        growth = tl.load(terms + 1, mask=block < own_blocks, other=float("-inf"))
        if head % GROUP == 0:
            tl.store(longest + block, of_keys, mask=block < blocks)
        tl.store(weight + block, growth, mask=block < blocks)
    there, last = length > 0, length - 1
    strides = log_decay.strides
    if DECAY == "scalar":
        entry = head // heads
        first = tl.load(log_decay.data + entry * strides[0] + head % heads * strides[2], mask=there, other=0.0)
        begins_anew = first < RESET_BELOW
        beta = tl.load(prefix.beta + head * length + last, mask=there, other=0.0).to(tl.float64)
        total = tl.load(prefix.base + head * own_blocks + own_blocks - 1, mask=there, other=0.0) + beta
        total += tl.abs(beta) * BETA_MARGIN
        # the prefix stores 0 both for a reset of the first token and for no reset
        last_reset = tl.load(prefix.last_reset + head * length + last, mask=there, other=0)
        last_reset = tl.where((last_reset > 0) | begins_anew, last_reset, -1)
        next_reset = tl.load(prefix.next_reset + head * length, mask=there, other=0)
        next_reset = tl.where(begins_anew, 0, next_reset)
    else:
        first = tl.load(log_decay.data + head % heads * strides[0], mask=there, other=0.0)
        total = base2_log_decay(first, tl.float64) * last
        # a rate that resets leaves each row its own key
        last_reset, next_reset = -1, tl.where(first < RESET_BELOW, 0, length)
    tl.store(of_head, total)
    tl.store(of_head + count, base2_log_decay(first, tl.float64))
    tl.store(of_head + 2 * count, last_reset)
    tl.store(first_reset + head, next_reset)


@triton.jit
def _join(
    everyone, stride, offsets, first_reset, sequence, lowest, rows, of_blocks, limits, found, rank, blocks, heads,
    GROUP: tl.constexpr, CHUNK: tl.constexpr,
):
    """Collect K and W of a head in all slices before a rank's, W relative to the rank's first row.

    Also writes the limits of its rows' view of them: the first token, the number of rows that see one, and the first
    token's block. Initialises the search's results to "nothing found".
    """
    head = tl.program_id(0).to(tl.int64)  # of all batch entries
    longest, weight, of_head = _of_head(everyone, head, heads, blocks, GROUP)
    begin = tl.load(offsets + rank)
    rows = tl.minimum(rows, tl.load(first_reset + head))
    first = tl.full([], 0, tl.int64) + lowest
    own, behind = of_blocks + 2 * head * rank * blocks, tl.full([], 0.0, tl.float64)
    for after in range(0, rank):
        slice_ = rank - 1 - after
        at = tl.cast(slice_, tl.int64) * stride
        of_slice, step = tl.load(of_head + at), tl.load(of_head + heads + at + stride)
        last_reset = tl.load(of_head + 2 * heads + at).to(tl.int64)
        first = tl.maximum(first, tl.where(last_reset < 0, 0, last_reset + tl.load(offsets + slice_)))
        # the decay from the slice's keys to the rank's first row
        behind += of_slice + step + (tl.abs(of_slice) + tl.abs(step)) * ALPHA_MARGIN
        for chunk in range(0, blocks, CHUNK):
            block = chunk + tl.arange(0, CHUNK)
            inside = block < blocks
            of_keys = tl.load(longest + at + block, mask=inside)
            growth = tl.load(weight + at + block, mask=inside)
            terms = own + 2 * (slice_ * blocks + block)
            tl.store(terms, of_keys, mask=inside)
            tl.store(terms + 1, growth + behind, mask=inside)
    if sequence is not None:
        first, rows = tl.maximum(first, tl.load(sequence)), tl.minimum(rows, tl.load(sequence + 1) - begin)
    first = tl.minimum(tl.where(rows > 0, first, begin), begin)
    # slices may be empty: a token belongs to the last slice that begins at or before it
    slice_ = 0
    for other in range(1, rank + 1):
        slice_ = tl.where(tl.load(offsets + other) <= first, other, slice_)
    limits += 3 * head
    tl.store(limits, first)
    tl.store(limits + 1, tl.where(first < begin, rows, 0))
    tl.store(limits + 2, slice_ * blocks + (first - tl.load(offsets + slice_)) // DECAY_BLOCK)
    if head % GROUP == 0:
        tl.store(found + head // GROUP, begin)
    if head == 0:
        tl.store(found + heads // GROUP, 0)


@triton.jit
def _find_first_fetched(
    of_blocks, of_granules, limits, offsets, found, log_tolerance: tl.float64, rank, blocks, granules, heads,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, TOGETHER: tl.constexpr,
):
    """Find the first block, of those before a slice, that TOGETHER granules visit, and the last visitor's end."""
    programs = tl.cdiv(granules, TOGETHER)
    head = (tl.program_id(0) // programs).to(tl.int64)  # of all batch entries
    # granules past the end repeat the last one
    granule = tl.minimum(tl.program_id(0) % programs * TOGETHER + tl.arange(0, TOGETHER), granules - 1)
    first, rows = tl.load(limits + 3 * head), tl.load(limits + 3 * head + 1)
    end = rank * blocks
    begin = tl.where(granule * GRANULE < rows, tl.load(limits + 3 * head + 2).to(tl.int32), end)
    visited = first_visited(
        of_granules + 2 * head * granules, granule, log_tolerance, of_blocks + 2 * head * end, begin,
        granule * 0 + end, CHUNK, TOGETHER,
    )
    block = tl.min(visited, 0)
    if block < end:
        # blocks without a key begin at the end of their slice
        slice_ = block // blocks
        token = tl.load(offsets + slice_) + (block - slice_ * blocks).to(tl.int64) * DECAY_BLOCK
        token = tl.maximum(tl.minimum(token, tl.load(offsets + slice_ + 1)), first)
        tl.atomic_min(found + head // GROUP, token, sem="relaxed")
        needed = tl.max(tl.where(visited < end, (granule + 1) * GRANULE, 0), 0).to(tl.int64)
        tl.atomic_max(found + heads // GROUP, tl.minimum(needed, rows), sem="relaxed")
