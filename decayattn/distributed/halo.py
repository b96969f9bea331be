"""Each rank keeps its queries and fetches the keys before its slice that can matter to them: the halo.

fetching.py chooses the keys and the rows that see them. two_calls.py makes the calls. Packed sequences instead use one
call of decay_attention_varlen, after an autograd Function for the exchange.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from decayattn.backends import registry
from decayattn.distributed import local
from decayattn.distributed.agreement import Handshake
from decayattn.distributed.exchange import Slices
from decayattn.distributed.fetching import Sight, can_plan, fetch, shares
from decayattn.distributed.local import Packed
from decayattn.distributed.moving import add_returned, extend, send_back
from decayattn.distributed.two_calls import Settings, TwoCalls
from decayattn.problem import AttentionProblem, Inputs


def attention(
    slices: Slices, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None,
    scale: Tensor | float, sight: Sight, packed: Packed | None, kernels: str | None, return_lse: bool,
    options: dict[str, Any], handshake: Handshake,
) -> Tensor | tuple[Tensor, Tensor]:
    """An exchange, and one call or two. problem is that of the slice alone; the eager reference skips nothing.

    kernels: the backend for that slice; any name if it is packed, None for the reference.
    The handshake comes before the first collective and after all launches that need none.
    """
    runs_kernels = kernels is not None
    planned = sight.reach is None and can_plan(problem) and runs_kernels
    waits = sight.reach is None and (problem.decay != "none" or packed is not None)
    if waits and q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "reach: expected a number in a CUDA graph, because the host waits for the size of a planned halo, got "
            "None; pass reach, or mode='heads'"
        )
    tolerance = problem.skip_tolerance / (shares(problem) if planned else 1)
    row_scale, number = (scale, 1.0) if isinstance(scale, Tensor) else (None, scale)
    key_decay = None
    with torch.no_grad():
        if planned and kernels is not None and packed is None:  # shared by the plan and the rows without a halo
            inputs = Inputs(q, k, v, log_decay, row_scale, scale=number)
            key_decay = registry.loaded(kernels).decay_of_keys(problem, inputs)
        prefix = None if key_decay is None else key_decay.prefix
        found, terms = fetch(
            slices, problem, q, k, log_decay, scale, sight, tolerance if planned else 0.0, handshake, prefix
        )
    options = options | {"skip_tolerance": tolerance or None}
    if packed is None:
        settings = Settings(
            found, terms, waits, number, key_decay, return_lse, runs_kernels, options, handshake
        )
        return TwoCalls.apply(q, k, v, log_decay, row_scale, options["sink"], settings)
    length = q.shape[1]
    per_token = log_decay if problem.decay == "scalar" else None
    k, v, extended = Halo.apply(k, v, per_token, found, runs_kernels, handshake)
    begins, halo = packed.cu_seqlens_k - slices.begin, found.halo
    packed = Packed(
        begins.clamp(0, length), (begins + halo).clamp(0, k.shape[1]),
        min(packed.longest_query, length), min(packed.longest_key, k.shape[1]),
    )
    return local.attention(q, k, v, log_decay if extended is None else extended, scale, packed, return_lse, options)


class Halo(torch.autograd.Function):
    """k, v and λ per token of a slice → the same with the halo before them. One exchange; in the backward, another one
    returns the gradients to their owners."""

    @staticmethod
    def forward(ctx, k, v, log_decay, fetch, runs_kernels, handshake):
        parts = [k, v, log_decay]
        ctx.fetch, ctx.runs_kernels = fetch, runs_kernels
        ctx.asked = [x is not None and asked for x, asked in zip(parts, ctx.needs_input_grad[:3], strict=True)]
        extended = extend(fetch, parts, k.shape[1], runs_kernels, handshake)
        ctx.mark_non_differentiable(
            *(x for x, asked in zip(extended, ctx.asked, strict=True) if x is not None and not asked)
        )
        return tuple(extended)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        grads = [x if asked else None for x, asked in zip(grads, ctx.asked, strict=True)]
        returned = send_back(ctx.fetch, grads, ctx.runs_kernels)
        # cloned: a gradient that autograd passes must not be changed in place
        own = [None if x is None else x[:, ctx.fetch.halo :].clone() for x in grads]
        return *add_returned(ctx.fetch, returned, own, grads, 0, ctx.runs_kernels), None, None, None
