"""TMA descriptors of tensors, cached by value.

A descriptor is a function of an address, a shape, strides and a tile shape, and holds no tensor. So the cache keeps no
memory alive, and a new tensor at an old address gets the right descriptor.
"""

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from decayattn.backends.runtime.tma import CACHED_DESCRIPTORS, Memory, usable_strides
from decayattn.backends.tiles.bf16_splits import DEPTH, SPLIT_COLUMNS

# end of every slice of `slices` on the slice's own axis; larger than the rows of any tensor
SLICE_END = 2**30
# keys with their splits (in eight rows) adjacent in the shared memory that a product reads: 128 bytes of bfloat16
PART_KEYS = 64
# larger than any coordinate
_FAR = 0x7FFF0000


def tokens(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Describe tiles of `rows` tokens of one head of a (B, T, H, D) tensor, `width` ≥ D columns wide.

    Coordinates are (batch, head, token, 0). The descriptor knows the true T and D: elements past an end read as zeros
    and are never written.
    """
    return _describe(x.data_ptr(), x.dtype, x.shape, x.stride(), (1, 1, rows, width), order=(0, 2, 1, 3))


def slices_unsupported(x: Tensor) -> str | None:
    """Reason why `slices` cannot take a (B, T, H, D) tensor's batch and token axes as one axis, or None."""
    if x.shape[0] * x.shape[1] >= SLICE_END:
        return f"it has {x.shape[0] * x.shape[1]} tokens, expected fewer than {SLICE_END}"
    if x.shape[0] > 1 and x.shape[1] > 1 and x.stride(0) != x.shape[1] * x.stride(1):
        return f"its batch entries are not consecutive in memory (stride {x.stride(0)})"
    return None


def slices(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Describe tiles of `rows` tokens of one head in a slice of B·T tokens, which the kernel chooses.

    The tensor is (B, T, H, D); a tile is `width` ≥ D columns wide. Coordinates are (SLICE_END, slice's end, head,
    SLICE_END − slice's length + token, 0), with the token counted in the slice. An axis ends at the slice's end, so
    tokens past it read as zeros and are never written. The second and the fourth coordinate count tokens. The first
    subtracts SLICE_END of them, by a stride of −1 token modulo 2^64 bytes (the trick of triton.tools.ragged_tma).
    """
    (batch, length, heads, dim), (batch_stride, token_stride, head_stride, _) = x.shape, x.stride()
    if length == 1:
        token_stride = batch_stride if batch > 1 else dim
    # 2^34 elements times SLICE_END is a multiple of 2^64
    return _describe(
        x.data_ptr(), x.dtype, (_FAR, _FAR, heads, SLICE_END, dim),
        (2**34 - token_stride, token_stride, head_stride, token_stride, 1), (1, 1, 1, rows, width),
    )


def columns(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe tiles of `rows` rows of a contiguous tensor, seen as (all other dimensions, last dimension).

    Zeros fill up their columns to the depth of a matrix instruction.
    """
    width = x.shape[-1]
    return _describe(x.data_ptr(), x.dtype, (x.numel() // width, width), (width, 1), (rows, DEPTH))


def key_splits(x: Tensor) -> TensorDescriptor:
    """Describe tiles of the splits of PART_KEYS of one block's keys.

    The contiguous tensor (…, splits, keys) is seen as (blocks, splits, keys). Zeros fill up its splits to SPLIT_COLUMNS
    rows; coordinates are (block, 0, key).
    """
    splits, keys = x.shape[-2:]
    blocks = x.numel() // (splits * keys)
    tile = (1, SPLIT_COLUMNS, PART_KEYS)
    return _describe(x.data_ptr(), x.dtype, (blocks, splits, keys), (splits * keys, keys, 1), tile)


def plain(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe tiles of `rows` whole rows, consecutive in shared memory (unswizzled): no matrix product reads them."""
    width = x.shape[-1]
    return _describe(x.data_ptr(), x.dtype, (x.numel() // width, width), (width, 1), (rows, width), swizzled=False)


@functools.lru_cache(CACHED_DESCRIPTORS)
def _describe(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], tile: tuple[int, ...],
    swizzled: bool = True, order: tuple[int, ...] | None = None,
) -> TensorDescriptor:
    """Describe tiles of a tensor; order: its dimensions in the order of the descriptor's."""
    if order is not None:
        shape, strides = (tuple(sizes[axis] for axis in order) for sizes in (shape, strides))
    layout = _layout(dtype, tile, swizzled)
    return TensorDescriptor(Memory(address, dtype), list(shape), usable_strides(shape, strides), list(tile), layout)


@functools.cache
def _layout(dtype: torch.dtype, tile: tuple[int, ...], swizzled: bool) -> gl.NVMMASharedLayout:
    """Layout of a tile in shared memory; cached by itself, because calls with other lengths share it."""
    if swizzled:
        return gl.NVMMASharedLayout.get_default_for(list(tile), getattr(gl, str(dtype).removeprefix("torch.")))
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * dtype.itemsize, rank=len(tile))
