"""Context parallelism as one function of whole tensors, for whoever compares it with one process."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decayattn.distributed import context_parallel_attention


def whole_attention(group: dist.ProcessGroup, mode: str, lengths: Sequence[int], **options: Any) -> Callable:
    """What takes and gives what decay_attention and decay_attention_varlen do, on every rank; each attends to its
    slice. Its first derivatives are those of one loss of the whole results, and all ranks get them.

    options: of context_parallel_attention, in place of those of a call.
    """
    rank = dist.get_rank(group)
    mine = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))

    def attend(q, k, v, log_decay=None, *, scale=None, bias=None, sink=None, cu_seqlens_q=None, **given: Any):
        packed = cu_seqlens_q is not None
        given = {name: x for name, x in given.items() if x is not None} | options
        if packed:
            given.pop("cu_seqlens_k")
            given["cu_seqlens"] = cu_seqlens_q
            given["max_seqlen"] = max(given.pop("max_seqlen_q"), given.pop("max_seqlen_k"))
        assert given.pop("return_lse")

        def run(*parts: Tensor | float | None) -> tuple[Tensor, Tensor]:
            q, k, v, log_decay, scale, sink = parts
            return context_parallel_attention(
                q, k, v, log_decay, scale=scale, sink=sink, bias=bias, group=group, mode=mode, lengths=lengths,
                return_lse=True, **given,
            )

        tensors = [q, k, v, log_decay, scale, sink]
        if packed:
            tensors = [x[None] if isinstance(x, Tensor) and x.ndim > 1 else x for x in tensors]
        out, lse = _Whole.apply(run, group, mine, sum(lengths), *tensors)
        return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)

    return attend


class _Whole(torch.autograd.Function):
    """Each rank runs its slice, and all get all results and gradients."""

    @staticmethod
    def forward(ctx, run, group, mine, length, *tensors):
        ctx.group, ctx.mine = group, mine
        ctx.by_token = [isinstance(x, Tensor) and x.ndim > 2 and x.shape[1] == length for x in tensors]
        ctx.leaves = []
        for x, by_token in zip(tensors, ctx.by_token, strict=True):
            x = x.detach() if isinstance(x, Tensor) else x
            x = x[:, mine] if by_token else x
            ctx.leaves.append(x.requires_grad_() if isinstance(x, Tensor) else x)
        with torch.enable_grad():
            ctx.results = run(*ctx.leaves)
        out, lse = (x.detach() for x in ctx.results)
        return _joined(out, 1, group), _joined(lse, 2, group)

    @staticmethod
    def backward(ctx, d_out, d_lse):
        leaves = [x for x in ctx.leaves if isinstance(x, Tensor)]
        mine = (d_out[:, ctx.mine], d_lse[:, :, ctx.mine])
        grads = iter(torch.autograd.grad(ctx.results, leaves, mine, materialize_grads=True))
        found: list[Tensor | None] = []
        for x, by_token in zip(ctx.leaves, ctx.by_token, strict=True):
            grad = next(grads) if isinstance(x, Tensor) else None
            if by_token:
                grad = _joined(grad, 1, ctx.group)
            elif grad is not None:
                dist.all_reduce(grad, group=ctx.group)
            found.append(grad)
        return None, None, None, None, *found


def _joined(part: Tensor, axis: int, group: dist.ProcessGroup) -> Tensor:
    """The ranks' parts behind one another, of any lengths."""
    pieces: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(pieces, part.cpu(), group=group)
    return torch.cat([piece.to(part.device) for piece in pieces], axis)
