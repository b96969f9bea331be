"""Offsets of heads, sequences and rows in buffers, for the kernels of every backend."""

import triton
import triton.language as tl


@triton.jit
def parts_before(first, sequence, SIZE: tl.constexpr):
    """Index of the first part of SIZE rows of a packed sequence at `first`: each one before may have a partial part."""
    return first // SIZE + sequence


@triton.jit
def row_pointers(source, entry, head, row):
    """Pointers to the starts of rows of a head of a Strided (B, T, H, …)."""
    strides = source.strides
    of_head = source.data + entry.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]
    return of_head + row.to(tl.int64) * strides[1]


@triton.jit
def start_of_head(head_row, axis, first, LARGE: tl.constexpr = True):
    """Offset of head_row (batch entry · H + head) in (B, H, axis), from `first`; not LARGE: fewer than 2^31 values."""
    if LARGE:
        head_row = head_row.to(tl.int64)
    return head_row * axis + first
