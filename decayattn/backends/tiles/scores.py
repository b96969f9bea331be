"""What one tile of scores means: the elementwise formulas of decay attention, each written once.

Every helper takes operands that are already broadcast against each other (`row[:, None]`, `column[None, :]`), so that
it serves the forward and the backward pass, scores S (queries × keys) and transposed scores Sᵀ (keys × queries), and
any layout. There are no loads, products, reductions or schedules here. Everything is in base 2: scores, decays and
log-sum-exps are natural values times log2(e), because the GPU's exponential is 2^x.
"""

import triton
import triton.language as tl

from decayattn.problem import RESET_BELOW as _RESET_BELOW

RESET_BELOW: tl.constexpr = tl.constexpr(_RESET_BELOW)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def base2_log_decay(log_decay, PRODUCT: tl.constexpr):
    """λ or γ in base 2; 0 where it is a reset: that is visibility (tiles.decay.side_of_head), not arithmetic.

    PRODUCT: float64, to be rounded once; or float32, in kernels whose float64 instructions would wait for the matrix
    products beside them.
    """
    return tl.where(log_decay < RESET_BELOW, 0.0, log_decay.to(PRODUCT) * LOG2E)


@triton.jit
def decay_sign(query_position, key_position):
    """σ = sign(i − j): the decay lowers scores on both sides of the diagonal."""
    return (query_position > key_position).to(tl.int32) - (query_position < key_position).to(tl.int32)


@triton.jit
def decayed_score(
    score, query_alpha, key_alpha, base_difference, rate, query_position, key_position,
    DECAY: tl.constexpr, CAUSAL: tl.constexpr, ROW_CANCELS: tl.constexpr,
):
    """A scaled product s q·k plus the decay σ (α_i − α_j), which is |i − j| γ for a constant decay.

    ROW_CANCELS (causal, 16-bit inputs): only −α_j of the key's block is added; α_i and the difference of the two bases
    are one number per row and tile, so they cancel in the softmax: the kernel moves them into what it subtracts.
    """
    if ROW_CANCELS:
        score -= key_alpha
    elif DECAY == "constant":
        score += tl.abs(query_position - key_position).to(score.dtype) * rate
    elif DECAY == "scalar":
        # through the two-level prefix: the two β first, then the one large scalar
        difference = ((query_alpha - key_alpha) + base_difference).to(score.dtype)
        if not CAUSAL:
            difference *= decay_sign(query_position, key_position).to(score.dtype)
        score += difference
    return score


@triton.jit
def visible(index, first, end):
    """Whether an index lies in the interval [first, end) that the other side sees (visibility is an interval)."""
    return (index >= first) & (index < end)


@triton.jit
def finite_or_zero(maximum):
    """A maximum that may be subtracted: a row that has seen nothing has −inf, and (−inf) − (−inf) is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def probability(score, anchor):
    """Unnormalised against a running maximum, exact against the log-sum-exp; a masked score (−inf) gives 0."""
    return tl.exp2(score - anchor)


@triton.jit
def rescale(old_maximum, new_maximum):
    """Factor that moves sums taken relative to the old maximum to the new one; 0 before anything was seen."""
    return tl.exp2(old_maximum - new_maximum)


@triton.jit
def with_sink(maximum, total, sink, row_alpha):
    """(factor, maximum, total, whole maximum) of a row with one more key, of score sink and value 0: what makes its sum
    of P V the output, and the maximum and Σ 2^(S − maximum) that its log-sum-exp is of.

    Scores of the row, and its maximum, lack row_alpha; the sink and the whole maximum have it. Where the sink is the
    largest, the whole maximum is the sink itself: (sink − α) + α would lose the sink's low bits.
    """
    score = sink - row_alpha
    new_maximum = tl.maximum(maximum, score)
    anchor = finite_or_zero(new_maximum)
    correction = rescale(maximum, anchor)
    # a row that sees no key, and a sink of −inf: nothing to divide by, as without a sink
    new_total = tl.where(new_maximum == float("-inf"), 1.0, total * correction + tl.exp2(score - anchor))
    whole_maximum = tl.where(maximum < score, sink, new_maximum + row_alpha)
    return correction / new_total, new_maximum, new_total, whole_maximum


@triton.jit
def score_gradient(p, grad_p, delta):
    """dS = P (dP − Δ), the softmax Jacobian with Δ = Σ dO·O − dLSE."""
    return p * (grad_p - delta)
