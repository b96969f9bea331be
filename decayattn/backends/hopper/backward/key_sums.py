"""Sums of dS over the rows of a tile, per key: Σ dS for a decay per token, Σ dS (i − j) for a constant one.

Both are products of dSᵀ with few columns, issued beside dk.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.backward.work import WARPGROUP_KEYS
from decayattn.backends.hopper.common.fragments import COPIES, SHARES

# bits of a row's number in a tile (bit_weights)
BITS: gl.constexpr = gl.constexpr(7)


@gluon.constexpr_function
def key_columns(DECAY):
    """How many columns sum up dS of keys."""
    return 16 if DECAY == "constant" else 8


@gluon.jit
def bit_weights(column, row):
    """What a row of a tile counts for in a column of the sums of keys: 2^b in column 2 b if its number has bit b, and
    in column 2 b + 1 if it does not; 1 in the two columns behind those.

    r − c is the sum of 2^b over the bits that r has and c lacks, less that over the bits that c has and r lacks. So the
    columns 2 b of the bits that c lacks, less the columns 2 b + 1 of those that it has, are Σ dS (r − c), and row c
    counts for 0 in each of them. With c the key's own row, dS of the own pair stays out of the gradient of a constant
    decay, to which it does not belong: where the decay is strong, all others are less than the rounding of that one.
    """
    bit = column // 2
    return gl.where(bit < BITS, (((row >> bit) + column) & 1) << bit, 1)


@gluon.jit
def _two_bits(x):
    """x (64 keys, bits 0 to 7) by threads, (64, 4) each: bits 0 to 3, and bits 4 to 7."""
    low, high = gl.split(gl.permute(gl.reshape(x, [WARPGROUP_KEYS, 2, 4]), [0, 2, 1]))
    return gl.convert_layout(low, SHARES, assert_trivial=True), gl.convert_layout(high, SHARES, assert_trivial=True)


@gluon.jit
def _distance_sum(of_keys, own_row, edge):
    """Σ dS (i − j) of the rows of a tile: (64 keys, 4 shares).

    of_keys is dSᵀ times bit_weights, own_row what number the key's own row has in the tile or would have.
    """
    has, lacks = gl.split(gl.reshape(of_keys, [WARPGROUP_KEYS, 8, 2]))
    low, high = _two_bits(has)
    own_row = gl.expand_dims(gl.convert_layout(own_row, gl.SliceLayout(1, SHARES), assert_trivial=True), 1)
    bit = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, SHARES)), 0)
    # the last thread's second bit is none, but Σ dS
    is_sum = bit + 4 == BITS
    # of the own row, what is not in c: in whole tiles, where nothing is its own row unless that is row 0, c is 0
    rest = own_row
    if edge:
        low_lacks, high_lacks = _two_bits(lacks)
        low = gl.where((own_row >> bit) & 1 == 0, low, -low_lacks)
        high = gl.where(((own_row >> (bit + 4)) & 1 == 0) | is_sum, high, -high_lacks)
        rest = own_row & -(1 << BITS)
    return low + high * gl.where(is_sum, (-rest).to(gl.float32), 1.0)


@gluon.jit
def key_sums(of_keys, own_row, edge, DECAY: gl.constexpr):
    """Of the rows of a tile Σ dS, in 4 copies, or for a constant decay Σ dS (i − j), in 4 shares: (64 keys, 4)."""
    if DECAY == "constant":
        total = _distance_sum(of_keys, own_row, edge)
    else:
        total, _ = gl.split(gl.reshape(of_keys, [WARPGROUP_KEYS, COPIES // 2, 2]))
        total = gl.convert_layout(total, SHARES, assert_trivial=True)
    return total
