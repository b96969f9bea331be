"""Processes that meet, and attention of whole tensors by their slices."""

import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from decayattn.distributed import context_parallel_attention


def on_ranks(function: Callable[..., int], ranks: int, device: str, limit: int, *arguments: Any) -> int:
    """The largest of function(rank, *arguments) on every rank, a process each, with a GPU or with gloo. A rank that
    waits for another one for `limit` seconds raises."""
    with tempfile.TemporaryDirectory() as folder:
        statuses = mp.get_context("spawn").Array("i", [1] * ranks)
        given = (f"file://{Path(folder, 'store')}", ranks, device, limit, statuses, function, arguments)
        mp.spawn(_rank, given, nprocs=ranks)
        return max(statuses)


def _rank(
    rank: int, store: str, ranks: int, device: str, limit: int, statuses: Any, function: Callable[..., int],
    arguments: tuple,
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store, timedelta(seconds=limit), ranks, rank)
    try:
        statuses[rank] = function(rank, *arguments)
    finally:
        dist.destroy_process_group()


def whole_attention(
    group: dist.ProcessGroup, mode: str, lengths: Sequence[int], reach: int | None = None
) -> Callable[..., Any]:
    """decay_attention and decay_attention_varlen of whole tensors, by slices of these lengths on the ranks. All ranks
    get all results, and the gradients of one loss of the whole results."""
    rank = dist.get_rank(group)
    mine = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))

    def own(name: str, x: Any, packed: bool) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        x = _Shared.apply(x, group)
        dims = (4 if name in "qkv" else 3) - packed  # with an axis of tokens
        if name in ("bias", "sink") or (name == "log_decay" and x.ndim < dims):
            return x
        x = x[None] if packed and x.ndim >= dims else x
        axis = -2 if name == "scale" else 1 - x.ndim
        is_cut = x.ndim >= -axis and x.shape[axis] == sum(lengths)  # a scale may have one row for all
        return x.narrow(axis, mine.start, mine.stop - mine.start) if is_cut else x

    def attend(*, cu_seqlens_q: Tensor | None = None, return_lse: bool = True, **given: Any) -> Any:
        packed = cu_seqlens_q is not None
        if packed:
            del given["cu_seqlens_k"]
            longest = max(given.pop("max_seqlen_q"), given.pop("max_seqlen_k"))
            given |= {"cu_seqlens": cu_seqlens_q, "max_seqlen": longest}
        given = {name: own(name, x, packed) for name, x in given.items() if x is not None}
        found = context_parallel_attention(
            **given, return_lse=return_lse, group=group, mode=mode, lengths=lengths, reach=reach
        )
        out, *lse = found if return_lse else (found,)
        found = _Joined.apply(out, 1, mine, group), *(_Joined.apply(x, 2, mine, group) for x in lse)
        found = tuple(x.squeeze(0) for x in found) if packed else found
        return found if return_lse else found[0]

    return attend


class _Shared(torch.autograd.Function):
    """A tensor that all ranks have; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Joined(torch.autograd.Function):
    """The ranks' consecutive parts, of any lengths, as one tensor; the gradient of a rank's part is its slice."""

    @staticmethod
    def forward(ctx, part, axis, mine, group):
        ctx.at = (slice(None),) * axis + (mine,)
        pieces: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(pieces, part.detach().cpu(), group=group)
        return torch.cat([piece.to(part.device) for piece in pieces], axis)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[ctx.at], None, None, None
