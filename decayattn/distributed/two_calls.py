"""A slice's attention in two calls: the first rows with the halo before their keys, and the others without it.

    near   the first rows: they wait for keys of other ranks
    far    the other rows: they see nothing before their slice

The far call needs nothing of other ranks. If earlier calls had the same number of far rows (`Expected`), it is launched
before the host knows that number: the GPU computes while the host waits. If they also fetched the same number of keys
for all heads, the exchange and the near call are launched early, too. The GPU then has all its work before the host
waits. A wrong prediction is computed again.

In the backward the near call comes first: its gradients of other ranks' keys are sent while the far call computes. If
the near call has few rows, and so little to send, the far call comes first: after the forward's wait, the host then
gives the GPU work sooner. Both calls write into one dq. The near call's gradients of the slice's keys are added to the
far call's in the launch that adds the rows from other ranks.
"""

import functools
import operator
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from decayattn.autograd import Asked
from decayattn.distributed.agreement import Handshake
from decayattn.distributed.exchange import Slices
from decayattn.distributed.fetching import Fetch, Pending
from decayattn.distributed.local import Call
from decayattn.distributed.moving import add_returned, extend, send_back
from decayattn.problem import GRANULE, Inputs, KeyDecay, Prepared

# Divisors of a slice's length: the near call has one such part of its rows, or all. Only a few numbers, so that
# consecutive calls mostly have the same
_PARTS = 32, 16, 8, 4, 2, 1
# the near call has few rows if they are at most 1/_FEW_ROWS of the slice
_FEW_ROWS = 8
# consecutive equal calls before a prediction. Layers take turns: if one in twelve differs, a prediction would waste one
# far call in twelve
CALLS = 24
_REMEMBERED = 256


class Expected(NamedTuple):
    """Properties that earlier calls had in common; None if unknown."""

    part: int | None = None  # divisor: the near call has 1/part of every slice's rows
    tokens: int | None = None  # Fetch.tokens


class Settings(NamedTuple):
    """Arguments of a call besides its tensors."""

    kind: Hashable  # key of calls with a common history, the same on every rank
    slices: Slices
    pending: Pending
    waits: bool  # the host must wait for the near call's number of rows
    expected: Expected  # the same on every rank
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
        with_lse, length = settings.return_lse, q.shape[1]

        def far_call(rows, key_decay):
            """lse, and the tensors for the backward."""
            if rows == length:
                return None, ()
            terms = settings.pending.terms
            if terms is not None:
                of_blocks, of_granules = terms
                terms = of_blocks, of_granules[:, :, rows // GRANULE :]
            prepared = Prepared(out[:, rows:], terms, key_decay)
            return _far(inputs, rows, settings.options).forward(with_lse, prepared)

        def near_call(fetch, rows):
            """Extended keys; lse, the tensors for the backward, and False if there is no call."""
            parts = [k, v, log_decay if _is_per_token(log_decay) else None]
            extended = extend(fetch, parts, rows, settings.runs_kernels, settings.handshake)
            if not rows and not fetch.halo and length:
                return extended, None, (), False
            near = _near(inputs, extended, rows, settings.options)
            return extended, *near.forward(with_lse, Prepared(out[:, :rows])), True

        slices, expected = settings.slices, settings.expected
        far_lse, of_far, near = None, (), None
        if expected.part is not None:
            of_ranks = _rows_of(settings, expected.part)
            rows = of_ranks[slices.rank]
            far_lse, of_far = far_call(rows, settings.key_decay)
            if expected.tokens is not None:
                fetch = Fetch.last(slices, expected.tokens, k, of_ranks)
                near = near_call(fetch, rows)
        found = settings.pending.wait()
        if settings.waits:
            part = _part(settings, found)
            rows, seen = _rows_of(settings, part)[slices.rank], Expected(part, found.tokens)
            history(slices.group).note(settings.kind, seen)
        else:
            rows, seen = _seeing_rows(found), Expected()
        if seen != expected:
            near = None  # free its memory before the next near call
        if seen.part is None or seen.part != expected.part:
            far_lse, of_far = None, ()
            # the key decay serves one forward only
            far_lse, of_far = far_call(rows, settings.key_decay if expected.part is None else None)
        if near is None:
            fetch = found
            near = near_call(fetch, rows)
        extended, near_lse, of_near, has_near = near
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


def _part(settings: Settings, found: Fetch) -> int:
    """Largest divisor in _PARTS for which the part contains every rank's rows that see the halo.

    All ranks use the same divisor, also one without a halo, so that they reach the exchange at the same time.
    """
    return next(part for part in _PARTS if all(map(operator.le, found.rows, _rows_of(settings, part))))


def _rows_of(settings: Settings, part: int) -> Sequence[int]:
    """Number of near rows in every slice: 1/part of its rows, in full granules. 1: all rows."""
    lengths, multiple = settings.slices.lengths, 1 if settings.pending.terms is None else GRANULE
    return lengths if part == 1 else [length // part // multiple * multiple for length in lengths]


def _seeing_rows(fetch: Fetch) -> int:
    """Number of this rank's rows that see the halo. If it is more than half on any rank, all rows, on every rank."""
    lengths, rank = fetch.slices.lengths, fetch.slices.rank
    few = all(2 * seeing <= length for seeing, length in zip(fetch.rows, lengths, strict=True))
    return fetch.rows[rank] if few else lengths[rank]


class History:
    """Common properties of a group's earlier calls, by kind; equal on all its ranks."""

    def __init__(self) -> None:
        # properties of the last call, and the numbers of consecutive calls with its part and with its tokens
        self.last: dict[Hashable, tuple[Expected, int, int]] = {}

    def expected(self, kind: Hashable) -> Expected:
        seen, of_part, of_tokens = self.last.get(kind, (Expected(), 0, 0))
        if of_part < CALLS:
            return Expected()
        return seen if of_tokens >= CALLS else Expected(seen.part)

    def note(self, kind: Hashable, seen: Expected) -> None:
        before, of_part, of_tokens = self.last.pop(kind, (seen, 0, 0))
        while len(self.last) >= _REMEMBERED:
            del self.last[next(iter(self.last))]
        of_part = of_part + 1 if seen.part == before.part else 1
        of_tokens = of_tokens + 1 if seen.tokens == before.tokens else 1
        self.last[kind] = seen, of_part, of_tokens

    def forget(self, kind: Hashable) -> None:
        self.last.pop(kind, None)


_histories: "weakref.WeakKeyDictionary[dist.ProcessGroup, History]" = weakref.WeakKeyDictionary()


def history(group: dist.ProcessGroup) -> History:
    """History of a group."""
    return _histories.setdefault(group, History())
