"""The two-level decay prefix and its reverse.

α_t = λ_0 + … + λ_t over a whole sequence cannot be stored in float32: at a million tokens of strong decay its spacing
exceeds a whole λ. Blocks of DECAY_BLOCK tokens carry it instead: `base` (float64), α at the block's start, and `local`
(β), the sum from there. Inside a tile the difference of two bases is one scalar, formed in float64 and rounded once.

A reset (λ = −inf) is visibility, not arithmetic: it counts as λ = 0, and every token records its segment, the last
reset at or before it (0 without one) and the next one after it (T_k without one).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decayattn.backends import COMPILER_OPTIONS
from decayattn.backends.sequences import (
    BLOCK,
    Sequences,
    constants,
    decay_blocks,
    fill_outside,
    offsets_of_head,
    tile_of_program,
    token_programs,
)
from decayattn.backends.tile_math import LOG2E
from decayattn.problem import AttentionProblem

DECAY_BLOCK = BLOCK
# columns beside a key that hold its bias: a matrix instruction's depth, of which three bfloat16 numbers are used, the
# high, middle and low bits of a float32
BIAS_COLUMNS = 16
BIAS_PARTS = 3
# blocks that one step of a scan over block totals reads at once
_SCAN_CHUNK = 128
# one warp scans a block of tokens without meeting others
_WARPS = 1


class DecayPrefix(NamedTuple):
    """What the kernels read of a per-token decay, in (B, H, ·) and base 2; empty tensors for other decays.

    Every sequence has a prefix of its own: its blocks start at its first token, and its resets are counted from there.
    """

    local: (
        Tensor  # β (B, H, T_k): float32 for 16-bit inputs, else float64, since a strong decay costs float32's low bits
    )
    base: Tensor  # α at each block's start (B, H, blocks), float64
    last_reset: Tensor  # (B, H, T_k) int32
    next_reset: Tensor  # (B, H, T_k) int32


def allocate(problem: AttentionProblem, like: Tensor) -> DecayPrefix:
    """Uninitialised buffers of the prefix's shapes (of size 0 where the decay is not per token)."""
    tokens, blocks = (problem.key_length, decay_blocks(problem)) if problem.decay == "scalar" else (0, 0)
    shape = (problem.batch, problem.num_heads)
    local_dtype = torch.float32 if problem.dtype.itemsize == 2 else torch.float64
    return DecayPrefix(
        like.new_empty(*shape, tokens, dtype=local_dtype),
        like.new_empty(*shape, blocks, dtype=torch.float64),
        like.new_empty(*shape, tokens, dtype=torch.int32),
        like.new_empty(*shape, tokens, dtype=torch.int32),
    )


def build(
    problem: AttentionProblem, log_decay: Tensor, columns: Tensor | None = None, factor: float = 1.0,
    counter: Tensor | None = None, sequences: Sequences | None = None,
) -> DecayPrefix:  # fmt: skip
    """The prefix of log_decay (B, T_k, H): two launches, whatever the length. Tokens outside the sequences have none.

    columns, if given, is filled on the way: (B, H, blocks, DECAY_BLOCK, BIAS_COLUMNS), the parts of factor · β.
    counter, if given, is one int32 that is zeroed, which saves the attention that draws from it a launch.
    """
    prefix = allocate(problem, log_decay)
    grid = (token_programs(problem, sequences, DECAY_BLOCK, problem.num_heads),)
    totals = torch.empty_like(prefix.base)
    resets = torch.empty_like(prefix.base, dtype=torch.int32), torch.empty_like(prefix.base, dtype=torch.int32)
    sizes = (problem.key_length, problem.num_heads, sequences)
    modes = dict(**constants(problem, sequences), BLOCK=DECAY_BLOCK, **COMPILER_OPTIONS)
    _block_totals[grid](
        log_decay, log_decay.stride(), totals, *resets, resets[0] if counter is None else counter, *sizes,
        ZERO_COUNTER=counter is not None, num_warps=_WARPS, **modes,
    )  # fmt: skip
    _scan_blocks[grid](
        log_decay, log_decay.stride(), totals, *resets, *prefix, totals if columns is None else columns, factor,
        *sizes, CHUNK=_SCAN_CHUNK, COLUMNS=0 if columns is None else BIAS_COLUMNS, num_warps=_WARPS, **modes,
    )  # fmt: skip
    return prefix


def constant_columns(rates: Tensor, factor: float, counter: Tensor) -> Tensor:
    """(H, DECAY_BLOCK, BIAS_COLUMNS): the parts of factor · γ·(t − start of t's block), base 2; zeroes the counter."""
    columns = rates.new_empty(rates.shape[0], DECAY_BLOCK, BIAS_COLUMNS, dtype=torch.bfloat16)
    _constant_columns[(rates.shape[0],)](
        rates, rates.stride(0), columns, factor, counter, BLOCK=DECAY_BLOCK, COLUMNS=BIAS_COLUMNS, **COMPILER_OPTIONS
    )
    return columns


def gradient(
    problem: AttentionProblem, prefix: DecayPrefix, row_sums: Tensor, column_sums: Tensor, like: Tensor,
    sequences: Sequences | None = None,
) -> Tensor:  # fmt: skip
    """dλ_t = Σ dα_u over the rest of t's segment, with dα = row sums − column sums of dS; (B, T_k, H) in like's dtype.

    row_sums is (B, H, T_q), column_sums (B, H, T_k), both float. The first λ of a segment acts on nothing: literal 0.
    """
    grad = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    fill_outside(problem, sequences, [(grad[..., None], 0.0)], of_keys=True)
    grid = (token_programs(problem, sequences, DECAY_BLOCK, problem.num_heads),)
    heads = torch.empty_like(prefix.base)
    sizes = (problem.query_length, problem.key_length, problem.num_heads, sequences)
    segments = (prefix.last_reset, prefix.next_reset)
    modes = dict(**constants(problem, sequences), BLOCK=DECAY_BLOCK, **COMPILER_OPTIONS)
    _segment_heads[grid](row_sums, column_sums, *segments, heads, *sizes, **modes)
    _reverse_sums[grid](
        row_sums, column_sums, *segments, heads, grad, grad.stride(), *sizes, CHUNK=_SCAN_CHUNK, **modes
    )
    return grad


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def _add_in_segment(sum_a, ended_a, sum_b, ended_b):
    """Running sum that restarts where a segment ends: b comes after a in the direction of the scan."""
    return tl.where(ended_b != 0, sum_b, sum_a + sum_b), ended_a | ended_b


@triton.jit
def _load_block(log_decay, strides, batch, head, first_token, tokens, length):
    """A block's λ in base 2 and float64, resets as 0, and where the resets are. The first λ is never used."""
    tokens_there = (first_token + tokens).to(tl.int64)
    pointers = log_decay + batch.to(tl.int64) * strides[0] + tokens_there * strides[1] + head * strides[2]
    value = tl.load(pointers, mask=(tokens > 0) & (tokens < length), other=0.0).to(tl.float64)
    is_reset = value == float("-inf")
    return tl.where(is_reset, 0.0, value * LOG2E), is_reset


@triton.jit
def _block_totals(
    log_decay, strides, totals, last_resets, first_resets, counter, length, heads, sequences,
    PACKED: tl.constexpr, SEARCHES: tl.constexpr, BLOCK: tl.constexpr,
    ZERO_COUNTER: tl.constexpr,
):  # fmt: skip
    """Per block: the sum of λ, its last reset (−1 without one) and its first one (T_k without one)."""
    if ZERO_COUNTER:
        tl.store(counter, 0, mask=tl.program_id(0) == 0)
    start, sequence, head, entry, _, _, first_token, length = tile_of_program(
        sequences, heads, 0, length, BLOCK, True, False, PACKED, SEARCHES
    )
    _, _, block_row = offsets_of_head(sequences, sequence, head, heads, 0, 0, first_token, length, PACKED)
    if sequences is not None:  # noqa: SIM102 (one is known when it compiles, the other when it runs)
        if start >= length:
            return
    tokens = start + tl.arange(0, BLOCK)
    value, is_reset = _load_block(log_decay, strides, entry, head, first_token, tokens, length)
    here = block_row + start // BLOCK
    tl.store(totals + here, tl.sum(value, 0))
    tl.store(last_resets + here, tl.max(tl.where(is_reset, tokens, -1), 0))
    tl.store(first_resets + here, tl.min(tl.where(is_reset, tokens, length), 0))


@triton.jit
def _scan_blocks(
    log_decay, strides, totals, last_resets, first_resets, local, base, last_reset, next_reset, columns,
    factor: tl.float64, length, heads, sequences,
    PACKED: tl.constexpr, SEARCHES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each block sums its predecessors' totals itself: T²/128² short reads in all, and no block waits for another."""
    start, sequence, head, entry, _, _, first_token, length = tile_of_program(
        sequences, heads, 0, length, BLOCK, True, False, PACKED, SEARCHES
    )
    _, token_row, block_row = offsets_of_head(sequences, sequence, head, heads, 0, 0, first_token, length, PACKED)
    if sequences is not None:  # noqa: SIM102
        if start >= length:
            return
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
    tl.store(base + block_row + block, tl.sum(alpha, 0))

    tokens = block * BLOCK + tl.arange(0, BLOCK)
    value, is_reset = _load_block(log_decay, strides, entry, head, first_token, tokens, length)
    last = tl.associative_scan(tl.where(is_reset, tokens, tl.max(before, 0)), 0, _larger)
    here = token_row + tokens
    inside = tokens < length
    beta = tl.cumsum(value, 0)
    tl.store(local + here, beta.to(local.dtype.element_ty), mask=inside)
    if COLUMNS > 0:
        _store_columns(columns + (block_row + block) * BLOCK * COLUMNS, beta * factor, BLOCK, COLUMNS)
    tl.store(last_reset + here, last, mask=inside)
    # the next reset strictly after t: seen from t + 1, so the scan's result moves back by one token
    coming = tl.associative_scan(tl.where(is_reset, tokens, tl.min(after, 0)), 0, _smaller, reverse=True)
    tl.store(next_reset + here - 1, coming, mask=inside & (tokens > block * BLOCK))
    final = tl.minimum(block * BLOCK + BLOCK, length) - 1
    tl.store(next_reset + token_row + final, tl.min(after, 0))


@triton.jit
def _store_columns(columns, value, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """The high, middle and low bits of one block's values as (BLOCK, COLUMNS) bfloat16, the other columns 0."""
    value = value.to(tl.float32)
    high = value.to(tl.bfloat16)
    rest = value - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    column = tl.arange(0, COLUMNS)[None, :]
    parts = tl.where(column == 2, low[:, None], tl.zeros([BLOCK, COLUMNS], tl.bfloat16))
    parts = tl.where(column == 1, middle[:, None], parts)
    parts = tl.where(column == 0, high[:, None], parts)
    tl.store(columns + tl.arange(0, BLOCK)[:, None] * COLUMNS + column, parts)


@triton.jit
def _constant_columns(
    rates, rate_stride, columns, factor: tl.float64, counter, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    head = tl.program_id(0)
    tl.store(counter, 0, mask=head == 0)
    rate = tl.load(rates + head * rate_stride).to(tl.float64) * LOG2E
    value = tl.arange(0, BLOCK).to(tl.float64) * rate * factor
    _store_columns(columns + head * BLOCK * COLUMNS, value, BLOCK, COLUMNS)


@triton.jit
def _load_alpha_gradient(row_sums, column_sums, tokens, inside, first_position):
    """dα_t = (signed) row sum − column sum of dS, float64; the tokens before the first query have no row."""
    query = tokens - first_position
    rows = tl.load(row_sums + query, mask=inside & (query >= 0), other=0.0)
    columns = tl.load(column_sums + tokens, mask=inside, other=0.0)
    return rows.to(tl.float64) - columns.to(tl.float64)


@triton.jit
def _segment_heads(
    row_sums, column_sums, last_reset, next_reset, heads_out, query_length, key_length, heads, sequences,
    PACKED: tl.constexpr, SEARCHES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per block: the sum of dα from its start up to its first reset, which is what earlier blocks take from it."""
    start, sequence, head, _, first_row, query_length, first_token, key_length = tile_of_program(
        sequences, heads, query_length, key_length, BLOCK, True, False, PACKED, SEARCHES
    )
    query_row, token_row, block_row = offsets_of_head(
        sequences, sequence, head, heads, first_row, query_length, first_token, key_length, PACKED
    )
    if sequences is not None:  # noqa: SIM102
        if start >= key_length:
            return
    tokens = start + tl.arange(0, BLOCK)
    starts_segment = tl.load(last_reset + token_row + start) == start
    segment_end = tl.where(starts_segment, start, tl.load(next_reset + token_row + start))
    inside = (tokens < key_length) & (tokens < segment_end)
    value = _load_alpha_gradient(
        row_sums + query_row, column_sums + token_row, tokens, inside, key_length - query_length
    )
    tl.store(heads_out + block_row + start // BLOCK, tl.sum(value, 0))


@triton.jit
def _reverse_sums(
    row_sums, column_sums, last_reset, next_reset, heads_in, grad, strides, query_length, key_length, heads, sequences,
    PACKED: tl.constexpr, SEARCHES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """dλ of one block: its own later dα of the segment, plus the heads of the blocks that it reaches into."""
    start, sequence, head, entry, first_row, query_length, first_token, key_length = tile_of_program(
        sequences, heads, query_length, key_length, BLOCK, True, False, PACKED, SEARCHES
    )
    query_row, token_row, block_row = offsets_of_head(
        sequences, sequence, head, heads, first_row, query_length, first_token, key_length, PACKED
    )
    if sequences is not None:  # noqa: SIM102
        if start >= key_length:
            return
    block, blocks = start // BLOCK, tl.cdiv(key_length, BLOCK)
    final = tl.minimum(block * BLOCK + BLOCK, key_length) - 1
    last_block = tl.load(next_reset + token_row + final) // BLOCK
    carried = tl.zeros([CHUNK], tl.float64)
    for first in range(block + 1, tl.minimum(last_block + 1, blocks), CHUNK):
        index = first + tl.arange(0, CHUNK)
        reached = (index <= last_block) & (index < blocks)
        carried += tl.load(heads_in + block_row + index, mask=reached, other=0.0)

    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < key_length
    value = _load_alpha_gradient(
        row_sums + query_row, column_sums + token_row, tokens, inside, key_length - query_length
    )
    segment_start = tl.load(last_reset + token_row + tokens, mask=inside, other=0)
    segment_end = tl.load(next_reset + token_row + tokens, mask=inside, other=0)
    total, _ = tl.associative_scan((value, (segment_end == tokens + 1).to(tl.int32)), 0, _add_in_segment, reverse=True)
    total += tl.where(segment_end > final, tl.sum(carried, 0), 0.0)
    total = tl.where(segment_start == tokens, 0.0, total)
    tokens_there = (first_token + tokens).to(tl.int64)
    pointers = grad + entry.to(tl.int64) * strides[0] + tokens_there * strides[1] + head * strides[2]
    tl.store(pointers, total.to(grad.dtype.element_ty), mask=inside)
