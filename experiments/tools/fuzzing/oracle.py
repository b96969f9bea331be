"""Exact results, in float64: scores with the decay summed up from its definition, and gradients by autograd.

Nothing here is a difference of two prefixes, as in the kernels, in "reference" and in decayattn.testing: the decay of a
pair is the sum of the λ between its positions, every one of them picked by an indicator. Resets are visibility first,
and count as 0 then.
"""

from typing import Any

import torch
from torch import Tensor

# a log-decay below this is a reset: exp of it is 0 in float64, too
RESET_BELOW = -746.0


def attention(*, grad_out: Tensor, grad_lse: Tensor, **heads: Any) -> dict[str, Tensor]:
    """out, lse and all gradients of N independent heads; the arguments are explicit_attention's."""
    leaves = {
        name: x.to(torch.float64, copy=True).requires_grad_()
        for name, x in heads.items() if isinstance(x, Tensor) and x.is_floating_point()
    }
    with torch.enable_grad():
        out, lse, _ = _forward(**heads | leaves)
    grads = torch.autograd.grad(
        [out, lse], list(leaves.values()), [grad_out.double(), grad_lse.double()], materialize_grads=True
    )
    results = {f"d{name}": gradient for name, gradient in zip(leaves, grads, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **results}


def lost(*, tolerance: float, **heads: Any) -> dict[str, Tensor]:
    """Upper bound on the change of every entry if each row may lose keys of probability `tolerance` together.

    A kept P grows to at most P / (1 − ε), a lost one, which is at most ε, goes to 0; Δ moves by at most 2 ε max |dP|.
    """
    wide = ("q", "k", "v", "scale", "grad_out", "grad_lse")
    q, k, v, scale, grad_out, grad_lse = (heads.pop(name).double() for name in wide)
    out, lse, p = _forward(q=q, k=k, v=v, scale=scale, **heads)
    log_decay, sink = heads["log_decay"], heads["sink"]
    grown = tolerance / (1 - tolerance)
    moved = p * grown + p.clamp(max=tolerance)
    grad_lse = torch.where(lse.isneginf(), 0.0, grad_lse)  # of a row that sees nothing it may be anything
    dp = torch.where(p > 0, (grad_out @ v.mT).abs(), 0.0)
    largest = dp.amax(-1, keepdim=True) if dp.shape[-1] else dp.sum(-1, keepdim=True)
    delta = ((grad_out * out).sum(-1) - grad_lse).abs()[..., None]
    ds = moved * (dp + delta + 2 * tolerance * largest) + p * (2 * tolerance * largest)
    rows = scale.abs()[..., None] if scale.ndim == 2 else scale.abs()[:, None, None].expand(len(q), q.shape[1], 1)
    i, j = positions(q, k)
    largest_values = v.abs().amax(1, keepdim=True) if v.shape[1] else v.new_zeros(len(v), 1, v.shape[2])
    result = {
        "out": 2 * tolerance * largest_values * (p.sum(-1, keepdim=True) > 0), "lse": torch.full_like(lse, grown),
        "dq": rows * (ds @ k.abs()), "dk": ds.mT @ (rows * q.abs()), "dv": moved.mT @ grad_out.abs(),
        "dscale": (q.abs() * (ds @ k.abs())).sum(-1), "dbias": ds,
    }
    if log_decay is not None and log_decay.ndim == 1:
        result["dlog_decay"] = (ds * (i[:, None] - j).abs()).sum((1, 2))
    elif log_decay is not None:
        result["dlog_decay"] = ds.sum((1, 2)).view(-1, *(1,) * (log_decay.ndim - 1)).expand(log_decay.shape)
    if sink is not None:
        p_sink = torch.where(sink.isneginf()[:, None], 0.0, (sink.double()[:, None] - lse).exp())[..., None]
        result["dsink"] = (p_sink * (grown * (delta + 2 * tolerance * largest) + 2 * tolerance * largest)).sum((1, 2))
    return result


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    rows, keys = q.shape[1], k.shape[1]
    return torch.arange(rows, device=q.device) + keys - rows, torch.arange(keys, device=q.device)


def _forward(
    *, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: Tensor, causal: bool, window: tuple[int, int],
    bias: Tensor | None, sink: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and P of float64 heads."""
    i, j = positions(q, k)
    distance = i[:, None] - j
    left, right = (len(i) + len(j) if side < 0 else min(side, len(i) + len(j)) for side in window)
    visible = (distance <= left) & (distance >= (0 if causal else -right))
    scores = (scale[:, None, None] if scale.ndim == 1 else scale[..., None]) * (q @ k.mT)
    if log_decay is not None:
        decay, unbroken = _decay(log_decay.double(), i, j)
        scores, visible = scores + decay, visible & unbroken
    if bias is not None and bias.dtype == torch.bool:
        visible = visible & bias
    elif bias is not None:
        visible, scores = visible & ~bias.isneginf(), scores + torch.where(bias.isneginf(), 0.0, bias.double())
    scores = torch.where(visible, scores, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[:, None, None].expand(*scores.shape[:2], 1)], -1)
    largest = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:2], 1)
    largest = torch.where(largest.isneginf(), 0.0, largest)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    sees = total > 0
    total = torch.where(sees, total, 1.0)
    lse = torch.where(sees, largest + total.log(), -torch.inf)[..., 0]
    p = (weights / total)[..., : len(j)]
    return p @ v, lse, p


def _decay(log_decay: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of λ over (min(i, j), max(i, j)], and whether there is no reset in it."""
    if log_decay.ndim == 3:
        (left, kept_left), (right, kept_right) = (_decay(x, i, j) for x in log_decay.unbind(-1))
        before = j <= i[:, None]
        return torch.where(before, left, right), torch.where(before, kept_left, kept_right)
    reset = log_decay < RESET_BELOW
    rate = torch.where(reset, 0.0, log_decay)
    if log_decay.ndim == 1:
        distance = (i[:, None] - j).abs()
        return rate[:, None, None] * distance, ~reset[:, None, None] | (distance == 0)
    reset, rate = reset & (j > 0), torch.where(j > 0, rate, 0.0)  # the first is in no such interval
    after_key, up_to_key = (j[:, None] > j).double(), (j[:, None] <= j).double()  # (t, j)
    up_to_row = (j <= i[:, None]).double()  # (i, t)

    def between(x: Tensor) -> Tensor:  # (N, t) → (N, i, j)
        x = x[:, None]
        return (x * up_to_row) @ after_key + (x * (1 - up_to_row)) @ up_to_key

    return between(rate), between(reset.double()) == 0
