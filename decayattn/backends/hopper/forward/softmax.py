"""The online softmax of a tile: its maximum, its exponentials, their sum, and the correction of earlier sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.common.fragments import (
    SHARES,
    WARPGROUP_ROWS,
    WARPS,
    by_threads,
    from_threads,
    from_words,
    shares,
    to_words,
)
from decayattn.backends.tiles.scores import finite_or_zero, probability, rescale

# powers of two by which scores may exceed a row's maximum before it moves: p stays far below float16's 2^16
LAG: gl.constexpr = gl.constexpr(8.0)
# largest trusted sum of a row with an unmoved maximum: below float32's 2^128
SUM_LIMIT: gl.constexpr = gl.constexpr(2.0**120)
# The same before a partial tile, for each of the four threads that share a row. The tile may move the maximum so far
# that the factor for the sum, below 2^-126, becomes 0. The loss is then at most 2^-28 of what the tile adds
PARTIAL_SUM_LIMIT: gl.constexpr = gl.constexpr(2.0**96)
# Powers of two by which a row's first maximum may exceed its own, if another row's does. In a tile of which a row sees
# few keys, its own maximum says little about later scores. The row's keys still count in its sums
AHEAD: gl.constexpr = gl.constexpr(64.0)
# Divisor of the operand P when all tiles are treated as partial: P V of 2^24 keys, each p up to 2^LAG, is then at most
# the largest |v|. The exponents keep their bits; relative to a larger maximum they would lose five
HEADROOM: gl.constexpr = gl.constexpr(2.0**32)


@gluon.constexpr_function
def _rescale_assembly(width):
    """Assembly of acc · correction for the `width` accumulators of a thread, skipped if no thread of the warp needs it.

    Operands: the results; the accumulators, in the results' registers; the correction of each. A thread has two rows,
    which alternate every two accumulators.
    """
    first_row, second_row = f"${2 * width}", f"${2 * width + 2}"
    lines = [
        "{",
        ".reg .pred changed, any;",
        f"setp.neu.f32 changed, {first_row}, 0f3F800000;",
        f"setp.neu.or.f32 changed, {second_row}, 0f3F800000, changed;",
        "vote.sync.any.pred any, changed, 0xffffffff;",
        "@!any bra DONE;",
        *(f"mul.f32 ${n}, ${n}, {second_row if n // 2 % 2 else first_row};" for n in range(width)),
        "DONE:",
        "}",
    ]
    constraints = ["=r"] * width + [str(n) for n in range(width)] + ["r"] * width
    return "\n".join(lines), ",".join(constraints)


@gluon.jit
def rescale_accumulator(acc, correction, D: gl.constexpr):
    """Return acc · correction; a warp skips the multiplications if all its corrections are 1."""
    correction = gl.expand_dims(gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout)), 1)
    _, factors = gl.broadcast(acc, correction)
    WIDTH: gl.constexpr = 32 if D == 64 else 64
    RESCALE: gl.constexpr = _rescale_assembly(WIDTH)
    return gl.inline_asm_elementwise(
        RESCALE[0], RESCALE[1], [acc, factors], dtype=gl.float32, is_pure=True, pack=WIDTH
    )


@gluon.jit
def _of_both_rows(tile_max, ahead):
    """Return the larger maximum of the two rows of a thread, 8 apart; at most `ahead` above a row's own.

    A row keeps its own maximum if they differ by no more than LAG. Otherwise the result is a whole number above its
    own: p of the row's largest score then needs no rounding, so a row that sees one key is exact.
    """
    pairs = tile_max.reshape([WARPS, 2, 8])
    _, larger = gl.broadcast(pairs, gl.expand_dims(gl.max(pairs, 1), 1))
    larger = gl.convert_layout(larger.reshape([WARPGROUP_ROWS]), tile_max.type.layout, assert_trivial=True)
    above = gl.where(larger > tile_max + LAG, gl.minimum(larger - tile_max, ahead), 0.0)
    return tile_max + gl.floor(above)


@gluon.jit
def softmax(score, row_max, row_sum, difference, scale, ahead, PARTIAL: gl.constexpr, BFLOAT16: gl.constexpr):
    """Return (p, row_max, row_sum, correction): unnormalised p of a tile, and the factor for earlier sums.

    BFLOAT16: p has the exponents of float32, so that only PARTIAL tiles look for a maximum; the correction of full
    tiles is not read. A row without a maximum gets p = inf, an overflow. ahead: for a first tile only (_of_both_rows);
    None leaves each row its own maximum.
    """
    if PARTIAL and BFLOAT16:
        # an overflow stays one, however far this tile moves the maximum
        row_sum = gl.where(row_sum >= PARTIAL_SUM_LIMIT, float("inf"), row_sum)
    new_max, anchor = row_max, row_max
    correction = row_max
    if PARTIAL or not BFLOAT16:
        tile_max = gl.max(score, 1) * scale + difference
        if ahead is not None:
            tile_max = _of_both_rows(tile_max, ahead)
        # the maximum lags behind the true one: it moves only when scores exceed it by more than LAG, so that most tiles
        # correct nothing. p is at most 2^LAG then
        new_max = gl.where(tile_max > row_max + LAG, tile_max, row_max)
        anchor = finite_or_zero(new_max)
        correction = rescale(row_max, anchor)
        row_sum *= gl.expand_dims(gl.convert_layout(correction, gl.SliceLayout(1, SHARES), assert_trivial=True), 1)
    p = probability(score * scale, gl.expand_dims(anchor - difference, 1))
    row_sum += shares(by_threads(p))
    return p, new_max, row_sum, correction


@gluon.jit
def rounded(p, shared, count, PARTIAL: gl.constexpr):
    """Round P of a tile to 16 bits, as words (fragments.to_words); a second pass divides it by HEADROOM."""
    p = p.to(shared.queries.tiles.dtype)
    if PARTIAL and p.dtype == gl.bfloat16:
        # read again for every partial tile, because keeping it would take a register; partial tiles are few
        factor = gl.where(shared.is_careful(count), 1.0 / HEADROOM, 1.0).to(gl.bfloat16)
        # one instruction per pair; Triton would use one per value
        p = gl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [p, factor], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    return to_words(by_threads(p))


@gluon.jit
def as_operand(p, shared, LAYOUT: gl.constexpr):
    """View the words of P as a left operand of P V."""
    return from_threads(from_words(p, shared.queries.tiles), LAYOUT)


@gluon.jit
def log2_of_sum(total):
    """log2 of normal values to within 2^-22, the rounding of a float32 between 4 and 8. inf and NaN stay.

    The hardware's log2 is that exact for the mantissa, in [1, 2). gl.log2 takes five times as many instructions.
    """
    bits = total.to(gl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(gl.float32, bitcast=True)
    log2 = gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [mantissa], dtype=gl.float32, is_pure=True, pack=1
    )
    return gl.where(total < float("inf"), ((bits >> 23) - 127).to(gl.float32) + log2, total)


@gluon.jit
def reciprocal(total):
    """1 / total to a relative error of 2^-23, in one instruction: a division takes seven."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [total], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def are_finite(out):
    """(rows, 4): True if all of a thread's values of a row are finite and at most about 2^64.

    One instruction tests two of them: it adds their product to a sum.
    """
    even, odd = gl.split(by_threads(out))
    return gl.abs(gl.sum(even * odd, 1)) < float("inf")
