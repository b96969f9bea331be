"""Per-key code of all consumers of the backward: α of keys, the rows that see them, and P of a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.common.fragments import (
    FACTORS,
    MINUS_LSE2,
    SCALE,
    bits_before,
    by_threads,
    from_threads,
    where_bits,
)
from decayattn.backends.tiles.decay import constant_rate
from decayattn.backends.tiles.scores import decayed_score, probability


@gluon.jit
def keys_of_head(work, member, tokens, key, inside, decay):
    """Return data of keys, one per row of a product, for a query head of the group.

    These are α relative to the work tile's first key, the rows that see the keys (KeyWork.rows_of), and the rows that
    see the work tile's first and last key. tokens: the head's first one; inside: keys, clipped to the last one.
    """
    DECAY: gl.constexpr = work.schedule.MODES.decay
    alpha = inside.to(gl.float32)
    if DECAY == "scalar":
        alpha = gl.load(decay.beta + tokens + inside)
    elif DECAY == "constant":
        rate = constant_rate(decay.rates, 1, work.head(member), gl.float32)
        alpha = (key - work.bounds.start).to(gl.float32) * rate
    last_reset, next_reset = decay.last_reset + tokens, decay.next_reset + tokens
    limits = work.limits(member, decay.rates)
    rows = work.rows_of(key, last_reset, next_reset, limits)
    return alpha, rows, work.rows_of_ends(member, last_reset, next_reset, limits)


@gluon.jit
def _row_factors(shared, stage, FACTOR: gl.constexpr, like, ROW: gl.constexpr = 0):
    """Load a factor (row_terms.py) of the query tile's rows from ROW on, one per column of like: (1, columns)."""
    factors = shared.factors.index(stage * FACTORS + FACTOR).slice(ROW, like.shape[1], 1)
    return factors.load(like.type.layout)


@gluon.jit
def operand_of_dk(left, d_scores, shared, stage, ROW_SCALES: gl.constexpr, ROW: gl.constexpr = 0):
    """Return the left operand of dk: `left`, that of dSᵀ; with a scale per row, that of dSᵀ times the scales."""
    if ROW_SCALES:
        d_scores *= _row_factors(shared, stage, SCALE, d_scores, ROW)
        left = gl.convert_layout(d_scores.to(left.dtype), left.type.layout)
    return left


@gluon.jit
def tile_probability(
    scoreT, shared, stage, keys, score_scale, DECAY: gl.constexpr, PARTIAL: gl.constexpr, ROW: gl.constexpr = 0,
    ROW_SCALES: gl.constexpr = False,
):
    """P of the query tile in a stage, from products with keys; scoreT begins with its row ROW."""
    _, key_alpha, first, end = keys
    SCORE: gl.constexpr = scoreT.type.layout
    if DECAY != "none":
        # the term that the tile's rows share is added to the key's
        key_alpha = key_alpha - shared.differences.index(stage).load(key_alpha.type.layout)
    if ROW_SCALES:
        scoreT *= _row_factors(shared, stage, SCALE, scoreT, ROW)
        scoreT += _row_factors(shared, stage, MINUS_LSE2, scoreT, ROW)
    else:
        scoreT *= score_scale
    scoreT = decayed_score(scoreT, 0, gl.expand_dims(key_alpha, 1), 0, 0, 0, 0, DECAY, True, DECAY != "none")
    if PARTIAL:
        # read the tile's first row here: if it were known earlier, the compiler would compare before the scores are
        # ready
        here = shared.starts.index(stage).load(key_alpha.type.layout)
        if ROW > 0:
            here += ROW
        x = by_threads(scoreT)
        seen = bits_before(end - here, x) & ~bits_before(first - here, x)
        scoreT = from_threads(where_bits(seen, x), SCORE)
    return probability(scoreT, 0)
