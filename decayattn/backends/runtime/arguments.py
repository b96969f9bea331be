"""What kernels take a tensor as, and what they write to."""

from typing import NamedTuple, overload

import torch
from torch import Tensor


class Strided(NamedTuple):
    """A tensor and its strides; Triton passes (named) tuples to kernels, and what is None compiles to nothing."""

    data: Tensor | None  # None where a descriptor reads all of it
    strides: tuple[int, ...]


@overload
def strided(x: Tensor) -> Strided: ...
@overload
def strided(x: Tensor | None) -> Strided | None: ...
def strided(x: Tensor | None) -> Strided | None:
    return None if x is None else Strided(x, x.stride())


def contiguous_like(x: Tensor) -> Tensor:
    """Uninitialised, in the shape of x. x.new_empty(x.shape) takes the host twice as long, most of it for the shape."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
