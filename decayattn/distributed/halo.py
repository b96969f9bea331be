"""Halo mode: each rank keeps its queries and fetches the keys before its slice that can matter to them.

halo_plan.py chooses the keys and the rows that see them, halo_exchange.py moves them. The slice's rows are one call of
packed sequences, or two calls::

    near   the first rows: they need keys of other ranks
    far    the other rows: they see nothing before their slice

In the backward the near call comes first: its gradients of other ranks' keys are sent while the far call computes.
Both calls write into one dq. The near call's gradients of the slice's keys are added to the far call's together
with the rows from other ranks.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from decayattn import autograd, reference
from decayattn.backends import registry
from decayattn.distributed.collectives import Slices
from decayattn.distributed.halo_exchange import add_returned, fetch_halo, return_gradients
from decayattn.distributed.halo_plan import HaloPlan, ViewLimits, make_plan, tolerance_share
from decayattn.distributed.option_check import OptionCheck
from decayattn.normalize import sequence_spans
from decayattn.problem import GRANULE, AttentionProblem, BackendName, GradientRequest, Gradients, Inputs, Precomputed

# Divisors of a slice's length: the near call has one such part of its rows, or all. Only a few numbers, so that
# launches are mostly cached
_PARTS = 32, 16, 8, 4, 2


class Settings(NamedTuple):
    """Arguments of both calls of a slice besides tensors of its rows and keys."""

    plan: HaloPlan
    rows: int  # of the near call
    limits: ViewLimits
    tolerance: float
    backend: BackendName
    runs_kernels: bool
    return_lse: bool
    scale: float  # if it is not one per row


def attention(
    slices: Slices, problem: AttentionProblem, inputs: Inputs, limits: ViewLimits, runs_kernels: bool,
    backend: BackendName, return_lse: bool, check: OptionCheck,
) -> Tensor | tuple[Tensor, Tensor]:
    """One exchange, and attention of this rank's rows. problem and inputs are those of the slice alone.

    runs_kernels: False for the reference, which skips nothing.
    The check of options comes before the first collective and after all launches that need none.
    """
    planned = limits.reach is None and runs_kernels and problem.decay != "none"
    tolerance = tolerance_share(problem) if planned else problem.skip_tolerance
    with torch.no_grad():
        plan, terms = make_plan(slices, problem, inputs, limits, tolerance if planned else 0.0, check)
    rows = slices.length if limits.cu_seqlens is not None else _near_rows(plan, 1 if terms is None else GRANULE)
    if terms is not None:
        terms = terms[0], terms[1][:, :, rows // GRANULE :]  # of blocks and of granules
    settings = Settings(plan, rows, limits, tolerance, backend, runs_kernels, return_lse, inputs.scale)
    return TwoCalls.apply(*inputs[:5], inputs.sink, settings, terms, check)


class TwoCalls(torch.autograd.Function):
    """q, k, v, λ, scales and sink of a slice → out, and lse if requested."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, row_scale, sink, settings, terms, check):
        ctx.set_materialize_grads(False)
        # not the check: it has the group, which must not live as long as a graph
        ctx.settings, inputs = settings, Inputs(q, k, v, log_decay, row_scale, sink=sink, scale=settings.scale)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        plan, rows, with_lse, length = settings.plan, settings.rows, settings.return_lse, q.shape[1]
        far_lse, of_far = None, ()
        if rows < length:
            far_lse, of_far = _far(inputs, settings).forward(with_lse, Precomputed(out[:, rows:], terms))
        parts = [k, v, None if log_decay is None or log_decay.ndim == 1 else log_decay]
        extended = fetch_halo(plan, parts, rows, settings.runs_kernels, check)
        near_lse, of_near = _near(inputs, extended, settings).forward(with_lse, Precomputed(out[:, :rows]))
        ctx.of_near = len(of_near)
        ctx.save_for_backward(q, k, v, log_decay, row_scale, sink, out, *extended, *of_near, *of_far)
        if not with_lse:
            return out
        return out, torch.cat([lse for lse in (near_lse, far_lse) if lse is not None], 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_lse=None):
        q, k, v, log_decay, row_scale, sink, out, *kept = ctx.saved_tensors
        settings, length = ctx.settings, q.shape[1]
        inputs = Inputs(q, k, v, log_decay, row_scale, sink=sink, scale=settings.scale)
        extended, of_near, of_far = kept[:3], kept[3 : 3 + ctx.of_near], kept[3 + ctx.of_near :]
        plan, rows = settings.plan, settings.rows
        needs_q, needs_k, needs_v, needs_decay, needs_scale, needs_sink, *_ = ctx.needs_input_grad
        per_token = log_decay is not None and log_decay.ndim == 3
        request = GradientRequest(decay_gradient=needs_decay, bias_gradient=False, sink_gradient=needs_sink)
        if d_out is None:
            d_out = out.new_zeros(()).expand(out.shape)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)

        def gradients(call, saved, part):
            of_lse = None if d_lse is None else d_lse[:, :, part]
            return call.backward(out[:, part], saved, d_out[:, part], of_lse, request, dq[:, part])

        def of_keys(*grads):
            needed = needs_k, needs_v, needs_decay and per_token
            return [x if is_needed else None for x, is_needed in zip(grads, needed, strict=True)]

        near = gradients(_near(inputs, extended, settings), of_near, slice(0, rows))
        calls, near_keys = [near], of_keys(near.dk, near.dv, near.d_log_decay)
        exchanges = any(x is not None for x in near_keys)
        returned = return_gradients(plan, near_keys, settings.runs_kernels) if exchanges else None
        if rows < length:
            far = gradients(_far(inputs, settings), of_far, slice(rows, length))
            calls.append(far)
            added, totals = rows, of_keys(far.dk, far.dv, far.d_log_decay)
        else:
            added, totals = 0, [None if x is None else x[:, plan.halo :] for x in near_keys]
        if returned is not None:
            add_returned(plan, returned, totals, near_keys, added, settings.runs_kernels)
        dk, dv, d_log_decay = totals
        if needs_decay and not per_token:
            d_log_decay = functools.reduce(operator.add, [x.d_log_decay for x in calls])
        d_scale = torch.cat([x.d_row_scale for x in calls], 1) if needs_scale else None
        d_sink = functools.reduce(operator.add, [x.d_sink for x in calls]) if needs_sink else None
        return dq if needs_q else None, dk, dv, d_log_decay, d_scale, d_sink, None, None, None


class Call(NamedTuple):
    """decay_attention of causal rows with checked arguments: a forward and a backward for a caller's Function."""

    problem: AttentionProblem
    inputs: Inputs
    backend: BackendName

    @classmethod
    def of(cls, inputs: Inputs, settings: Settings, longest: Sequence[int] | None = None) -> "Call":
        problem = AttentionProblem.of(inputs, True, (settings.limits.left, -1), longest, settings.tolerance)
        return cls(problem, inputs, registry.select(problem, settings.backend))

    def forward(self, with_lse: bool, precomputed: Precomputed) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        """lse, if requested, and the tensors for the backward. The result is written to precomputed.out."""
        if self.backend == "reference":
            out, lse = reference.attention(self.problem, self.inputs)
            precomputed.out.copy_(out)
            return lse, ()
        return autograd.forward(self.problem, self.inputs, self.backend, with_lse, precomputed)[1:]

    def backward(
        self, out: Tensor, saved: Sequence[Tensor | None], d_out: Tensor, d_lse: Tensor | None,
        request: GradientRequest, dq: Tensor,
    ) -> Gradients:
        """Gradients of the call. dq: output buffer for that of q."""
        if self.backend != "reference":
            return autograd.backward(self.problem, self.inputs, self.backend, out, saved, d_out, d_lse, request, dq)
        with torch.enable_grad():  # through another forward
            leaves: dict[str, Any] = {
                name: x.detach().requires_grad_()
                for name, x in self.inputs._asdict().items() if isinstance(x, Tensor) and x.is_floating_point()
            }
            out, lse = reference.attention(self.problem, self.inputs._replace(**leaves))
            outputs, grads = ([out], [d_out]) if d_lse is None else ([out, lse], [d_out, d_lse])
            found = dict(zip(leaves, torch.autograd.grad(outputs, [*leaves.values()], grads), strict=True))
        dq.copy_(found["q"])
        others = found.get("log_decay"), found.get("row_scale"), None, found.get("sink")
        return Gradients(dq, found["k"], found["v"], *others)


def _far(inputs: Inputs, settings: Settings) -> Call:
    """Call of the rows after the near ones, with all keys of the slice."""
    rows, scale = settings.rows, inputs.row_scale
    scale = None if scale is None else scale[:, rows:]
    return Call.of(inputs._replace(q=inputs.q[:, rows:], row_scale=scale), settings)


def _near(inputs: Inputs, extended: Sequence[Any], settings: Settings) -> Call:
    """Call of the first rows, with the halo and the first keys."""
    rows, scale, (k, v, log_decay) = settings.rows, inputs.row_scale, extended
    near = inputs._replace(
        q=inputs.q[:, :rows], k=k, v=v, log_decay=inputs.log_decay if log_decay is None else log_decay,
        row_scale=None if scale is None else scale[:, :rows],
    )
    limits, plan, tokens = settings.limits, settings.plan, k.shape[1]
    if limits.cu_seqlens is None:
        return Call.of(near, settings)
    first, length = sequence_spans(limits.cu_seqlens, plan.slices.offsets[-1], limits.max_seqlen)
    bounds = []
    for begin, axis in ((plan.slices.begin, rows), (plan.slices.begin - plan.halo, tokens)):
        start, end = ((x - begin).clamp(0, axis) for x in (first, first + length))
        bounds += [start, end - start]
    longest = min(limits.max_seqlen, rows), min(limits.max_seqlen, tokens)
    return Call.of(near._replace(bounds=torch.stack(bounds, 1)), settings, longest)


def _near_rows(plan: HaloPlan, multiple: int) -> int:
    """Number of near rows: the least part, in a multiple, that is enough on all ranks: they exchange at one time."""
    lengths, rank = plan.slices.lengths, plan.slices.rank
    for part in _PARTS:
        rows = [length // part // multiple * multiple for length in lengths]
        if all(map(operator.le, plan.rows, rows)):
            return rows[rank]
    return lengths[rank]
