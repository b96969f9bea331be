"""What kernels take a tensor as."""

from typing import NamedTuple, overload

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
