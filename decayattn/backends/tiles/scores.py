"""Elementwise formulas of decay attention for one tile of scores, each written once.

Every helper takes operands that are already broadcast against each other (`row[:, None]`, `column[None, :]`). So it
serves the forward and the backward pass, scores S (queries × keys), transposed scores Sᵀ (keys × queries) and any
layout. This file has no loads, products, reductions or schedules. Everything is in base 2, because the GPU's
exponential is 2^x: scores, decays and log-sum-exps are natural values times log2(e).
"""

import triton
import triton.language as tl

from decayattn.problem import RESET_BELOW as _RESET_BELOW

RESET_BELOW: tl.constexpr = tl.constexpr(_RESET_BELOW)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def base2_log_decay(log_decay, PRODUCT: tl.constexpr):
    """λ or γ in base 2; 0 for a reset, which acts through visibility (tiles.decay.side_of_head).

    PRODUCT: the type of the product. float64 for a result that is rounded once; float32 in kernels where float64
    instructions would wait for concurrent matrix products.
    """
    return tl.where(log_decay < RESET_BELOW, 0.0, log_decay.to(PRODUCT) * LOG2E)


@triton.jit
def decay_sign(query_position, key_position):
    """σ = sign(i − j), with which the decay lowers scores on both sides of the diagonal."""
    return (query_position > key_position).to(tl.int32) - (query_position < key_position).to(tl.int32)


@triton.jit
def decayed_score(
    score, query_alpha, key_alpha, base_difference, rate, query_position, key_position,
    DECAY: tl.constexpr, CAUSAL: tl.constexpr, ROW_CANCELS: tl.constexpr,
):
    """A scaled product s q·k plus the decay σ (α_i − α_j), which is |i − j| γ for a constant decay.

    ROW_CANCELS (causal, 16-bit inputs): add only −α_j of the key's block. α_i and the difference of the two bases are
    one value per row and tile, so they cancel in the softmax: the kernel adds them to the anchor that it subtracts.
    """
    if ROW_CANCELS:
        score -= key_alpha
    elif DECAY == "constant":
        score += tl.abs(query_position - key_position).to(score.dtype) * rate
    elif DECAY == "scalar":
        # the two β first: they are small, and the difference of the bases may be large
        difference = ((query_alpha - key_alpha) + base_difference).to(score.dtype)
        if not CAUSAL:
            difference *= decay_sign(query_position, key_position).to(score.dtype)
        score += difference
    return score


@triton.jit
def visible(index, first, end):
    """True if an index is in the interval [first, end) that is visible to the other side."""
    return (index >= first) & (index < end)


@triton.jit
def finite_or_zero(maximum):
    """Replace −inf, the maximum of a row without a visible key, by 0, because (−inf) − (−inf) is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def probability(score, anchor):
    """2^(score − anchor): exact for the log-sum-exp, unnormalised for a running maximum; 0 if masked (−inf)."""
    return tl.exp2(score - anchor)


@triton.jit
def rescale(old_maximum, new_maximum):
    """Factor that moves sums relative to the old maximum to the new one; 0 before the first visible key."""
    return tl.exp2(old_maximum - new_maximum)


@triton.jit
def with_sink(maximum, total, sink, row_alpha):
    """Add the sink to a row's softmax: one more key, with score `sink` and a zero value vector.

    Returns (factor, maximum, total, whole maximum). The row's sum of P V times factor is the output. maximum and
    total, Σ 2^(S − maximum), give the log-sum-exp. The row's scores and its maximum lack row_alpha; the sink and the
    whole maximum include it. If the sink is the largest score, the whole maximum is the sink itself, because
    (sink − α) + α would lose the sink's low bits.
    """
    score = sink - row_alpha
    new_maximum = tl.maximum(maximum, score)
    anchor = finite_or_zero(new_maximum)
    correction = rescale(maximum, anchor)
    # no visible key and a sink of −inf: avoid dividing by 0, as without a sink
    new_total = tl.where(new_maximum == float("-inf"), 1.0, total * correction + tl.exp2(score - anchor))
    whole_maximum = tl.where(maximum < score, sink, new_maximum + row_alpha)
    return correction / new_total, new_maximum, new_total, whole_maximum


@triton.jit
def score_gradient(p, grad_p, delta):
    """dS = P (dP − Δ), the softmax Jacobian with Δ = Σ dO·O − dLSE."""
    return p * (grad_p - delta)
