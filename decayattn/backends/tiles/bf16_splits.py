"""A float32 value as three bfloat16 values, stored in extra columns (of rows) or extra rows (of keys).

A product with ones adds the three up again. One more matrix instruction then adds the value to a whole row, or column,
of float32 scores, without further arithmetic.
"""

import triton
import triton.language as tl

# high, middle and low bits
SPLITS = 3
# columns in memory: 16 bytes, the minimum of a TMA copy, which fills the rest of a tile with zeros
SPLIT_COLUMNS = 8
# columns or rows of a tile: the depth of a matrix instruction
DEPTH = 16


@triton.jit
def in_splits(value):
    """Return the high, middle and low bits."""
    value = value.to(tl.float32)
    high = value.to(tl.bfloat16)
    rest = value - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def with_splits(columns, value, FIRST: tl.constexpr):
    """Return bfloat16 columns (rows, SPLIT_COLUMNS) with the splits of value (rows,) in columns FIRST to FIRST + 2."""
    high, middle, low = in_splits(value)
    column = tl.arange(0, columns.shape[1])[None, :]
    columns = tl.where(column == FIRST, high[:, None], columns)
    columns = tl.where(column == FIRST + 1, middle[:, None], columns)
    return tl.where(column == FIRST + 2, low[:, None], columns)
