"""Forward: one program per query tile walks the keys that its rows see, with an online softmax.

The loop order is FlashAttention 2's (Dao, arXiv 2307.08691). DERIVATION.md has every step.

Tiles: q (BLOCK_M, D) · k (BLOCK_N, D) · v (BLOCK_N, D_v) · score, p (BLOCK_M, BLOCK_N) · acc (BLOCK_M, D_v)
"""

from typing import NamedTuple

import triton
import triton.language as tl

from decayattn.backends.planning.sequences import offsets_of_head, tile_of_program
from decayattn.backends.portable.kernel_args import QueryRows, TileSource
from decayattn.backends.portable.tiles import (
    add_product,
    bias_of_head,
    decay_of_head,
    from_token,
    keys_of_rows,
    load_part,
    load_rows,
    scores_of_rows,
    store_tile,
)
from decayattn.backends.runtime.strided import Strided
from decayattn.backends.tiles.scores import LN2, LOG2E, finite_or_zero, probability, rescale, with_sink
from decayattn.backends.tiles.visibility import partial_tile, visited_tiles


class QueryTile(NamedTuple):
    """A tile of query rows, and the keys [first, end) that each of them sees."""

    q: tl.tensor  # (BLOCK_M, D)
    rows: QueryRows
    scale: tl.tensor  # s·log2(e): a scalar, or (BLOCK_M, 1)
    first: tl.tensor
    end: tl.tensor


class Softmax(NamedTuple):
    """The online softmax of a tile of query rows: sums relative to the running maximum."""

    acc: tl.tensor  # (BLOCK_M, D_v)
    row_sum: tl.tensor  # (BLOCK_M,)
    row_max: tl.tensor  # (BLOCK_M,)


@triton.jit
def _attend(
    state, queries, k_source, v_source, kv_head, tile, work, decay, bias, PARTIAL: tl.constexpr, TRAITS: tl.constexpr
):
    """Add one key tile to the running Softmax."""
    PRECISION: tl.constexpr = TRAITS.precision
    ACCUMULATOR: tl.constexpr = state.acc.dtype
    start = tile * TRAITS.block_n
    score, difference, _ = scores_of_rows(
        queries, queries.scale, k_source, kv_head, start, work, decay, bias, PARTIAL, ACCUMULATOR, TRAITS
    )
    tile_max = tl.max(score, 1)
    if TRAITS.row_cancels:
        tile_max += difference
    new_max = tl.maximum(state.row_max, tile_max)
    anchor = finite_or_zero(new_max) if PARTIAL or bias is not None else new_max
    tile_anchor = anchor - difference if TRAITS.row_cancels else anchor
    p = probability(score, tile_anchor[:, None])
    correction = rescale(state.row_max, anchor)
    row_sum = state.row_sum * correction + tl.sum(p, 1)
    v = load_part("v", v_source, work, kv_head, start, PARTIAL, TRAITS)
    acc = add_product(p.to(v.dtype), v, state.acc * correction[:, None], PRECISION)
    return Softmax(acc, row_sum, new_max)


@triton.jit
def forward_kernel(
    q_descriptor, k_descriptor, v_descriptor, inputs, out, row_outputs, row_scales, decay, sequences, plan, window,
    bias, sink, scale: tl.float64, sizes, TRAITS: tl.constexpr,
):
    """out = softmax(s q·kᵀ + decay) v and its log-sum-exp, for one tile of query rows of one head of a sequence.

    kernel_args.py defines inputs, decay, window, bias, sizes and TRAITS; out is a Strided.

    row_outputs: pointers to row_lse2, which the backward reads, and to lse, or None
    sink: (H,), or None
    """
    row_lse2, lse = row_outputs
    BLOCK_M: tl.constexpr = TRAITS.block_m
    BLOCK_DV: tl.constexpr = TRAITS.block_dv
    ACCUMULATOR: tl.constexpr = row_lse2.dtype.element_ty
    work = tile_of_program(
        sequences, sizes.heads, sizes.query_length, sizes.key_length, BLOCK_M, False, TRAITS.packed, TRAITS.searches
    )
    start, head, query_length = work.start, work.head, work.query_length
    kv_head = head // TRAITS.group
    offsets = offsets_of_head(sequences, work, head, sizes.heads, TRAITS.packed)
    if sequences is not None:  # noqa: SIM102 (one is known when it compiles, the other when it runs)
        # nothing to write outside a sequence; fill_outside writes the rows of a sequence without keys
        if (start >= query_length) | (work.key_length == 0):
            return
    out = Strided(from_token(out, work.first_row), out.strides)
    if bias is not None:
        bias = Strided(bias_of_head(bias, work, head), bias.strides)
    k_source, v_source = TileSource(k_descriptor, inputs.k), TileSource(v_descriptor, inputs.v)

    head_decay = decay_of_head(decay, head, offsets, ACCUMULATOR, TRAITS)
    rows = load_rows(start, head, work, scale, row_scales, head_decay, True, ACCUMULATOR, TRAITS)
    row_scale = rows.scale * LOG2E
    if row_scales is not None:
        row_scale = row_scale[:, None]
    q = load_part("q", TileSource(q_descriptor, inputs.q), work, head, start, True, TRAITS)
    first, end = keys_of_rows(rows, work, sizes.heads, decay, head_decay.prefix, window, plan, TRAITS)
    queries = QueryTile(q, rows, row_scale, first, end)
    tile_begin, full_begin, full_end, tile_end = visited_tiles(first, end, TRAITS.block_n)

    state = Softmax(
        tl.zeros([BLOCK_M, BLOCK_DV], ACCUMULATOR),
        tl.zeros([BLOCK_M], ACCUMULATOR),
        tl.full([BLOCK_M], float("-inf"), ACCUMULATOR),
    )
    partial_tiles = tile_end - tile_begin - (full_end - full_begin)
    for full in tl.static_range(2):  # partial tiles, then full ones
        for n in range(full_begin if full else 0, full_end if full else partial_tiles):
            tile = n if full else partial_tile(n, tile_begin, full_begin, full_end)
            state = _attend(
                state, queries, k_source, v_source, kv_head, tile, work, head_decay, bias, not full, TRAITS
            )

    # a row without a visible key: row_sum 0 gives out 0 and lse −inf (a NaN stays)
    seen = state.row_sum != 0
    row_max, total = state.row_max, tl.where(seen, state.row_sum, 1.0)
    if sink is None:
        acc = state.acc / total[:, None]
    else:
        row_sink = tl.load(sink + head).to(ACCUMULATOR) * LOG2E
        lacking = rows.alpha if TRAITS.row_cancels else 0.0
        factor, row_max, total, whole_max = with_sink(row_max, total, row_sink, lacking)
        acc = state.acc * factor[:, None]
    store_tile(out, work.entry, head, start, query_length, acc, BLOCK_M, TRAITS.d_v, BLOCK_DV)
    # The backward subtracts this from a score to get log2 P. It is in base 2 and lacks row_alpha if the scores lack it,
    # so it is exact for a row that one key dominates
    own_lse2 = row_max + tl.log2(total)
    here = offsets.rows + rows.index
    inside = rows.index < query_length
    tl.store(row_lse2 + here, tl.where(seen, own_lse2, float("inf")), mask=inside)
    if lse is not None:
        if sink is not None:
            row_lse = whole_max + tl.log2(total)
        else:
            row_lse = own_lse2 + rows.alpha if TRAITS.row_cancels else own_lse2
        tl.store(lse + here, tl.where(seen, row_lse * LN2, float("-inf")), mask=inside)
