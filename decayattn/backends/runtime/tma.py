"""Requirements of TMA, Hopper's tensor memory accelerator, on a tensor that a descriptor is to address."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

# of addresses and strides, in bytes
ALIGNMENT = 16
# descriptors of one kind to keep, by value
CACHED_DESCRIPTORS = 4096


class Memory(NamedTuple):
    """Address of a descriptor's tensor for a launch: descriptors are cached by value and must keep no tensor alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def unsupported(x: Tensor) -> str | None:
    """Reason why TMA cannot address a (B, T, H, D) tensor, or None."""
    if x.data_ptr() % ALIGNMENT:
        return f"its address is not a multiple of {ALIGNMENT} bytes"
    return _strides_unsupported(x.shape, x.stride(), x.dtype)


@functools.lru_cache(CACHED_DESCRIPTORS)
def _strides_unsupported(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> str | None:
    if strides[-1] != 1:
        return f"its last dimension is not contiguous (stride {strides[-1]})"
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size > 1 and (stride <= 0 or stride * dtype.itemsize % ALIGNMENT):
            return f"stride {stride} is not a positive multiple of {ALIGNMENT} bytes"
    return None


def usable_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Strides for a descriptor. The stride of a dimension of size 1 is never used, but must be valid."""
    usable = [stride if size > 1 else shape[-1] * ALIGNMENT for size, stride in zip(shape, strides, strict=True)]
    return [*usable[:-1], 1]
