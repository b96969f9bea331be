"""Fragments: products as the registers of a warpgroup hold them, their layouts, and operations that move no data.

Four threads share a row of a result. Each has one of every four pairs of its columns.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.config import KEY_TILE as _KEY_TILE
from decayattn.backends.hopper.config import WARPGROUP_ROWS as _WARPGROUP_ROWS
from decayattn.backends.tiles import bf16_splits

# rows of one warpgroup's product: query rows in the forward, keys in the backward
WARPGROUP_ROWS: gl.constexpr = gl.constexpr(_WARPGROUP_ROWS)
WARPGROUP_KEYS: gl.constexpr = WARPGROUP_ROWS
# warps of a warpgroup
WARPS: gl.constexpr = gl.constexpr(4)
# keys of a block of the decay prefix, and of a tile of the backward
KEY_TILE: gl.constexpr = gl.constexpr(_KEY_TILE)
SPLITS: gl.constexpr = gl.constexpr(bf16_splits.SPLITS)
SPLIT_COLUMNS: gl.constexpr = gl.constexpr(bf16_splits.SPLIT_COLUMNS)
DEPTH: gl.constexpr = gl.constexpr(bf16_splits.DEPTH)
# terms of rows (backward/row_terms.py): the first column of Δ, after those of LSE₂
DELTA: gl.constexpr = SPLITS
# factors of rows, with a scale per row: s·log2(e), and −LSE₂
SCALE: gl.constexpr = gl.constexpr(0)
MINUS_LSE2: gl.constexpr = gl.constexpr(1)
FACTORS: gl.constexpr = gl.constexpr(2)

# layout (64 rows, 4): one value for each of the four threads that share a row
SHARES: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [_WARPGROUP_ROWS, 4]
    )
)

# columns of the narrowest product; in a product with ones, copies of a row's sum
COPIES: gl.constexpr = gl.constexpr(8)
# part of dq: the 64 rows × 64 columns of a tile that one warpgroup multiplies, and its shape as fragments
PART: gl.constexpr = gl.constexpr(64)
FRAGMENT_ROWS: gl.constexpr = gl.constexpr(16)
FRAGMENT_COLUMNS: gl.constexpr = gl.constexpr(256)


@gluon.constexpr_function
def product_layout(columns):
    """Layout of a warpgroup's product, (WARPGROUP_ROWS, columns)."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def operand_layout(product):
    """Layout of a 16-bit left operand in registers, for a product with this layout."""
    return gl.DotOperandLayout(0, product, 2)


@gluon.jit
def by_threads(x):
    """View (rows, columns) by threads: (rows, blocks of 8 columns, 4 threads that share a row, 2 columns)."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def shares(x):
    """Sum each thread's values of a row of x (by threads): (64 rows, 4), in the layout SHARES."""
    return gl.convert_layout(gl.sum(gl.sum(x, 3), 1), SHARES, assert_trivial=True)


@gluon.jit
def from_threads(x, LAYOUT: gl.constexpr):
    """View x by threads as (rows, columns) again, in the layout of the product."""
    return gl.convert_layout(x.reshape([x.shape[0], x.shape[1] * 8]), LAYOUT, assert_trivial=True)


@gluon.jit
def to_words(x):
    """View 16-bit x by threads as words of two columns: (rows, blocks of 8 columns, 4 threads that share a row).

    Loops carry words. For 16-bit values ptxas moves the operands of products to other registers in every iteration (18
    instructions at D = 128), and spills 150 bytes more at D = 64.
    """
    even, odd = gl.split(x)
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [even, odd], gl.int32, is_pure=True, pack=1)


@gluon.jit
def from_words(words, like):
    """Inverse of to_words, in the type of `like`."""
    words = gl.join(words, words)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [words], like.dtype, is_pure=True, pack=2)


@gluon.jit
def common_columns(x, COLUMNS: gl.constexpr = 8):
    """Column index minus 2 · thread, for x by threads, if a block counts COLUMNS columns: 2 for the thread's own.

    All threads have the same values, so they are constants in instructions; the index itself would need a register.
    """
    UNSHARED: gl.constexpr = gl.SliceLayout(2, x.type.layout)
    block = gl.arange(0, x.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, UNSHARED)))
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, UNSHARED)))
    column = gl.expand_dims(gl.expand_dims(block * COLUMNS, 0), 2) + gl.expand_dims(gl.expand_dims(pair, 0), 1)
    return gl.expand_dims(column, 2)


@gluon.jit
def less_own(column, LAYOUT: gl.constexpr):
    """(rows, 4): a column index per row, minus 2 · thread."""
    column = gl.convert_layout(column, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    return gl.expand_dims(column, 1) - gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, LAYOUT)) * 2, 0)


@gluon.jit
def among_columns(column, x):
    """A column index per row, in the form to compare with common_columns(x)."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
    return gl.expand_dims(gl.expand_dims(less_own(column, LAYOUT), 1), 3)


@gluon.jit
def ones_of_splits(FIRST: gl.constexpr, RESULT: gl.constexpr):
    """Ones (64, DEPTH) at the splits of a value, in columns from FIRST on.

    As left operand of a product with columns of splits, in the layout RESULT, they add the value (bf16_splits.py).
    """
    return ones_of_columns(FIRST, operand_layout(RESULT))


@gluon.jit
def ones_of_columns(FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Ones (64, DEPTH) at the splits of a value, in any layout."""
    column = gl.expand_dims(gl.arange(0, DEPTH, gl.SliceLayout(0, LAYOUT)), 0)
    ones = ((column >= FIRST) & (column < FIRST + SPLITS)).to(gl.bfloat16)
    ones, _ = gl.broadcast(ones, gl.full([WARPGROUP_ROWS, DEPTH], 0.0, gl.bfloat16, LAYOUT))
    return ones


@gluon.jit
def bits_before(column, x):
    """Bits for where_bits, (rows, 4): set for the thread's columns of x (by threads, up to 32 per row) before a column.

    column: one index per row.
    """
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
    column = less_own(column, LAYOUT)
    count = gl.maximum(2 * (column >> 3) + gl.minimum(column & 7, 2), 0)
    return gl.inline_asm_elementwise("bmsk.clamp.b32 $0, 0, $1;", "=r,r", [count], gl.int32, is_pure=True, pack=1)


@gluon.jit
def where_bits(bits, x):
    """Keep x by threads at columns with a set bit; −inf elsewhere."""
    _, bit = gl.broadcast(x, 1 << common_columns(x, 2))
    _, bits = gl.broadcast(x, gl.expand_dims(gl.expand_dims(bits, 1), 3))
    # not an expression: LLVM would pack the results of the tests into integers and unpack them again
    return gl.inline_asm_elementwise(
        "{ .reg .b32 own; .reg .pred set; and.b32 own, $2, $3; setp.ne.b32 set, own, 0; "
        "selp.f32 $0, $1, 0fFF800000, set; }",
        "=f,f,r,r", [x, bits, bit], gl.float32, is_pure=True, pack=1,
    )


@gluon.jit
def index_along(x, AXIS: gl.constexpr):
    """Index along one axis of a tensor of three dimensions."""
    PLANE: gl.constexpr = gl.SliceLayout(2 if AXIS < 2 else 1, x.type.layout)
    LINE: gl.constexpr = gl.SliceLayout(1 if AXIS == 0 else 0, PLANE)
    index = gl.expand_dims(gl.arange(0, x.shape[AXIS], LINE), 1 if AXIS == 0 else 0)
    return gl.expand_dims(index, 2 if AXIS < 2 else 1)


@gluon.jit
def to_fragments(part):
    """Reorder a product (PART, PART) to (FRAGMENT_ROWS, FRAGMENT_COLUMNS): every thread's registers side by side."""
    # (warp, row / 8, row % 8, column / 8, column % 8 / 2, column % 2)
    fragments = gl.permute(gl.reshape(part, [4, 2, 8, 8, 4, 2]), [3, 0, 2, 4, 1, 5])
    return gl.reshape(fragments, [FRAGMENT_ROWS, FRAGMENT_COLUMNS])


@triton.jit
def from_fragments(fragments):
    """Inverse of to_fragments, for plain Triton: PART · PART values as in memory, to (PART, PART)."""
    part = tl.permute(tl.reshape(fragments, (8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    return tl.reshape(part, (PART, PART))
