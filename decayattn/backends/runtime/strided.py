"""Tensors as kernel arguments, and output buffers."""

from typing import NamedTuple, overload

import torch
from torch import Tensor


class Strided(NamedTuple):
    """A tensor and its strides; Triton passes (named) tuples to kernels, and a field that is None compiles to nothing.
    """

    data: Tensor | None  # None if a descriptor reads all of it
    strides: tuple[int, ...]


@overload
def strided(x: Tensor) -> Strided: ...
@overload
def strided(x: Tensor | None) -> Strided | None: ...
def strided(x: Tensor | None) -> Strided | None:
    return None if x is None else Strided(x, x.stride())


def contiguous_like(x: Tensor) -> Tensor:
    """Uninitialised tensor of x's shape. x.new_empty(x.shape) takes twice the host time, mostly to read the shape."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
