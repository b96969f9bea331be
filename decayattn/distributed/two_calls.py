"""A slice's attention in two calls: the first rows with the halo before their keys, and the others without it.

    near   the first rows: they need keys of other ranks
    far    the other rows: they see nothing before their slice

In the backward the near call comes first: its gradients of other ranks' keys are sent while the far call computes. If
the near call has few rows, and so little to send, the far call comes first: after the forward's wait, the host then
gives the GPU work sooner. Both calls write into one dq. The near call's gradients of the slice's keys are added to the
far call's in the launch that adds the rows from other ranks.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from decayattn.distributed.agreement import Handshake
from decayattn.distributed.fetching import Fetch
from decayattn.distributed.local import Call
from decayattn.distributed.moving import add_returned, extend, send_back
from decayattn.problem import GRANULE, GradientRequest, Inputs, KeyDecay, Precomputed

# Divisors of a slice's length: the near call has one such part of its rows, or all. Only a few numbers, so that
# launches are mostly cached
_PARTS = 32, 16, 8, 4, 2
# the near call has few rows if they are at most 1/_FEW_ROWS of the slice
_FEW_ROWS = 8

class Settings(NamedTuple):
    """Arguments of a call besides its tensors."""

    fetch: Fetch
    terms: tuple[Tensor, Tensor] | None  # of the plan (fetching.fetch)
    waits: bool  # the host has waited for the near call's number of rows
    scale: float  # if it is not one per row
    key_decay: KeyDecay | None
    return_lse: bool
    runs_kernels: bool
    options: dict[str, Any]
    handshake: Handshake  # before the first collective


class TwoCalls(torch.autograd.Function):
    """q, k, v, λ, scales and sink of a slice → out, and lse if requested."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, row_scale, sink, settings):
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.options, ctx.runs_kernels = settings.scale, settings.options, settings.runs_kernels
        inputs = Inputs(q, k, v, log_decay, row_scale, sink=sink, scale=settings.scale)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        fetch, terms, with_lse, length = settings.fetch, settings.terms, settings.return_lse, q.shape[1]
        rows = _waiting_rows(fetch, 1 if terms is None else GRANULE) if settings.waits else _seeing_rows(fetch)
        far_lse, of_far = None, ()
        if rows < length:
            if terms is not None:
                of_blocks, of_granules = terms
                terms = of_blocks, of_granules[:, :, rows // GRANULE :]
            precomputed = Precomputed(out[:, rows:], terms, settings.key_decay)
            far_lse, of_far = _far(inputs, rows, settings.options).forward(with_lse, precomputed)
        parts = [k, v, log_decay if _is_per_token(log_decay) else None]
        extended = extend(fetch, parts, rows, settings.runs_kernels, settings.handshake)
        near_lse, of_near, has_near = None, (), rows > 0 or fetch.halo > 0 or not length
        if has_near:
            near = _near(inputs, extended, rows, settings.options)
            near_lse, of_near = near.forward(with_lse, Precomputed(out[:, :rows]))
        ctx.fetch, ctx.rows, ctx.has_near, ctx.of_near = fetch, rows, has_near, len(of_near)
        ctx.save_for_backward(q, k, v, log_decay, row_scale, sink, out, *extended, *of_near, *of_far)
        if not with_lse:
            return out
        return out, torch.cat([lse for lse in (near_lse, far_lse) if lse is not None], 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_lse=None):
        q, k, v, log_decay, row_scale, sink, out, *kept = ctx.saved_tensors
        inputs = Inputs(q, k, v, log_decay, row_scale, sink=sink, scale=ctx.scale)
        extended, of_near, of_far = kept[:3], kept[3 : 3 + ctx.of_near], kept[3 + ctx.of_near :]
        fetch, rows, length = ctx.fetch, ctx.rows, q.shape[1]
        of_q, of_k, of_v, of_decay, of_scale, of_sink, _ = ctx.needs_input_grad
        per_token = _is_per_token(log_decay)
        asked = GradientRequest(decay_gradient=of_decay, bias_gradient=False, sink_gradient=of_sink)
        if d_out is None:
            d_out = out.new_zeros(()).expand(out.shape)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)

        def differentiated(call, saved, begin, end):
            part = slice(begin, end)
            of_lse = None if d_lse is None else d_lse[:, :, part]
            return call.backward(out[:, part], saved, d_out[:, part], of_lse, asked, dq[:, part])

        def of_keys(dk, dv, d_log_decay):
            return [dk if of_k else None, dv if of_v else None, d_log_decay if of_decay and per_token else None]

        def far_call():
            return differentiated(_far(inputs, rows, ctx.options), of_far, rows, length) if rows < length else None

        far_first = rows * _FEW_ROWS <= length
        far = far_call() if far_first else None
        near = None
        near_keys = of_keys(*extended)  # without a near call: only for dtypes and widths
        if ctx.has_near:
            near = differentiated(_near(inputs, extended, rows, ctx.options), of_near, 0, rows)
            near_keys = of_keys(near.dk, near.dv, near.d_log_decay)
        exchanges = any(x is not None for x in near_keys)
        returned = send_back(fetch, near_keys, ctx.runs_kernels) if exchanges else None
        if not far_first:
            far = far_call()
        if far is None:
            totals = [None if x is None else x[:, fetch.halo :] for x in near_keys]
        else:
            totals = of_keys(far.dk, far.dv, far.d_log_decay)
        if returned is not None:
            totals = add_returned(fetch, returned, totals, near_keys, 0 if far is None else rows, ctx.runs_kernels)
        calls = [x for x in (near, far) if x is not None]
        dk, dv, d_log_decay = totals
        if of_decay and not per_token:
            d_log_decay = functools.reduce(operator.add, [x.d_log_decay for x in calls])
        d_scale = torch.cat([x.d_row_scale for x in calls], 1) if of_scale else None
        d_sink = functools.reduce(operator.add, [x.d_sink for x in calls]) if of_sink else None
        return dq if of_q else None, dk, dv, d_log_decay, d_scale, d_sink, None


def _far(inputs: Inputs, rows: int, options: dict[str, Any]) -> Call:
    """Call of the rows from `rows` on, with all keys of the slice."""
    scale = inputs.row_scale
    others = inputs._replace(q=inputs.q[:, rows:], row_scale=None if scale is None else scale[:, rows:])
    return Call.of(others, options)


def _near(inputs: Inputs, extended: Sequence[Tensor | None], rows: int, options: dict[str, Any]) -> Call:
    """Call of the first rows, with the halo and the first keys."""
    scale, (k, v, log_decay) = inputs.row_scale, extended
    assert k is not None
    assert v is not None
    first = inputs._replace(q=inputs.q[:, :rows], k=k, v=v, row_scale=None if scale is None else scale[:, :rows])
    return Call.of(first if log_decay is None else first._replace(log_decay=log_decay), options)


def _is_per_token(log_decay: Tensor | None) -> bool:
    return log_decay is not None and log_decay.ndim == 3


def _waiting_rows(fetch: Fetch, multiple: int) -> int:
    """Number of this rank's near rows: the smallest part of the slice, in a multiple, that contains the rows that see
    the halo.

    All ranks use the same part, also one without a halo, so that they reach the exchange at the same time.
    """
    lengths, rank = fetch.slices.lengths, fetch.slices.rank
    for part in _PARTS:
        rows = [length // part // multiple * multiple for length in lengths]
        if all(map(operator.le, fetch.rows, rows)):
            return rows[rank]
    return lengths[rank]


def _seeing_rows(fetch: Fetch) -> int:
    """Number of this rank's rows that see the halo. If it is more than half on any rank, all rows, on every rank."""
    lengths, rank = fetch.slices.lengths, fetch.slices.rank
    few = all(2 * seeing <= length for seeing, length in zip(fetch.rows, lengths, strict=True))
    return fetch.rows[rank] if few else lengths[rank]
