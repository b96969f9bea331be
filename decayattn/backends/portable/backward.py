"""Backward: recompute the scores tile by tile from the saved log-sum-exp (FlashAttention 2, Dao, arXiv 2307.08691).

Three kernels. Only the gradient of a broadcast bias uses atomics; all others are bitwise repeatable.

    row_terms         one Δ per query row
    key_gradients     owns a key tile and walks the rows that see it: dk, dv, column sums of dS
    query_gradients   owns a query tile and walks the keys that it sees: dq, row sums of dS, the gradients of a constant
                      decay and of the scale

Tiles: q, d_out (BLOCK_M, D or D_v) · k, v (BLOCK_N, D or D_v) · score, p, dp, ds (BLOCK_M, BLOCK_N). A T suffix marks
a transposed tile.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from decayattn.backends.planning.sequences import offsets_of_head, tile_of_program
from decayattn.backends.planning.skipping import end_of_planned_rows
from decayattn.backends.portable.kernel_args import QueryRows, Sizes, TileSource
from decayattn.backends.portable.tiles import (
    add_bias_gradient,
    add_product,
    bias_of_head,
    decay_of_head,
    from_token,
    keys_of_rows,
    load_bias,
    load_part,
    load_rows,
    load_tile,
    scores_of_rows,
    store_tile,
)
from decayattn.backends.runtime.strided import Strided
from decayattn.backends.tiles.decay import base_difference, key_alpha, side_of_head
from decayattn.backends.tiles.scores import LOG2E, decay_sign, decayed_score, probability, score_gradient, visible
from decayattn.backends.tiles.visibility import partial_tile, rows_that_see, visited_tiles


class KeyTile(NamedTuple):
    """A tile of keys, and the query rows [first, end) that see each of them."""

    k: tl.tensor  # (BLOCK_N, D)
    v: tl.tensor  # (BLOCK_N, D_v)
    key: tl.tensor  # position; keys past the end repeat the last one: they widen no interval, and are never stored
    alpha: tl.tensor
    first: tl.tensor
    end: tl.tensor


class KeySums(NamedTuple):
    """Sums over the rows that see a tile of keys."""

    dk: tl.tensor  # (BLOCK_N, D)
    dv: tl.tensor  # (BLOCK_N, D_v)
    column_sum: tl.tensor  # (BLOCK_N,): Σ σ dS, of one query head


class QueryTile(NamedTuple):
    """A tile of query rows, and the keys [first, end) that each of them sees."""

    q: tl.tensor  # (BLOCK_M, D)
    d_out: tl.tensor  # (BLOCK_M, D_v)
    rows: QueryRows
    scale: tl.tensor  # s: a scalar, or (BLOCK_M, 1)
    lse2: tl.tensor
    delta: tl.tensor
    first: tl.tensor
    end: tl.tensor


class QuerySums(NamedTuple):
    """Sums over the keys that a tile of rows sees."""

    dq: tl.tensor  # (BLOCK_M, D)
    decay: tl.tensor  # (BLOCK_M,): Σ σ dS of a decay per token, Σ dS |i − j| of a constant one
    score: tl.tensor  # (BLOCK_M,): Σ dS; only for a constant decay in 16 bits
    distance: tl.tensor  # (BLOCK_M,): Σ P |i − j|; likewise


@triton.jit
def row_terms_kernel(
    out, d_out, d_lse, row_lse2, sink_probability, delta, score_sums, query_length, heads,
    D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):
    """Compute Δ = Σ dO·O − dLSE of every query row and, if score_sums is given, Σ_j dS_ij = dLSE + P_sink Δ."""
    ACCUMULATOR: tl.constexpr = delta.dtype.element_ty
    row_tiles = tl.cdiv(query_length, BLOCK_M)
    head_row = tl.program_id(0) // row_tiles
    start = tl.program_id(0) % row_tiles * BLOCK_M
    batch, head = head_row // heads, head_row % heads
    row = start + tl.arange(0, BLOCK_M)
    inside = row < query_length
    here = head_row.to(tl.int64) * query_length + row

    o = load_tile(TileSource(None, out), batch, head, 0, start, query_length, BLOCK_M, D_V, BLOCK_DV, True)
    do = load_tile(TileSource(None, d_out), batch, head, 0, start, query_length, BLOCK_M, D_V, BLOCK_DV, True)
    row_delta = tl.sum(o.to(ACCUMULATOR) * do.to(ACCUMULATOR), 1)
    row_sum = tl.zeros([BLOCK_M], ACCUMULATOR)
    if d_lse is not None:
        offset = batch.to(tl.int64) * d_lse.strides[0] + head.to(tl.int64) * d_lse.strides[1]
        row_sum += tl.load(d_lse.data + offset + row.to(tl.int64) * d_lse.strides[2], mask=inside, other=0.0)
        row_delta -= row_sum
    # a row without a visible key (row_lse2 +inf) has no gradient, for any dLSE
    seen = tl.load(row_lse2 + here, mask=inside, other=0.0) < float("inf")
    tl.store(delta + here, tl.where(seen, row_delta, 0.0), mask=inside)
    if score_sums is not None:
        if sink_probability is not None:
            row_sum += tl.load(sink_probability + here, mask=inside, other=0.0) * row_delta
        tl.store(score_sums + here, tl.where(seen, row_sum, 0.0), mask=inside)


@triton.jit
def _add_rows(
    sums, keys, q_source, d_out_source, head, tile, work, row_lse2, delta, scale, row_scales, decay, bias,
    DECAY_GRADIENT: tl.constexpr, PARTIAL: tl.constexpr, TRAITS: tl.constexpr,
):
    """Add one tile of query rows to a key tile's KeySums; scores are transposed, keys × rows."""
    DECAY: tl.constexpr = TRAITS.decay
    PRECISION: tl.constexpr = TRAITS.precision
    ACCUMULATOR: tl.constexpr = sums.dk.dtype
    prefix, start = decay.prefix, tile * TRAITS.block_m
    rows = load_rows(start, head, work, scale, row_scales, decay, PARTIAL, ACCUMULATOR, TRAITS)
    difference = base_difference(rows.anchor, work.start, decay.rate, prefix.base, prefix.beta, DECAY)
    if PARTIAL:
        inside = rows.index < work.query_length
        lse2 = tl.load(row_lse2 + rows.index, mask=inside, other=float("inf"))
        row_delta = tl.load(delta + rows.index, mask=inside, other=0.0)
    else:
        lse2 = tl.load(row_lse2 + rows.index)
        row_delta = tl.load(delta + rows.index)
    if TRAITS.row_cancels:
        lse2 -= difference
    row_scale = rows.scale
    if row_scales is not None:
        row_scale = row_scale[None, :]

    q = load_part("q", q_source, work, head, start, PARTIAL, TRAITS)
    scoreT = tl.dot(keys.k, tl.trans(q), input_precision=PRECISION, out_dtype=ACCUMULATOR) * (row_scale * LOG2E)
    scoreT = decayed_score(
        scoreT, rows.alpha[None, :], keys.alpha[:, None], difference, decay.rate, rows.position[None, :],
        keys.key[:, None], DECAY, TRAITS.causal, TRAITS.row_cancels,
    )
    if bias is not None:
        scoreT += load_bias(bias, rows.row[None, :], keys.key[:, None], work, ACCUMULATOR)
    if PARTIAL:
        scoreT = tl.where(visible(rows.index[None, :], keys.first[:, None], keys.end[:, None]), scoreT, float("-inf"))
    pT = probability(scoreT, lse2[None, :])
    do = load_part("d_out", d_out_source, work, head, start, PARTIAL, TRAITS)
    dv = add_product(pT.to(do.dtype), do, sums.dv, PRECISION)
    dpT = tl.dot(keys.v, tl.trans(do), input_precision=PRECISION, out_dtype=ACCUMULATOR)
    dsT = score_gradient(pT, dpT, row_delta[None, :])
    column_sum = sums.column_sum
    if DECAY_GRADIENT:
        if TRAITS.causal:
            column_sum += tl.sum(dsT, 1)
        else:
            column_sum += tl.sum(dsT * decay_sign(rows.position[None, :], keys.key[:, None]).to(ACCUMULATOR), 1)
    if row_scales is not None:
        dsT *= row_scale
    dk = add_product(dsT.to(q.dtype), q, sums.dk, PRECISION)
    return KeySums(dk, dv, column_sum)


@triton.jit
def key_gradients_kernel(
    q_descriptor, k_descriptor, v_descriptor, d_out_descriptor, inputs, row_terms, decay, gradients, sequences, mirror,
    window, bias, scale: tl.float64, sizes, TRAITS: tl.constexpr, program=None,
):
    """dk = Σ s dSᵀ q, dv = Σ Pᵀ dO of one key tile over its group of query heads; column sums of dS per query head."""
    BLOCK_N: tl.constexpr = TRAITS.block_n
    BLOCK_D: tl.constexpr = TRAITS.block_d
    BLOCK_DV: tl.constexpr = TRAITS.block_dv
    DECAY: tl.constexpr = TRAITS.decay
    PACKED: tl.constexpr = TRAITS.packed
    ACCUMULATOR: tl.constexpr = row_terms.delta.dtype.element_ty
    work = tile_of_program(
        sequences, sizes.heads, sizes.query_length, sizes.key_length, BLOCK_N, True, PACKED, TRAITS.searches,
        program=program,
    )
    start, kv_head, query_length, key_length = work.start, work.head, work.query_length, work.key_length
    if sequences is not None:  # noqa: SIM102 (one is known when it compiles, the other when it runs)
        if start >= key_length:
            return
    dk_out = Strided(from_token(gradients.dk, work.first_token), gradients.dk.strides)
    dv_out = Strided(from_token(gradients.dv, work.first_token), gradients.dv.strides)
    heads = sizes.heads * TRAITS.group
    key = tl.minimum(start + tl.arange(0, BLOCK_N), key_length - 1)
    q_source, d_out_source = TileSource(q_descriptor, inputs.q), TileSource(d_out_descriptor, inputs.d_out)

    k = load_part("k", TileSource(k_descriptor, inputs.k), work, kv_head, start, True, TRAITS)
    v = load_part("v", TileSource(v_descriptor, inputs.v), work, kv_head, start, True, TRAITS)
    dk = tl.zeros([BLOCK_N, BLOCK_D], ACCUMULATOR)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], ACCUMULATOR)
    for member in range(0, TRAITS.group):
        head = kv_head * TRAITS.group + member
        offsets = offsets_of_head(sequences, work, head, heads, PACKED)
        row_lse2, delta = row_terms.row_lse2 + offsets.rows, row_terms.delta + offsets.rows
        head_bias = bias
        if bias is not None:
            head_bias = Strided(bias_of_head(bias, work, head), bias.strides)
        head_decay = decay_of_head(decay, head, offsets, ACCUMULATOR, TRAITS)
        alpha = key_alpha(key, start, key_length, head_decay.rate, head_decay.prefix.beta, DECAY)
        left, right = window.left, window.right
        if DECAY == "constant":
            left = side_of_head(decay.rates, decay.rate_stride, head, left)
            if not TRAITS.causal:
                right = side_of_head(decay.rates, decay.rate_stride, head, right)
        first, end = rows_that_see(
            key, query_length, key_length - query_length, head_decay.prefix.last_reset, head_decay.prefix.next_reset,
            TRAITS.causal, DECAY == "scalar", left, right,
        )
        if mirror is not None:
            end = tl.minimum(end, end_of_planned_rows(mirror, work, head, heads, PACKED))
        keys = KeyTile(k, v, key, alpha, first, end)
        tile_begin, full_begin, full_end, tile_end = visited_tiles(first, end, TRAITS.block_m)
        partial_tiles = tile_end - tile_begin - (full_end - full_begin)
        sums = KeySums(dk, dv, tl.zeros([BLOCK_N], ACCUMULATOR))
        for full in tl.static_range(2):  # partial tiles, then full ones
            for n in range(full_begin if full else 0, full_end if full else partial_tiles):
                tile = n if full else partial_tile(n, tile_begin, full_begin, full_end)
                sums = _add_rows(
                    sums, keys, q_source, d_out_source, head, tile, work, row_lse2, delta, scale,
                    row_terms.scales, head_decay, head_bias, gradients.column_sums is not None, not full, TRAITS,
                )
        dk, dv = sums.dk, sums.dv
        if gradients.column_sums is not None:
            index = start + tl.arange(0, BLOCK_N)
            tl.store(gradients.column_sums + offsets.tokens + index, sums.column_sum, mask=index < key_length)
    if row_terms.scales is None:
        dk *= tl.full([], scale, ACCUMULATOR)
    store_tile(dk_out, work.entry, kv_head, start, key_length, dk, BLOCK_N, TRAITS.d, BLOCK_D)
    store_tile(dv_out, work.entry, kv_head, start, key_length, dv, BLOCK_N, TRAITS.d_v, BLOCK_DV)


@triton.jit
def _add_keys(
    sums, queries, k_source, v_source, kv_head, tile, work, decay, bias, d_bias,
    DECAY_GRADIENT: tl.constexpr, SCORE_SUMS: tl.constexpr, PARTIAL: tl.constexpr, TRAITS: tl.constexpr,
):
    """Add one key tile to a query tile's QuerySums; SCORE_SUMS: also to the two sums that correct the error of Δ."""
    PRECISION: tl.constexpr = TRAITS.precision
    ACCUMULATOR: tl.constexpr = sums.dq.dtype
    rows, start = queries.rows, tile * TRAITS.block_n
    key = start + tl.arange(0, TRAITS.block_n)
    score, difference, k = scores_of_rows(
        queries, queries.scale * LOG2E, k_source, kv_head, start, work, decay, bias, PARTIAL, ACCUMULATOR, TRAITS
    )
    lse2 = queries.lse2
    if TRAITS.row_cancels:
        lse2 -= difference
    p = probability(score, lse2[:, None])
    v = load_part("v", v_source, work, kv_head, start, PARTIAL, TRAITS)
    dp = tl.dot(queries.d_out, tl.trans(v), input_precision=PRECISION, out_dtype=ACCUMULATOR)
    ds = score_gradient(p, dp, queries.delta[:, None])
    decay_sum, score_sum, distance_sum = sums.decay, sums.score, sums.distance
    if DECAY_GRADIENT:
        if TRAITS.decay == "constant":
            # relative to the rows' anchor, exact for near pairs; one conversion per row and key instead of per pair
            row_offset, key_offset = (rows.position - rows.anchor).to(ACCUMULATOR), (key - rows.anchor).to(ACCUMULATOR)
            distance = tl.abs(row_offset[:, None] - key_offset[None, :])
            decay_sum += tl.sum(ds * distance, 1)
            if SCORE_SUMS:
                score_sum += tl.sum(ds, 1)
                distance_sum += tl.sum(p * distance, 1)
        elif TRAITS.causal:
            decay_sum += tl.sum(ds, 1)
        else:
            decay_sum += tl.sum(ds * decay_sign(rows.position[:, None], key[None, :]).to(ACCUMULATOR), 1)
    if d_bias is not None:
        add_bias_gradient(d_bias, rows.index[:, None], key[None, :], work, ds, TRAITS.shared_bias)
    dq = add_product(ds.to(k.dtype), k, sums.dq, PRECISION)
    return QuerySums(dq, decay_sum, score_sum, distance_sum)


@triton.jit
def query_gradients_kernel(
    q_descriptor, k_descriptor, v_descriptor, d_out_descriptor, inputs, row_terms, decay, gradients, sequences, plan,
    window, bias, scale: tl.float64, sizes, TRAITS: tl.constexpr, program=None,
):
    """dq = s Σ dS k of a query tile; per row Σ σ dS (per-token decay) or Σ dS |i − j| (constant), and ds = q·Σ dS k."""
    BLOCK_M: tl.constexpr = TRAITS.block_m
    BLOCK_D: tl.constexpr = TRAITS.block_d
    ACCUMULATOR: tl.constexpr = row_terms.delta.dtype.element_ty
    DECAY_GRADIENT: tl.constexpr = gradients.decay_sums is not None
    SCORE_SUMS: tl.constexpr = row_terms.score_sums is not None
    work = tile_of_program(
        sequences, sizes.heads, sizes.query_length, sizes.key_length, BLOCK_M, False, TRAITS.packed, TRAITS.searches,
        program=program,
    )
    start, entry, head, first_row, query_length = work.start, work.entry, work.head, work.first_row, work.query_length
    kv_head = head // TRAITS.group
    offsets = offsets_of_head(sequences, work, head, sizes.heads, TRAITS.packed)
    if sequences is not None:  # noqa: SIM102
        if (start >= query_length) | (work.key_length == 0):
            return
    dq_out, d_bias = Strided(from_token(gradients.dq, first_row), gradients.dq.strides), gradients.bias
    if bias is not None:
        bias = Strided(bias_of_head(bias, work, head), bias.strides)
    if d_bias is not None:
        d_bias = Strided(bias_of_head(d_bias, work, head), d_bias.strides)
    k_source, v_source = TileSource(k_descriptor, inputs.k), TileSource(v_descriptor, inputs.v)

    head_decay = decay_of_head(decay, head, offsets, ACCUMULATOR, TRAITS)
    rows = load_rows(start, head, work, scale, row_terms.scales, head_decay, True, ACCUMULATOR, TRAITS)
    row_scale = rows.scale
    if row_terms.scales is not None:
        row_scale = row_scale[:, None]
    here = offsets.rows + rows.row
    lse2 = tl.load(row_terms.row_lse2 + here)
    row_delta = tl.load(row_terms.delta + here)
    q = load_part("q", TileSource(q_descriptor, inputs.q), work, head, start, True, TRAITS)
    do = load_part("d_out", TileSource(d_out_descriptor, inputs.d_out), work, head, start, True, TRAITS)
    first, end = keys_of_rows(rows, work, sizes.heads, decay, head_decay.prefix, window, plan, TRAITS)
    queries = QueryTile(q, do, rows, row_scale, lse2, row_delta, first, end)
    tile_begin, full_begin, full_end, tile_end = visited_tiles(first, end, TRAITS.block_n)

    nothing = tl.zeros([BLOCK_M], ACCUMULATOR)
    sums = QuerySums(tl.zeros([BLOCK_M, BLOCK_D], ACCUMULATOR), nothing, nothing, nothing)
    partial_tiles = tile_end - tile_begin - (full_end - full_begin)
    for full in tl.static_range(2):  # partial tiles, then full ones
        for n in range(full_begin if full else 0, full_end if full else partial_tiles):
            tile = n if full else partial_tile(n, tile_begin, full_begin, full_end)
            sums = _add_keys(
                sums, queries, k_source, v_source, kv_head, tile, work, head_decay, bias, d_bias,
                DECAY_GRADIENT, SCORE_SUMS, not full, TRAITS,
            )

    here, inside = offsets.rows + rows.index, rows.index < query_length
    decay_sum = sums.decay
    if SCORE_SUMS:
        # Correct the error of Δ, which comes from rounding the output to 16 bits: every dS is too small by P times it.
        # The error is the exact Σ dS minus the computed one. The rounding of large scores scales all P of a row by one
        # factor. Its effect on Σ dS is small, because Σ dS is small where one key dominates the row. Σ P dP would give
        # the error of Δ too, but the factor's effect on it is large
        decay_sum += (tl.load(row_terms.score_sums + offsets.rows + rows.row) - sums.score) * sums.distance
    if DECAY_GRADIENT:
        tl.store(gradients.decay_sums + here, decay_sum, mask=inside)
    if gradients.scales is not None:
        tl.store(gradients.scales + here, tl.sum(q.to(ACCUMULATOR) * sums.dq, 1), mask=inside)
    store_tile(dq_out, entry, head, start, query_length, sums.dq * row_scale, BLOCK_M, TRAITS.d, BLOCK_D)


@triton.jit
def gradients_kernel(
    inputs, row_terms, decay, of_queries, of_keys, plan, mirror, window, scale: tl.float64, sizes, key_programs,
    TRAITS: tl.constexpr,
):
    """Compute both gradients in one launch, for sequences that fill their batch entries, without a bias.

    The first key_programs programs have key tiles. Those of query tiles, in a launch of their own, would wait for them.
    sizes.heads is H_kv.
    """
    program = tl.program_id(0)
    if program < key_programs:
        key_gradients_kernel(
            None, None, None, None, inputs, row_terms, decay, of_keys, None, mirror, window, None, scale, sizes,
            TRAITS, program,
        )
    else:
        query_sizes = Sizes(sizes.query_length, sizes.key_length, sizes.heads * TRAITS.group)
        query_gradients_kernel(
            None, None, None, None, inputs, row_terms, decay, of_queries, None, plan, window, None, scale, query_sizes,
            TRAITS, program - key_programs,
        )
