"""Backward: the scores are recomputed tile by tile from the saved row references (FlashAttention 2, Dao, arXiv
2307.08691).

Three kernels, without atomics but for a broadcast bias, so every other gradient is bitwise repeatable: `row_terms`
prepares one Δ per query row; `key_gradients` owns a key tile and walks the rows that see it (dk, dv, column sums of
dS); `query_gradients` owns a query tile and walks the keys that it sees (dq, row sums of dS, the gradients of a
constant decay and of the scale).

Tiles: q, d_out (BLOCK_M, D or D_v) · k, v (BLOCK_N, D or D_v) · score, p, dp, ds (BLOCK_M, BLOCK_N); a T suffix says
transposed.
"""

import triton
import triton.language as tl

from decayattn.backends.planning.sequences import offsets_of_head, tile_of_program
from decayattn.backends.planning.skipping import end_of_planned_rows, first_planned_key
from decayattn.backends.portable.tiles import (
    add_bias_gradient,
    from_pair,
    from_token,
    load_bias,
    load_scale,
    load_tile,
    of_head,
    store_tile,
)
from decayattn.backends.tiles.decay import base_difference, key_alpha, load_rate, row_alpha, row_reference, side_of_head
from decayattn.backends.tiles.scores import LOG2E, decay_sign, decayed_score, probability, score_gradient, visible
from decayattn.backends.tiles.visibility import edge_tile, keys_seen, rows_that_see, visited_tiles


@triton.jit
def row_terms_kernel(
    out, d_out, d_lse, row_references, delta, out_strides, d_out_strides, d_lse_strides, query_length, heads,
    D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_D_LSE: tl.constexpr,
):  # fmt: skip
    """Δ = Σ dO·O − dLSE of every query row."""
    ACCUMULATOR: tl.constexpr = delta.dtype.element_ty
    row_tiles = tl.cdiv(query_length, BLOCK_M)
    head_row = tl.program_id(0) // row_tiles
    start = tl.program_id(0) % row_tiles * BLOCK_M
    batch, head = head_row // heads, head_row % heads
    row = start + tl.arange(0, BLOCK_M)
    inside = row < query_length
    here = head_row.to(tl.int64) * query_length + row

    o = load_tile(out, out_strides, batch, head, start, query_length, BLOCK_M, D_V, BLOCK_DV, True, False)
    do = load_tile(d_out, d_out_strides, batch, head, start, query_length, BLOCK_M, D_V, BLOCK_DV, True, False)
    row_delta = tl.sum(o.to(ACCUMULATOR) * do.to(ACCUMULATOR), 1)
    if HAS_D_LSE:
        offset = batch.to(tl.int64) * d_lse_strides[0] + head.to(tl.int64) * d_lse_strides[1]
        row_delta -= tl.load(d_lse + offset + row.to(tl.int64) * d_lse_strides[2], mask=inside, other=0.0)
    # a row that saw nothing (reference +inf) has no gradient, whatever dLSE is
    seen = tl.load(row_references + here, mask=inside, other=0.0) < float("inf")
    tl.store(delta + here, tl.where(seen, row_delta, 0.0), mask=inside)


@triton.jit
def _add_rows(
    dk, dv, column_sum, k, v, q_source, d_out_source, q_strides, d_out_strides, batch, head, tile, query_length,
    delta, row_references, scale, row_scales, row_scale_strides, rate, local, base, key, key_start, key_side,
    first_position, first, end, bias, bias_strides, key_length, origin, q_edge, d_out_edge,
    EDGE: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    DECAY: tl.constexpr, CAUSAL: tl.constexpr, ROW_CANCELS: tl.constexpr, ROW_SCALE: tl.constexpr,
    DECAY_GRADIENT: tl.constexpr, DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of query rows into a key tile's (dk, dv, column_sum); scores are transposed, keys × rows."""
    ACCUMULATOR: tl.constexpr = dk.dtype
    start = tile * BLOCK_M
    row = start + tl.arange(0, BLOCK_M)
    position = row + first_position
    reference = row_reference(start, first_position)
    difference = base_difference(reference, key_start, rate, base, local, DECAY)
    alpha = tl.zeros([BLOCK_M], ACCUMULATOR)
    if EDGE:
        inside = row < query_length
        row_reference_value = tl.load(row_references + row, mask=inside, other=float("inf"))
        row_delta = tl.load(delta + row, mask=inside, other=0.0)
        row = tl.minimum(row, query_length - 1)
    else:
        row_reference_value = tl.load(row_references + row)
        row_delta = tl.load(delta + row)
    if ROW_CANCELS:
        row_reference_value -= difference
    elif DECAY == "scalar":
        alpha = row_alpha(row + first_position, reference, rate, local, base, DECAY)
    row_scale = load_scale(scale, row_scales, row_scale_strides, batch, head, row, ROW_SCALE, ACCUMULATOR)
    if ROW_SCALE:
        row_scale = row_scale[None, :]

    q = load_tile(
        q_source, q_strides, batch, head, start, query_length, BLOCK_M, D, BLOCK_D, EDGE, DESCRIPTOR, origin, q_edge
    )
    scoreT = tl.dot(k, tl.trans(q), input_precision=PRECISION, out_dtype=ACCUMULATOR) * (row_scale * LOG2E)
    scoreT = decayed_score(
        scoreT, alpha[None, :], key_side[:, None], difference, rate, position[None, :], key[:, None],
        DECAY, CAUSAL, ROW_CANCELS,
    )  # fmt: skip
    if bias is not None:
        scoreT += load_bias(bias, bias_strides, row[None, :], key[:, None], query_length, key_length, ACCUMULATOR)
    if EDGE:
        index = start + tl.arange(0, BLOCK_M)
        scoreT = tl.where(visible(index[None, :], first[:, None], end[:, None]), scoreT, float("-inf"))
    pT = probability(scoreT, row_reference_value[None, :])
    do = load_tile(
        d_out_source, d_out_strides, batch, head, start, query_length, BLOCK_M, D_V, BLOCK_DV, EDGE, DESCRIPTOR, origin,
        d_out_edge,
    )  # fmt: skip
    dv = tl.dot(pT.to(do.dtype), do, dv, input_precision=PRECISION, out_dtype=ACCUMULATOR)
    dpT = tl.dot(v, tl.trans(do), input_precision=PRECISION, out_dtype=ACCUMULATOR)
    dsT = score_gradient(pT, dpT, row_delta[None, :])
    if DECAY_GRADIENT:
        if CAUSAL:
            column_sum += tl.sum(dsT, 1)
        else:
            column_sum += tl.sum(dsT * decay_sign(position[None, :], key[:, None]).to(ACCUMULATOR), 1)
    if ROW_SCALE:
        dsT *= row_scale
    dk = tl.dot(dsT.to(q.dtype), q, dk, input_precision=PRECISION, out_dtype=ACCUMULATOR)
    return dk, dv, column_sum


@triton.jit
def key_gradients_kernel(
    q_source, k_source, v_source, d_out_source, q_edge, d_out_edge, delta, row_references, row_scales, rates, local,
    base, last_reset, next_reset, dk_out, dv_out, column_sums, sequences, mirror, left, right, bias, bias_strides,
    q_strides, k_strides, v_strides, d_out_strides, dk_strides, dv_strides, row_scale_strides, rate_stride,
    scale: tl.float64, query_length, key_length, kv_heads,
    PACKED: tl.constexpr, SEARCHES: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    DECAY: tl.constexpr, CAUSAL: tl.constexpr,
    ROW_CANCELS: tl.constexpr, ROW_SCALE: tl.constexpr, DECAY_GRADIENT: tl.constexpr, DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr, program=None,
):  # fmt: skip
    """dk = Σ s dSᵀ q, dv = Σ Pᵀ dO of one key tile over its group of query heads; column sums of dS per query head."""
    ACCUMULATOR: tl.constexpr = delta.dtype.element_ty
    # causal: the first key tiles are seen by the most rows, and come first
    work = tile_of_program(
        sequences, kv_heads, query_length, key_length, BLOCK_N, True, False, PACKED, SEARCHES, program=program
    )
    key_start, kv_head, batch, query_length, key_length = (
        work.start, work.head, work.entry, work.query_length, work.key_length,
    )  # fmt: skip
    row_origin, token_origin = None, None
    if sequences is not None:
        if key_start >= key_length:
            return
        row_origin, token_origin = work.first_row, work.first_token
        dk_out = from_token(dk_out, dk_strides, work.first_token)
        dv_out = from_token(dv_out, dv_strides, work.first_token)
        row_scales = from_token(row_scales, row_scale_strides, work.first_row)
        if bias is not None:
            bias = from_pair(bias, bias_strides, work.first_row, work.first_token)
    first_position = key_length - query_length
    # keys past the end repeat the last one: they widen no interval, and are never stored
    key = tl.minimum(key_start + tl.arange(0, BLOCK_N), key_length - 1)

    k = load_tile(
        k_source, k_strides, batch, kv_head, key_start, key_length, BLOCK_N, D, BLOCK_D, True, DESCRIPTOR, token_origin
    )
    v = load_tile(
        v_source, v_strides, batch, kv_head, key_start, key_length, BLOCK_N, D_V, BLOCK_DV, True, DESCRIPTOR,
        token_origin,
    )  # fmt: skip
    dk = tl.zeros([BLOCK_N, BLOCK_D], ACCUMULATOR)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], ACCUMULATOR)
    for member in range(0, GROUP):
        head = kv_head * GROUP + member
        offsets = offsets_of_head(sequences, work, head, kv_heads * GROUP, PACKED)
        head_local = local + offsets.tokens
        head_base = base + offsets.blocks
        head_delta = delta + offsets.rows
        head_references = row_references + offsets.rows
        head_bias = bias
        if bias is not None:
            head_bias = of_head(bias, bias_strides, batch, head)
        rate = load_rate(rates, rate_stride, head, DECAY, ACCUMULATOR)
        key_side = key_alpha(key, key_start, key_length, rate, head_local, DECAY)
        head_left, head_right = left, right
        if DECAY == "constant":
            head_left = side_of_head(rates, rate_stride, head, left)
            if not CAUSAL:
                head_right = side_of_head(rates, rate_stride, head, right)
        first, end = rows_that_see(
            key, query_length, first_position, last_reset + offsets.tokens, next_reset + offsets.tokens,
            CAUSAL, DECAY == "scalar", head_left, head_right,
        )  # fmt: skip
        if mirror is not None:
            end = tl.minimum(end, end_of_planned_rows(mirror, work, head, kv_heads * GROUP, PACKED))
        tile_begin, whole_begin, whole_end, tile_end = visited_tiles(first, end, BLOCK_M)
        column_sum = tl.zeros([BLOCK_N], ACCUMULATOR)
        for n in range(0, tile_end - tile_begin - (whole_end - whole_begin)):
            dk, dv, column_sum = _add_rows(
                dk, dv, column_sum, k, v, q_source, d_out_source, q_strides, d_out_strides, batch, head,
                edge_tile(n, tile_begin, whole_begin, whole_end), query_length,
                head_delta, head_references, scale, row_scales, row_scale_strides, rate, head_local, head_base, key,
                key_start, key_side, first_position, first, end, head_bias, bias_strides, key_length, row_origin,
                q_edge, d_out_edge, True,
                D, D_V, BLOCK_M, BLOCK_D, BLOCK_DV, DECAY, CAUSAL, ROW_CANCELS, ROW_SCALE,
                DECAY_GRADIENT, DESCRIPTOR, PRECISION,
            )  # fmt: skip
        for tile in range(whole_begin, whole_end):
            dk, dv, column_sum = _add_rows(
                dk, dv, column_sum, k, v, q_source, d_out_source, q_strides, d_out_strides, batch, head,
                tile, query_length,
                head_delta, head_references, scale, row_scales, row_scale_strides, rate, head_local, head_base, key,
                key_start, key_side, first_position, first, end, head_bias, bias_strides, key_length, row_origin,
                q_edge, d_out_edge, False,
                D, D_V, BLOCK_M, BLOCK_D, BLOCK_DV, DECAY, CAUSAL, ROW_CANCELS, ROW_SCALE,
                DECAY_GRADIENT, DESCRIPTOR, PRECISION,
            )  # fmt: skip
        if DECAY_GRADIENT:
            index = key_start + tl.arange(0, BLOCK_N)
            tl.store(column_sums + offsets.tokens + index, column_sum, mask=index < key_length)
    if not ROW_SCALE:
        dk *= tl.full([], scale, ACCUMULATOR)
    store_tile(dk_out, dk_strides, batch, kv_head, key_start, key_length, dk, BLOCK_N, D, BLOCK_D)
    store_tile(dv_out, dv_strides, batch, kv_head, key_start, key_length, dv, BLOCK_N, D_V, BLOCK_DV)


@triton.jit
def _add_keys(
    dq, decay_sum, ds_sum, p_sum, distance_mean, q, do, k_source, v_source, k_strides, v_strides, batch, kv_head, tile,
    key_length, row_reference_value, row_delta, row_scale, rate, local, base, position, reference, alpha, first, end,
    bias, d_bias, bias_strides, d_bias_strides, row, index, query_length, origin, k_edge, v_edge,
    SHARED_BIAS: tl.constexpr, EDGE: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DECAY: tl.constexpr, CAUSAL: tl.constexpr,
    ROW_CANCELS: tl.constexpr, DECAY_GRADIENT: tl.constexpr, DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile into a query tile's (dq, decay_sum, ds_sum, p_sum, distance_mean)."""
    ACCUMULATOR: tl.constexpr = dq.dtype
    start = tile * BLOCK_N
    key = start + tl.arange(0, BLOCK_N)
    k = load_tile(
        k_source, k_strides, batch, kv_head, start, key_length, BLOCK_N, D, BLOCK_D, EDGE, DESCRIPTOR, origin, k_edge
    )
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACCUMULATOR) * row_scale
    difference = base_difference(reference, start, rate, base, local, DECAY)
    score = decayed_score(
        score, alpha[:, None], key_alpha(key, start, key_length, rate, local, DECAY)[None, :], difference, rate,
        position[:, None], key[None, :], DECAY, CAUSAL, ROW_CANCELS,
    )  # fmt: skip
    if bias is not None:
        score += load_bias(bias, bias_strides, row[:, None], key[None, :], query_length, key_length, ACCUMULATOR)
    if EDGE:
        score = tl.where(visible(key[None, :], first[:, None], end[:, None]), score, float("-inf"))
    if ROW_CANCELS:
        row_reference_value -= difference
    p = probability(score, row_reference_value[:, None])
    v = load_tile(
        v_source, v_strides, batch, kv_head, start, key_length, BLOCK_N, D_V, BLOCK_DV, EDGE, DESCRIPTOR, origin, v_edge
    )
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION, out_dtype=ACCUMULATOR)
    ds = score_gradient(p, dp, row_delta[:, None])
    if DECAY_GRADIENT:
        if DECAY == "constant":
            distance = tl.abs(position[:, None] - key[None, :]).to(ACCUMULATOR)
            decay_sum += tl.sum(ds * distance, 1)
            ds_sum += tl.sum(ds, 1)
            p_sum += tl.sum(p, 1)
            distance_mean += tl.sum(p * distance, 1)
        elif CAUSAL:
            decay_sum += tl.sum(ds, 1)
        else:
            decay_sum += tl.sum(ds * decay_sign(position[:, None], key[None, :]).to(ACCUMULATOR), 1)
    if d_bias is not None:
        add_bias_gradient(
            d_bias, d_bias_strides, index[:, None], key[None, :], query_length, key_length, ds, SHARED_BIAS
        )
    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION, out_dtype=ACCUMULATOR)
    return dq, decay_sum, ds_sum, p_sum, distance_mean


@triton.jit
def query_gradients_kernel(
    q_source, k_source, v_source, d_out_source, k_edge, v_edge, delta, row_references, row_scales, rates, local, base,
    last_reset, next_reset, dq_out, decay_sums, d_row_scales, d_lse, d_lse_strides, sequences, plan, left, right, bias,
    bias_strides, d_bias, d_bias_strides,
    q_strides, k_strides, v_strides, d_out_strides, dq_strides, row_scale_strides, rate_stride,
    scale: tl.float64, query_length, key_length, heads,
    SHARED_BIAS: tl.constexpr, PACKED: tl.constexpr, SEARCHES: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    DECAY: tl.constexpr, CAUSAL: tl.constexpr, ROW_CANCELS: tl.constexpr, ROW_SCALE: tl.constexpr,
    DECAY_GRADIENT: tl.constexpr, DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr, program=None,
):  # fmt: skip
    """dq = s Σ dS k of a query tile; per row Σ σ dS (per-token decay) or Σ dS |i − j| (constant), and ds = q·Σ dS k."""
    ACCUMULATOR: tl.constexpr = delta.dtype.element_ty
    work = tile_of_program(
        sequences, heads, query_length, key_length, BLOCK_M, False, True, PACKED, SEARCHES, program=program
    )
    start, head, batch, query_length, key_length = work.start, work.head, work.entry, work.query_length, work.key_length
    kv_head = head // GROUP
    offsets = offsets_of_head(sequences, work, head, heads, PACKED)
    row_origin, token_origin = None, None
    if sequences is not None:
        if (start >= query_length) | (key_length == 0):
            return
        row_origin, token_origin = work.first_row, work.first_token
        dq_out = from_token(dq_out, dq_strides, work.first_row)
        row_scales = from_token(row_scales, row_scale_strides, work.first_row)
        if bias is not None:
            bias = from_pair(bias, bias_strides, work.first_row, work.first_token)
        if d_bias is not None:
            d_bias = from_pair(d_bias, d_bias_strides, work.first_row, work.first_token)
    if bias is not None:
        bias = of_head(bias, bias_strides, batch, head)
    if d_bias is not None:
        d_bias = of_head(d_bias, d_bias_strides, batch, head)
    first_position = key_length - query_length
    local += offsets.tokens
    last_reset += offsets.tokens
    next_reset += offsets.tokens
    base += offsets.blocks

    index = start + tl.arange(0, BLOCK_M)
    row = tl.minimum(index, query_length - 1)
    position = row + first_position
    here = offsets.rows + row
    reference = row_reference(start, first_position)
    rate = load_rate(rates, rate_stride, head, DECAY, ACCUMULATOR)
    alpha = row_alpha(position, reference, rate, local, base, DECAY)
    row_scale = load_scale(scale, row_scales, row_scale_strides, batch, head, row, ROW_SCALE, ACCUMULATOR)
    if ROW_SCALE:
        row_scale = row_scale[:, None]
    row_reference_value = tl.load(row_references + here)
    row_delta = tl.load(delta + here)
    q = load_tile(
        q_source, q_strides, batch, head, start, query_length, BLOCK_M, D, BLOCK_D, True, DESCRIPTOR, row_origin
    )
    do = load_tile(
        d_out_source, d_out_strides, batch, head, start, query_length, BLOCK_M, D_V, BLOCK_DV, True, DESCRIPTOR,
        row_origin,
    )  # fmt: skip
    if DECAY == "constant":
        left = side_of_head(rates, rate_stride, head, left)
        if not CAUSAL:
            right = side_of_head(rates, rate_stride, head, right)
    first, end = keys_seen(position, key_length, last_reset, next_reset, CAUSAL, DECAY == "scalar", left, right)
    if plan is not None:
        first = tl.maximum(first, first_planned_key(plan, work, heads, BLOCK_M, PACKED))
    tile_begin, whole_begin, whole_end, tile_end = visited_tiles(first, end, BLOCK_N)

    dq = tl.zeros([BLOCK_M, BLOCK_D], ACCUMULATOR)
    decay_sum = tl.zeros([BLOCK_M], ACCUMULATOR)
    # of a constant decay: Σ dS, Σ P and Σ P |i − j|
    ds_sum = tl.zeros([BLOCK_M], ACCUMULATOR)
    p_sum = tl.zeros([BLOCK_M], ACCUMULATOR)
    distance_mean = tl.zeros([BLOCK_M], ACCUMULATOR)
    for n in range(0, tile_end - tile_begin - (whole_end - whole_begin)):
        dq, decay_sum, ds_sum, p_sum, distance_mean = _add_keys(
            dq, decay_sum, ds_sum, p_sum, distance_mean, q, do, k_source, v_source, k_strides, v_strides, batch,
            kv_head, edge_tile(n, tile_begin, whole_begin, whole_end), key_length,
            row_reference_value, row_delta, row_scale * LOG2E, rate, local, base, position, reference, alpha, first,
            end, bias, d_bias, bias_strides, d_bias_strides, row, index, query_length, token_origin, k_edge, v_edge,
            SHARED_BIAS, True, D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, DECAY, CAUSAL, ROW_CANCELS, DECAY_GRADIENT,
            DESCRIPTOR, PRECISION,
        )  # fmt: skip
    for tile in range(whole_begin, whole_end):
        dq, decay_sum, ds_sum, p_sum, distance_mean = _add_keys(
            dq, decay_sum, ds_sum, p_sum, distance_mean, q, do, k_source, v_source, k_strides, v_strides, batch,
            kv_head, tile, key_length,
            row_reference_value, row_delta, row_scale * LOG2E, rate, local, base, position, reference, alpha, first,
            end, bias, d_bias, bias_strides, d_bias_strides, row, index, query_length, token_origin, k_edge, v_edge,
            SHARED_BIAS, False, D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, DECAY, CAUSAL, ROW_CANCELS, DECAY_GRADIENT,
            DESCRIPTOR, PRECISION,
        )  # fmt: skip

    here = offsets.rows + index
    if DECAY_GRADIENT and DECAY == "constant":
        # Σ_j dS is dLSE, and, where a sink has the rest of P, that times Δ; but for the error of Δ, which a 16-bit
        # output brings and every dS has P times: it leaves again
        ds_sum -= (1 - p_sum) * row_delta
        if d_lse is not None:
            offset = batch.to(tl.int64) * d_lse_strides[0] + head.to(tl.int64) * d_lse_strides[1]
            own_row = row if row_origin is None else row + row_origin
            ds_sum -= tl.load(d_lse + offset + own_row.to(tl.int64) * d_lse_strides[2])
        # a row that saw nothing has no gradient, whatever dLSE is
        decay_sum -= tl.where(distance_mean == 0, 0.0, ds_sum * distance_mean)
    if DECAY_GRADIENT:
        tl.store(decay_sums + here, decay_sum, mask=index < query_length)
    if ROW_SCALE:
        tl.store(d_row_scales + here, tl.sum(q.to(ACCUMULATOR) * dq, 1), mask=index < query_length)
    store_tile(dq_out, dq_strides, batch, head, start, query_length, dq * row_scale, BLOCK_M, D, BLOCK_D)


@triton.jit
def gradients_kernel(
    q, k, v, d_out, delta, row_references, row_scales, rates, local, base, last_reset, next_reset, dq, dk, dv,
    decay_sums, column_sums, d_row_scales, d_lse, d_lse_strides, plan, mirror, left, right,
    q_strides, k_strides, v_strides, d_out_strides, dq_strides, dk_strides, dv_strides, row_scale_strides, rate_stride,
    scale: tl.float64, query_length, key_length, kv_heads, key_programs,
    PACKED: tl.constexpr, SEARCHES: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    DECAY: tl.constexpr, CAUSAL: tl.constexpr, ROW_CANCELS: tl.constexpr, ROW_SCALE: tl.constexpr,
    DECAY_GRADIENT: tl.constexpr, DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both gradients in one launch, of sequences that fill their batch entries and without a bias: key_programs
    programs of key tiles, then those of query tiles, which would otherwise wait for them."""
    program = tl.program_id(0)
    if program < key_programs:
        key_gradients_kernel(
            q, k, v, d_out, None, None, delta, row_references, row_scales, rates, local, base, last_reset, next_reset,
            dk, dv, column_sums, None, mirror, left, right, None, None,
            q_strides, k_strides, v_strides, d_out_strides, dk_strides, dv_strides, row_scale_strides, rate_stride,
            scale, query_length, key_length, kv_heads,
            PACKED, SEARCHES, GROUP, D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, DECAY, CAUSAL, ROW_CANCELS, ROW_SCALE,
            DECAY_GRADIENT and DECAY == "scalar", DESCRIPTOR, PRECISION, program,
        )  # fmt: skip
    else:
        query_gradients_kernel(
            q, k, v, d_out, None, None, delta, row_references, row_scales, rates, local, base, last_reset, next_reset,
            dq, decay_sums, d_row_scales, d_lse, d_lse_strides, None, plan, left, right, None, None, None, None,
            q_strides, k_strides, v_strides, d_out_strides, dq_strides, row_scale_strides, rate_stride,
            scale, query_length, key_length, kv_heads * GROUP,
            False, PACKED, SEARCHES, GROUP, D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, DECAY, CAUSAL, ROW_CANCELS,
            ROW_SCALE, DECAY_GRADIENT, DESCRIPTOR, PRECISION, program - key_programs,
        )  # fmt: skip
