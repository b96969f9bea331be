"""Decay attention in eager PyTorch: the owner of the semantics, and the oracle that the kernels are held to.

Plain differentiable code on any device, quadratic in memory. α is always accumulated in float64; the rest is computed
in float32 for 16-bit inputs and in the inputs' own dtype otherwise.
"""

import torch
from einops import rearrange, repeat
from torch import Tensor

from decayattn.problem import AttentionProblem


def attention(
    problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: Tensor | float,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (B, T_q, H, D_v) and lse (B, H, T_q): softmax of the decayed scores over the visible keys."""
    dtype = problem.accumulator_dtype
    with torch.autocast(problem.device.type, enabled=False):  # the caller applied it; inside it would round the scores
        scores = scaled_products(problem, q.to(dtype), k.to(dtype), scale)
        if log_decay is not None:
            scores = scores + decay_bias(problem, log_decay).to(dtype)
        weights, lse = masked_softmax(scores, visible_pairs(problem, log_decay))
        out = torch.einsum("bhij,bjhe->bihe", weights, _per_query_head(problem, v.to(dtype)))
    return out.to(problem.dtype), lse


def scaled_products(problem: AttentionProblem, q: Tensor, k: Tensor, scale: Tensor | float) -> Tensor:
    """s_i · q_i·k_j as (B, H, T_q, T_k)."""
    products = torch.einsum("bihd,bjhd->bhij", q, _per_query_head(problem, k))
    return products * (rearrange(scale, "b i h -> b h i 1") if isinstance(scale, Tensor) else scale)


def decay_bias(problem: AttentionProblem, log_decay: Tensor) -> Tensor:
    """sign(i − j) (α_i − α_j) in float64, broadcastable to (B, H, T_q, T_k). Resets count as 0: they are visibility."""
    i, j = _positions(problem)
    log_decay = log_decay.double()
    if problem.decay == "constant":
        return rearrange(log_decay, "h -> 1 h 1 1") * (i[:, None] - j).abs()
    unused = torch.isneginf(log_decay)
    unused[:, :1] = True  # no pair has the first token between them: its gradient is a literal 0, not a rounding error
    finite = torch.where(unused, 0.0, log_decay)
    alpha = rearrange(finite, "b t h -> b h t").cumsum(-1)
    alpha_rows = alpha[..., i.clamp(min=0)] if problem.key_length else alpha.new_zeros(*alpha.shape[:2], len(i))
    difference = alpha_rows[..., :, None] - alpha[..., None, :]
    # causal, every visible pair has i ≥ j, and the sign is worth a pass over (B, H, T_q, T_k)
    return difference if problem.causal else (i[:, None] - j).sign() * difference


def visible_pairs(problem: AttentionProblem, log_decay: Tensor | None) -> Tensor:
    """True where query row i sees key j, broadcastable to (B, H, T_q, T_k)."""
    i, j = _positions(problem)
    visible = (i[:, None] >= j) if problem.causal else torch.ones_like(i[:, None] >= j)
    if problem.decay == "scalar" and problem.key_length:
        segment = rearrange(torch.isneginf(log_decay), "b t h -> b h t").cumsum(-1)
        visible = visible & (segment[..., i.clamp(min=0)][..., :, None] == segment[..., None, :])
    return visible


def masked_softmax(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """(softmax, logsumexp) of the visible scores over the last dimension.

    A row without a visible key gives zeros and −inf, and no gradient whatever arrives at it.
    """
    scores = torch.where(visible, scores, -torch.inf)
    # the softmax does not depend on the maximum, so neither does any derivative: it is a constant here
    maximum = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    maximum = torch.where(torch.isneginf(maximum), 0.0, maximum)
    weights = torch.exp(scores - maximum)
    total = weights.sum(-1, keepdim=True)
    sees_a_key = total > 0
    total = torch.where(sees_a_key, total, 1.0)
    lse = torch.where(sees_a_key, maximum + total.log(), -torch.inf)
    return weights / total, lse.squeeze(-1)


def _positions(problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """i of every query row and j of every key, both on the keys' axis."""
    rows = torch.arange(problem.query_length, device=problem.device)
    return rows + problem.first_position, torch.arange(problem.key_length, device=problem.device)


def _per_query_head(problem: AttentionProblem, x: Tensor) -> Tensor:
    """Keys or values (B, T_k, H_kv, ·) as every query head reads them."""
    group = problem.num_heads // problem.num_kv_heads
    return x if group == 1 else repeat(x, "b j h d -> b j (h g) d", g=group)
