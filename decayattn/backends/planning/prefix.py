"""The two-level decay prefix and its reverse.

α_t = λ_0 + … + λ_t over a whole sequence cannot be stored in float32: at a million tokens of strong decay its spacing
exceeds a whole λ. Blocks of DECAY_BLOCK tokens store it in two levels: `base` (float64), α at the block's start, and
`beta` (β), the sum from there. Inside a tile the difference of two bases is one scalar. It is formed in float64 and
rounded once; or in float32 from the two halves of each base (SplitPrefix), which rounds large differences only.

A reset (λ < RESET_BELOW, −inf above all) acts through visibility: its λ counts as 0, and every token records its
segment, the last reset at or before it (0 without one) and the next one after it (T_k without one).

No block waits for another. One program scans all blocks of a short sequence. For longer ones, a block reads the sums
per block of a launch before it. The reverse does the same.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decayattn.backends.planning.sequences import (
    Sequences,
    constants,
    decay_blocks,
    fill_outside,
    offsets_of_head,
    programs,
    sequence_of_program,
    tile_of_program,
)
from decayattn.backends.runtime import launching
from decayattn.backends.runtime.dependent_launch import let_next_start
from decayattn.backends.runtime.integers import cdiv, next_power_of_2
from decayattn.backends.runtime.launching import Launch
from decayattn.backends.runtime.strided import contiguous_like, strided, uninitialised
from decayattn.backends.tiles.bf16_splits import SPLITS, in_splits
from decayattn.backends.tiles.scores import RESET_BELOW, base2_log_decay
from decayattn.problem import DECAY_BLOCK, AttentionProblem, DecayPrefix

_SPLITS: tl.constexpr = tl.constexpr(SPLITS)
# block sums that one step of a scan over them reads
_SCAN_CHUNK = 128
# largest number of tokens for which one program has a whole sequence, which saves a launch
_MOST_TOKENS = 2048
# one warp scans a block of tokens without synchronising with others; upper bound on the warps of a program
_MOST_WARPS = 4
# consecutive tokens of a lane, where a warp has a block
_LANE_TOKENS: tl.constexpr = tl.constexpr(DECAY_BLOCK // 32)
# λ of consecutive heads are adjacent in memory, and an L2 sector (32 bytes) holds this many in float32. The launch that
# sums blocks reads them together and transposes them, so that the scan reads without gaps.
_HEADS = 8


@triton.jit
def prefix_of_head(prefix, offsets):
    """Prefix of one head: pointers to its first token and block, at these offsets."""
    return DecayPrefix(
        prefix.beta + offsets.tokens, prefix.base + offsets.blocks,
        prefix.last_reset + offsets.tokens, prefix.next_reset + offsets.tokens,
    )


class SplitPrefix(NamedTuple):
    """The prefix in values that products and float32 arithmetic add exactly; the Hopper forward reads it.

    float64 instructions in that kernel would wait until concurrent matrix products have left the pipe.
    """

    beta: Tensor  # (B, H, blocks, SPLITS, DECAY_BLOCK) bfloat16: the splits of factor · β
    bases: Tensor  # (B, H, blocks, 2) float32: the high and the low bits of base


def allocate(problem: AttentionProblem, like: Tensor, flat_base: bool = False) -> DecayPrefix:
    """Uninitialised buffers of the prefix's shapes (size 0 unless the decay is per token); base may be flat."""
    tokens, blocks = (problem.key_length, decay_blocks(problem)) if problem.decay == "scalar" else (0, 0)
    shape = (problem.batch, problem.num_heads)
    local_dtype = torch.float32 if problem.dtype.itemsize == 2 else torch.float64
    base_shape = (math.prod((*shape, blocks)),) if flat_base else (*shape, blocks)
    last_reset = uninitialised(like, *shape, tokens, dtype=torch.int32)
    return DecayPrefix(
        uninitialised(like, *shape, tokens, dtype=local_dtype), uninitialised(like, *base_shape, dtype=torch.float64),
        last_reset, contiguous_like(last_reset),
    )


def allocate_split(problem: AttentionProblem, like: Tensor) -> SplitPrefix:
    blocks = problem.batch, problem.num_heads, decay_blocks(problem)
    return SplitPrefix(
        uninitialised(like, *blocks, SPLITS, DECAY_BLOCK, dtype=torch.bfloat16),
        uninitialised(like, *blocks, 2, dtype=torch.float32),
    )


def build(
    problem: AttentionProblem, log_decay: Tensor, split: SplitPrefix | None = None, factor: float = 1.0,
    counter: Tensor | None = None, sequences: Sequences | None = None, launch: Launch = launching.uncached,
) -> DecayPrefix:
    """Return the prefix of log_decay (B, T_k, H), by one launch or two. Tokens outside the sequences have none.

    split: filled too, if given, with factor · β.
    counter: one int32, zeroed if given, which saves a launch of the attention that fetches its work tiles with it.
    """
    prefix = allocate(problem, log_decay)
    sizes = (problem.key_length, problem.num_heads, sequences)
    modes = dict(**constants(problem), BLOCK=DECAY_BLOCK)
    sums = None
    is_whole, blocks, grid = _division(problem)
    if not is_whole:
        together = math.gcd(problem.num_heads, _HEADS)
        dtypes = torch.float64, torch.int32, torch.int32
        sums = tuple(uninitialised(prefix.base, *prefix.base.shape, dtype=dtype) for dtype in dtypes)
        launch(
            _block_totals, programs(problem, DECAY_BLOCK, problem.num_heads // together, of_keys=True),
            strided(log_decay), prefix.beta, sums, *sizes, HEADS=together, num_warps=1, **modes,
        )
        log_decay = prefix.beta.mT  # λ, in the buffer in which the scan writes β
    launch(
        _scan_blocks, grid,
        strided(log_decay), sums, prefix, split, factor, counter, *sizes, BLOCKS=blocks, CHUNK=_SCAN_CHUNK,
        num_warps=min(blocks, _MOST_WARPS), **modes,
    )
    return prefix


def constant_split(rates: Tensor, factor: float, counter: Tensor, launch: Launch = launching.uncached) -> Tensor:
    """(H, SPLITS, DECAY_BLOCK): bf16 splits of factor · γ·(t − start of t's block), base 2; zeroes the counter."""
    beta = uninitialised(rates, rates.shape[0], SPLITS, DECAY_BLOCK, dtype=torch.bfloat16)
    launch(
        _constant_split, rates.shape[0],
        rates, rates.stride(0), beta, factor, counter, BLOCK=DECAY_BLOCK,
    )
    return beta


def gradient(
    problem: AttentionProblem, prefix: DecayPrefix, row_sums: Tensor, column_sums: Tensor, like: Tensor,
    sequences: Sequences | None = None, launch: Launch = launching.uncached,
) -> Tensor:
    """dλ_t = Σ dα_u over the rest of t's segment, with dα = row sums − column sums of dS; (B, T_k, H) in like's dtype.

    row_sums is (B, H, T_q), column_sums (B, H, T_k), both float. The first λ of a segment is unused: literal 0.
    """
    grad = contiguous_like(like)
    if sequences is not None:
        fill_outside(problem, sequences, (grad[..., None],), of_keys=True, launch=launch)
    sizes = (problem.query_length, problem.key_length, problem.num_heads, sequences)
    segments = (prefix.last_reset, prefix.next_reset)
    modes = dict(**constants(problem), BLOCK=DECAY_BLOCK)
    heads = None
    is_whole, blocks, grid = _division(problem)
    if not is_whole:
        heads = contiguous_like(prefix.base)
        launch(_segment_heads, grid, row_sums, column_sums, *segments, heads, *sizes, **modes)
    launch(
        _reverse_sums, grid,
        row_sums, column_sums, *segments, heads, grad, grad.stride(), *sizes, BLOCKS=blocks, CHUNK=_SCAN_CHUNK,
        num_warps=_MOST_WARPS, **modes,
    )
    return grad


def _division(problem: AttentionProblem) -> tuple[bool, int, int]:
    """True if a program has a whole sequence, not a single block; its number of blocks, and the number of programs."""
    if problem.longest_key <= _MOST_TOKENS:
        return True, next_power_of_2(cdiv(problem.longest_key, DECAY_BLOCK)), problem.sequences * problem.num_heads
    return False, 1, programs(problem, DECAY_BLOCK, problem.num_heads, of_keys=True)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller_before(all_a, before_a, all_b, before_b):
    """Minimum of a range, and that of the range without its last element; b comes after a in the scan's direction."""
    return tl.minimum(all_a, all_b), tl.minimum(all_a, before_b)


@triton.jit
def _add_in_segment(sum_a, ended_a, sum_b, ended_b):
    """Running sum that restarts where a segment ends: b comes after a in the direction of the scan."""
    return tl.where(ended_b != 0, sum_b, sum_a + sum_b), ended_a | ended_b


@triton.jit
def _tokens_of_lanes(BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens of blocks, as (lanes of all warps, tokens of a lane): in this shape they are loaded and stored.

    A warp has whole blocks then, as scans need it. Of strided (BLOCKS, BLOCK), Triton would spread each block over all
    warps.
    """
    lane = tl.arange(0, BLOCKS * BLOCK // _LANE_TOKENS)[:, None]
    return lane * _LANE_TOKENS + tl.arange(0, _LANE_TOKENS)[None, :]


@triton.jit
def _by_lanes(x):
    """Reshape (blocks, tokens) as _tokens_of_lanes."""
    return x.reshape(x.numel // _LANE_TOKENS, _LANE_TOKENS)


@triton.jit
def _load_log_decay(log_decay, work, head, tokens):
    """λ of tokens, of one head or of heads that broadcast against them. The first one is never used: 0."""
    strides, tokens_there = log_decay.strides, (work.first_token + tokens).to(tl.int64)
    pointers = log_decay.data + work.entry.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]
    value = tl.load(pointers + tokens_there * strides[1], mask=tokens < work.key_length, other=0.0)
    return tl.where(tokens > 0, value, 0.0)  # as a part of the mask it would prevent vectorised loads


@triton.jit
def _without_resets(value):
    """Return λ in base 2 and float64, with 0 for resets, and a mask of the resets."""
    return base2_log_decay(value, tl.float64), value < RESET_BELOW


@triton.jit
def _block_totals(
    log_decay, turned, sums, length, heads, sequences,
    PACKED: tl.constexpr, SEARCHES: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):
    """Per block: the sum of λ, the last reset (−1 without one) and the first one (T_k without one); λ as (B, H, T_k).

    A program has the blocks of HEADS heads.
    """
    work = tile_of_program(sequences, heads // HEADS, 0, length, BLOCK, True, PACKED, SEARCHES)
    length = work.key_length
    if sequences is not None:  # noqa: SIM102 (one is known when it compiles, the other when it runs)
        if work.start >= length:
            return
    head = work.head * HEADS + tl.arange(0, HEADS)
    offsets = offsets_of_head(sequences, work, head, heads, PACKED)
    tokens = (work.start + tl.arange(0, BLOCK))[None, :]
    value = _load_log_decay(log_decay, work, head[:, None], tokens)
    tl.store(turned + offsets.tokens[:, None] + tokens, value, mask=tokens < length)
    value, is_reset = _without_resets(value)
    totals, last_resets, first_resets = sums
    here = offsets.blocks + work.start // BLOCK
    tl.store(totals + here, tl.sum(value, 1))
    tl.store(last_resets + here, tl.max(tl.where(is_reset, tokens, -1), 1))
    tl.store(first_resets + here, tl.min(tl.where(is_reset, tokens, length), 1))


@triton.jit
def _around_in_sequence(value, is_reset, has_resets, tokens, length, BLOCKS: tl.constexpr):
    """Surroundings of every block of a sequence, all in one program; each (BLOCKS, 1).

    Returns the sum of λ before the block, the last reset before it (0 without one) and the first one after it (T_k
    without one).
    """
    own, other = tl.arange(0, BLOCKS)[:, None], tl.arange(0, BLOCKS)[None, :]
    alpha = tl.sum(tl.where(other < own, tl.sum(value, 1)[None, :], 0.0), 1)
    before = tl.zeros([BLOCKS], tl.int32)
    after = before + length
    if has_resets:
        lasts = tl.max(tl.where(is_reset, tokens, 0), 1)[None, :]
        firsts = tl.min(tl.where(is_reset, tokens, length), 1)[None, :]
        before = tl.max(tl.where(other < own, lasts, 0), 1)
        after = tl.min(tl.where(other > own, firsts, length), 1)
    return alpha[:, None], before[:, None], after[:, None]


@triton.jit
def _around_by_blocks(sums, block_row, start, length, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """The same for one block, from the sums of `_block_totals`: T²/128² short reads in all."""
    totals, last_resets, first_resets = sums
    block, blocks = start // BLOCK, tl.cdiv(length, BLOCK)
    alpha = tl.zeros([CHUNK], tl.float64)
    before = tl.zeros([CHUNK], tl.int32)
    after = tl.zeros([CHUNK], tl.int32) + length
    for first in range(0, blocks, CHUNK):
        index = first + tl.arange(0, CHUNK)
        earlier = index < block
        later = (index > block) & (index < blocks)
        alpha += tl.load(totals + block_row + index, mask=earlier, other=0.0)
        before = tl.maximum(before, tl.load(last_resets + block_row + index, mask=earlier, other=0))
        after = tl.minimum(after, tl.load(first_resets + block_row + index, mask=later, other=length))
    return tl.sum(alpha, 0), tl.max(before, 0), tl.min(after, 0)


@triton.jit
def _scan_blocks(
    log_decay, sums, prefix, split, factor: tl.float64, counter, length, heads, sequences,
    PACKED: tl.constexpr, SEARCHES: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr,
):
    """Write the prefix of all BLOCKS blocks of a sequence; or of one block, given the three sums of `_block_totals`."""
    if split is not None:
        # the attention's programs wait until all programs of this launch have ended
        let_next_start(heads)
    if counter is not None:
        tl.store(counter, 0, mask=tl.program_id(0) == 0)
    if sums is None:
        work = sequence_of_program(sequences, heads, 0, length, PACKED)
    else:
        work = tile_of_program(sequences, heads, 0, length, BLOCK, True, PACKED, SEARCHES)
    start, length = work.start, work.key_length
    _, token_row, block_row = offsets_of_head(sequences, work, work.head, heads, PACKED)
    if sequences is not None:  # noqa: SIM102
        if start >= length:
            return
    # these loads are in flight while the block's surroundings are read
    lanes = _tokens_of_lanes(BLOCKS, BLOCK)
    inside = start + lanes < length
    value = _load_log_decay(log_decay, work, work.head, start + lanes).reshape(BLOCKS, BLOCK)
    tokens = (start + lanes).reshape(BLOCKS, BLOCK)
    block = start // BLOCK + tl.arange(0, BLOCKS)[:, None]
    there = block * BLOCK < length
    if sums is not None:
        alpha, before, after = _around_by_blocks(sums, block_row, start, length, BLOCK, CHUNK)
    value, is_reset = _without_resets(value)
    # most sequences have no reset, which saves scans
    has_resets = tl.max(tl.max(is_reset.to(tl.int32), 1), 0) != 0
    if sums is None:
        alpha, before, after = _around_in_sequence(value, is_reset, has_resets, tokens, length, BLOCKS)
    here = token_row + start + lanes
    beta = tl.cumsum(value, 1)
    tl.store(prefix.beta + here, _by_lanes(beta.to(prefix.beta.dtype.element_ty)), mask=inside)
    if split is not None:
        _store_splits(split.beta + (block_row + start // BLOCK) * (_SPLITS * BLOCK), beta * factor, length - start)
    before += tl.zeros_like(tokens)
    after += tl.zeros_like(tokens)
    if has_resets:
        before = tl.associative_scan(tl.where(is_reset, tokens, before), 1, larger)
        coming = tl.where(is_reset, tokens, after)
        coming, after = tl.associative_scan((coming, after), 1, _smaller_before, reverse=True)
    tl.store(prefix.last_reset + here, _by_lanes(before), mask=inside)
    tl.store(prefix.next_reset + here, _by_lanes(after), mask=inside)
    tl.store(prefix.base + block_row + block, alpha, mask=there)
    if split is not None:
        high = alpha.to(tl.float32)
        tl.store(split.bases + (block_row + block) * 2, high, mask=there)
        tl.store(split.bases + (block_row + block) * 2 + 1, (alpha - high).to(tl.float32), mask=there)


@triton.jit
def _store_splits(split, value, length):
    """Store the splits of values (blocks, tokens) into (blocks, SPLITS, tokens); blocks from `length` on do not exist.
    """
    BLOCK: tl.constexpr = value.shape[1]
    lanes = _tokens_of_lanes(value.shape[0], BLOCK)
    block = lanes // BLOCK
    here = split + block * (_SPLITS * BLOCK) + lanes % BLOCK
    splits = in_splits(value)
    for i in tl.static_range(_SPLITS):
        tl.store(here + i * BLOCK, _by_lanes(splits[i]), mask=block * BLOCK < length)


@triton.jit
def _constant_split(rates, rate_stride, split, factor: tl.float64, counter, BLOCK: tl.constexpr):
    head = tl.program_id(0)
    let_next_start(head)
    tl.store(counter, 0, mask=head == 0)
    rate, _ = _without_resets(tl.load(rates + head * rate_stride))
    splits = split + head * (_SPLITS * BLOCK)
    _store_splits(splits, tl.arange(0, BLOCK)[None, :].to(tl.float64) * rate * factor, BLOCK)


@triton.jit
def _load_alpha_gradient(row_sums, column_sums, tokens, inside, first_position):
    """dα_t = (signed) row sum − column sum of dS, float64; tokens before the first query have no row."""
    query = tokens - first_position
    rows = tl.load(row_sums + query, mask=inside & (query >= 0), other=0.0)
    columns = tl.load(column_sums + tokens, mask=inside, other=0.0)
    return rows.to(tl.float64) - columns.to(tl.float64)


@triton.jit
def _segment_heads(
    row_sums, column_sums, last_reset, next_reset, heads_out, query_length, key_length, heads, sequences,
    PACKED: tl.constexpr, SEARCHES: tl.constexpr, BLOCK: tl.constexpr,
):
    """Per block: the sum of dα from its start up to its first reset, the part that earlier blocks add to theirs."""
    work = tile_of_program(sequences, heads, query_length, key_length, BLOCK, True, PACKED, SEARCHES)
    start, key_length = work.start, work.key_length
    query_row, token_row, block_row = offsets_of_head(sequences, work, work.head, heads, PACKED)
    if sequences is not None:  # noqa: SIM102
        if start >= key_length:
            return
    tokens = start + tl.arange(0, BLOCK)
    starts_segment = tl.load(last_reset + token_row + start) == start
    segment_end = tl.where(starts_segment, start, tl.load(next_reset + token_row + start))
    inside = (tokens < key_length) & (tokens < segment_end)
    value = _load_alpha_gradient(
        row_sums + query_row, column_sums + token_row, tokens, inside, key_length - work.query_length
    )
    tl.store(heads_out + block_row + start // BLOCK, tl.sum(value, 0))


@triton.jit
def _after_in_sequence(value, tokens, segment_start, end, key_length, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Sum of dα from the end of every block up to its last segment's `end`; both (BLOCKS, 1).

    One program has all blocks of the sequence.
    """
    own, other = tl.arange(0, BLOCKS)[:, None], tl.arange(0, BLOCKS)[None, :]
    first_start = tl.min(tl.where(segment_start == tokens, tokens, key_length), 1)
    heads = tl.sum(tl.where(tokens < first_start[:, None], value, 0.0), 1)[None, :]
    reached = (other > own) & (other <= end // BLOCK)
    return tl.sum(tl.where(reached, heads, 0.0), 1)[:, None]


@triton.jit
def _after_by_blocks(heads_in, begin, end, key_length, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """The same for one block, from the `_segment_heads` of the blocks between its end, `begin`, and the segment's."""
    last_block, blocks = end // BLOCK, tl.cdiv(key_length, BLOCK)
    total = tl.zeros([CHUNK], tl.float64)
    for first in range(begin // BLOCK, tl.minimum(last_block + 1, blocks), CHUNK):
        index = first + tl.arange(0, CHUNK)
        reached = (index <= last_block) & (index < blocks)
        total += tl.load(heads_in + index, mask=reached, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _reverse_sums(
    row_sums, column_sums, last_reset, next_reset, heads_in, grad, strides, query_length, key_length, heads, sequences,
    PACKED: tl.constexpr, SEARCHES: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr,
):
    """dλ of all BLOCKS blocks of a sequence; or of one block, given the `_segment_heads` of all blocks.

    dλ is the sum of later dα within the block's segment. The block's last segment adds the sums of the blocks that it
    reaches into.
    """
    if heads_in is None:
        work = sequence_of_program(sequences, heads, query_length, key_length, PACKED)
    else:
        work = tile_of_program(sequences, heads, query_length, key_length, BLOCK, True, PACKED, SEARCHES)
    start, key_length = work.start, work.key_length
    query_row, token_row, block_row = offsets_of_head(sequences, work, work.head, heads, PACKED)
    if sequences is not None:  # noqa: SIM102
        if start >= key_length:
            return
    first_position = key_length - work.query_length
    block = start // BLOCK + tl.arange(0, BLOCKS)[:, None]
    tokens = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    final = tl.minimum(block * BLOCK + BLOCK, key_length) - 1
    inside = tokens < key_length
    if heads_in is not None:
        end = tl.load(next_reset + token_row + tl.minimum(start + BLOCK, key_length) - 1)
        carried = _after_by_blocks(heads_in + block_row, start + BLOCK, end, key_length, BLOCK, CHUNK)
    value = _load_alpha_gradient(row_sums + query_row, column_sums + token_row, tokens, inside, first_position)
    segment_start = tl.load(last_reset + token_row + tokens, mask=inside, other=0)
    segment_end = tl.load(next_reset + token_row + tokens, mask=inside, other=0)
    if heads_in is None:
        # a block's segments end in order, so the largest end is the last segment's
        end = tl.max(segment_end, 1)[:, None]
        carried = _after_in_sequence(value, tokens, segment_start, end, key_length, BLOCK, BLOCKS)
    total, _ = tl.associative_scan((value, (segment_end == tokens + 1).to(tl.int32)), 1, _add_in_segment, reverse=True)
    total += tl.where(segment_end > final, carried, 0.0)
    total = tl.where(segment_start == tokens, 0.0, total)
    tokens_there = (work.first_token + tokens).to(tl.int64)
    pointers = grad + work.entry.to(tl.int64) * strides[0] + tokens_there * strides[1] + work.head * strides[2]
    tl.store(pointers, total.to(grad.dtype.element_ty), mask=inside)
