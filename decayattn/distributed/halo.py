"""Each rank keeps its queries and fetches the keys before its slice that can matter to them: the halo.

The rest are ordinary calls with T_q < T_k. Rows that see nothing of the halo have one of their own, which waits for no
key of another rank; the first rows have another one, with the halo. Where those are more than half, all rows have one.

Which keys matter, and to which rows, is fetching.py's.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from decayattn.backends import registry
from decayattn.distributed import local
from decayattn.distributed import rows as eager_rows
from decayattn.distributed.exchange import Slices, all_to_all
from decayattn.distributed.fetching import Fetch, Sight, can_plan, fetch, shares
from decayattn.distributed.local import Packed
from decayattn.problem import GRANULE, AttentionProblem, BackendName, Inputs, KeyDecay, Prepared


def attention(
    slices: Slices, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None,
    scale: Tensor | float, sight: Sight, packed: Packed | None, runs_kernels: bool, return_lse: bool,
    options: dict[str, Any], agree: Callable[[], None],
) -> Tensor | tuple[Tensor, Tensor]:
    """An exchange, and one call or two; problem is the slice on its own, and the eager reference skips nothing.

    agree is called before the first collective, behind what can be launched without one.
    """
    planned = sight.reach is None and can_plan(problem) and runs_kernels
    waits = sight.reach is None and (problem.decay != "none" or packed is not None)
    if waits and q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "mode: 'halo' in a CUDA graph expects a reach, because the host waits for the size of a planned one; or "
            "take 'heads'"
        )
    tolerance = problem.skip_tolerance / (shares(problem) if planned else 1)
    key_decay = None
    with torch.no_grad():
        if planned and packed is None:  # once for the plan and for the rows that need no halo
            key_decay = _decay_of_keys(problem, q, k, v, log_decay, scale, options["backend"])
        prefix = None if key_decay is None else key_decay.prefix
        found = fetch(slices, problem, q, k, log_decay, scale, sight, tolerance if planned else 0.0, agree, prefix)
    of_keys = log_decay if problem.decay == "scalar" else None
    options = options | {"skip_tolerance": tolerance or None}
    length, rows = q.shape[1], found.rows
    if packed is not None or 2 * rows > length:
        if not waits:
            agree()
        k, v, extended = Halo.apply(k, v, of_keys, found, length, runs_kernels)
        if packed is not None:
            begins, halo = packed.cu_seqlens_k - slices.begin, found.halo
            packed = Packed(
                begins.clamp(0, length), (begins + halo).clamp(0, k.shape[1]),
                min(packed.longest_query, length), min(packed.longest_key, k.shape[1]),
            )
        return local.attention(
            q, k, v, log_decay if extended is None else extended, scale, packed, return_lse, options
        )
    parts = [rows, length - rows]
    q, far_q = q.split(parts, 1)
    scale, far_scale = scale.split(parts, 1) if isinstance(scale, Tensor) else (scale, scale)
    out = q.new_empty(*q.shape[:1], length, *q.shape[2:3], v.shape[3])
    terms = None
    if found.terms is not None:
        of_blocks, of_granules = found.terms
        terms = of_blocks, of_granules[:, :, rows // GRANULE :]
    # first, so that the GPU has something to do while the host sends keys
    far, far_lse = local.causal_attention(
        far_q, k, v, log_decay, far_scale, return_lse, options, Prepared(_part(out, rows, length), terms, key_decay)
    )
    if not waits:
        agree()
    # also where there are no such rows: in the backward the other ranks send gradients here
    k, v, extended = Halo.apply(k, v, of_keys, found, rows, runs_kernels)
    near, near_lse = local.causal_attention(
        q, k, v, log_decay if extended is None else extended, scale, return_lse, options, Prepared(_part(out, 0, rows))
    )
    out = Joined.apply(near, far, [out])
    if not return_lse:
        return out
    assert near_lse is not None
    assert far_lse is not None
    return out, torch.cat([near_lse, far_lse], 2)


def _decay_of_keys(
    problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: Tensor | float,
    backend: BackendName,
) -> KeyDecay:
    """By the backend that takes the slice on its own."""
    row_scale, number = (scale, 1.0) if isinstance(scale, Tensor) else (None, scale)
    inputs = Inputs(q, k, v, log_decay, row_scale, scale=number)
    return registry.loaded(registry.resolve(problem, backend, inputs)).decay_of_keys(problem, inputs)


def _part(x: Tensor, begin: int, end: int) -> Tensor:
    """x[:, begin:end] as a tensor of its own for autograd, for which two results cannot be views of one tensor."""
    part = x[:, begin:end]
    return x.new_empty(0).set_(x.untyped_storage(), part.storage_offset(), part.shape, part.stride())


class Joined(torch.autograd.Function):
    """The tensor of which two calls wrote the first rows and the others; what they wrote elsewhere is copied."""

    @staticmethod
    def forward(ctx, near, far, outs):
        (out,) = outs
        ctx.rows = near.shape[1]
        for part, place in ((near, out[:, : ctx.rows]), (far, out[:, ctx.rows :])):
            if part.numel() and part.data_ptr() != place.data_ptr():
                place.copy_(part)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors  # an error if it was changed in place: the calls read theirs
        return grad[:, : ctx.rows], grad[:, ctx.rows :], None


class Halo(torch.autograd.Function):
    """k, v and λ per token of a slice → the same of its first tokens, with the halo before them: one exchange; its
    gradient goes back to the owners by another one.

    Heads that fetch less than others have zeros before their first key, and a reset there: nothing before is visible.
    """

    @staticmethod
    def forward(ctx, k, v, log_decay, fetch, tokens, runs_kernels):
        parts = [k, v, log_decay]
        ctx.fetch, ctx.tokens, ctx.runs_kernels = fetch, tokens, runs_kernels
        ctx.asked = [x is not None and asked for x, asked in zip(parts, ctx.needs_input_grad[:3], strict=True)]
        steps, where = _steps(fetch, runs_kernels)
        received = all_to_all(steps.pack_sent(where, parts), fetch.send, fetch.receive, fetch.slices.group)
        extended = steps.extend(where, received, parts, tokens)
        ctx.mark_non_differentiable(
            *(x for x, asked in zip(extended, ctx.asked, strict=True) if x is not None and not asked)
        )
        return tuple(extended)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        fetch = ctx.fetch
        grads = [x if asked else None for x, asked in zip(grads, ctx.asked, strict=True)]
        steps, where = _steps(fetch, ctx.runs_kernels)
        returned = all_to_all(steps.pack_returned(where, grads), fetch.receive, fetch.send, fetch.slices.group)
        return *steps.add_returned(where, returned, grads, ctx.tokens), None, None, None


def _steps(fetch: Fetch, runs_kernels: bool) -> tuple[ModuleType, Any]:
    """The steps around an exchange, by kernels or by PyTorch's operators, and where their rows are."""
    if not runs_kernels:
        return eager_rows, fetch
    from decayattn.backends.planning import exchange  # imports Triton

    return exchange, fetch.segments
