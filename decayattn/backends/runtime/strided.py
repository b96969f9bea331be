"""Tensors as kernel arguments, and output buffers."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Strided(NamedTuple):
    """A tensor and its strides; Triton passes (named) tuples to kernels, and a field that is None compiles to nothing.
    """

    data: Tensor | None  # None if a descriptor reads all of it
    strides: tuple[int, ...]


def strided(x: Tensor | None) -> Any:
    """Strided of a tensor; None for None."""
    return None if x is None else Strided(x, x.stride())


def contiguous_like(x: Tensor) -> Tensor:
    """Uninitialised tensor of x's shape. x.new_empty(x.shape) takes twice the host time, mostly to read the shape."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
