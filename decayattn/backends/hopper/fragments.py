"""A product's result as its threads hold it: four threads share a row, and have every fourth pair of its columns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.config import WARPGROUP_ROWS

# of a warpgroup's rows, a number for each of the four threads that share one
SHARES: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [WARPGROUP_ROWS, 4]
    )
)


@gluon.jit
def by_threads(x):
    """(rows, columns) as (rows, blocks of 8 columns, 4 threads that share a row, 2 columns)."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def shares(x):
    """(64 rows, 4), in the layout SHARES: of x by threads, the sum of what each has of a row."""
    return gl.convert_layout(gl.sum(gl.sum(x, 3), 1), SHARES, assert_trivial=True)


@gluon.jit
def from_threads(x, LAYOUT: gl.constexpr):
    """x by threads as it was, in the layout of the product."""
    return gl.convert_layout(x.reshape([x.shape[0], x.shape[1] * 8]), LAYOUT, assert_trivial=True)


@gluon.jit
def common_columns(x):
    """Of x by threads, a column's number less 2 · thread: it is the same in all of them, a constant in an instruction
    where the number would need a register."""
    UNSHARED: gl.constexpr = gl.SliceLayout(2, x.type.layout)
    block = gl.arange(0, x.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, UNSHARED)))
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, UNSHARED)))
    column = gl.expand_dims(gl.expand_dims(block * 8, 0), 2) + gl.expand_dims(gl.expand_dims(pair, 0), 1)
    return gl.expand_dims(column, 2)


@gluon.jit
def less_own(column, LAYOUT: gl.constexpr):
    """(rows, 4): a column's number, one per row, less 2 · thread."""
    column = gl.convert_layout(column, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    return gl.expand_dims(column, 1) - gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, LAYOUT)) * 2, 0)


@gluon.jit
def among_columns(column, x):
    """A column's number, one per row, to be compared with common_columns(x)."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
    return gl.expand_dims(gl.expand_dims(less_own(column, LAYOUT), 1), 3)
