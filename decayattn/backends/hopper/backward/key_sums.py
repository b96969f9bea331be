"""Sums of dS over the rows of a tile, per key: Σ dS for a decay per token, Σ dS (i − j) for a constant one.

A product of dSᵀ with ones and with the rows' indices r in the tile, issued with dk, gives Σ dS and Σ dS r. With i₀ the
tile's first row, Σ dS (i − j) = Σ dS r + (i₀ − j) Σ dS. This is exact enough if the tile does not have the key's own
row. If it does, the own pair is a problem: its distance is 0, so it must not count in the gradient, but it would leave
the rounding of r dS and −r dS. Under a strong decay all other pairs are smaller than that.

So partial tiles sum rows by the bits of their indices: for every bit, the rows with it and the rows without it. With o
the index of the key's own row, r − o = Σ 2^bit (bit of r − bit of o). If o has the bit, the term is −2^bit for rows
without it; otherwise it is 2^bit for rows with it. The own pair is in none of the sums that count. If o is outside of
the tile, its bits beyond those of the tile's rows count for all rows alike.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.common.fragments import (
    COPIES,
    SHARES,
    WARPGROUP_KEYS,
    by_threads,
    index_along,
    product_layout,
)

# columns of bit_weights: two for each bit of a row's index, and for the first bit beyond
BIT_COLUMNS: gl.constexpr = gl.constexpr(16)


@gluon.jit
def bit_weights(column, row, ROWS: gl.constexpr):
    """1 if a row's index has the bit column // 2; in odd columns, if it does not.

    The first bit that no row of the tile has gives a column of ones; later bits have weight 0.
    """
    bit = column // 2
    has_bit = (row >> bit) & 1
    return gl.where(bit > _row_bits(ROWS), 0, gl.where(column % 2 == 0, has_bit, 1 - has_bit))


@gluon.constexpr_function
def _row_bits(rows):
    return rows.bit_length() - 1


@gluon.jit
def sum_operands(shared, DECAY: gl.constexpr, PARTIAL: gl.constexpr):
    """Return the weights of a tile's rows, (1, columns, rows), and zeros of the product (64 keys, columns)."""
    weights = shared.weights
    if DECAY == "constant" and PARTIAL:
        weights = shared.bits
    SUMS: gl.constexpr = weights.shape[1]
    return weights, gl.zeros([WARPGROUP_KEYS, SUMS], gl.float32, product_layout(SUMS))


@gluon.jit
def partial_distance_sum(of_bits, own_row, ROWS: gl.constexpr):
    """Σ dS (i − j) of the rows of a partial tile, (64 keys, 4 shares), from dSᵀ times bit_weights.

    own_row: index that the key's own row has in the tile, or would have.
    """
    with_bit, without_bit = gl.split(by_threads(of_bits))
    KEY: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, with_bit.type.layout))
    bit = index_along(with_bit, 1) * 4 + index_along(with_bit, 2)
    own = gl.convert_layout(own_row, KEY, assert_trivial=True)
    # a shift rounds down, as needed: own_row may be negative, or after the tile
    own_bits = gl.expand_dims(gl.expand_dims(own, 1), 2) >> bit
    own_bit = own_bits & 1
    without = gl.where(bit == _row_bits(ROWS), own_bits, own_bit)
    distance = with_bit * (1 - own_bit).to(gl.float32) - without_bit * without.to(gl.float32)
    distance *= (1 << bit).to(gl.float32)
    return gl.convert_layout(gl.sum(distance, 1), SHARES, assert_trivial=True)


@gluon.jit
def key_sum_of_tile(of_keys, work, tile, key, PARTIAL: gl.constexpr):
    """Return a query tile's contribution to the sums of keys, from the product issued with dk."""
    ROWS: gl.constexpr = work.schedule.TILE.rows
    DECAY: gl.constexpr = work.schedule.MODES.decay
    own_row = key - work.bounds.first_position() - tile * ROWS
    if DECAY == "constant" and PARTIAL:
        total = partial_distance_sum(of_keys, own_row, ROWS)
    else:
        # the two columns that a thread has: four copies of Σ dS, or Σ dS and Σ dS r
        total, moment = gl.split(gl.reshape(of_keys, [WARPGROUP_KEYS, COPIES // 2, 2]))
        if DECAY == "constant":
            own = gl.convert_layout(own_row.to(gl.float32), gl.SliceLayout(1, total.type.layout), assert_trivial=True)
            total = moment - total * gl.expand_dims(own, 1)
        total = gl.convert_layout(total, SHARES, assert_trivial=True)
    return total


@gluon.jit
def store_key_sums(done, member, key_sum, decay, NTH: gl.constexpr):
    """Store the sums of a query head over WARPGROUP_KEYS keys of a work tile."""
    bounds, head_row = done.bounds, done.head_row(member)
    tokens, start = bounds.tokens(head_row), bounds.start + NTH * WARPGROUP_KEYS
    total = gl.sum(key_sum, 1)
    if done.schedule.MODES.decay == "scalar":
        total *= 0.25  # of 4 copies
        share = gl.arange(0, WARPGROUP_KEYS, total.type.layout)
        here = decay.key_sums + tokens + start + share
        gl.store(here, total, mask=start + share < bounds.key_length)
    else:
        gl.store(decay.rate_sums + bounds.blocks(head_row) * 2 + start // WARPGROUP_KEYS, gl.sum(total, 0))
