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
