"""Decay attention in eager PyTorch: the owner of the semantics, and the oracle that the kernels are held to.

Plain differentiable code on any device, quadratic in memory. α is always accumulated in float64; the rest is computed
in float32 for 16-bit inputs and in the inputs' own dtype otherwise.
"""

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from decayattn.problem import (
    AttentionProblem,
    Held,
    Inputs,
    accumulator_dtype,
    any_scale,
    first_position,
    is_reset,
    within,
    without_autocast,
)


def attention(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out (B, T_q, H, D_v) and lse (B, H, T_q): softmax of the decayed scores over the visible keys.

    The sink (H,) is the score of one more key, of value 0, in every row. The bias is added to the scores, or, boolean,
    says which keys may be visible.
    """
    with without_autocast(problem.device):  # the caller applied it; inside it would round the scores
        if inputs.bounds is None:
            i = torch.arange(problem.query_length, device=problem.device) + first_position(problem)
            return _attend(problem, inputs, i[None, None], None)
        return _attend_sequences(problem, inputs, inputs.bounds)


def append(held: Held, k: Tensor, v: Tensor, log_decay: Tensor | None, counted: Tensor | None) -> Tensor | None:
    """Write T new tokens behind those of every cache entry, lengths aside; the first keys that they see.

    α goes on as the running sum of λ, in which a reset and an entry's first token count 0, and a reset becomes the
    first key of its head, of which nothing was evicted.

    Args:
        held: the cache, written in place but for lengths.
        k, v: (B, T, H_kv, D) and (B, T, H_kv, D_v), T ≥ 1.
        log_decay: (B, T, H), if held has alpha.
        counted: (B,) int32: of each entry only the first so many tokens count. The others are written as 0, for rows of
            these very tokens read them with probability 0. None: all count.

    Returns:
        (B, H, T) int32, any strides; None where held has no first, and the decay is not one per token.
    """
    tokens = k.shape[1]
    token = torch.arange(tokens, device=k.device)
    if counted is not None:
        padding = token >= counted[:, None]
        k, v = (x.masked_fill(padding[..., None, None], 0) for x in (k, v))
        log_decay = None if log_decay is None else log_decay.masked_fill(padding[..., None], 0)
    position = held.lengths[:, None] + token
    place, fits = _places(held, position)
    held.keys[place], held.values[place] = k[fits], v[fits]
    if log_decay is None or held.alpha is None:
        return None if held.first is None else held.first[..., None].expand(-1, -1, tokens)
    assert held.first is not None
    resets = is_reset(log_decay)
    unused = resets | (position == 0)[..., None]  # nothing lies before an entry's first token
    steps = torch.where(unused, 0.0, log_decay.double()).cumsum(1)
    newest, before = _places(held, position[:, :1].sub(1).clamp(min=0))
    last = held.alpha.new_zeros(len(k), 1, held.alpha.shape[2])
    last[before] = held.alpha[newest]
    alpha = torch.where(position[:, :1, None] > 0, last, 0.0) + steps
    held.alpha[place] = alpha[fits]
    last_reset = torch.where(resets, position[..., None], 0).to(torch.int32).cummax(1).values
    first = torch.maximum(last_reset, held.first[:, None]).transpose(1, 2)
    held.first.copy_(first[..., -1])
    if held.log_evicted is not None:
        held.log_evicted.masked_fill_(last_reset[:, -1] > 0, -torch.inf)
    return first


def _places(held: Held, position: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Where tokens at these positions (B, T) are in keys, values and alpha, and their (entry, token): of those that
    have a place, one behind the other."""
    entry, token = torch.meshgrid(*(torch.arange(n, device=position.device) for n in position.shape), indexing="ij")
    if held.block_table is None:
        return (entry.flatten(), position.flatten()), (entry.flatten(), token.flatten())
    page = held.keys.shape[1]
    fits = position < held.block_table.shape[1] * page
    entry, token, position = entry[fits], token[fits], position[fits]
    return (held.block_table[entry, position // page].long(), position % page), (entry, token)


def _entries(pages: Tensor, block_table: Tensor) -> Tensor:
    """The tokens of every entry behind one another, (B, blocks · page, ·, ·)."""
    return pages[block_table.long().clamp(0, len(pages) - 1)].flatten(1, 2)


def evict(held: Held, alpha: Tensor, log_tolerance: float, score_bound: Tensor) -> Tensor:
    """Hide the oldest tokens of every head from all later rows, as many as a bound on what they lose allows.

    With |s q·k| ≤ S, a row i that sees itself loses at most exp(2 S + α_i) Σ_evicted exp(−α_j) of its probability.

    Args:
        held: the cache, whose first and log_evicted (log Σ_evicted exp(−α_j)) are written in place.
        alpha: (B or 1, T, H) float64, of the T tokens that the longest entry holds.
        log_tolerance: the most that the log of the bound may be.
        score_bound: (H,), S.

    Returns:
        (B, H) float64, the log of the bound for the newest row of every entry.
    """
    assert held.first is not None
    assert held.log_evicted is not None
    j = torch.arange(alpha.shape[1], device=alpha.device)[:, None]
    lengths = held.lengths[:, None]
    alpha = alpha.expand(len(lengths), -1, -1)
    entry = torch.arange(len(lengths), device=alpha.device)
    newest = torch.where(lengths > 0, alpha[entry, (held.lengths - 1).clamp(min=0)], 0.0)
    seen = (j >= held.first[:, None]) & (j < lengths[..., None])
    weights = torch.where(seen, newest[:, None] - alpha, -torch.inf).logcumsumexp(1)
    # log of the bound when all tokens up to j went; it never falls with j
    lost = torch.logaddexp((held.log_evicted + newest)[:, None], weights) + 2 * score_bound
    last = torch.minimum((lost <= log_tolerance).sum(1), lengths - 1)  # the newest token stays
    first = torch.maximum(held.first, last.to(torch.int32))
    after = lost.gather(1, (first.long() - 1).clamp(min=0)[:, None])[:, 0]
    bound = torch.where(first > held.first, after, held.log_evicted + newest + 2 * score_bound)
    held.log_evicted.copy_(bound - 2 * score_bound - newest)
    held.first.copy_(first)
    return bound


def decode(
    inputs: Inputs,
    lengths: Tensor,
    *,
    alpha: Tensor | None = None,
    first: Tensor | None = None,
    left: int | None = None,
    longest: int | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (B, T_q, H, D_v) and lse (B, H, T_q) of the last T_q tokens of every cache entry.

    Args:
        inputs: q of those tokens, the whole buffers of the cache as k and v, (B, T_max, H_kv, ·), log_decay where it is
            constant, a scale, and a sink.
        lengths: (B,), tokens in use, the T_q new ones among them. Beyond them may lie anything.
        alpha: (B, T_max, H) float64, the running sum of a decay per token (resets counted as 0), instead of log_decay.
        first: (B, H, T_q), the first key that a row sees; default 0.
        left: a row at position i sees the keys j ≥ i − left only; None is no limit.
        longest: no length is larger; default T_max.
        block_table: (B, blocks) int32, if the cache is in pages (Held): k, v and alpha are (pages, page, ·, ·).
    """
    if block_table is not None:
        inputs = inputs._replace(k=_entries(inputs.k, block_table), v=_entries(inputs.v, block_table))
        alpha = None if alpha is None else _entries(alpha, block_table)
        lengths = lengths.clamp(max=inputs.k.shape[1])
    q, log_decay, rows = inputs.q, inputs.log_decay, inputs.q.shape[1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    longest = inputs.k.shape[1] if longest is None else longest
    j = torch.arange(longest, device=q.device)
    i = lengths[:, None] - rows + torch.arange(rows, device=q.device)
    used = (j < lengths[:, None])[..., None]  # beyond it may lie NaN, and 0 · NaN is NaN
    k, v = (torch.where(used[..., None], x[:, :longest], 0.0).to(dtype) for x in (inputs.k, inputs.v))
    k, v = (_repeat_heads(x, q.shape[2] // x.shape[2]) for x in (k, v))
    distance = i[:, None, :, None] - j
    visible = distance >= 0
    if first is not None:
        visible = visible & (j >= first[..., None])
    if log_decay is not None:  # a rate that resets leaves a row its own token
        alone = is_reset(log_decay)
        visible = visible & ((distance == 0) | ~alone[:, None, None])
        log_decay = log_decay.masked_fill(alone, 0)
    if left is not None:
        visible = visible & (distance <= left)
    with without_autocast(q.device):  # it would round the scores
        scores = scaled_products(q.to(dtype), k, any_scale(inputs))
        if alpha is not None:
            alpha = torch.where(used, alpha[:, :longest], 0.0).transpose(1, 2)
            scores = scores + (_at_rows(alpha, i[:, None])[..., :, None] - alpha[..., None, :]).to(dtype)
        elif log_decay is not None:
            scores = scores + (log_decay.double()[:, None, None] * distance).to(dtype)
        weights, lse = masked_softmax(scores, visible)
        out = torch.einsum("bhij,bjhe->bihe", weights, v)
    if inputs.sink is not None:
        sink = inputs.sink.to(dtype)[:, None]
        # a row without a key has 0, also where the sink is −inf as well
        share = torch.where(lse.isneginf(), 0.0, torch.sigmoid(lse - sink))
        out = out * share.transpose(1, 2)[..., None]
        lse = torch.where(lse.isneginf(), lse, torch.logaddexp(lse, sink))
    return out.to(q.dtype), lse


def _attend(
    problem: AttentionProblem, inputs: Inputs, i: Tensor, num_keys: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`attention` of one sequence per batch entry, which begins at key 0.

    i (B or 1, 1, T_q) are the rows' positions on the keys' axis, num_keys (B, 1) how many keys there are; None: T_k.
    """
    dtype, log_decay, bias, sink = accumulator_dtype(problem), inputs.log_decay, inputs.bias, inputs.sink
    k, v = (_repeat_heads(x.to(dtype), problem.num_heads // problem.num_kv_heads) for x in (inputs.k, inputs.v))
    j = torch.arange(k.shape[1], device=problem.device)
    scores = scaled_products(inputs.q.to(dtype), k, any_scale(inputs))
    if log_decay is not None:
        scores = scores + decay_bias(problem, log_decay, i, j).to(dtype)
    visible = visible_pairs(problem, log_decay, i, j, num_keys)
    if bias is not None and bias.dtype == torch.bool:
        visible = visible & bias
    elif bias is not None:
        scores = scores + bias.to(dtype)
    if sink is not None:
        column = rearrange(sink.to(dtype), "h -> 1 h 1 1").expand(*scores.shape[:3], 1)
        scores, visible = torch.cat([scores, column], -1), pad(visible, (0, 1), value=True)
    weights, lse = masked_softmax(scores, visible)
    out = torch.einsum("bhij,bjhe->bihe", weights[..., : k.shape[1]], v)
    return out.to(problem.dtype), lse


def _attend_sequences(problem: AttentionProblem, inputs: Inputs, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Every sequence is cut out into a batch entry of its own, and its results are put back to where it lies."""
    first_row, num_rows, first_key, num_keys = bounds.long().T[..., None]  # each (sequences, 1)
    row = torch.arange(within(problem.longest_query, problem.query_length), device=problem.device)
    key = torch.arange(within(problem.longest_key, problem.key_length), device=problem.device)
    entry = torch.arange(bounds.shape[0], device=problem.device)[:, None]
    entry = torch.zeros_like(entry) if problem.layout == "packed" else entry

    def cut(x: Tensor, first: Tensor, number: Tensor, t: Tensor) -> Tensor:
        own = x[entry, (first + t).clamp(max=x.shape[1] - 1)]
        inside = (t < number).reshape(*own.shape[:2], *(1,) * (x.ndim - 2))
        # what lies outside may be NaN, and 0 · NaN is NaN: it enters no product
        return torch.where(inside, own, own.new_zeros(()))

    def rows_of(x: Tensor) -> Tensor:
        return cut(x, first_row, num_rows, row)

    def keys_of(x: Tensor) -> Tensor:
        return cut(x, first_key, num_keys, key)

    bias, sink = inputs.bias, inputs.sink
    if bias is not None:
        bias = bias.expand(problem.batch, problem.num_heads, problem.query_length, problem.key_length)
        bias = rearrange(rows_of(rearrange(bias, "b h i j -> b i h j")), "b i h j -> b j h i")
        bias = rearrange(keys_of(bias), "b j h i -> b h i j")
    log_decay = inputs.log_decay
    cut_out = inputs._replace(
        q=rows_of(inputs.q),
        k=keys_of(inputs.k),
        v=keys_of(inputs.v),
        log_decay=log_decay if log_decay is None or problem.decay == "constant" else keys_of(log_decay),
        row_scale=None if inputs.row_scale is None else rows_of(inputs.row_scale),
        bias=bias,
    )
    out, lse = _attend(problem, cut_out, (row + num_keys - num_rows)[:, None], num_keys)
    # rows past the end of a sequence are put behind the last row, which is cut off again
    to = entry, torch.where(row < num_rows, first_row + row, problem.query_length)
    everywhere = (problem.batch, problem.query_length + 1, problem.num_heads)
    if sink is None:
        nothing_seen = lse.new_full((problem.num_heads,), -torch.inf)
    else:  # −inf is none, whose log-sum-exp has no gradient
        nothing_seen = torch.where(sink.isneginf(), sink.detach(), sink).to(lse.dtype)
    out = torch.index_put(out.new_zeros(*everywhere, problem.value_dim), to, out)
    # a copy: in torch 2.11 and 2.13, compiled code puts rows into one (H,) of all otherwise
    lse = torch.index_put(nothing_seen.expand(everywhere).clone(), to, rearrange(lse, "b h i -> b i h"))
    return out[:, :-1], rearrange(lse[:, :-1], "b i h -> b h i")


def scaled_products(q: Tensor, k: Tensor, scale: Tensor | float) -> Tensor:
    """s_i · q_i·k_j as (B, H, T_q, T_k)."""
    products = torch.einsum("bihd,bjhd->bhij", q, k)
    return products * (rearrange(scale, "b i h -> b h i 1") if isinstance(scale, Tensor) else scale)


def decay_bias(problem: AttentionProblem, log_decay: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """sign(i − j) (α_i − α_j) in float64, broadcastable to (B, H, T_q, T_k). Resets count as 0: they are visibility."""
    distance = i[..., :, None] - j
    unused = is_reset(log_decay)
    if problem.decay == "scalar":
        # no pair has the first token between them: its gradient is a literal 0, not a rounding error
        unused[:, :1] = True
    log_decay = torch.where(unused, 0.0, log_decay.double())
    if problem.decay == "constant":
        return rearrange(log_decay, "h -> 1 h 1 1") * distance.abs()
    alpha = rearrange(log_decay, "b t h -> b h t").cumsum(-1)
    difference = _at_rows(alpha, i)[..., :, None] - alpha[..., None, :]
    # causal, every visible pair has i ≥ j, and the sign is worth a pass over (B, H, T_q, T_k)
    return difference if problem.causal else distance.sign() * difference


def visible_pairs(
    problem: AttentionProblem, log_decay: Tensor | None, i: Tensor, j: Tensor, num_keys: Tensor | None
) -> Tensor:
    """True where query row i sees key j, broadcastable to (B, H, T_q, T_k)."""
    distance = i[..., :, None] - j
    left, right = problem.window
    visible = distance >= 0 if problem.causal else torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible = visible & (distance <= left)
    if right >= 0:
        visible = visible & (distance >= -right)
    if num_keys is not None:
        visible = visible & (j < num_keys)[:, None, None]
    if log_decay is None:
        return visible
    if problem.decay == "constant":
        visible = visible & ((distance == 0) | ~rearrange(is_reset(log_decay), "h -> 1 h 1 1"))
    else:
        segment = rearrange(is_reset(log_decay), "b t h -> b h t").cumsum(-1)
        same_segment = _at_rows(segment, i)[..., :, None] == segment[..., None, :]
        visible = visible & (i >= 0)[..., None] & same_segment  # before the first key there is no λ
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


def _at_rows(x: Tensor, i: Tensor) -> Tensor:
    """x (B, H, T_k) at the positions of the rows: (B, H, T_q), with some entry of x for a row that stands on no key."""
    if not x.shape[-1]:
        return x.new_zeros(*x.shape[:2], i.shape[-1])
    # not take_along_dim, which compiles to a graph of its own for every length
    return x.gather(-1, i.clamp(0, x.shape[-1] - 1).expand(*x.shape[:2], -1))


def _repeat_heads(x: Tensor, group: int) -> Tensor:
    """Keys or values (B, T_k, H_kv, ·) as every query head reads them."""
    return x if group == 1 else repeat(x, "b j h d -> b j (h g) d", g=group)
