"""Collectives of a group, and the slices of a sequence that its ranks hold."""

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from decayattn import compatibility


class Slices(NamedTuple):
    """Consecutive ranges of a sequence's tokens, one for each rank of a group."""

    lengths: tuple[int, ...]
    rank: int
    # Weak, because a result's autograd graph holds this object. A strong reference keeps the group and gloo's threads
    # alive after destroy_process_group, and a thread that drops a tensor after Python has ended aborts the process
    # (pytorch#190489).
    group_reference: "weakref.ref[dist.ProcessGroup]"

    @property
    def group(self) -> dist.ProcessGroup:
        group = self.group_reference()
        if group is None:
            raise RuntimeError("group: expected to live until the backward has run, got a destroyed process group")
        return group

    @property
    def ranks(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Start of every slice, and the end of the last one."""
        return (0, *itertools.accumulate(self.lengths))

    @property
    def begin(self) -> int:
        return self.offsets[self.rank]

    @property
    def length(self) -> int:
        return self.lengths[self.rank]


# tensors that CUDA graphs read: their addresses must stay valid while the graphs may be replayed
_graph_constants: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """The numbers as an int64 tensor. Cached, because copying new numbers to a GPU synchronises."""
    if compatibility.has_observers():  # a dispatch mode may intercept tensor creation
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    constant = _constant(numbers, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _graph_constants.setdefault((numbers, device), constant)
    return constant


@functools.lru_cache(maxsize=64)
def _constant(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def copied(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """The same of numbers that are new in every call; the host does not wait for the copy."""
    found = torch.tensor(numbers, dtype=torch.int64)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def all_gather(own: Tensor, ranks: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank's tensor, as (ranks, ·)."""
    everyone = own.new_empty(ranks, *own.shape)
    # PyTorch 2.13 renames the function; the old name warns
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everyone, own[None], group=group)
    return everyone


class TokenBefore(torch.autograd.Function):
    """Last token of every rank (B, 1, ·) → the one before this rank's slice; 0 for the first token of all."""

    @staticmethod
    def forward(ctx: Any, last: Tensor, slices: Slices) -> Tensor:
        ctx.slices = slices
        source = _token_source(slices, slices.rank)
        everyone = all_gather(last, slices.ranks, slices.group)
        return torch.zeros_like(last) if source is None else everyone[source]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        slices = ctx.slices
        everyone = all_gather(grad.contiguous(), slices.ranks, slices.group)
        readers = [rank for rank in range(slices.ranks) if _token_source(slices, rank) == slices.rank]
        return everyone[readers].sum(0), None


def _token_source(slices: Slices, rank: int) -> int | None:
    """Rank with the token before that rank's slice, or None."""
    return next((other for other in reversed(range(rank)) if slices.lengths[other]), None)


def all_to_all(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup, async_op: bool = False
) -> tuple[Tensor, Any]:
    """Send consecutive rows to the ranks. Return every rank's rows in order, and with async_op the work to wait for."""
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    arguments = received, rows.contiguous(), list(receive), list(send)
    return received, dist.all_to_all_single(*arguments, group=group, async_op=async_op)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of bytes with the last dimension of every tensor (..., ·)."""
    rows = tensors[0].new_empty(*tensors[0].shape[:-1], row_bytes(tensors), dtype=torch.uint8)
    for x, place in zip(tensors, unpack(rows, tensors), strict=True):
        place.copy_(x)
    return rows


def unpack(rows: Tensor, like: Sequence[Tensor | None]) -> list[Any]:
    """Views of rows of `row_bytes` with the last dimensions and dtypes of `like`; None for None."""
    begins = itertools.accumulate(map(_bytes, like), initial=0)
    return [None if x is None else rows[..., begin : begin + x.shape[-1] * x.itemsize].view(x.dtype)
            for begin, x in zip(begins, like, strict=False)]


def row_bytes(tensors: Sequence[Tensor | None]) -> int:
    """Bytes of a row with the last dimension of every tensor."""
    return sum(map(_bytes, tensors))


def _bytes(x: Tensor | None) -> int:
    # the kernels read keys and values in place, with strides that are multiples of 16 bytes
    return 0 if x is None else -(-x.shape[-1] * x.itemsize // 16) * 16
