"""A slice's attention in two calls: the first rows with the halo before their keys, and the others without it.

    near   the first rows: they wait for keys of other ranks
    far    the others, which see nothing before their slice

Nothing of other ranks is in the far call. Where calls before had one as long (`_Expected`), it is launched before the
host knows how long it is: the GPU computes while the host waits, and launches the exchange and the near call. Where
that was wrong, it is computed again.

In the backward the near call is first: what it gives of other ranks' keys is on its way while the far call computes.
But where it has few rows, and so little to send, the far call is: a host that comes from the wait of the forward then
has the GPU busy sooner. Both write into one dq, and what the near call gives of the slice's keys is added to the far
call's in the launch that adds what other ranks send back.
"""

import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from decayattn.autograd import Asked
from decayattn.distributed.fetching import Fetch, Pending
from decayattn.distributed.local import Call
from decayattn.distributed.moving import add_returned, extend, send_back
from decayattn.problem import GRANULE, Inputs, KeyDecay, Prepared

# the near call has one part of so many, or all rows: few different numbers, so that a call mostly has as many as the
# one before
_PARTS = 32, 16, 8, 4, 2
# the near call has few rows where they are at most one part of so many
_FEW = 8
# so many calls in a row have had as many first rows before one is expected to: layers take turns, and one in twelve
# that differs would be one far call in twelve for nothing
CALLS = 24
_REMEMBERED = 256


class Settings(NamedTuple):
    """What a call is besides its tensors."""

    kind: Hashable  # of calls that may have as many first rows
    pending: Pending
    waits: bool  # the host has to, to know how many there are
    scale: float  # where it is not one per row
    key_decay: KeyDecay | None
    return_lse: bool
    runs_kernels: bool
    options: dict[str, Any]
    agree: Callable[[], None]  # before the first collective


class TwoCalls(torch.autograd.Function):
    """q, k, v, λ, scales and sink of a slice → out, and lse if it is asked for."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, row_scale, sink, settings):
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.options, ctx.runs_kernels = settings.scale, settings.options, settings.runs_kernels
        inputs = Inputs(q, k, v, log_decay, row_scale, sink=sink, scale=settings.scale)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        with_lse, length = settings.return_lse, q.shape[1]

        def far_call(rows, key_decay):
            """lse, and what the backward reads."""
            if rows == length:
                return None, ()
            terms = settings.pending.terms
            if terms is not None:
                of_blocks, of_granules = terms
                terms = of_blocks, of_granules[:, :, rows // GRANULE :]
            prepared = Prepared(out[:, rows:], terms, key_decay)
            return _far(inputs, rows, settings.options).forward(with_lse, prepared)

        expected = _expected.rows(settings.kind) if settings.waits else None
        far_lse, of_far = (None, ()) if expected is None else far_call(expected, settings.key_decay)
        fetch = settings.pending.wait()
        rows = _first_rows(fetch, settings)
        if settings.waits:
            _expected.note(settings.kind, rows)
        if rows != expected:  # the decay of the keys is for one forward
            far_lse, of_far = far_call(rows, settings.key_decay if expected is None else None)
        if not settings.waits:
            settings.agree()  # behind what needs no other rank

        extended = extend(fetch, [k, v, log_decay if _is_per_token(log_decay) else None], rows, settings.runs_kernels)
        near_lse, of_near = None, ()
        has_near = rows > 0 or fetch.halo > 0 or length == 0
        if has_near:
            near = _near(inputs, extended, rows, settings.options)
            near_lse, of_near = near.forward(with_lse, Prepared(out[:, :rows]))
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
        asked = Asked(decay_gradient=of_decay, bias_gradient=False, sink_gradient=of_sink)
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

        far_first = rows * _FEW <= length
        far = far_call() if far_first else None
        near = None
        near_keys = of_keys(*extended)  # where there is no near call, for dtypes and widths
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
    """The rows from that one on, with all keys of the slice."""
    scale = inputs.row_scale
    others = inputs._replace(q=inputs.q[:, rows:], row_scale=None if scale is None else scale[:, rows:])
    return Call.of(others, options)


def _near(inputs: Inputs, extended: Sequence[Tensor | None], rows: int, options: dict[str, Any]) -> Call:
    """The first rows, with the halo and the first keys."""
    scale, (k, v, log_decay) = inputs.row_scale, extended
    assert k is not None
    assert v is not None
    first = inputs._replace(q=inputs.q[:, :rows], k=k, v=v, row_scale=None if scale is None else scale[:, :rows])
    return Call.of(first if log_decay is None else first._replace(log_decay=log_decay), options)


def _is_per_token(log_decay: Tensor | None) -> bool:
    return log_decay is not None and log_decay.ndim == 3


def _first_rows(fetch: Fetch, settings: Settings) -> int:
    """How many rows the near call has: at least those that see the halo, and all where those are more than half.

    Every rank has the same share, so that they come to the exchange at the same time, also a rank without a halo.
    """
    slices, waits = fetch.slices, settings.waits
    own, multiple = slices.lengths[slices.rank], 1 if settings.pending.terms is None else GRANULE
    for part in _PARTS if waits else (2,):
        most = [length // part // multiple * multiple for length in slices.lengths]
        if all(seeing <= rows for seeing, rows in zip(fetch.rows, most, strict=True)):
            return most[slices.rank] if waits else fetch.rows[slices.rank]
    return own


class _Expected:
    """How many first rows the last call of a kind had, and how many calls in a row had as many."""

    def __init__(self) -> None:
        self.last: dict[Hashable, tuple[int, int]] = {}

    def rows(self, kind: Hashable) -> int | None:
        """What to expect, if anything."""
        rows, calls = self.last.get(kind, (0, 0))
        return rows if calls >= CALLS else None

    def note(self, kind: Hashable, rows: int) -> None:
        before, calls = self.last.pop(kind, (rows, 0))
        while len(self.last) >= _REMEMBERED:
            del self.last[next(iter(self.last))]
        self.last[kind] = rows, calls + 1 if rows == before else 1


_expected = _Expected()
