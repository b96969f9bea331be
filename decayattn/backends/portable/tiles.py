"""What the portable kernels load: tiles of q, k, v and dO, scales and biases."""

import triton
import triton.language as tl

from decayattn.backends.tiles.scores import LOG2E


@triton.jit
def load_tile(
    source, strides, batch, head, start, length, ROWS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    MASK_ROWS: tl.constexpr, DESCRIPTOR: tl.constexpr, origin=None, edge=None,
):  # fmt: skip
    """(ROWS, COLUMNS) of a (B, T, H, DIM) tensor from token `start` of a sequence on; zeros beyond its `length`.

    origin is the token where the sequence begins; None where it fills the tensor. One helper for both memory paths:
    `source` is a TMA descriptor or a pointer, as the launch found possible. A descriptor ends where the tensor does, so
    instead of zeros it gives what follows the sequence, which is good enough for rows that no sum meets; for others,
    `edge` is the tensor's pointer, through which tiles come that may reach beyond the sequence.
    """
    there = start
    if origin is not None:
        there += origin
    if DESCRIPTOR and (edge is None or not MASK_ROWS):
        tile = source.load([batch, there, head, 0]).reshape([ROWS, COLUMNS])
    else:
        pointer = edge if DESCRIPTOR else source
        pointers, row, column = _pointers(pointer, strides, batch, head, there, ROWS, COLUMNS)
        if MASK_ROWS:
            tile = tl.load(pointers, mask=(start + row < length) & (column < DIM), other=0.0)
        elif DIM != COLUMNS:
            tile = tl.load(pointers, mask=column < DIM, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(
    target, strides, batch, head, start, length, tile, ROWS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write (ROWS, COLUMNS) to a (B, T, H, DIM) tensor from token `start` on, nothing beyond it."""
    pointers, row, column = _pointers(target, strides, batch, head, start, ROWS, COLUMNS)
    tl.store(pointers, tile.to(target.dtype.element_ty), mask=(start + row < length) & (column < DIM))


@triton.jit
def load_bias(source, strides, row, key, query_length, key_length, ACCUMULATOR: tl.constexpr):
    """A tile of a head's bias in base 2, for rows (·, 1) and keys (1, ·) in either order; a mask's False is −inf."""
    inside = (row < query_length) & (key < key_length)
    bias = tl.load(_of_pair(source, strides, row, key), mask=inside, other=0)
    if source.dtype.element_ty == tl.uint8:
        bias = tl.where(bias == 0, float("-inf"), 0.0).to(ACCUMULATOR)
    else:
        bias = bias.to(ACCUMULATOR) * LOG2E
    return bias


@triton.jit
def add_bias_gradient(target, strides, row, key, query_length, key_length, ds, SHARED: tl.constexpr):
    """dS into a head's bias gradient; SHARED: other rows or heads have the same entries."""
    inside = (row < query_length) & (key < key_length)
    if SHARED:
        tl.atomic_add(_of_pair(target, strides, row, key), ds, mask=inside, sem="relaxed")
    else:
        tl.store(_of_pair(target, strides, row, key), ds, mask=inside)


@triton.jit
def of_head(source, strides, batch, head):
    """The pointer of a (B, H, T_q, T_k) tensor, moved to a head."""
    return source + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def from_pair(source, strides, first_row, first_token):
    """The same, moved to the row and token where a sequence begins."""
    return _of_pair(source, strides, first_row, first_token)


@triton.jit
def _of_pair(source, strides, row, key):
    return source + row.to(tl.int64) * strides[2] + key.to(tl.int64) * strides[3]


@triton.jit
def from_token(source, strides, first):
    """A tensor's pointer, moved to the token where a sequence begins."""
    return source + first.to(tl.int64) * strides[1]


@triton.jit
def _pointers(tensor, strides, batch, head, start, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Addresses of a tile, its rows (ROWS, 1) and its columns (1, COLUMNS)."""
    # 64-bit offsets: strided views reach past 2^31 elements
    origin = tensor + batch.to(tl.int64) * strides[0] + start.to(tl.int64) * strides[1] + head.to(tl.int64) * strides[2]
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    return origin + row.to(tl.int64) * strides[1] + column.to(tl.int64) * strides[3], row, column


@triton.jit
def load_scale(scale, row_scales, strides, batch, head, row, ROW_SCALE: tl.constexpr, ACCUMULATOR: tl.constexpr):
    """s per query row: a vector like `row` if every row has its own, else one number."""
    if ROW_SCALE:
        offset = batch.to(tl.int64) * strides[0] + row.to(tl.int64) * strides[1] + head.to(tl.int64) * strides[2]
        row_scale = tl.load(row_scales + offset)
    else:
        row_scale = tl.full([], scale, ACCUMULATOR)
    return row_scale
