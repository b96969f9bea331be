"""Sums of dS over the rows of a tile, per key: Σ dS for a decay per token, Σ dS (i − j) for a constant one.

A product of dSᵀ with ones and with the rows' numbers r, issued beside dk, has Σ dS and Σ dS r. With i₀ the tile's first
row, Σ dS (i − j) = Σ dS r + (i₀ − j) Σ dS, which is exact enough where the tile does not have the key's own row. There
the own pair has distance 0 and no part in the gradient, but it would leave the rounding of r dS and −r dS, and under a
strong decay all other pairs are less than that.

So in edge tiles the rows are summed in 8 groups of neighbours, and in classes: all first rows of the groups, all
second ones, and so on. Of r = CLASSES · group + class, Σ dS (r − own) is CLASSES · Σ (group − own group) · (sum of the
group) + Σ (class − own class) · (sum of the class), where what holds the own pair is multiplied by 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.backward.work import WARPGROUP_KEYS
from decayattn.backends.hopper.common.fragments import COPIES, SHARES, among_columns, by_threads, common_columns, shares


@gluon.jit
def rate_weights(column, row):
    """What a row of a tile counts for in the columns of a constant decay's product: 1 in the first, its number in the
    second. The others are there because no product has fewer than 8; 0 in them makes the sums shares."""
    return gl.where(column == 0, 1, gl.where(column == 1, row, 0))


@gluon.jit
def group_weights(column, row, CLASSES: gl.constexpr):
    """1 in the column of a row's group."""
    return gl.where(column == row // CLASSES, 1, 0)


@gluon.jit
def class_weights(column, row, CLASSES: gl.constexpr):
    """1 in the column of a row's class."""
    return gl.where(column == row % CLASSES, 1, 0)


@gluon.jit
def _sum_and_moment(of_keys):
    """The two columns of the product that a thread has, (64 keys, 4 threads) each."""
    return gl.split(gl.reshape(of_keys, [WARPGROUP_KEYS, COPIES // 2, 2]))


@gluon.jit
def copies_of_sum(of_keys):
    """Σ dS of the rows of a tile, (64 keys, 4 copies), from dSᵀ times ones."""
    total, _ = _sum_and_moment(of_keys)
    return gl.convert_layout(total, SHARES, assert_trivial=True)


@gluon.jit
def distance_sum(of_keys, own_row):
    """Σ dS (i − j) of the rows of a whole tile, (64 keys, 4 shares), from dSᵀ times rate_weights, and what number the
    key's own row has in the tile or would have."""
    total, moment = _sum_and_moment(of_keys)
    own_row = gl.convert_layout(own_row.to(gl.float32), gl.SliceLayout(1, total.type.layout), assert_trivial=True)
    return gl.convert_layout(moment - total * gl.expand_dims(own_row, 1), SHARES, assert_trivial=True)


@gluon.jit
def edge_distance_sum(of_groups, of_classes, own_row):
    """The same of an edge tile, from dSᵀ times group_weights and class_weights."""
    CLASSES: gl.constexpr = of_classes.shape[1]
    # a shift, which rounds down: own_row may be negative, or behind the tile
    LOG: gl.constexpr = 4 if CLASSES == 16 else 3
    between_groups = _times_distance(of_groups, own_row >> LOG)
    return between_groups * CLASSES + _times_distance(of_classes, own_row & (CLASSES - 1))


@gluon.jit
def _times_distance(sums, own):
    """Σ sums · (column − own column), (64 keys, 4 shares)."""
    x = by_threads(sums)
    return shares(x * (common_columns(x).to(gl.float32) - among_columns(own.to(gl.float32), x)))
