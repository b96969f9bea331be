"""Heads mode: an all-to-all gives every rank the whole sequences of some heads (DeepSpeed-Ulysses, arXiv 2309.14509).

Key heads, repeated to a multiple of the ranks, go to the ranks in turn with their query heads: rates that fall from
head to head are spread over all ranks.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from einops import repeat
from torch import Tensor
from torch.autograd.function import once_differentiable

from decayattn.distributed.collectives import Slices, all_to_all, pack, unpack
from decayattn.distributed.option_check import OptionCheck
from decayattn.functional import decay_attention, decay_attention_varlen


def attention(
    slices: Slices, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, max_seqlen: int, check: OptionCheck,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Two exchanges around one call of decay_attention, or of decay_attention_varlen, with these options."""
    kv_heads = math.lcm(k.shape[2], slices.ranks)
    per_row = [name for name in ("log_decay", "scale") if isinstance(options[name], Tensor) and options[name].ndim > 2]
    columns = (options[name][..., None].flatten(3) for name in per_row)  # a log_decay may have a gate per direction
    k, v = (_repeated(x, kv_heads) for x in (k, v))
    q, k, v, *exchanged = Exchange.apply(True, slices, kv_heads, check, q, k, v, *columns)
    options |= {name: x.squeeze(-1) for name, x in zip(per_row, exchanged, strict=True)}
    for name, axis in (("log_decay", 0), ("sink", 0), ("bias", -3)):
        x = options.get(name)
        if name not in per_row and x is not None and x.ndim >= -axis and x.shape[axis] > 1:
            options[name] = _own_heads(x, axis, slices, kv_heads)
    if cu_seqlens is None:
        result = decay_attention(q, k, v, **options)
    else:
        options |= {name: x.squeeze(0) for name, x in options.items() if isinstance(x, Tensor) and x.ndim > 2}
        result = decay_attention_varlen(
            q.squeeze(0), k.squeeze(0), v.squeeze(0), cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, **options,
        )
    out, *lse = result if isinstance(result, tuple) else (result,)
    if cu_seqlens is not None:
        out, lse = out[None], [x[None] for x in lse]
    out, *lse = Exchange.apply(False, slices, kv_heads, None, out, *(x.transpose(1, 2)[..., None] for x in lse))
    return (out, lse[0].squeeze(-1).transpose(1, 2)) if lse else out


class Exchange(torch.autograd.Function):
    """`_to_heads` or `_to_rows` of tensors, each of which is the other's backward."""

    @staticmethod
    def forward(ctx, to_heads, slices, kv_heads, check, *tensors):
        ctx.to_heads, ctx.slices, ctx.kv_heads = to_heads, slices, kv_heads
        if to_heads:
            return tuple(_to_heads(tensors, kv_heads, slices, check))
        return tuple(_to_rows(tensors, kv_heads, slices))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        move, needed = _to_rows if ctx.to_heads else _to_heads, ctx.needs_input_grad[4:]
        found = iter(move([*itertools.compress(grads, needed)], ctx.kv_heads, ctx.slices))
        return None, None, None, None, *(next(found) if is_needed else None for is_needed in needed)


def _to_heads(
    tensors: Sequence[Tensor], kv_heads: int, slices: Slices, check: OptionCheck | None = None
) -> list[Tensor]:
    """(B, T_r, heads, ·) → (B, T, heads / ranks, ·); the check of options, if any, comes before the exchange."""
    parts, ranks = [], slices.ranks
    for x in tensors:
        # (B, T_r, own key heads, ranks, their query heads, ·) → (ranks, T_r, B, ·)
        groups = x.unflatten(2, (kv_heads // ranks, ranks, x.shape[2] // kv_heads))
        parts.append(groups.permute(3, 1, 0, 2, 4, 5).flatten(3))
    own = pack(parts).flatten(0, 1)
    if check is not None:
        check.compare()
    rows, _ = all_to_all(own, [slices.length] * ranks, slices.lengths, slices.group)
    whole = unpack(rows.transpose(0, 1), parts)
    return [y.unflatten(-1, (x.shape[2] // ranks, x.shape[3])) for x, y in zip(tensors, whole, strict=True)]


def _to_rows(tensors: Sequence[Tensor], kv_heads: int, slices: Slices) -> list[Tensor]:
    """(B, T, heads / ranks, ·) → (B, T_r, heads, ·)"""
    ranks = slices.ranks
    parts = [x.transpose(0, 1).flatten(2) for x in tensors]
    rows, _ = all_to_all(pack(parts), slices.lengths, [slices.length] * ranks, slices.group)
    found = unpack(rows.unflatten(0, (ranks, slices.length)), parts)
    result = []
    for x, y in zip(tensors, found, strict=True):
        groups = y.unflatten(-1, (kv_heads // ranks, x.shape[2] * ranks // kv_heads, x.shape[3]))
        result.append(groups.permute(2, 1, 3, 0, 4, 5).flatten(2, 4))
    return result


def _own_heads(x: Tensor, axis: int, slices: Slices, kv_heads: int) -> Tensor:
    """This rank's heads of a tensor that has all H heads on an axis."""
    axis %= x.ndim
    groups = x.unflatten(axis, (kv_heads // slices.ranks, slices.ranks, x.shape[axis] // kv_heads))
    return groups.select(axis + 1, slices.rank).flatten(axis, axis + 1)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """x with each key head repeated to that many heads. The gradient, a sum, adds 16-bit values in float32."""
    return repeat(x, "b t h d -> b t (h g) d", g=heads // x.shape[2])
