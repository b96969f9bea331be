"""Decay attention in eager PyTorch: the definition of the semantics, and the oracle for the kernels.

Plain differentiable code on any device. α is always accumulated in float64. The rest is computed in float32 for 16-bit
inputs and in the inputs' own dtype otherwise. A large call is computed in blocks of rows, and the backward recomputes
their scores, so that memory grows with the length and not with its square.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from decayattn import compatibility
from decayattn.compatibility import within
from decayattn.problem import AttentionProblem, Inputs, accumulator_dtype, first_position, is_reset, without_autocast

# Scores of a block of rows over all batch entries and heads: 16 MB in float32. On two cores with 4,096 tokens and 8
# heads, blocks are 1.7 times as fast forward and 1.1 times with the backward, and take 0.2 GB instead of 3.3 GB
SCORES_AT_ONCE = 2**22


class CacheBuffers(NamedTuple):
    """Buffers of a cache; DecayCache documents each. With a block table, keys, values, alpha are (pages, page, …)."""

    keys: Tensor  # (B, max_length, H_kv, D)
    values: Tensor  # (B, max_length, H_kv, D_v)
    lengths: Tensor  # (B,) int32
    first: Tensor | None  # (B, H) int32; None: 0, unless the decay is per token
    log_evicted: Tensor | None  # (B, H) float64; None: nothing is evicted
    alpha: Tensor | None  # (B, max_length, H) float64
    block_table: Tensor | None = None  # (B, blocks) int32: an entry's pages, in the order of its tokens


def attention(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out (B, T_q, H, D_v) and lse (B, H, T_q): softmax of the decayed scores over the visible keys.

    The sink (H,) is the score of one more key in every row, with value 0. A floating bias is added to the scores; a
    boolean one masks keys.
    """
    with without_autocast(problem.device):  # the caller has cast the inputs; here it would round the scores
        if inputs.bounds is not None:
            return _attend_sequences(problem, inputs, inputs.bounds)
        first = first_position(problem)
        i = torch.arange(problem.query_length, device=problem.device) + first
        return _attend(problem, inputs, i[None, None], None, (first, first))


def append(
    cache: CacheBuffers, k: Tensor, v: Tensor, log_decay: Tensor | None, counted: Tensor | None
) -> Tensor | None:
    """Write T new tokens after those of every cache entry, except its lengths. Return the first keys that they see.

    α continues as the running sum of λ, in which a reset and an entry's first token count as 0. A reset becomes the
    first key of its head, with nothing evicted.

    Args:
        cache: the buffers, written in place except for lengths.
        k, v: (B, T, H_kv, D) and (B, T, H_kv, D_v), T ≥ 1.
        log_decay: (B, T, H), if cache has alpha.
        counted: (B,) int32, number of valid tokens of each entry. The others are written as 0, because their own rows
            read them with probability 0. None: all are valid.

    Returns:
        (B, H, T) int32, any strides; None if cache has no `first` and the decay is not per token.
    """
    tokens = k.shape[1]
    token = torch.arange(tokens, device=k.device)
    if counted is not None:
        padding = token >= counted[:, None]
        k, v = (x.masked_fill(padding[..., None, None], 0) for x in (k, v))
        log_decay = None if log_decay is None else log_decay.masked_fill(padding[..., None], 0)
    position = cache.lengths[:, None] + token
    place, fits = _places(cache, position)
    cache.keys[place], cache.values[place] = k[fits], v[fits]
    if log_decay is None or cache.alpha is None:
        return None if cache.first is None else cache.first[..., None].expand(-1, -1, tokens)
    assert cache.first is not None
    resets = is_reset(log_decay)
    unused = resets | (position == 0)[..., None]  # an entry's first token has nothing before it
    steps = torch.where(unused, 0.0, log_decay.double()).cumsum(1)
    newest, before = _places(cache, position[:, :1].sub(1).clamp(min=0))
    last = cache.alpha.new_zeros(len(k), 1, cache.alpha.shape[2])
    last[before] = cache.alpha[newest]
    alpha = torch.where(position[:, :1, None] > 0, last, 0.0) + steps
    cache.alpha[place] = alpha[fits]
    last_reset = torch.where(resets, position[..., None], 0).to(torch.int32).cummax(1).values
    first = torch.maximum(last_reset, cache.first[:, None]).transpose(1, 2)
    cache.first.copy_(first[..., -1])
    if cache.log_evicted is not None:
        cache.log_evicted.masked_fill_(last_reset[:, -1] > 0, -torch.inf)
    return first


def _places(cache: CacheBuffers, position: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Indices into the buffers, and (entry, token), of the tokens with a place; position: their positions (B, T)."""
    entry, token = torch.meshgrid(*(torch.arange(n, device=position.device) for n in position.shape), indexing="ij")
    if cache.block_table is None:
        return (entry.flatten(), position.flatten()), (entry.flatten(), token.flatten())
    page = cache.keys.shape[1]
    fits = position < cache.block_table.shape[1] * page
    entry, token, position = entry[fits], token[fits], position[fits]
    return (cache.block_table[entry, position // page].long(), position % page), (entry, token)


def _entries(pages: Tensor, block_table: Tensor) -> Tensor:
    """Consecutive tokens of every entry, (B, blocks · page, ·, ·)."""
    return pages[block_table.long().clamp(0, len(pages) - 1)].flatten(1, 2)


def decode(
    inputs: Inputs, lengths: Tensor, *, alpha: Tensor | None = None, first: Tensor | None = None,
    left: int | None = None, longest: int | None = None, block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (B, T_q, H, D_v) and lse (B, H, T_q) of the last T_q tokens of every cache entry.

    Args:
        inputs: q of those tokens, the cache's whole buffers as k and v (B, T_max, H_kv, ·), log_decay if it is
            constant, a scale, and a sink.
        lengths: (B,), tokens in use, including the T_q new ones. The rest of the buffers may hold anything.
        alpha: (B, T_max, H) float64, the running sum of a decay per token (resets counted as 0), instead of log_decay.
        first: (B, H, T_q), the first key that a row sees; default 0.
        left: a row at position i sees the keys j ≥ i − left only; None is no limit.
        longest: upper bound on the lengths; default T_max.
        block_table: (B, blocks) int32, if the cache is in pages (CacheBuffers): k, v and alpha are (pages, page, ·, ·).
    """
    if block_table is not None:
        inputs = inputs._replace(k=_entries(inputs.k, block_table), v=_entries(inputs.v, block_table))
        alpha = None if alpha is None else _entries(alpha, block_table)
        lengths = lengths.clamp(max=inputs.k.shape[1])
    q, rows = inputs.q, inputs.q.shape[1]
    longest = inputs.k.shape[1] if longest is None else longest
    j = torch.arange(longest, device=q.device)
    i = (lengths[:, None] - rows + torch.arange(rows, device=q.device))[:, None]
    used = (j < lengths[:, None])[..., None]  # the rest may hold NaN, and 0 · NaN is NaN
    k, v = (torch.where(used[..., None], x[:, :longest], 0.0) for x in (inputs.k, inputs.v))
    window = (-1 if left is None else left, -1)
    problem = AttentionProblem.of(inputs._replace(v=v), True, window)
    k, v = keys_of_heads(problem, k, v)
    inside = None if first is None else j >= first[..., None]
    bias = None
    if alpha is not None:
        alpha = torch.where(used, alpha[:, :longest], 0.0).transpose(1, 2)
        bias = _at_rows(alpha, i)[..., :, None] - alpha[..., None, :]
    with without_autocast(q.device):  # it would round the scores
        out, lse = _attend_rows(problem, inputs._replace(k=k, v=v, bias=bias), i, j, inside)
    # a row without a key has no sink either
    return out, lse.masked_fill(i < (0 if first is None else first), -torch.inf)


def _attend(
    problem: AttentionProblem, inputs: Inputs, i: Tensor, num_keys: Tensor | None, first: tuple[int, int] | None
) -> tuple[Tensor, Tensor]:
    """`attention` of one sequence per batch entry that starts at key 0.

    Args:
        i: (B or 1, 1, T_q), the rows' positions on the keys' axis.
        num_keys: (B, 1), the number of keys; None: T_k.
        first: smallest and largest position of row 0, if the host knows them.
    """
    keys, scale = inputs.k.shape[1], inputs.scale
    k, v = keys_of_heads(problem, inputs.k, inputs.v)

    def attend_rows(i: Tensor, j: Tensor, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        inside = None if num_keys is None else (j < num_keys)[:, None, None]
        return _attend_rows(problem, Inputs._make((*tensors, scale)), i, j, inside)

    if _is_traced(inputs) or inputs.q.shape[:3].numel() * keys <= SCORES_AT_ONCE:
        return attend_rows(i, torch.arange(keys, device=i.device), *inputs._replace(k=k, v=v)[:-1])
    batch, rows, heads, _ = inputs.q.shape
    step, results = max(1, SCORES_AT_ONCE // (batch * heads * keys)), []
    for start in range(0, rows, step):
        some, seen = slice(start, start + step), _visible_keys(problem, first, start, min(start + step, rows), keys)
        block = inputs._replace(
            q=inputs.q[:, some], k=k[:, seen], v=v[:, seen],
            row_scale=None if inputs.row_scale is None else inputs.row_scale[:, some],
            bias=None if inputs.bias is None else block_of_bias(inputs.bias, some, seen),
        )
        j = torch.arange(seen.start, seen.stop, device=i.device)
        results.append(_Recomputed.apply(functools.partial(attend_rows, i[..., some], j), *block[:-1]))
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 2)


def _attend_rows(
    problem: AttentionProblem, inputs: Inputs, i: Tensor, j: Tensor, inside: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`_attend` of the rows at positions i to the keys j. k and v are those keys, repeated per query head."""
    weights, total, lse = row_weights(problem, inputs, i, j, inside)
    out = torch.einsum("bhij,bjhe->bihe", weights, inputs.v) / total.transpose(1, 2)
    return out.to(problem.dtype), lse


def row_weights(
    problem: AttentionProblem, inputs: Inputs, i: Tensor, j: Tensor, inside: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`masked_softmax` of the rows at positions i (B or 1, 1, T_q) and the keys j; k holds those keys per query head.

    inside: True for visible keys, broadcastable to (B, H, T_q, T_k); the problem and the bias may hide others.
    The sum and the logsumexp include the sink; the weights do not.
    """
    dtype, log_decay, bias, sink = accumulator_dtype(problem.dtype), inputs.log_decay, inputs.bias, inputs.sink
    scale = inputs.scale if inputs.row_scale is None else inputs.row_scale[..., None]
    scores = torch.einsum("bihd,bjhd->bhij", inputs.q.to(dtype) * scale, inputs.k)
    if log_decay is not None:
        scores = scores + decay_bias(problem, log_decay, i, j).to(dtype)
    visible = visible_pairs(problem, log_decay, i, j, inside)
    if bias is not None and bias.dtype == torch.bool:
        visible = visible & bias
    elif bias is not None:
        scores = scores + bias.to(dtype)
    if sink is not None:
        # times 1: else the gradient of one row is a view of that of the scores, and gloo adds up views wrongly
        column = rearrange(1 * sink.to(dtype), "h -> 1 h 1 1").expand(*scores.shape[:3], 1)
        scores, visible = torch.cat([scores, column], -1), pad(visible, (0, 1), value=True)
    weights, total, lse = masked_softmax(scores, visible)
    return weights[..., : j.shape[0]], total, lse


def _is_traced(inputs: Inputs) -> bool:
    """True if a tracer, a dispatch mode, a transform of torch.func or a tangent sees the operations."""
    return compatibility.has_observers() or compatibility.has_tangent(x for x in inputs if isinstance(x, Tensor))


class _Recomputed(torch.autograd.Function):
    """Function that the backward recomputes; torch.utils.checkpoint would import torch._dynamo and Triton."""

    @staticmethod
    def forward(ctx, function: Callable[..., tuple[Tensor, ...]], *tensors):
        ctx.function = function
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return function(*tensors)

    @staticmethod
    def backward(ctx, *gradients):
        tensors, asked = ctx.saved_tensors, ctx.needs_input_grad[1:]
        create_graph = torch.is_grad_enabled()  # for a second derivative
        with torch.enable_grad():
            outputs = ctx.function(*tensors)
        pairs = [(x, gradient) for x, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
        if not pairs:
            return None, *(None for _ in asked)
        leaves = [x for x, needed in zip(tensors, asked, strict=True) if needed]
        outputs, given = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, leaves, given, create_graph=create_graph, allow_unused=True))
        return None, *(next(found) if needed else None for needed in asked)


def _visible_keys(problem: AttentionProblem, first: tuple[int, int] | None, start: int, stop: int, keys: int) -> slice:
    """The keys that any of the rows start … stop − 1 may see."""
    if first is None:
        return slice(0, keys)
    left, right = problem.window
    right = 0 if problem.causal else right
    begin = 0 if left < 0 else min(max(first[0] + start - left, 0), keys)
    end = keys if right < 0 else min(max(first[1] + stop + right, begin), keys)
    return slice(begin, end)


def block_of_bias(bias: Tensor, rows: slice, keys: slice) -> Tensor:
    """Block of these rows and keys of a bias that broadcasts to (B, H, T_q, T_k)."""
    bias = bias if bias.ndim < 1 or bias.shape[-1] == 1 else bias[..., keys]
    return bias if bias.ndim < 2 or bias.shape[-2] == 1 else bias[..., rows, :]


def _attend_sequences(problem: AttentionProblem, inputs: Inputs, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Copy every sequence into its own batch entry, attend, and write the results back to its place.

    On a CPU, sequences of similar lengths are computed together, so that the cost depends on their lengths, not on the
    axes or the longest sequence.
    """
    entry = torch.arange(bounds.shape[0], device=problem.device)
    entry = torch.zeros_like(entry) if problem.layout == "packed" else entry
    if bounds.device.type != "cpu" or _is_traced(inputs):
        longest = within(problem.longest_query, problem.query_length), within(problem.longest_key, problem.key_length)
        results = [_attend_cut(problem, inputs, bounds, entry, *longest, None)]
    else:
        sequences, alike = bounds.tolist(), dict[tuple[int, int], list[int]]()
        for n, (_, rows, _, keys) in enumerate(sequences):
            if rows and keys:
                alike.setdefault((rows.bit_length(), keys.bit_length()), []).append(n)
        results = []
        for some in alike.values() or [[]]:  # at least one, so that the results are in the inputs' graph
            rows_of, keys_of = ([sequences[n][column] for n in some] for column in (1, 3))
            first = [keys - rows for rows, keys in zip(rows_of, keys_of, strict=True)]
            limits = max(rows_of, default=0), max(keys_of, default=0), (min(first, default=0), max(first, default=0))
            results.append(_attend_cut(problem, inputs, bounds[some], entry[some], *limits))
    sink, heads = inputs.sink, problem.num_heads
    dtype, everywhere = accumulator_dtype(problem.dtype), (problem.batch, problem.query_length + 1, heads)
    if sink is None:
        nothing_seen = torch.full((heads,), -torch.inf, dtype=dtype, device=problem.device)
    else:  # −inf is no sink: its log-sum-exp has no gradient
        nothing_seen = torch.where(sink.isneginf(), sink.detach(), sink).to(dtype)
    out = inputs.q.new_zeros(*everywhere, problem.value_dim)
    # clone: in torch 2.11 and 2.13, compiled code otherwise writes the rows into one shared (H,)
    lse = nothing_seen.expand(everywhere).clone()
    entries, rows, outs, lses = (torch.cat(x) for x in zip(*results, strict=True))
    out, lse = (torch.index_put(x, (entries, rows), y) for x, y in ((out, outs), (lse, lses)))
    return out[:, :-1], rearrange(lse[:, :-1], "b i h -> b h i")


def _attend_cut(
    problem: AttentionProblem, inputs: Inputs, bounds: Tensor, entry: Tensor, longest_query: int, longest_key: int,
    first: tuple[int, int] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(batch entry, row, out (·, H, D_v), lse (·, H)) of some sequences; rows past the end of one have the row T_q."""
    first_row, num_rows, first_key, num_keys = bounds.long().T[..., None]  # each (sequences, 1)
    row = torch.arange(longest_query, device=problem.device)
    key = torch.arange(longest_key, device=problem.device)
    entry = entry[:, None]

    def cut(x: Tensor, entry: Tensor, first: Tensor, number: Tensor, t: Tensor) -> Tensor:
        own = x[entry, (first + t).clamp(max=x.shape[1] - 1)]
        inside = (t < number).reshape(*own.shape[:2], *(1,) * (x.ndim - 2))
        # outside may be NaN, and 0 · NaN is NaN: replace it before any product
        return torch.where(inside, own, own.new_zeros(()))

    rows_of = functools.partial(cut, entry=entry, first=first_row, number=num_rows, t=row)
    keys_of = functools.partial(cut, entry=entry, first=first_key, number=num_keys, t=key)
    bias = inputs.bias
    if bias is not None:
        bias = bias.expand(problem.batch, problem.num_heads, problem.query_length, problem.key_length)
        bias = rearrange(rows_of(rearrange(bias, "b h i j -> b i h j")), "b i h j -> b j h i")
        own = torch.arange(len(bias), device=problem.device)[:, None]
        bias = rearrange(keys_of(bias, entry=own), "b j h i -> b h i j")
    log_decay = inputs.log_decay
    cut_out = inputs._replace(
        q=rows_of(inputs.q), k=keys_of(inputs.k), v=keys_of(inputs.v), bias=bias,
        log_decay=log_decay if log_decay is None or problem.decay == "constant" else keys_of(log_decay),
        row_scale=None if inputs.row_scale is None else rows_of(inputs.row_scale),
    )
    out, lse = _attend(problem, cut_out, (row + num_keys - num_rows)[:, None], num_keys, first)
    to = torch.where(row < num_rows, first_row + row, problem.query_length)
    return entry.expand_as(to).flatten(), to.flatten(), out.flatten(0, 1), rearrange(lse, "b h i -> (b i) h")


def decay_bias(problem: AttentionProblem, log_decay: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """sign(i − j) (α_i − α_j) in float64, broadcastable to (B, H, T_q, T_k). Resets count as 0 (see visible_pairs)."""
    distance = i[..., :, None] - j
    if log_decay.ndim == 4:  # a gate per direction
        of_left, of_right = (decay_bias(problem, x, i, j) for x in log_decay.unbind(-1))
        return torch.where(distance >= 0, of_left, of_right)
    unused = is_reset(log_decay)
    if problem.decay == "scalar":
        # no pair has the first token between them: its gradient is exactly 0, not a rounding error
        unused[:, :1] = True
    log_decay = torch.where(unused, 0.0, log_decay.double())
    if problem.decay == "constant":
        return rearrange(log_decay, "h -> 1 h 1 1") * distance.abs()
    alpha = rearrange(log_decay, "b t h -> b h t").cumsum(-1)
    difference = _at_rows(alpha, i)[..., :, None] - alpha.index_select(-1, j)[..., None, :]
    # causal: every visible pair has i ≥ j, and leaving out the sign saves a pass over (B, H, T_q, T_k)
    return difference if problem.causal else distance.sign() * difference


def visible_pairs(
    problem: AttentionProblem, log_decay: Tensor | None, i: Tensor, j: Tensor, inside: Tensor | None = None
) -> Tensor:
    """True where query row i sees key j, broadcastable to (B, H, T_q, T_k); inside: that of row_weights."""
    distance = i[..., :, None] - j
    if log_decay is not None and log_decay.ndim == 4:
        of_left, of_right = (visible_pairs(problem, x, i, j, inside) for x in log_decay.unbind(-1))
        return torch.where(distance >= 0, of_left, of_right)
    left, right = problem.window
    visible = distance >= 0 if problem.causal else torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible = visible & (distance <= left)
    if right >= 0:
        visible = visible & (distance >= -right)
    if inside is not None:
        visible = visible & inside
    if log_decay is None:
        return visible
    if problem.decay == "constant":
        visible = visible & ((distance == 0) | ~rearrange(is_reset(log_decay), "h -> 1 h 1 1"))
    else:
        segment = rearrange(is_reset(log_decay), "b t h -> b h t").cumsum(-1)
        same_segment = _at_rows(segment, i)[..., :, None] == segment.index_select(-1, j)[..., None, :]
        visible = visible & (i >= 0)[..., None] & same_segment  # rows before the first key have no λ
    return visible


def masked_softmax(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, their sum (·, 1) and the logsumexp of visible scores; without any 0, 1 and −inf, without gradient."""
    scores = torch.where(visible, scores, -torch.inf)
    # the softmax does not depend on the maximum, so neither does any derivative: it is constant here
    maximum = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    maximum = torch.where(torch.isneginf(maximum), 0.0, maximum)
    weights = torch.exp(scores - maximum)
    total = weights.sum(-1, keepdim=True)
    sees_a_key = total != 0  # not > 0: a NaN stays
    total = torch.where(sees_a_key, total, 1.0)
    lse = torch.where(sees_a_key, maximum + total.log(), -torch.inf)
    return weights, total, lse.squeeze(-1)


def _at_rows(x: Tensor, i: Tensor) -> Tensor:
    """x (B, H, T_k) at the positions of the rows: (B, H, T_q). A row off the keys gets an arbitrary entry of x."""
    if not x.shape[-1]:
        return x.new_zeros(*x.shape[:2], i.shape[-1])
    # not take_along_dim: it compiles to a new graph for every length
    return x.gather(-1, i.clamp(0, x.shape[-1] - 1).expand(*x.shape[:2], -1))


def keys_of_heads(problem: AttentionProblem, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Keys or values (B, T_k, H_kv, ·) in the accumulator dtype, repeated for every query head."""
    group, wide = problem.num_heads // problem.num_kv_heads, [x.to(accumulator_dtype(problem.dtype)) for x in tensors]
    return tuple(x if group == 1 else repeat(x, "b j h d -> b j (h g) d", g=group) for x in wide)
