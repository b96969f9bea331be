"""Decay attention and every gradient of it, formula by formula and without autograd."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from decayattn.problem import is_reset

# Scores held at once by the evaluations below, in chunks of rows: 256 MB per float64 matrix
SCORES_AT_ONCE = 2**25

# Smallest probability of a visible key in A, so that A is 0 only where nothing is summed
FAINTEST = 1e-200
# A factor with a long mantissa, between those of attention.DRAWS
ELSEWHERE = 2.0 ** (1 / 32)
# Products of 16-bit factors that a tensor core adds to a sum at once
PRODUCTS_AT_ONCE = 16
# Keys (or rows) that an evaluation adds to a sum at once: kernels go key by key, or tile by tile
TOKENS_AT_ONCE = (1, 32)
# upper bound on the steps of a sum; longer sums add more terms at once
MOST_STEPS = 1024


@torch.no_grad()
def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    scale: Tensor,
    causal: bool,
    grad_out: Tensor,
    grad_lse: Tensor,
    *,
    window: tuple[int, int] = (-1, -1),
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    rounding: torch.dtype | None = None,
    factor: float = 1.0,
    absolute: bool = False,
    prefix_block: int = 0,
) -> dict[str, Tensor]:
    """out, lse and every gradient of N independent heads, formula by formula and without autograd.

    Args:
        q, k, v: (N, T_q, D), (N, T_k, D), (N, T_k, D_v), in the dtype of the computation.
        log_decay: None, (N,) constant, (N, T_k) per token or (N, T_k, 2) with a gate per direction; α is accumulated in
            float64.
        scale: (N,), or (N, T_q) for one per row.
        grad_out, grad_lse: (N, T_q, D_v), (N, T_q).
        window: (left, right), row i sees the keys i − left ≤ j ≤ i + right; −1 is no limit.
        bias: None, or (N, T_q, T_k), added to the scores; boolean: False hides a key.
        sink: None, or (N,) in the dtype of the computation: the score of one more key in every row, with value 0.
        rounding: dtype to which P, dS and out are rounded, as a kernel for inputs of that dtype must; None: none.
        factor: the scores and P are rounded as multiples by this factor, as kernels hold scores as multiples by log2 e.
            Every factor but 1 also has its own order of the products of a score. Above 16 bits it has its own order of
            the keys in P·V and in the sum of P, and of the rows in dv. For 16 bits it has its own `_anchor`,
            `_products_cut_off` and rounding of out in Δ, and half of the factors round P for dS.
        absolute: every term enters with its absolute value, so no sum cancels. P is the true P. A result is 0 only
            where nothing is summed; that of λ only where its gradient is 0 by contract.
        prefix_block: tokens of a block. With absolute, the decay of a score counts as the difference of two prefixes
            that start in the last block. Without, the decay of a score is one number if this is 0; otherwise two, as in
            the tiles: the products get the key's part inside its block.

    Returns:
        out, lse, dq, dk, dv, dscale (N, T_q), dlog_decay (log_decay's shape), dbias (N, T_q, T_k), dsink (N,).
        Gradients are not rounded yet, because heads may share them. With absolute also score_size (N,), the largest |S|
        of a visible pair.
    """
    (heads, rows, _), keys = q.shape, k.shape[1]
    position, j = torch.arange(rows, device=q.device) + keys - rows, torch.arange(keys, device=q.device)
    size = torch.abs if absolute else lambda x: x
    minus = torch.add if absolute else torch.sub
    rounded = (lambda x: x) if rounding is None else lambda x: x.to(rounding).to(q.dtype)

    # rounding P to 16 bits is a larger error than any order of a sum
    in_order = factor != 1.0 and rounding in (None, q.dtype)
    online = factor != 1.0 and not in_order and keys > 0
    by_columns = log_decay is not None and prefix_block > 0 and not absolute and keys > 0
    cut_off = online and _draw(factor) // 16 % 2 == 1  # equally often with each kind of `_anchor`

    row_scale = (scale if scale.ndim == 2 else scale[:, None].expand(heads, rows))[..., None]
    result = {"out": v.new_zeros(heads, rows, v.shape[2]), "lse": q.new_zeros(heads, rows)}
    result |= {name: torch.zeros_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    result["dscale"] = q.new_zeros(heads, rows)
    gates = [] if log_decay is None or log_decay.ndim == 1 else torch.atleast_3d(log_decay).unbind(-1)
    dalpha, touching = q.new_zeros(2, 2, heads, keys, dtype=torch.float64)
    dgamma = q.new_zeros(heads, dtype=torch.float64)
    if bias is not None and bias.dtype != torch.bool:
        result["dbias"] = q.new_zeros(heads, rows, keys)
    if sink is not None:
        result["dsink"] = q.new_zeros(heads)
    if absolute:
        result["score_size"] = q.new_zeros(heads) if sink is None else _size_of_sink(sink)

    step = max(1, SCORES_AT_ONCE // max(1, heads * keys))
    for start in range(0, max(1, rows), step):  # at least once, because there is always a result
        chunk = slice(start, min(start + step, rows))
        i, s, qi = position[chunk], row_scale[:, chunk], q[:, chunk]
        visible = _on_sides(_visible, log_decay, i, j, causal, window)
        decay, added = _on_sides(_decay_term, log_decay, i, j), q.new_zeros(())
        of_blocks = of_rows = torch.zeros((), dtype=torch.float64, device=q.device)
        if log_decay is not None and by_columns:
            decay, of_blocks, of_rows = _decay_by_columns(log_decay, i, j, prefix_block)
        if bias is not None and bias.dtype == torch.bool:
            visible = visible & bias[:, chunk]
        elif bias is not None:
            added = bias[:, chunk]
            visible = visible & ~added.isneginf()
        products = _products_cut_off(qi, k) if cut_off else _products(qi, k, factor)
        scores = _scores(s, products, decay, added, visible, factor, cut_off) + of_blocks
        total = of_keys = scores.logsumexp(-1)
        if sink is not None:
            total = _with_sink(total, sink, factor)
        p = _probabilities(scores, total, visible, absolute).to(q.dtype)
        p_rounded, normaliser = rounded(p * factor), q.new_ones(())
        if in_order:
            weighted = _over_tokens(p_rounded, nn.functional.pad(v, (0, 1), value=1.0), factor) / factor
            # a kernel divides by this sum, which is 1 up to rounding, and its log-sum-exp contains it
            weighted, normaliser = weighted[..., :-1], weighted[..., -1:]
            if sink is not None:
                normaliser = normaliser + _of_sink(sink, total).to(q.dtype)[..., None]
            normaliser = torch.where(normaliser > 0, normaliser, 1.0)  # no visible key
            total = total + normaliser[..., 0].double().log()
        else:
            weighted = p_rounded @ size(v) / factor
        if online and (p_anchor := _anchor(scores, factor, chunk.start, q.dtype)) is not None:
            weighted = _online_softmax(scores, total, p_anchor, v, rounded)

        def in_dtype(x: Tensor) -> Tensor:
            return (x * factor).to(q.dtype).double() / factor

        lse = saved_lse = in_dtype(total)
        if by_columns and causal:
            # the row's part of its own block cancels in P: tiles leave it out, and LSE gets it at the end
            row_lse = in_dtype(of_keys - of_rows)
            lse, saved_lse = in_dtype(row_lse + in_dtype(of_rows)), row_lse + of_rows
            if sink is not None:
                total = _with_sink(lse, sink, factor)
                lse, saved_lse = in_dtype(total), in_dtype(row_lse + total - lse) + of_rows
        result["lse"][:, chunk] = lse
        if absolute:
            s, qi = s.abs(), qi.abs()
            sizes = s * (qi @ k.abs().mT) + _on_sides(_decay_size, log_decay, i, j, prefix_block) + added.abs()
            sizes = torch.where(visible, sizes, 0.0)
            if sizes.numel():
                result["score_size"] = torch.maximum(result["score_size"], sizes.amax((1, 2)))
            # LSE_i = Σ_j P_ij (S_ij − log P_ij), and −log P is nonnegative already
            result["lse"][:, chunk] = (p * sizes - torch.xlogy(p, p)).sum(-1)
            if sink is not None:
                p_sink = _of_sink(sink, lse)
                result["lse"][:, chunk] += p_sink * _size_of_sink(sink)[:, None] - torch.xlogy(p_sink, p_sink)
        out = weighted / normaliser
        result["out"][:, chunk] = rounded(out)

        # the backward computes P from the saved log-sum-exp, which is rounded, and from recomputed scores, which are
        # rounded differently: with huge scores, or one key that has a whole row, no other error matters
        multiple = factor * ELSEWHERE
        scores = _scores(row_scale[:, chunk], products, decay, added, visible, multiple, cut_off) + of_blocks
        p = _probabilities(scores, saved_lse, visible, absolute).to(q.dtype)
        p_rounded = rounded(p * factor)
        do, dlse = size(grad_out[:, chunk]), size(grad_lse[:, chunk])
        # in Δ, factors that round P alike round out differently: else sums over rows would have a single error
        multiple = factor if online and _kind(factor) > 1 else 1.0
        out = rounded(out * multiple) / multiple
        delta = minus((do * out).sum(-1), dlse)
        if sink is not None:  # the sink's value is 0, and so is its dP
            p_sink = _of_sink(sink, lse).to(q.dtype)
            result["dsink"] += size(p_sink * -delta).sum(-1)
        dp = do @ size(v).mT
        # masked before rounding: dLSE may be anything in a row without a visible key
        p_in_ds = p_rounded / factor if online and _draw(factor) // 32 % 2 == 1 else p
        ds = torch.where(visible, p_in_ds * minus(dp, delta[..., None]), 0.0)
        if "dbias" in result:
            result["dbias"][:, chunk] = ds
        result["dv"] += (_over_tokens(p_rounded.mT, do, factor) if in_order else p_rounded.mT @ do) / factor
        if scale.ndim == 2:
            result["dk"] += rounded(s * ds).mT @ qi
        else:
            result["dk"] += size(scale)[:, None, None] * (rounded(ds).mT @ qi)
        ds = rounded(ds)
        ds_k = ds @ size(k)
        result["dq"][:, chunk] = s * ds_k
        result["dscale"][:, chunk] = (qi * ds_k).sum(-1)
        distance = i[:, None] - j
        dgamma += (ds * distance.abs()).sum((1, 2), dtype=torch.float64)
        # σ is 1 on the diagonal, where both sums hold the same dS
        signed = ds if causal else torch.where(distance >= 0, ds, -ds)
        for n in range(len(gates)):
            of_gate = signed if len(gates) == 1 else signed.masked_fill((distance < 0) == (n == 0), 0.0)
            dalpha[n] += _rows_on_keys(of_gate, i, minus=True)
            touching[n] += _rows_on_keys(of_gate.abs(), i) if absolute else 0

    for n, gate in enumerate(gates):
        # With absolute values the sum is over the pairs that t separates. A pair on one side of t enters twice with
        # opposite signs and leaves its rounding error, which is random: these add in quadrature
        residue = _suffix_sums(touching[n].square(), gate).clamp(min=0).sqrt()
        dalpha[n] = _suffix_sums(dalpha[n], gate) + residue
        if absolute:
            dalpha[n].clamp_(min=FAINTEST).masked_fill_(_has_no_gradient(gate), 0.0)
    if log_decay is not None:
        result["dlog_decay"] = dalpha[: len(gates)].movedim(0, -1).reshape(log_decay.shape) if gates else dgamma
    return result


def _draw(factor: float) -> int:
    """Index from 0 to 63 of a factor between 1 and 2."""
    return round(64 * math.log2(factor))


def _kind(factor: float) -> int:
    """Kind of `_anchor` of a factor, from 0 to 3; equally frequent among 16 factors and among 64."""
    return (_draw(factor) + _draw(factor) // 4) % 4


def _products(q: Tensor, k: Tensor, factor: float) -> Tensor:
    """q·k as (N, rows, keys). A factor other than 1 adds the products one by one, in its own two orders.

    The exponential turns the rounding of a large score into a relative error of P, and most of that rounding comes from
    this sum: for D = 165, 8 times that of the multiplication by the scale.

    A kernel rounds equal scores differently: a full tile fuses the scale with the subtraction of the maximum, a partial
    tile rounds the score first. On an H200 that moved P of equal keys by 2e-4 at scores of 5,000. So half of the scores
    are added in the second order.
    """
    if factor == 1.0:
        return q @ k.mT
    random = _generator(factor)
    first, second = (_added_up(q, k.mT, random, 1) for _ in range(2))
    # half of the scores, at different keys in each row and at different rows in each column
    of_row, of_key = (torch.rand(x.shape[1], generator=random, device="cpu").to(x.device) < 0.5 for x in (q, k))
    return torch.where(of_row[:, None] ^ of_key, second, first)


def _products_cut_off(q: Tensor, k: Tensor) -> Tensor:
    """q·k as a tensor core adds it: 16 products at once, and the sum truncated to float32, not rounded.

    See Fasi et al., Numerical behavior of NVIDIA tensor cores, PeerJ Computer Science 7:e330, 2021. All scores are off
    in one direction, so a sum over rows, such as dsink, does not average the error out.
    """
    total = q.new_zeros(q.shape[0], q.shape[1], k.shape[1])
    for some_q, some_k in zip(q.split(PRODUCTS_AT_ONCE, 2), k.split(PRODUCTS_AT_ONCE, 2), strict=True):
        total = _toward_zero(total + some_q.double() @ some_k.double().mT, total.dtype)
    return total


def _toward_zero(x: Tensor, dtype: torch.dtype) -> Tensor:
    nearest = x.to(dtype)
    return torch.where(nearest.abs() > x.abs(), nearest.nextafter(torch.zeros_like(nearest)), nearest)


def _over_tokens(p: Tensor, x: Tensor, factor: float) -> Tensor:
    """p @ x, summed in the factor's order, singly or by tiles: a sum of one sign rounds later terms to fewer bits."""
    random = _generator(factor)
    at_once = TOKENS_AT_ONCE[int(torch.randint(len(TOKENS_AT_ONCE), (), generator=random, device="cpu"))]
    return _added_up(p, x, random, max(at_once, math.ceil(p.shape[2] / MOST_STEPS)))


def _anchor(scores: Tensor, factor: float, start: int, dtype: torch.dtype) -> Tensor | None:
    """Number per row (N, rows) relative to which P is rounded to 16 bits; None: P is normalised first.

    Kind 1: a different number in every row, like a maximum that lags behind. Kinds 2 and 3: the row's maximum, rounded,
    because kernels fuse the scale with the subtraction for the scores only; for large scores this error exceeds a
    16-bit rounding.
    """
    if (kind := _kind(factor)) == 0:
        return None
    anchor = scores.amax(-1)
    if kind == 1:
        random = torch.Generator("cpu").manual_seed(64 * start + _draw(factor))
        drawn = torch.rand(anchor.shape, generator=random, dtype=torch.float64, device="cpu")
        return anchor + math.log(2) * drawn.to(anchor.device)
    multiple = factor * ELSEWHERE
    return (anchor * multiple).to(dtype).double() / multiple


def _online_softmax(scores: Tensor, total: Tensor, anchor: Tensor, v: Tensor, rounded: Callable) -> Tensor:
    """P·V with P rounded relative to a number per row, which is divided out exactly."""
    seen = ~anchor.isneginf()
    anchor = torch.where(seen, anchor, 0.0)
    p = rounded((scores - anchor[..., None]).exp()).to(v.dtype)
    return p @ v * torch.where(seen, (anchor - total).exp(), 0.0).to(v.dtype)[..., None]


def _generator(factor: float) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(round(factor * 2**20))


def _added_up(a: Tensor, b: Tensor, random: torch.Generator, at_once: int) -> Tensor:
    """a (N, rows, terms) @ b (N, terms, columns), at_once terms at a time, in a random order."""
    order = torch.randperm(a.shape[2], generator=random, device="cpu").to(a.device)
    a, b = a.movedim(2, 0)[order], b.movedim(1, 0)[order]
    total = a.new_zeros(*a.shape[1:], b.shape[2])
    for some_a, some_b in zip(a.split(at_once), b.split(at_once), strict=True):
        total.baddbmm_(some_a.movedim(0, 2), some_b.movedim(0, 1))
    return total


def _scores(
    scale: Tensor, products: Tensor, decay: Tensor, bias: Tensor, visible: Tensor, factor: float, cut_off: bool
) -> Tensor:
    """S in float64, rounded as a multiple by the factor to the products' dtype; −inf for invisible pairs."""
    dtype, multiple = products.dtype, scale * factor * products
    # a tensor core also adds the decay
    multiple = _toward_zero(multiple + decay * factor, dtype) if cut_off else multiple + (decay * factor).to(dtype)
    multiple = multiple + (bias * factor).to(dtype)
    return torch.where(visible, multiple.double() / factor, -math.inf)


def _probabilities(scores: Tensor, total: Tensor, visible: Tensor, absolute: bool) -> Tensor:
    """P (N, rows, keys), 0 for invisible pairs; absolute: never 0 elsewhere."""
    p = (scores - total[..., None]).exp()
    return torch.where(visible, p.clamp(min=FAINTEST) if absolute else p, 0.0)  # no visible key: 0, not ∞ − ∞


def _of_sink(sink: Tensor, lse: Tensor) -> Tensor:
    """P of the sink, (N, rows). A sink of −inf has 0, also in a row without a visible key."""
    return torch.where(sink.isneginf()[:, None], 0.0, (sink[:, None] - lse).exp())


def _size_of_sink(sink: Tensor) -> Tensor:
    """|sink|; 0 for a sink of −inf, which is none."""
    return sink.masked_fill(sink.isneginf(), 0.0).abs()


def _with_sink(total: Tensor, sink: Tensor, factor: float) -> Tensor:
    """log(e^total + e^sink), (N, rows), as with the sink as one more column: the sum is rounded to the sink's dtype."""
    column = sink.double()[:, None].expand_as(total)
    largest = torch.maximum(total.double(), column)
    anchor = largest.masked_fill(largest.isneginf(), 0.0)
    of_keys, of_sink = (((x - anchor).exp() * factor).to(sink.dtype) for x in (total.double(), column))
    return anchor + ((of_keys + of_sink).double() / factor).log()


def _rows_on_keys(ds: Tensor, i: Tensor, minus: bool = False) -> Tensor:
    """Row sums of dS (N, rows, keys) at the positions i, plus or minus its column sums, in float64 (N, keys)."""
    columns = ds.sum(1).double()
    on_keys = i >= 0  # the other rows see no key
    return (-columns if minus else columns).index_add_(1, i[on_keys], ds[:, on_keys].sum(-1).double())


def _on_sides(term: Callable[..., Tensor], log_decay: Tensor | None, i: Tensor, j: Tensor, *rest: Any) -> Tensor:
    """term(λ, i, j, …); with a gate per direction, that of each gate on its side of the diagonal."""
    if log_decay is None or log_decay.ndim < 3:
        return term(log_decay, i, j, *rest)
    left, right = (term(gate, i, j, *rest) for gate in log_decay.unbind(-1))
    return torch.where(i[:, None] >= j, left, right)


def _decay_term(log_decay: Tensor | None, i: Tensor, j: Tensor) -> Tensor:
    """The sum of λ over (min(i, j), max(i, j)] in float64."""
    distance = i[:, None] - j
    if log_decay is None:
        return torch.zeros_like(distance, dtype=torch.float64)
    log_decay = _finite(log_decay.double())
    if log_decay.ndim == 1:
        return log_decay[:, None, None] * distance.abs()
    if not len(j):
        return log_decay.new_zeros(distance.shape)
    alpha = log_decay.cumsum(1)
    return distance.sign() * (alpha[:, i.clamp(min=0), None] - alpha[:, None, :])


def _finite(log_decay: Tensor) -> Tensor:
    """λ (N,) or (N, T_k) for sums: a reset counts as 0, and so does the first λ of tokens, which is never used."""
    finite = torch.where(is_reset(log_decay), 0.0, log_decay)
    if finite.ndim == 2:
        finite[:, :1] = 0.0
    return finite


def _decay_by_columns(log_decay: Tensor, i: Tensor, j: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """`_decay_term` as two terms (N, rows, keys), and β_i (N, rows). The first term is −σ β_j, which every key adds to
    its scores. The second is σ (α_i − base_J), shared by a row and a block of keys. base is α before a token's block,
    and β = α − base."""
    if log_decay.ndim == 3:
        left, right = (_decay_by_columns(gate, i, j, block) for gate in log_decay.unbind(-1))
        of_keys, of_blocks = (torch.where(i[:, None] >= j, *sides) for sides in zip(left[:2], right[:2], strict=True))
        return of_keys, of_blocks, left[2]
    rates = _finite(log_decay.double())
    if rates.ndim == 1:
        alpha, rows_alpha = rates[:, None] * j, rates[:, None] * i
        base, rows_base = (rates[:, None] * (x.div(block, rounding_mode="floor") * block) for x in (j, i))
    else:
        alpha, position = rates.cumsum(1), i.clamp(min=0)
        base = (alpha - rates)[:, j // block * block]
        rows_alpha, rows_base = alpha[:, position], base[:, position]
    sign = torch.where(j <= i[:, None], 1.0, -1.0).double()
    beta = alpha - base
    return -sign * beta[:, None], sign * (rows_alpha[..., None] - base[:, None]), rows_alpha - rows_base


def _decay_size(log_decay: Tensor | None, i: Tensor, j: Tensor, prefix_block: int) -> Tensor:
    """`_decay_term` of |λ|, plus the sums of |λ| over the prefix_block tokens up to i and up to j."""
    if log_decay is None or not len(j):
        return _decay_term(log_decay, i, j)
    size = _finite(log_decay.double()).abs()
    if log_decay.ndim == 1:
        # positions count from the first row of a block; with more rows than keys it is before the first key
        inside = (size * min(prefix_block, max(len(i), len(j))))[:, None].expand(-1, len(j))
    else:
        alpha = nn.functional.pad(size.cumsum(1), (prefix_block, 0))
        inside = alpha[:, prefix_block:] - alpha[:, : len(j)]
    return _decay_term(size, i, j) + inside[:, i.clamp(min=0), None] + inside[:, None, :]


def _visible(log_decay: Tensor | None, i: Tensor, j: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
    left, right = (math.inf if side < 0 else side for side in window)
    right = 0 if causal else right
    visible = (j >= i[:, None] - left) & (j <= i[:, None] + right)
    if log_decay is not None and log_decay.ndim == 1:
        visible = visible & ((i[:, None] == j) | ~is_reset(log_decay)[:, None, None])
    elif log_decay is not None and len(j):
        segment = is_reset(log_decay).cumsum(1)
        visible = visible & (segment[:, i.clamp(min=0), None] == segment[:, None, :])
    return visible


def _suffix_sums(dalpha: Tensor, log_decay: Tensor) -> Tensor:
    """dλ_t = Σ_{u ≥ t} dα_u within the segment between two resets; exactly 0 for the first λ of a segment."""
    keys = dalpha.shape[1]
    sums = nn.functional.pad(dalpha, (0, 1)).flip(1).cumsum(1).flip(1)
    resets = torch.where(is_reset(log_decay), torch.arange(keys, device=dalpha.device), keys)
    # the first reset after t, or the end
    ends = nn.functional.pad(resets, (0, 1), value=keys).flip(1).cummin(1).values.flip(1)[:, 1:]
    return torch.where(_has_no_gradient(log_decay), 0.0, sums[:, :-1] - sums.gather(1, ends))


def _has_no_gradient(log_decay: Tensor) -> Tensor:
    """True for a reset, and for the first λ of (N, T_k), which is never used."""
    zero = is_reset(log_decay)
    zero[:, :1] = True
    return zero
