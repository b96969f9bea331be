"""The public function: its contract, then one straight call."""

import torch
from torch import Tensor

from decayattn import autograd, backends, reference
from decayattn.problem import AttentionProblem


def decay_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | float | None = None,
    *,
    scale: Tensor | float | None = None,
    causal: bool = True,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Softmax attention whose scores decay with the distance between query and key.

    Per batch entry and head, with log-decays λ_t (natural logarithm), α_t = λ_0 + … + λ_t and i the position of a query
    on the keys' axis (the queries are the last T_q of the T_k positions: i = row + T_k − T_q)::

        S_ij  = s_i · q_i·k_j + sign(i − j) · (α_i − α_j)     for the keys j that i sees, −inf elsewhere
        out_i = Σ_j softmax_j(S_ij) v_j                       lse_i = log Σ_j exp(S_ij)

    The decay term is the sum of λ over the tokens after the earlier and up to the later of the two positions. With
    λ = log of a forget gate this is the Forgetting Transformer (Lin et al., arXiv 2503.02130); with one constant per
    head it is ALiBi (Press et al., arXiv 2108.12409) or a retention rate (Sun et al., arXiv 2307.08621) under a
    softmax.

    Args:
        q: queries (B, T_q, H, D), D up to 256. float16, bfloat16, float32 or float64; any strides.
        k: keys (B, T_k, H_kv, D), H_kv dividing H: query head h reads key head h // (H / H_kv).
        v: values (B, T_k, H_kv, D_v), D_v up to 256.
        log_decay: λ in natural logarithm, float32 (or float64 with float64 q).
            None: no decay. A number or 0-d tensor: the same constant γ for every head. (H,): a constant γ_h per head,
            S gets |i − j|·γ_h. (B, T_k, H): one λ per token and query head; −inf resets (nothing before that token is
            visible from it on), values above 0 let scores grow. A sequence's first λ is never used.
        scale: s, a number, or a tensor broadcastable to (B, T_q, H): one finite scale of any sign per query row and
            head. Default 1/√D.
        causal: query i sees the keys j ≤ i. Otherwise it sees all, and the decay acts in both directions.
        return_lse: also return lse.
        backend: "auto" takes the fastest that accepts the problem. "reference" is eager PyTorch, differentiable to any
            order; "triton" the Triton kernels; "hopper" the Gluon kernels for sm_90, which are new, and which "auto"
            does not take yet. A name is taken literally or refused with the reason.

    Returns:
        out (B, T_q, H, D_v) in the dtype of q, or (out, lse) with lse (B, H, T_q) in float32 (float64 for float64
        inputs). Both are differentiable with respect to q, k, v, log_decay and scale. A row that sees no key gives out
        0, lse −inf and contributes exactly 0 to every gradient.

    Under autocast q, k and v are cast to its dtype, log_decay and scale are left alone. The kernels have no second
    derivative: a double backward raises.

    Raises:
        TypeError, ValueError: for every bad argument, by name, before any kernel starts.
    """
    q, k, v = _autocast(q, k, v)
    problem = AttentionProblem.check(q, k, v, log_decay, scale, causal)
    chosen = backends.select(problem, backend)
    attention = reference.attention if chosen == "reference" else autograd.attention
    out, lse = attention(problem, q, k, v, _per_head(log_decay, q), _per_row(scale, q), chosen)
    return (out, lse) if return_lse else out


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype where it is on, as scaled_dot_product_attention does; float64 is left alone."""
    first = tensors[0]
    if not isinstance(first, Tensor) or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.dtype in _AUTOCAST_FROM else t for t in tensors)


_AUTOCAST_FROM = (torch.float16, torch.bfloat16, torch.float32)


def _per_head(log_decay: Tensor | float | None, q: Tensor) -> Tensor | None:
    """log_decay as None, (H,) or (B, T_k, H)."""
    if log_decay is None:
        return None
    if not isinstance(log_decay, Tensor):
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return torch.full((q.shape[2],), log_decay, dtype=dtype, device=q.device)
    return log_decay.expand(q.shape[2]) if log_decay.ndim == 0 else log_decay


def _per_row(scale: Tensor | float | None, q: Tensor) -> Tensor | float:
    """scale as a float, or (B, T_q, H) in the accumulator dtype."""
    if scale is None:
        return q.shape[3] ** -0.5
    if not isinstance(scale, Tensor):
        return float(scale)
    return scale.to(torch.float64 if q.dtype == torch.float64 else torch.float32).expand(q.shape[:3])
