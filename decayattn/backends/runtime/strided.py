"""Tensors as kernel arguments, and buffers that kernels fill."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Strided(NamedTuple):
    """A tensor and its strides. Triton passes (named) tuples to kernels; a field that is None compiles to nothing."""

    data: Tensor | None  # None if a descriptor reads all of it
    strides: tuple[int, ...]


def strided(x: Tensor | None) -> Any:
    """Strided of a tensor; None for None."""
    if x is None or not x.is_neg():
        return None if x is None else tuple.__new__(Strided, (x, x.stride()))  # Strided(…) takes half as long again
    raise ValueError("q, k, v, log_decay, scale: expected plain tensors, got a lazy negative; pass x.resolve_neg()")


def contiguous_like(x: Tensor) -> Tensor:
    """Uninitialised tensor of x's shape. x.new_empty(x.shape) takes twice the host time, mostly to read the shape."""
    if torch.are_deterministic_algorithms_enabled():
        return uninitialised(x, *x.shape)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def uninitialised(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return like.new_empty(shape). Under deterministic algorithms torch would fill it; a storage is not filled.

    It filled 335 MB per Hopper backward (B4 H16 T8192 D64). Its switch is not per thread. Fake tensors have no storage.
    """
    if type(like) is not Tensor or not torch.are_deterministic_algorithms_enabled():
        return like.new_empty(*shape, dtype=dtype)  # parsing a tuple takes half as long again
    empty = like.new_empty(0, dtype=dtype)
    storage = torch.UntypedStorage(math.prod(shape) * empty.itemsize, device=like.device)
    return empty.set_(storage, 0, shape)  # type: ignore[call-overload]  # its stride is optional
