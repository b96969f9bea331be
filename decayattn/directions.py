"""Attention with one gate per direction: two calls of the kernels for one gate, merged by their log-sum-exps.

    left    the keys j ≤ i: a causal call
    right   the keys j > i: not causal, a window without keys before the row; rows are one position to the right

In the right call row i has position i + 1. Its decay lacks λ_{i+1}, which all of its keys have: the merge adds it. The
backward of each call gets the merged out and log-sum-exp. DERIVATION.md, section 15.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decayattn import autograd, reference
from decayattn.problem import AttentionProblem, BackendName, GradientRequest, Inputs, Saved, is_reset

_INPUTS = len(Inputs._fields)
_LOG2E = 1 / math.log(2)


def attention(
    problem: AttentionProblem, inputs: Inputs, backend: BackendName, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """autograd.attention for log_decay (B, T, H, 2), in which row i is token i."""
    if problem.window[1] == 0:
        return autograd.attention(*_left(problem, inputs), backend, with_lse)
    is_operator = autograd.needs_operator(inputs)
    if autograd.needs_gradient(inputs, is_operator):
        return _TwoCalls.apply(*inputs, problem, backend, is_operator)
    return _attend(inputs, problem, backend, is_operator)[:2]


def _left(problem: AttentionProblem, inputs: Inputs) -> tuple[AttentionProblem, Inputs]:
    assert inputs.log_decay is not None
    window = problem.window[0], -1
    return problem._replace(causal=True, window=window), inputs._replace(log_decay=inputs.log_decay[..., 0])


def _right(problem: AttentionProblem, inputs: Inputs) -> tuple[AttentionProblem, Inputs]:
    """The right call, without the sink, and without the last row of a sequence, which has no key there."""
    q, _, _, log_decay, scale, bounds, bias, *_ = inputs
    assert log_decay is not None
    after = problem.window[1]
    if bounds is None:
        q, scale = q[:, :-1], None if scale is None else scale[:, :-1]
        bias = None if bias is None else reference.block_of_bias(bias, slice(0, -1), slice(None))
    else:
        first_row, rows, *tokens = bounds.unbind(1)
        bounds = torch.stack([first_row, (rows - 1).clamp(min=0), *tokens], 1)
    longest = (problem.longest_query, problem.longest_key) if problem.layout == "packed" else None
    window = 0, after - 1 if after > 0 else -1
    log_decay = log_decay[..., 1]
    shifted = inputs._replace(q=q, log_decay=log_decay, row_scale=scale, bounds=bounds, bias=bias, sink=None)
    return AttentionProblem.of(shifted, False, window, longest, problem.skip_tolerance), shifted


def _calls(
    inputs: Inputs, problem: AttentionProblem, backend: BackendName, is_operator: bool
) -> list[tuple[AttentionProblem | None, Inputs, autograd.Modes]]:
    """(problem, or None for the operator; inputs; modes) of the left and the right call."""
    calls = _left(problem, inputs), _right(problem, inputs)
    return [(None if is_operator else own, tensors, autograd.modes_of(own, backend)) for own, tensors in calls]


def _attend(inputs: Inputs, problem: AttentionProblem, backend: BackendName, is_operator: bool) -> tuple[Any, ...]:
    """out and lse; then, for the backward, out of both calls, the difference of their LSE, and what each saves.

    The saved log-sum-exps are those of both calls together.
    """
    (before, lse, *saved), (after, lse_after, *saved_right) = (
        autograd.without_gradient(*call, True) for call in _calls(inputs, problem, backend, is_operator)
    )
    assert inputs.log_decay is not None
    nearest = inputs.log_decay[..., 1].roll(-1, 1).transpose(1, 2)  # λ_{i+1}, which the last row does not have
    lse_after = F.pad(lse_after, (0, before.shape[1] - after.shape[1]), value=-math.inf)
    alone = lse_after.isneginf() | is_reset(nearest)  # padding may hold NaN
    difference = torch.where(alone, math.inf, lse - lse_after - nearest)
    out = _merged(before, after, difference)
    if out.dtype != before.dtype:  # compiled by torch 2.11, an output that `to` returns unchanged has no gradient
        out = out.to(before.dtype)
    # LSE of both minus that of one call: exact for a row that one key dominates
    left, right = Saved(*saved), Saved(*saved_right)
    more, more_right = (-F.logsigmoid(x) * _LOG2E for x in (difference, -difference[:, :, : after.shape[1]]))
    of_left, right = left.row_lse2 + more, right._replace(row_lse2=right.row_lse2 + more_right)
    # inf is a row without a key; one with keys on the right only has P = 0 on the left for any other number
    left = left._replace(row_lse2=torch.where(of_left.isposinf() & ~alone, 0.0, of_left))
    if left.sink_probability is not None and inputs.sink is not None:
        left = left._replace(sink_probability=left.sink_probability * difference.sigmoid())
    lse = torch.where(alone, lse, torch.logaddexp(lse, lse_after + nearest))
    return out, lse, before, after, difference, *left, *right


def _merged(before: Tensor, after: Tensor, difference: Tensor) -> Tensor:
    """out of both calls, in the dtype of the difference LSE_left − LSE_right; the last rows may have no `after`."""
    merged = before * difference.sigmoid().transpose(1, 2)[..., None]
    weight = (-difference[:, :, : after.shape[1]]).sigmoid().transpose(1, 2)
    merged[:, : after.shape[1]] += after * weight[..., None]
    return merged


class _TwoCalls(torch.autograd.Function):
    """Inputs, a problem, a backend and autograd.needs_operator → out and lse."""

    @staticmethod
    def forward(ctx, *arguments):
        out, lse, *kept = _attend(Inputs(*arguments[:_INPUTS]), *arguments[_INPUTS:])
        ctx.save_for_backward(*arguments[: _INPUTS - 1], out, *kept)
        ctx.rest = arguments[_INPUTS - 1 :]
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        kept, (scale, *rest), (*_, needs_decay, _, _, needs_bias, needs_sink) = (
            ctx.saved_tensors, ctx.rest, ctx.needs_input_grad[: _INPUTS - 1]
        )
        inputs, (out, before, after, difference, *saved) = Inputs(*kept[: _INPUTS - 1], scale), kept[_INPUTS - 1 :]
        rows, half = slice(0, after.shape[1]), len(Saved._fields)
        left, right = Saved(*saved[:half]), Saved(*saved[half:])
        merged, wide = _merged(before, after, difference), d_out.to(difference.dtype)
        # Δ = dO·O − dLSE of an O that is rounded in the two calls only, not again when they are merged. Rows without a
        # key may have any dO
        rounding = (wide * (out - merged)).sum(-1).transpose(1, 2).masked_fill(left.row_lse2.isposinf(), 0.0)
        for_delta, requested = d_lse + rounding, GradientRequest(needs_decay, needs_bias, needs_sink)
        first, second = _calls(inputs, *rest)
        of_left = autograd.gradients_of(*first, out, left, d_out, for_delta, requested)
        of_right = autograd.gradients_of(
            *second, out[:, rows], right, d_out[:, rows], for_delta[:, :, rows], requested._replace(sink_gradient=False)
        )
        dq, d_decay, d_scale, d_bias = of_left.dq, None, None, None
        dq[:, rows] += of_right.dq
        if inputs.row_scale is not None:
            d_scale = of_left.d_row_scale
            d_scale[:, rows] += of_right.d_row_scale
        if needs_bias:
            d_bias = of_left.d_bias
            reference.block_of_bias(d_bias, rows, slice(None)).add_(of_right.d_bias)
        if needs_decay:
            # λ_{i+1} is in the scores of all keys after row i: its gradient is their sum of dS
            weight = (-difference[:, :, rows]).sigmoid().transpose(1, 2)
            sums = (wide[:, rows] * (after - merged[:, rows])).sum(-1) + d_lse[:, :, rows].transpose(1, 2)
            of_nearest = torch.where(weight > 0, weight * sums, 0.0)
            of_nearest = F.pad(of_nearest, (0, 0, 0, out.shape[1] - after.shape[1])).roll(1, 1)
            d_decay = torch.stack([of_left.d_log_decay, of_right.d_log_decay + of_nearest], -1)
        d_sink = of_left.d_sink if needs_sink else None
        dk, dv = of_left.dk + of_right.dk, of_left.dv + of_right.dv
        return dq, dk, dv, d_decay, d_scale, None, d_bias, d_sink, None, None, None, None
