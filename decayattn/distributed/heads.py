"""All-to-all that gives every rank the whole sequences of some heads (DeepSpeed-Ulysses, arXiv 2309.14509)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from decayattn.distributed import local
from decayattn.distributed.agreement import Handshake
from decayattn.distributed.exchange import Slices, all_to_all, pack, unpack
from decayattn.distributed.local import Packed


def attention(
    slices: Slices, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: Tensor | float,
    packed: Packed | None, return_lse: bool, options: dict[str, Any], handshake: Handshake,
) -> Tensor | tuple[Tensor, Tensor]:
    """Two exchanges around one call. The handshake comes before the first one."""
    dealt = math.lcm(k.shape[2], slices.ranks)
    # arguments with one number per row, or one for all rows
    fine: dict[str, Any] = {"log_decay": log_decay, "scale": scale}
    by_row = {name: x for name, x in fine.items() if isinstance(x, Tensor) and x.ndim == 3}
    q, k, v, *given = Deal.apply(slices, handshake, q, k, v, *(x[..., None] for x in by_row.values()))
    fine |= {name: x.squeeze(-1) for name, x in zip(by_row, given, strict=True)}
    if log_decay is not None and log_decay.ndim == 1:
        fine["log_decay"] = _share(log_decay, 0, slices, dealt)
    for name, axis in (("sink", 0), ("bias", -3)):
        x = options.get(name)
        if x is not None and x.ndim >= -axis and x.shape[axis] > 1:
            options = options | {name: _share(x, axis, slices, dealt)}
    result = local.attention(q, k, v, fine["log_decay"], fine["scale"], packed, return_lse, options)
    if isinstance(result, Tensor):
        return Collect.apply(slices, dealt, result)[0]
    out, lse = result
    out, lse = Collect.apply(slices, dealt, out, lse.transpose(1, 2)[..., None])
    return out, lse.squeeze(-1).transpose(1, 2)


def _share(x: Tensor, axis: int, slices: Slices, dealt: int) -> Tensor:
    """This rank's heads of a tensor that has all H heads on an axis."""
    axis %= x.ndim
    groups = x.unflatten(axis, (dealt // slices.ranks, slices.ranks, x.shape[axis] // dealt))
    return groups.select(axis + 1, slices.rank).flatten(axis, axis + 1)


class Deal(torch.autograd.Function):
    """Rows (B, T_r, heads, ·) of all heads → (B, T, heads / ranks, ·): one exchange.

    Key heads are dealt in turn, each with its query heads, so that rates that fall from head to head are spread over
    all ranks. k and v are the second and third tensor.
    """

    @staticmethod
    def forward(ctx, slices, handshake, *tensors):
        # if the ranks do not divide the key heads: repeat them until every rank has the same number
        dealt = math.lcm(tensors[1].shape[2], slices.ranks)
        ctx.slices, ctx.dealt, ctx.heads = slices, dealt, [x.shape[2] for x in tensors]
        return tuple(_to_heads([_repeated(x, dealt) for x in tensors], dealt, slices, handshake))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        asked = [n for n in range(len(grads)) if ctx.needs_input_grad[n + 2]]
        result = [None] * len(grads)
        for n, grad in zip(asked, _to_rows([grads[n] for n in asked], ctx.dealt, ctx.slices), strict=True):
            result[n] = _added(grad, ctx.heads[n])
        return None, None, *result


class Collect(torch.autograd.Function):
    """Inverse of Deal: rows of some heads (B, T, heads / ranks, ·) → (B, T_r, heads, ·)."""

    @staticmethod
    def forward(ctx, slices, dealt, *tensors):
        ctx.slices, ctx.dealt = slices, dealt
        return tuple(_to_rows(tensors, dealt, slices))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return None, None, *_to_heads(grads, ctx.dealt, ctx.slices)


def _to_heads(
    tensors: Sequence[Tensor], dealt: int, slices: Slices, handshake: Handshake | None = None
) -> list[Tensor]:
    """(B, T_r, heads, ·) → (B, T, heads / ranks, ·); the handshake, if any, comes before the exchange."""
    ranks, length = slices.ranks, slices.lengths[slices.rank]
    parts = []
    for x in tensors:
        # (B, T_r, own key heads, ranks, their query heads, ·) → (ranks, T_r, B, ·)
        groups = x.unflatten(2, (dealt // ranks, ranks, x.shape[2] // dealt))
        parts.append(groups.permute(3, 1, 0, 2, 4, 5).flatten(3))
    # q, k and v are read in place, and the kernels need rows of a multiple of 16 bytes
    own = pack(parts, 16).flatten(0, 1)
    if handshake is not None:
        handshake.meet()
    rows = all_to_all(own, [length] * ranks, slices.lengths, slices.group)
    whole = unpack(rows.transpose(0, 1), parts)
    return [y.unflatten(-1, (x.shape[2] // ranks, x.shape[3])) for x, y in zip(tensors, whole, strict=True)]


def _to_rows(tensors: Sequence[Tensor], dealt: int, slices: Slices) -> list[Tensor]:
    """(B, T, heads / ranks, ·) → (B, T_r, heads, ·)"""
    ranks, length = slices.ranks, slices.lengths[slices.rank]
    parts = [x.transpose(0, 1).flatten(2) for x in tensors]
    rows = all_to_all(pack(parts), slices.lengths, [length] * ranks, slices.group)
    found = unpack(rows.unflatten(0, (ranks, length)), parts)
    result = []
    for x, y in zip(tensors, found, strict=True):
        groups = y.unflatten(-1, (dealt // ranks, x.shape[2] * ranks // dealt, x.shape[3]))
        result.append(groups.permute(2, 1, 3, 0, 4, 5).flatten(2, 4))
    return result


def _repeated(x: Tensor, dealt: int) -> Tensor:
    """x with its heads repeated up to the number that is dealt."""
    return x.repeat_interleave(dealt // x.shape[2], 2) if x.shape[2] < dealt else x


def _added(grad: Tensor, heads: int) -> Tensor:
    """Gradient of heads that were repeated. torch.sum adds 16-bit values in float32 and rounds once."""
    return grad if grad.shape[2] == heads else grad.unflatten(2, (heads, -1)).sum(3)
