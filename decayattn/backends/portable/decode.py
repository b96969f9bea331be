"""Decoding: a few new query rows per batch entry over a long cache of keys. Forward only.

The rows of an entry are few, so the work is split over the keys (FlashDecoding; Dao, Haziza, Massa, Sizov, 2023). A
program of split_kernel walks its part of the keys that a tile of rows sees, and writes the state of its online softmax.
combine_kernel joins the parts of a row. The query heads of one key head are rows of the same tile, so that all of them
share each load of a key.

Let α be the running sum of λ, which the cache holds in float64 (natural logarithm), i the position of a row and s its
scale. The score of key j is s q·k_j + (α_i − α_j), or s q·k_j + γ (i − j) for a constant decay. A row sees
first_i ≤ j ≤ i; if γ is a reset, only its own token.

Tiles: q (BLOCK_M, D) · k (BLOCK_N, D) · v (BLOCK_N, D_v) · score, p (BLOCK_M, BLOCK_N) · acc (BLOCK_M, D_v)
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decayattn.backends.portable import config
from decayattn.backends.portable.config import TileConfig, padded
from decayattn.backends.portable.kernel_args import TileSource, Traits
from decayattn.backends.portable.pages import CachedTokens, entry_start, table_and_blocks, token_offset
from decayattn.backends.portable.tiles import add_product, load_scale, load_tile
from decayattn.backends.runtime import launching
from decayattn.backends.runtime.integers import cdiv, next_power_of_2
from decayattn.backends.runtime.strided import strided, uninitialised
from decayattn.backends.tiles.decay import load_rate, side_of_head
from decayattn.backends.tiles.scores import (
    LN2,
    LOG2E,
    decayed_score,
    finite_or_zero,
    probability,
    rescale,
    visible,
    with_sink,
)
from decayattn.backends.tiles.visibility import keys_seen, visited_tiles
from decayattn.problem import Inputs

# Times below: one H200, bfloat16, H32 H_kv8 D128 over 32,768 tokens, a decay per token; from a single sweep.
# `python experiments/benchmarks/sequences.py --what decode` measures the chosen values.
# Programs to aim for, per multiprocessor: they wait for memory in turn, and the last round is not left half empty (B64:
# 2.78 ms with one split, 2.10 with three; B1: 0.20 ms with 32 splits, 0.12 with 64).
_PROGRAMS_PER_MULTIPROCESSOR = 8
# Minimum of key tiles per split: below it, joining the splits costs more than they save.
_TILES_PER_SPLIT = 2
# combine_kernel holds all parts of a row at once.
_MAX_SPLITS = 64


def choose(gpu: str, dim: int, dtype: torch.dtype) -> TileConfig:
    """Choose the tile from config.arch's name of the GPU, the larger padded head dimension and the dtype.

    block_m is an upper bound: a tile has no more rows than the call, padded.
    """
    if dtype.itemsize == 2:
        # with 64 rows ptxas serialises the products (sm_90, D = 64, a decay per token); B64: 2.10 ms, with 32 keys
        # 2.14, with 128 keys 2.22
        stages = 2 if gpu == "small" else 3  # three take 68 KB (gfx942, D = 128)
        return TileConfig(32, 64 if dim <= 128 else 32, 4, stages)
    # products of float32 and float64 are unrolled instructions: with 32 rows they spill registers (sm_90, D = 128)
    return TileConfig(16, 32 if dim <= 128 else 16, 4, 1)


def number_of_splits(programs: int, key_tiles: int, multiprocessors: int) -> int:
    """Number of parts of the keys; programs: their number with one part."""
    wanted = cdiv(_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors, programs)
    return max(1, min(wanted, cdiv(key_tiles, _TILES_PER_SPLIT), _MAX_SPLITS))


def decode(
    inputs: Inputs, lengths: Tensor, *, alpha: Tensor | None = None, first: Tensor | None = None,
    left: int | None = None, longest: int | None = None, block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Implement reference.decode by two launches; the caller has checked the arguments.

    Row r is at position lengths − T_q + r, and rows at negative positions see nothing. Nothing is read beyond an
    entry's length; longest only sizes the launch. lengths and first are int32. Tensors may have any strides; alpha is
    read fastest if the tokens of a head are consecutive in memory. A row that sees no key has out 0 and lse −inf, with
    or without a sink.
    """
    # do not refuse lazy negatives: the tokens of this call are in the cache already
    inputs = Inputs._make(x.resolve_neg() if isinstance(x, Tensor) else x for x in inputs)
    q, keys, values, log_decay, row_scale = inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.row_scale
    batch, query_length, heads, head_dim = q.shape
    max_length, kv_heads, value_dim = values.shape[1:]
    page = 0
    if block_table is not None:
        page, max_length = max_length, block_table.shape[1] * max_length
    accumulator = torch.float64 if q.dtype == torch.float64 else torch.float32
    with launching.on_device(q.device):
        new = functools.partial(uninitialised, q)
        out = new(batch, query_length, heads, value_dim)
        lse = new(batch, heads, query_length, dtype=accumulator)
        if 0 in (batch, query_length):
            return out, lse
        group = heads // kv_heads
        rows = query_length * group
        tile = choose(config.arch(q.device), max(padded(head_dim), padded(value_dim)), q.dtype)
        block_m = min(padded(rows), tile.block_m)
        row_tiles = cdiv(rows, block_m)
        programs = row_tiles * batch * kv_heads
        most_keys = max_length if longest is None else longest
        if left is not None:
            left = min(left, max_length)  # positions minus it fit 32 bits
            most_keys = min(most_keys, left + query_length)
        splits = number_of_splits(programs, cdiv(most_keys, tile.block_n), launching.multiprocessors(q.device))
        parts = Parts(
            new(batch * kv_heads * rows, splits, value_dim, dtype=accumulator),
            *(new(batch * kv_heads * rows, splits, dtype=accumulator) for _ in range(2)),
        )
        traits = Traits(
            group=group, d=head_dim, d_v=value_dim, block_m=block_m, block_n=tile.block_n, block_d=padded(head_dim),
            block_dv=padded(value_dim),
            decay="scalar" if alpha is not None else "constant" if log_decay is not None else "none",
            precision=config.dot_precision(), page=page,
        )
        sink = None if inputs.sink is None else inputs.sink.contiguous()
        table, blocks = table_and_blocks(block_table)
        tensors = (q, keys, values, lengths, log_decay, alpha, first, row_scale, sink, block_table)
        launch = launching.of_call(q.device, tensors, q.shape, values.shape, left, splits, blocks)
        launch(
            split_kernel, programs * splits,
            strided(q), CachedTokens(strided(keys), strided(values), strided(alpha), table),
            lengths, strided(first), strided(log_decay), strided(row_scale), parts, inputs.scale, left, query_length,
            kv_heads, row_tiles, splits, blocks, TRAITS=traits, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )
        launch(
            combine_kernel, batch * kv_heads * rows,
            parts, out, lse, sink, query_length, kv_heads, splits,
            GROUP=group, D_V=value_dim, BLOCK_DV=padded(value_dim), BLOCK_SPLITS=next_power_of_2(splits),
        )
        return out, lse


class Parts(NamedTuple):
    """State of the online softmax of every row and split, (B · H_kv · T_q · group, splits)."""

    acc: Tensor  # (…, splits, D_v); unwritten where row_sum is 0
    row_max: Tensor
    row_sum: Tensor


@triton.jit
def split_kernel(
    queries, cache, lengths, first_keys, rates, row_scales, parts, scale: tl.float64, left, query_length, kv_heads,
    row_tiles, splits, blocks, TRAITS: tl.constexpr,
):
    """Attend with a tile of a key head's rows to one split of the keys: row m is row m // GROUP of head m % GROUP."""
    keys, values, alpha, table = cache
    GROUP: tl.constexpr = TRAITS.group
    BLOCK_M: tl.constexpr = TRAITS.block_m
    BLOCK_N: tl.constexpr = TRAITS.block_n
    BLOCK_D: tl.constexpr = TRAITS.block_d
    BLOCK_DV: tl.constexpr = TRAITS.block_dv
    DECAY: tl.constexpr = TRAITS.decay
    PRECISION: tl.constexpr = TRAITS.precision
    PAGE: tl.constexpr = TRAITS.page
    ACCUMULATOR: tl.constexpr = parts.acc.dtype.element_ty
    split = tl.program_id(0) % splits
    row_tile = tl.program_id(0) // splits % row_tiles
    batch_head = tl.program_id(0) // splits // row_tiles
    batch, kv_head = batch_head // kv_heads, batch_head % kv_heads
    entry = batch.to(tl.int64)
    length = tl.load(lengths + batch)
    if table is not None:
        length = tl.minimum(length, blocks * PAGE)
    rows = query_length * GROUP
    # rows past the end repeat the last one: they widen no interval, and are never stored
    index = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m = tl.minimum(index, rows - 1)
    row, head = m // GROUP, kv_head * GROUP + m % GROUP
    position = length - query_length + row

    if DECAY == "constant":
        left = side_of_head(rates.data, rates.strides[0], head, left)
    first, end = keys_seen(position, length, None, None, True, False, left)
    if first_keys is not None:
        strides = first_keys.strides
        first_key = tl.load(first_keys.data + entry * strides[0] + head * strides[1] + row * strides[2])
        first = tl.maximum(first, first_key)
    tile_begin, _, _, tile_end = visited_tiles(first, end, BLOCK_N)
    # divide this entry's tiles, not those of the longest entry, so that its splits are equally long
    tiles = tl.cdiv(tile_end - tile_begin, splits)
    tile_begin += split * tiles
    tile_end = tl.minimum(tile_begin + tiles, tile_end)

    row_scale = load_scale(scale, row_scales, batch, head, batch * 0, row, ACCUMULATOR) * LOG2E
    if row_scales is not None:
        row_scale = row_scale[:, None]
    rate, query_alpha = 0.0, 0.0
    if DECAY == "constant":
        rate = load_rate(rates.data, rates.strides[0], head, DECAY, ACCUMULATOR)[:, None]
    elif DECAY == "scalar":
        head_alpha = entry_start(alpha, batch, table) + head.to(tl.int64) * alpha.strides[2]
        # rows past the end read nothing
        has_alpha = (position >= 0) & (index < rows)
        own_offset = token_offset(alpha, batch, position, has_alpha, table, blocks, PAGE)
        row_alpha = tl.load(head_alpha + own_offset, mask=has_alpha, other=0.0)
        query_alpha = row_alpha[:, None] * LOG2E
    column = tl.arange(0, BLOCK_D)[None, :]
    strides = queries.strides
    q_row = entry * strides[0] + row.to(tl.int64) * strides[1] + head.to(tl.int64) * strides[2]
    q = tl.load(queries.data + q_row[:, None] + column.to(tl.int64) * strides[3], mask=column < TRAITS.d, other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], ACCUMULATOR)
    row_sum = tl.zeros([BLOCK_M], ACCUMULATOR)
    row_max = tl.full([BLOCK_M], float("-inf"), ACCUMULATOR)
    for tile in range(tile_begin, tile_end):
        start = tile * BLOCK_N
        key = start + tl.arange(0, BLOCK_N)
        # masked by the entry's length: values beyond it may be NaN, and 0 · NaN is NaN
        k = _load_cached(keys, batch, kv_head, start, length, table, blocks, PAGE, BLOCK_N, TRAITS.d, BLOCK_D)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACCUMULATOR) * row_scale
        key_alpha = 0.0
        if DECAY == "scalar":
            token = key[None, :]
            if queries.data.dtype.element_ty.primitive_bitwidth > 16:
                # Hides from the compiler which tokens are adjacent. It would choose the layout by that, and add up p of
                # pages in another order than p of a contiguous cache
                token = tl.where(token < length, token, 0)
            offset = token_offset(alpha, batch, token, key[None, :] < length, table, blocks, PAGE)
            used = has_alpha[:, None] & (key[None, :] < length)
            key_alpha = tl.load(head_alpha[:, None] + offset, mask=used, other=0.0) * LOG2E
        # α is a whole float64 here: there is no second level of the prefix, and no term cancels
        score = decayed_score(
            score, query_alpha, key_alpha, 0.0, rate, position[:, None], key[None, :], DECAY, True, False
        )
        score = tl.where(visible(key[None, :], first[:, None], end[:, None]), score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        anchor = finite_or_zero(new_max)
        p = probability(score, anchor[:, None])
        correction = rescale(row_max, anchor)
        row_sum = row_sum * correction + tl.sum(p, 1)
        v = _load_cached(values, batch, kv_head, start, length, table, blocks, PAGE, BLOCK_N, TRAITS.d_v, BLOCK_DV)
        acc = add_product(p.to(v.dtype), v, acc * correction[:, None], PRECISION)
        row_max = new_max

    here = (batch_head.to(tl.int64) * rows + index) * splits + split
    inside = index < rows
    tl.store(parts.row_max + here, row_max, mask=inside)
    tl.store(parts.row_sum + here, row_sum, mask=inside)
    # a split without keys stores row_sum 0, so combine_kernel reads nothing else of it
    value_column = tl.arange(0, BLOCK_DV)[None, :]
    written = (inside & (row_sum != 0))[:, None] & (value_column < TRAITS.d_v)
    tl.store(parts.acc + here[:, None] * TRAITS.d_v + value_column, acc, mask=written)


@triton.jit
def _load_cached(
    buffer, batch, head, start, length, table, blocks, PAGE: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Load (TOKENS, WIDTH) of an entry's head from token `start` on, 0 beyond its length."""
    if table is None:
        tile = load_tile(TileSource(None, buffer), batch, head, 0, start, length, TOKENS, DIM, WIDTH, True)
    else:
        token, column = start + tl.arange(0, TOKENS), tl.arange(0, WIDTH)[None, :]
        used = token < length
        rows = entry_start(buffer, batch, table) + head.to(tl.int64) * buffer.strides[2]
        rows += token_offset(buffer, batch, token, used, table, blocks, PAGE)[:, None]
        pointers = rows + column.to(tl.int64) * buffer.strides[3]
        tile = tl.load(pointers, mask=used[:, None] & (column < DIM), other=0.0)
    return tile


@triton.jit
def combine_kernel(
    parts, out, lse, sink, query_length, kv_heads, splits,
    GROUP: tl.constexpr, D_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):
    """Compute out and lse of one row from the Parts of its splits, and from the sink (H,) if there is one."""
    rows = query_length * GROUP
    batch_head, m = tl.program_id(0) // rows, tl.program_id(0) % rows
    batch, row = batch_head // kv_heads, m // GROUP
    head, heads = batch_head % kv_heads * GROUP + m % GROUP, kv_heads * GROUP

    split = tl.arange(0, BLOCK_SPLITS)
    here = tl.program_id(0).to(tl.int64) * splits + split
    maximum = tl.load(parts.row_max + here, mask=split < splits, other=float("-inf"))
    row_sum = tl.load(parts.row_sum + here, mask=split < splits, other=0.0)
    row_max = tl.max(maximum, 0)
    weight = rescale(maximum, finite_or_zero(row_max))
    total = tl.sum(row_sum * weight, 0)
    seen = total != 0
    total = tl.where(seen, total, 1.0)

    column = tl.arange(0, BLOCK_DV)
    written = (row_sum != 0)[:, None] & (column < D_V)[None, :]
    acc = tl.load(parts.acc + here[:, None] * D_V + column[None, :], mask=written, other=0.0)
    result = tl.sum(acc * weight[:, None], 0)
    if sink is None:
        result = result / total
    else:
        row_sink = tl.load(sink + head).to(total.dtype) * LOG2E
        factor, _, total, row_max = with_sink(row_max, total, row_sink, 0.0)
        result = result * factor
    token = batch.to(tl.int64) * query_length + row
    tl.store(out + (token * heads + head) * D_V + column, result.to(out.dtype.element_ty), mask=column < D_V)
    row_lse = tl.where(seen, (row_max + tl.log2(total)) * LN2, float("-inf"))
    tl.store(lse + (batch.to(tl.int64) * heads + head) * query_length + row, row_lse)
