"""Attention probabilities of chosen rows, and the decay alone, for plots and analysis."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decayattn import dtensor, normalize, reference
from decayattn.compatibility import refuse_unless
from decayattn.problem import first_position, without_autocast
from decayattn.validation import check_count, check_counts, check_tensor


def attention_rows(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | float | None,
    rows: Tensor | Sequence[int],
    *,
    scale: Tensor | float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
) -> Tensor:
    """Attention probabilities P of chosen query rows, as decay_attention forms them.

    Computed in eager PyTorch on any device, in float32, or in float64 for float64 q. Memory grows with the number of
    rows, not with T_q. Differentiable, and not affected by autocast.

    Args:
        q, k, log_decay, scale, causal, window_size, bias, sink, seqused_q, seqused_k, leftpad_q, leftpad_k: as in
            decay_attention.
        rows: query rows, a sequence of ints or an integer tensor (R,). A negative row counts from the end.

    Returns:
        (B, H, R, T_k). A row sums to 1; with a sink, to 1 minus the probability of the sink; and to 0 if it sees no
        key.

    Raises:
        TypeError, ValueError: for every bad argument, by name. On a GPU, an index in `rows` out of range fails a device
            assertion.
    """
    tensors: dict[str, Any] = dict(
        q=q, k=k, log_decay=log_decay, scale=scale, bias=bias, sink=sink, seqused_q=seqused_q, seqused_k=seqused_k,
        leftpad_q=leftpad_q, leftpad_k=leftpad_k,
    )
    dtensor.refuse(**tensors)
    problem, inputs = normalize.dense(**tensors, v=k, causal=causal, window_size=window_size)
    _, _, _, log_decay, row_scale, bounds, bias, _, _ = inputs
    rows = _checked_rows(rows, q.shape[1], q.device)
    i, token = (rows + first_position(problem))[None], torch.arange(k.shape[1], device=q.device)
    q = q.index_select(1, rows)
    row_scale = None if row_scale is None else row_scale.index_select(1, rows)
    if bias is not None and bias.ndim > 1 and bias.shape[-2] > 1:
        bias = bias.index_select(-2, rows)
    is_seen = None
    if bounds is not None:
        first_row, num_rows, first_key, num_keys = bounds.long().T[..., None]
        i = rows - first_row + first_key + num_keys - num_rows
        is_row = (rows >= first_row) & (rows < first_row + num_rows)
        is_key = (token >= first_key) & (token < first_key + num_keys)
        # padding may hold NaN; so may a sequence's first λ, which is never used
        q, k = (torch.where(inside[..., None, None], x, 0.0) for inside, x in ((is_row, q), (is_key, k)))
        row_scale = None if row_scale is None else torch.where(is_row[..., None], row_scale, 1.0)
        if log_decay is not None and problem.decay == "scalar":
            used = (is_key & (token > first_key)).view(*is_key.shape, *(1,) * (log_decay.ndim - 2))
            log_decay = torch.where(used, log_decay, 0.0)
            is_row = is_row & (i >= first_key)  # before the first key there is no λ
        is_seen = (is_row[..., None] & is_key[:, None])[:, None]
    (k,) = reference.keys_of_heads(problem, k)
    inputs = inputs._replace(q=q, k=k, log_decay=log_decay, row_scale=row_scale, bias=bias)
    with without_autocast(q.device):
        weights, total, _ = reference.row_weights(problem, inputs, i[:, None], token, is_seen)
    return weights / total


def decay_matrix(
    log_decay: Tensor, rows: Tensor | Sequence[int] | None = None, *, length: int | None = None, causal: bool = True
) -> Tensor:
    """Factor exp(Σ λ) by which the decay alone multiplies each key's weight, for chosen rows.

    Row i and key j have exp(λ_{j+1} + … + λ_i), or exp(γ |i − j|) for a constant decay; 0 before a reset and, if
    causal, after the row. This is the matrix D of RetNet (Sun et al., arXiv 2307.08621) and of the Forgetting
    Transformer (Lin et al., arXiv 2503.02130).

    Args:
        log_decay: natural logarithm, (B, T, H) per token or (H,) per head, float32 or float64; not causal, also (B, T,
            H, 2), a gate per direction.
        rows: positions of the rows, as in attention_rows; None: all.
        length: number of keys of a constant decay; None for a decay per token, which has T.
        causal: hide the keys after a row. Otherwise the decay acts in both directions.

    Returns:
        (B, H, R, T), or (H, R, length) for a constant decay, in the dtype of log_decay.

    Raises:
        TypeError, ValueError: for every bad argument, by name.
    """
    check_tensor("log_decay", log_decay)
    if log_decay.ndim not in (1, 3, 4):
        raise ValueError(f"log_decay: expected (B, T, H), (B, T, H, 2) or (H,), got {tuple(log_decay.shape)}")
    constant = log_decay.ndim == 1
    if constant != (length is not None):
        raise ValueError("length: expected the number of keys of a constant log_decay (H,), and None for (B, T, H)")
    shape = log_decay.shape if length is None else (1, check_count("length", length), len(log_decay))
    zeros, tokens = torch.zeros(*shape[:3], 1, dtype=log_decay.dtype, device=log_decay.device), shape[1]
    problem, _ = normalize.dense(zeros, zeros, zeros, log_decay, None, causal)
    rows = _checked_rows(range(tokens) if rows is None else rows, tokens, log_decay.device)
    j = torch.arange(tokens, device=log_decay.device)
    factors = reference.decay_bias(problem, log_decay, rows[None, None], j).exp()
    visible = reference.visible_pairs(problem, log_decay, rows[None, None], j)
    factors = torch.where(visible, factors, 0.0).to(log_decay.dtype)
    return factors.squeeze(0) if constant else factors


def _checked_rows(rows: Tensor | Sequence[int], length: int, device: torch.device) -> Tensor:
    """rows as an int64 tensor (R,) with values from 0 to length − 1."""
    if not isinstance(rows, Tensor):
        try:
            rows = torch.tensor([operator.index(row) for row in rows], dtype=torch.int64, device=device)
        except TypeError:
            raise TypeError(f"rows: expected a sequence of ints or an integer tensor (R,), got {rows!r}") from None
    check_counts("rows", rows, device, "(R,)", (rows.numel(),))
    in_range = (rows >= -length) & (rows < length)
    refuse_unless(in_range.all(), f"rows: expected numbers from {-length} to {length - 1}, got others")
    return torch.where(rows < 0, rows + length, rows).long()
