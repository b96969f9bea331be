"""Row terms of the gradients, before the backward's kernel, and dq unpacked from fragments, after it; in plain Triton.

Formulas::

    Δ_i = Σ_c dO_ic O_ic − dLSE_i        P_ij = exp2(S_ij − LSE₂_i)        dS_ij = P_ij (dP_ij − Δ_i)

row_terms_kernel has a program per BLOCK_M rows of a head. It writes bfloat16 terms (ROWS, SPLIT_COLUMNS) of a query
tile. Layout::

    column    0   1   2           |  3   4   5  |  6   7
              score_factor · LSE₂ |     −Δ      |    0       three splits of each, high to low

The backward adds either to all scores of a row by a product of depth 16: ones (64, 16) · termsᵀ (16, ROWS). With a
scale per row, LSE₂ is not among the terms, because it cannot be divided by a scale of 0. Such rows have float32 factors
in addition::

    factors (2, ROWS) of a query tile      s_i log2(e), and −LSE₂

Under deterministic algorithms dq and the row sums of dS are int32 multiples of a unit per row. It is a power of two,
and no sum of terms overflows::

    |Σ_j dS_ij| ≤ bound_i = Σ_c |dO_ic| max |v| + |Δ_i|      |Σ_j dS_ij k_j| ≤ bound_i max |k|      unit ≥ bound / 2²⁹

unpack_dq_kernel has a program per PART × PART values of dq. It reads fragments (in the order in which registers hold a
product) and writes (rows, D), float32 to the inputs' dtype.
"""

import triton
import triton.language as tl

from decayattn.backends.hopper.common.fragments import (
    DELTA,
    FACTORS,
    MINUS_LSE2,
    PART,
    SCALE,
    SPLIT_COLUMNS,
    from_fragments,
)
from decayattn.backends.hopper.common.tile_table import (
    ENTRY,
    FIRST_BLOCK,
    FIRST_ROW,
    FIRST_TOKEN,
    KEY_LENGTH,
    QUERY_LENGTH,
    START,
    line_of_tile,
)
from decayattn.backends.planning.offsets import row_pointers, start_of_head
from decayattn.backends.runtime.dependent_launch import let_next_start, wait_for_launch_before
from decayattn.backends.tiles.bf16_splits import with_splits
from decayattn.backends.tiles.decay import load_rate, row_alpha, row_anchor
from decayattn.backends.tiles.scores import LOG2E

# a score below all others for any scale; finite, because a product multiplies it by 0 too
NEVER: tl.constexpr = tl.constexpr(-3.0e38)


@triton.jit
def _sequence_of_tile(table, tile, entry, start, query_length, ROWS: tl.constexpr):
    """(batch entry, start, first row, rows) of rows of a tile: start in its sequence, and the sequence's bounds.

    Dense, table is None and the sequence is its entry.
    """
    first_row = 0
    if table is not None:
        line = line_of_tile(table, tile)
        start = tl.load(line + START) + start % ROWS
        query_length, entry = tl.load(line + QUERY_LENGTH), tl.load(line + ENTRY).to(tl.int64)
        first_row = tl.load(line + FIRST_ROW)
    return entry, start, first_row, query_length


@triton.jit
def _row_alpha(decay, table, tile, entry, head, heads, start, row, query_length, DECAY: tl.constexpr):
    """α of a block's rows relative to its anchor, in base 2; rows past the end repeat the last one."""
    rates, beta, base, token_axis, block_axis = decay
    head_row, key_length, first_token, first_block = entry * heads + head, token_axis, 0, 0
    if table is not None:
        line = line_of_tile(table, tile)
        key_length, first_token = tl.load(line + KEY_LENGTH), tl.load(line + FIRST_TOKEN)
        first_block = tl.load(line + FIRST_BLOCK)
    beta += start_of_head(head_row, token_axis, first_token)
    base += start_of_head(head_row, block_axis, first_block)
    first_position = key_length - query_length
    position = tl.minimum(row, query_length - 1) + first_position
    rate = load_rate(rates, 1, head, DECAY, tl.float32)
    return row_alpha(position, row_anchor(start, first_position), rate, beta, base, DECAY)


@triton.jit
def terms_row_of_tile(tile, side, SIDES: tl.constexpr, ROWS: tl.constexpr):
    """First row of a query tile's terms; tiles are counted through all heads."""
    return (tile * SIDES + side) * ROWS


@triton.jit
def _of_program(heads, parts):
    """(batch entry · heads + head, head, part) of a program: heads innermost, as in the memory that is read once."""
    head, rest = tl.program_id(0) % heads, tl.program_id(0) // heads
    return (rest // parts * heads + head).to(tl.int64), head.to(tl.int64), rest % parts


@triton.jit
def largest_kernel(
    k, v, largest, table, key_length, key_tiles, heads, KEYS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Write max |k| and max |v|, (B, H_kv, 2), over the finite values of an entry's tokens; a key tile per program.

    largest is 0 before. k and v are Strided; table: that of key tiles, or None.
    """
    let_next_start(heads)
    tile_row, head, tile = _of_program(heads, key_tiles)
    entry, start, first_token = tile_row // heads, tile * KEYS, 0
    if table is not None:
        if tile >= tl.load(table):
            return
        line = line_of_tile(table, tile)
        entry, start = tl.load(line + ENTRY).to(tl.int64), tl.load(line + START)
        first_token, key_length = tl.load(line + FIRST_TOKEN), tl.load(line + KEY_LENGTH)
    token = start + tl.arange(0, KEYS)
    inside = (token < key_length)[:, None]
    token = (first_token + token).to(tl.int64)
    column = tl.arange(0, D)[None, :]
    here = largest + (entry * heads + head) * 2
    for n in tl.static_range(2):
        x = row_pointers(k if n == 0 else v, entry, head, token)[:, None] + column
        x = tl.load(x, mask=inside & (column < (HEAD_DIM if n == 0 else VALUE_DIM)), other=0.0).to(tl.float32)
        x = tl.abs(x)
        x = tl.where(x < float("inf"), x, 0.0)
        tl.atomic_max(here + n, tl.max(tl.max(x, 1), 0), sem="relaxed")


@triton.jit
def _inverted_unit(bound):
    """Return the bits of the largest power of two, up to 2¹²⁶, for which bound · it < 2²⁹; those of NaN without one."""
    # from exponents as float32 holds them
    exponent = (bound.to(tl.int32, bitcast=True) >> 23) & 255
    return tl.where(exponent < 255, tl.minimum(2 * 127 + 28 - exponent, 127 + 126) << 23, 0x7FC00000)


@triton.jit(do_not_specialize=["row_tiles", "first_zeroed", "counters_end"])
def row_terms_kernel(
    out, d_out, d_lse, row_lse2, terms, row_factors, added, table, decay, score_factor, query_length, row_tiles, heads,
    first_zeroed, counters_end, TRAITS: tl.constexpr,
):
    """Write the row terms that the backward adds to scores and to dP: LSE₂ of the forward, and −Δ = dLSE − Σ dO·O.

    terms is (head rows, row tiles, SIDES, ROWS, SPLIT_COLUMNS), or (heads, tiles of the table, …). First come the
    splits of score_factor · LSE₂, divided by the scale like everything that is added to products of q and k; then the
    splits of −Δ. Rows past the end and rows that see no key get an LSE₂ for which P is 0 without a mask, and no
    gradient for any dLSE. With two sides (work.py) the forward saves the whole LSE₂, and this kernel adds α_i with the
    sign of the side.

    decay: (rates of a constant decay, β and bases of one per token, lengths of the axes of tokens and of blocks), or
    None with one side.
    added: (row sums, dq fragments, counters, units). The next kernel adds to the first three, and this one zeroes them
    first. Of dq, these are the head rows from first_zeroed on. There are no more counters than programs here. units:
    (units, largest of largest_kernel), or None. Written units are int32 words (B, H, T_q) of two bfloat16: the inverted
    unit of dq, high, and that of row sums; NaN for rows that are not finite. With units, this kernel is launched by
    programmatic dependent launch after largest_kernel.
    row_factors: the scales of rows and their factors, (head rows, row tiles, SIDES, 2, ROWS), or None; with them,
    score_factor is −1.
    out, d_out, d_lse and the scales are Strided; d_lse is None if lse has no gradient.
    TRAITS: D of the kernels, D_v, rows of a query tile, rows of a program (a divisor of those), decay, sides, and query
    heads per head of keys.
    """
    D: tl.constexpr = TRAITS[0]
    VALUE_DIM: tl.constexpr = TRAITS[1]
    ROWS: tl.constexpr = TRAITS[2]
    BLOCK_M: tl.constexpr = TRAITS[3]
    DECAY: tl.constexpr = TRAITS[4]
    SIDES: tl.constexpr = TRAITS[5]
    GROUP: tl.constexpr = TRAITS[6]
    row_sums, dq_fragments, counters, units = added
    let_next_start(heads)
    tl.store(counters + tl.program_id(0), 0, mask=tl.program_id(0) < counters_end)
    blocks = row_tiles * (ROWS // BLOCK_M)
    tile_row, head, block = _of_program(heads, blocks)
    tile, start = block // (ROWS // BLOCK_M), block * BLOCK_M
    axis = query_length
    if table is not None:  # noqa: SIM102 (one is known when it compiles, the other when it runs)
        if tile >= tl.load(table):
            return
    entry, start, first_row, query_length = _sequence_of_tile(table, tile, tile_row // heads, start, query_length, ROWS)
    row = start + tl.arange(0, BLOCK_M)
    inside = row < query_length
    here = start_of_head(entry * heads + head, axis, first_row) + row

    column = tl.arange(0, D)[None, :]
    token = (first_row + row).to(tl.int64)
    at = token[:, None]
    o = out.data + entry * out.strides[0] + head * out.strides[2] + at * out.strides[1] + column
    do = d_out.data + entry * d_out.strides[0] + head * d_out.strides[2] + at * d_out.strides[1] + column
    there = inside[:, None] & (column < VALUE_DIM)
    o = tl.load(o, mask=there, other=0.0).to(tl.float32)
    do = tl.load(do, mask=there, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    if d_lse is not None:
        offset = entry * d_lse.strides[0] + head * d_lse.strides[1] + token * d_lse.strides[2]
        delta -= tl.load(d_lse.data + offset, mask=inside, other=0.0)
    lse2 = tl.load(row_lse2 + here, mask=inside, other=float("inf"))
    if units is not None:
        words, largest = units
        wait_for_launch_before(heads)
        largest += (entry * heads + head) // GROUP * 2
        bound = tl.sum(tl.abs(do), 1) * tl.load(largest + 1) + tl.abs(delta)
        bound = tl.where(lse2 == lse2, bound, lse2)
        of_dq = _inverted_unit(bound * tl.load(largest))
        tl.store(words + here, of_dq | (_inverted_unit(bound) >> 16), mask=inside)
    seen = lse2 < float("inf")
    if SIDES == 2:
        alpha = _row_alpha(decay, table, tile, entry, head, heads, start, row, query_length, DECAY)
    if row_factors is not None:
        scales, factors = row_factors
        row_scale = tl.load(row_pointers(scales, entry, head, token), mask=inside, other=0.0) * LOG2E
    for side in tl.static_range(SIDES):
        side_lse2 = lse2
        if SIDES == 2:
            side_lse2 = lse2 - alpha if side == 0 else lse2 + alpha
        own_term = tl.where(seen, score_factor * side_lse2, NEVER)
        in_tile = block % (ROWS // BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)
        terms_row = terms_row_of_tile(tile_row * row_tiles + tile, side, SIDES, ROWS)
        tile_terms = tl.zeros([BLOCK_M, SPLIT_COLUMNS], tl.bfloat16)
        if row_factors is None:
            tile_terms = with_splits(tile_terms, own_term, 0)
        else:
            in_factors = factors + terms_row * FACTORS + in_tile
            tl.store(in_factors + SCALE * ROWS, row_scale)
            tl.store(in_factors + MINUS_LSE2 * ROWS, own_term)
        tile_terms = with_splits(tile_terms, tl.where(seen, -delta, 0.0), DELTA)
        at_terms = (terms_row + in_tile)[:, None] * SPLIT_COLUMNS + tl.arange(0, SPLIT_COLUMNS)[None, :]
        tl.store(terms + at_terms, tile_terms)

    SIZE: tl.constexpr = BLOCK_M * D
    if tile_row >= first_zeroed:
        tl.store(dq_fragments + (tile_row * blocks + block) * SIZE + tl.arange(0, SIZE), tl.zeros([SIZE], tl.float32))
    if row_sums is not None:
        tl.store(row_sums + here, tl.zeros([BLOCK_M], tl.float32), mask=inside)


@triton.jit(do_not_specialize=["row_tiles"])
def unpack_dq_kernel(
    dq_fragments, dq, table, dq_strides, scale, of_scales, units, row_sums, query_length, row_tiles, heads,
    D: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):
    """Write dq = s · fragments, one part of 64 rows × 64 columns per program.

    With a scale per row, a program has 64 whole rows, and also writes the gradient of their scales: q · fragments.
    Launched by programmatic dependent launch.

    of_scales: (q, the scales, both Strided, and their gradient, float32 (B, H, T_q)), or None
    units: written by row_terms_kernel, or None. Fragments and row sums are multiples of them.
    row_sums: become float32 in place; None without units, or without row sums
    """
    wait_for_launch_before(heads)
    WIDTH: tl.constexpr = 1 if of_scales is None else D // PART  # parts of a program
    PARTS: tl.constexpr = (ROWS // PART) * (D // PART)  # parts of a tile
    parts = row_tiles * PARTS
    tile_row, head, part = _of_program(heads, parts // WIDTH)
    part *= WIDTH
    tile, start = part // PARTS, part // (D // PART) * PART
    if table is not None:  # noqa: SIM102
        if tile >= tl.load(table):
            return
    axis = query_length
    entry, start, first_row, query_length = _sequence_of_tile(table, tile, tile_row // heads, start, query_length, ROWS)
    row = start + tl.arange(0, PART)
    token = (first_row + row).to(tl.int64)
    inside = row < query_length
    if units is not None:
        here = start_of_head(entry * heads + head, axis, first_row) + row
        words = tl.load(units + here, mask=inside, other=0x3F803F80)
        unit = tl.div_rn(1.0, (words & -65536).to(tl.float32, bitcast=True))[:, None]
        if row_sums is not None:
            own = row < tl.where(part % (D // PART) == 0, query_length, 0)  # in one program per row
            row_sum = tl.load(row_sums + here, mask=own, other=0).to(tl.float32)
            row_sum = tl.div_rn(row_sum, (words << 16).to(tl.float32, bitcast=True))
            tl.store(row_sums + here, row_sum.to(tl.int32, bitcast=True), mask=own)
    if of_scales is not None:
        q, scales, d_scales = of_scales
        row_scale = tl.load(row_pointers(scales, entry, head, token), mask=inside, other=0.0)[:, None]
        q_rows = row_pointers(q, entry, head, token)[:, None]
        d_scale = tl.zeros([PART], tl.float32)
    for n in tl.static_range(WIDTH):
        x = tl.load(dq_fragments + (tile_row * parts + part + n) * PART * PART + tl.arange(0, PART * PART))
        column = (part + n) % (D // PART) * PART + tl.arange(0, PART)[None, :]
        there = inside[:, None] & (column < HEAD_DIM)
        if units is None:
            x = from_fragments(x)
        else:
            x = from_fragments(x.to(tl.float32)) * unit
        if of_scales is None:
            x *= scale
        else:
            q_part = tl.load(q_rows + column, mask=there, other=0.0)
            d_scale += tl.sum(q_part.to(tl.float32) * x, 1)
            x *= row_scale
        origin = dq + entry * dq_strides[0] + head * dq_strides[2]
        tl.store(origin + token[:, None] * dq_strides[1] + column, x.to(dq.dtype.element_ty), mask=there)
    if of_scales is not None:
        tl.store(d_scales + start_of_head(entry * heads + head, axis, first_row) + row, d_scale, mask=inside)

