"""A float32 number as three bfloat16 ones, in columns beside rows, or rows beside keys.

A product with ones adds the three up again: one matrix instruction more, and the number is added to a whole row, or
column, of float32 scores without any other.
"""

import triton
import triton.language as tl

# high, middle and low bits
SPLITS = 3
# columns in memory: 16 bytes, as few as the copy engine can fetch; it fills up with zeros what a tile has more
COLUMNS = 8
# columns or rows of a tile: a matrix instruction's depth
DEPTH = 16


@triton.jit
def in_splits(value):
    """High, middle and low bits."""
    value = value.to(tl.float32)
    high = value.to(tl.bfloat16)
    rest = value - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def with_splits(columns, value, FIRST: tl.constexpr):
    """bfloat16 columns (rows, COLUMNS) with the splits of value (rows,) in those from FIRST on."""
    high, middle, low = in_splits(value)
    column = tl.arange(0, columns.shape[1])[None, :]
    columns = tl.where(column == FIRST, high[:, None], columns)
    columns = tl.where(column == FIRST + 1, middle[:, None], columns)
    return tl.where(column == FIRST + 2, low[:, None], columns)
