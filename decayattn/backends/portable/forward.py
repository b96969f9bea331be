"""Forward: one program per query tile walks the keys that its rows see, with an online softmax (FlashAttention 2's loop
order, Dao, arXiv 2307.08691). See DERIVATION.md for every step.

Tiles: q (BLOCK_M, D) · k (BLOCK_N, D) · v (BLOCK_N, D_v) · score, p (BLOCK_M, BLOCK_N) · acc (BLOCK_M, D_v)
"""

import triton
import triton.language as tl

from decayattn.backends.planning.sequences import offsets_of_head, tile_of_program
from decayattn.backends.planning.skipping import first_planned_key
from decayattn.backends.portable.tiles import (
    from_pair,
    from_token,
    load_bias,
    load_scale,
    load_tile,
    of_head,
    store_tile,
)
from decayattn.backends.tiles.decay import base_difference, key_alpha, load_rate, row_alpha, row_reference, side_of_head
from decayattn.backends.tiles.scores import LN2, LOG2E, decayed_score, finite_or_zero, probability, rescale, visible
from decayattn.backends.tiles.visibility import edge_tile, keys_seen, visited_tiles


@triton.jit
def _attend(
    acc, row_sum, row_max, q, k_source, v_source, k_strides, v_strides, batch, kv_head, tile, key_length,
    row_scale, rate, local, base, position, reference, alpha, first, end, bias, bias_strides, row, query_length, origin,
    v_edge, EDGE: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    DECAY: tl.constexpr, CAUSAL: tl.constexpr, ROW_CANCELS: tl.constexpr, DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile into the running (acc, row_sum, row_max)."""
    start = tile * BLOCK_N
    key = start + tl.arange(0, BLOCK_N)
    k = load_tile(k_source, k_strides, batch, kv_head, start, key_length, BLOCK_N, D, BLOCK_D, EDGE, DESCRIPTOR, origin)
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=acc.dtype) * row_scale
    key_side = key_alpha(key, start, key_length, rate, local, DECAY)
    difference = base_difference(reference, start, rate, base, local, DECAY)
    score = decayed_score(
        score, alpha[:, None], key_side[None, :], difference, rate, position[:, None], key[None, :],
        DECAY, CAUSAL, ROW_CANCELS,
    )  # fmt: skip
    if bias is not None:
        score += load_bias(bias, bias_strides, row[:, None], key[None, :], query_length, key_length, acc.dtype)
    if EDGE:
        score = tl.where(visible(key[None, :], first[:, None], end[:, None]), score, float("-inf"))
    tile_max = tl.max(score, 1)
    if ROW_CANCELS:
        tile_max += difference
    new_max = tl.maximum(row_max, tile_max)
    anchor = finite_or_zero(new_max) if EDGE or bias is not None else new_max
    tile_anchor = anchor - difference if ROW_CANCELS else anchor
    p = probability(score, tile_anchor[:, None])
    correction = rescale(row_max, anchor)
    row_sum = row_sum * correction + tl.sum(p, 1)
    v = load_tile(
        v_source, v_strides, batch, kv_head, start, key_length, BLOCK_N, D_V, BLOCK_DV, EDGE, DESCRIPTOR, origin, v_edge
    )
    acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision=PRECISION, out_dtype=acc.dtype)
    return acc, row_sum, new_max


@triton.jit
def forward_kernel(
    q_source, k_source, v_source, v_edge, out, lse, row_references, row_scales, rates, local, base, last_reset,
    next_reset, sequences, plan, left, right, bias, bias_strides,
    q_strides, k_strides, v_strides, out_strides, row_scale_strides, rate_stride,
    scale: tl.float64, query_length, key_length, heads,
    PACKED: tl.constexpr, SEARCHES: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    DECAY: tl.constexpr, CAUSAL: tl.constexpr, ROW_CANCELS: tl.constexpr, ROW_SCALE: tl.constexpr,
    DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = softmax(s q·kᵀ + decay) v and its log-sum-exp, for one tile of query rows of one head of a sequence."""
    ACCUMULATOR: tl.constexpr = row_references.dtype.element_ty
    # causal: the last row tiles see the most keys, and come first
    work = tile_of_program(sequences, heads, query_length, key_length, BLOCK_M, False, True, PACKED, SEARCHES)
    start, head, batch, query_length, key_length = work.start, work.head, work.entry, work.query_length, work.key_length
    kv_head = head // GROUP
    offsets = offsets_of_head(sequences, work, head, heads, PACKED)
    row_origin, token_origin = None, None
    if sequences is not None:
        # out of a sequence there is nothing to write, and fill_outside writes to one without a key
        if (start >= query_length) | (key_length == 0):
            return
        row_origin, token_origin = work.first_row, work.first_token
        out = from_token(out, out_strides, work.first_row)
        row_scales = from_token(row_scales, row_scale_strides, work.first_row)
        if bias is not None:
            bias = from_pair(bias, bias_strides, work.first_row, work.first_token)
    if bias is not None:
        bias = of_head(bias, bias_strides, batch, head)
    first_position = key_length - query_length
    local += offsets.tokens
    last_reset += offsets.tokens
    next_reset += offsets.tokens
    base += offsets.blocks

    # rows past the end repeat the last one: they widen no interval, and are never stored
    row = tl.minimum(start + tl.arange(0, BLOCK_M), query_length - 1)
    position = row + first_position
    reference = row_reference(start, first_position)
    rate = load_rate(rates, rate_stride, head, DECAY, ACCUMULATOR)
    alpha = row_alpha(position, reference, rate, local, base, DECAY)
    row_scale = load_scale(scale, row_scales, row_scale_strides, batch, head, row, ROW_SCALE, ACCUMULATOR) * LOG2E
    if ROW_SCALE:
        row_scale = row_scale[:, None]
    q = load_tile(
        q_source, q_strides, batch, head, start, query_length, BLOCK_M, D, BLOCK_D, True, DESCRIPTOR, row_origin
    )
    if DECAY == "constant":
        left = side_of_head(rates, rate_stride, head, left)
        if not CAUSAL:
            right = side_of_head(rates, rate_stride, head, right)
    first, end = keys_seen(position, key_length, last_reset, next_reset, CAUSAL, DECAY == "scalar", left, right)
    if plan is not None:
        first = tl.maximum(first, first_planned_key(plan, work, heads, BLOCK_M, PACKED))
    tile_begin, whole_begin, whole_end, tile_end = visited_tiles(first, end, BLOCK_N)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], ACCUMULATOR)
    row_sum = tl.zeros([BLOCK_M], ACCUMULATOR)
    row_max = tl.full([BLOCK_M], float("-inf"), ACCUMULATOR)
    for n in range(0, tile_end - tile_begin - (whole_end - whole_begin)):
        acc, row_sum, row_max = _attend(
            acc, row_sum, row_max, q, k_source, v_source, k_strides, v_strides, batch, kv_head,
            edge_tile(n, tile_begin, whole_begin, whole_end), key_length, row_scale, rate, local, base, position,
            reference, alpha, first, end, bias, bias_strides, row, query_length, token_origin, v_edge, True,
            D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, DECAY, CAUSAL, ROW_CANCELS, DESCRIPTOR, PRECISION,
        )  # fmt: skip
    for tile in range(whole_begin, whole_end):
        acc, row_sum, row_max = _attend(
            acc, row_sum, row_max, q, k_source, v_source, k_strides, v_strides, batch, kv_head,
            tile, key_length, row_scale, rate, local, base, position,
            reference, alpha, first, end, bias, bias_strides, row, query_length, token_origin, v_edge, False,
            D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, DECAY, CAUSAL, ROW_CANCELS, DESCRIPTOR, PRECISION,
        )  # fmt: skip

    # a row that saw no key: row_sum 0 gives out 0 and lse −inf
    seen = row_sum > 0
    total = tl.where(seen, row_sum, 1.0)
    store_tile(out, out_strides, batch, head, start, query_length, acc / total[:, None], BLOCK_M, D_V, BLOCK_DV)
    # what the backward subtracts from a score to get log2 P: the log-sum-exp as tiles count it, and still in base 2,
    # where it is exact for a row that one key dominates
    reference_value = row_max + tl.log2(total)
    row = start + tl.arange(0, BLOCK_M)
    here = offsets.rows + row
    tl.store(row_references + here, tl.where(seen, reference_value, float("inf")), mask=row < query_length)
    if lse is not None:
        row_lse = (reference_value + alpha if ROW_CANCELS else reference_value) * LN2
        tl.store(lse + here, tl.where(seen, row_lse, float("-inf")), mask=row < query_length)
