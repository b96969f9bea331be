"""Each rank keeps its queries and fetches the keys before its slice that can matter to them: the halo.

The rest are ordinary calls with T_q < T_k. Rows that see nothing of the halo have one of their own, which waits for no
key of another rank; the first rows have another one, with the halo. Where those are more than half, all rows have one.

Which keys matter, and to which rows, is the bound of backends/planning/halo.py, whose sum over everything that is not
fetched stays below a share of the tolerance.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from decayattn.distributed import local
from decayattn.distributed.exchange import Slices, all_to_all, gather, on_device, pack, unpack
from decayattn.distributed.local import Packed
from decayattn.problem import GRANULE, AttentionProblem, Prepared, is_reset

_NEVER = 2**31 - 1


class Sight(NamedTuple):
    """What bounds how far the rows of a slice see, besides decay and resets."""

    left: int  # the window, −1 without
    reach: int | None  # the caller's promise
    cu_seqlens: Tensor | None  # on the axis of all slices


def attention(
    slices: Slices, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None,
    scale: Tensor | float, sight: Sight, packed: Packed | None, runs_kernels: bool, return_lse: bool,
    options: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    """An exchange, and one call or two; problem is the slice on its own, and the eager reference skips nothing."""
    planned = sight.reach is None and can_plan(problem) and runs_kernels
    waits = sight.reach is None and (problem.decay != "none" or packed is not None)
    if waits and q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "mode: 'halo' in a CUDA graph expects a reach, because the host waits for the size of a planned one; or "
            "take 'heads'"
        )
    tolerance = problem.skip_tolerance / (shares(problem) if planned else 1)
    with torch.no_grad():
        found = fetch(slices, problem, q, k, log_decay, scale, sight, tolerance if planned else 0.0)
    of_keys = log_decay if problem.decay == "scalar" else None
    options = options | {"skip_tolerance": tolerance or None}
    length, rows = q.shape[1], found.rows
    if packed is not None or 2 * rows > length:
        k, v, extended = Halo.apply(k, v, of_keys, found, length)
        if packed is not None:
            begins, halo = packed.cu_seqlens_k - slices.begin, found.halo
            packed = Packed(
                begins.clamp(0, length), (begins + halo).clamp(0, k.shape[1]),
                min(packed.longest_query, length), min(packed.longest_key, k.shape[1]),
            )
        return local.attention(
            q, k, v, log_decay if extended is None else extended, scale, packed, return_lse, options
        )
    parts = [rows, length - rows]
    q, far_q = q.split(parts, 1)
    scale, far_scale = scale.split(parts, 1) if isinstance(scale, Tensor) else (scale, scale)
    out = q.new_empty(*q.shape[:1], length, *q.shape[2:3], v.shape[3])
    terms = None
    if found.terms is not None:
        of_blocks, of_granules = found.terms
        terms = of_blocks, of_granules[:, :, rows // GRANULE :]
    # first, so that the GPU has something to do while the host sends keys
    far, far_lse = local.causal_attention(
        far_q, k, v, log_decay, far_scale, return_lse, options, Prepared(_part(out, rows, length), terms)
    )
    # also where there are no such rows: in the backward the other ranks send gradients here
    k, v, extended = Halo.apply(k, v, of_keys, found, rows)
    near, near_lse = local.causal_attention(
        q, k, v, log_decay if extended is None else extended, scale, return_lse, options, Prepared(_part(out, 0, rows))
    )
    out = Joined.apply(near, far, [out])
    if not return_lse:
        return out
    assert near_lse is not None
    assert far_lse is not None
    return out, torch.cat([near_lse, far_lse], 2)


def _part(x: Tensor, begin: int, end: int) -> Tensor:
    """x[:, begin:end] as a tensor of its own for autograd, for which two results cannot be views of one tensor."""
    part = x[:, begin:end]
    return x.new_empty(0).set_(x.untyped_storage(), part.storage_offset(), part.shape, part.stride())


class Joined(torch.autograd.Function):
    """The tensor of which two calls wrote the first rows and the others; what they wrote elsewhere is copied."""

    @staticmethod
    def forward(ctx, near, far, outs):
        (out,) = outs
        ctx.rows = near.shape[1]
        for part, place in ((near, out[:, : ctx.rows]), (far, out[:, ctx.rows :])):
            if part.numel() and part.data_ptr() != place.data_ptr():
                place.copy_(part)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors  # an error if it was changed in place: the calls read theirs
        return grad[:, : ctx.rows], grad[:, ctx.rows :], None


def can_plan(problem: AttentionProblem) -> bool:
    """Whether a decay and a tolerance let keys be left where they are."""
    return problem.skip_tolerance > 0 and problem.decay != "none"


def shares(problem: AttentionProblem) -> int:
    """How many lose some of the tolerance: keys that are not fetched, and those that the call then skips. A constant
    rate cannot hide the zeros that a head has where another one has fetched keys; they take no more than those would.
    """
    return 3 if problem.decay == "constant" else 2


class Fetch(NamedTuple):
    """Who fetches which keys: every rank those of a batch entry and key head from one token on up to its slice."""

    slices: Slices
    first: Tensor  # (ranks, B, H_kv) int64: that token on the axis of all slices, never behind the slice's begin
    rows: int  # of this rank's slice; those from here on see nothing before the slice
    halo: int  # tokens before this rank's slice that any of its heads fetches
    kept: int  # tokens of this rank's slice before the first one that another rank fetches
    send: list[int]  # rows, of one token and key head, to every rank
    receive: list[int]
    terms: tuple[Tensor, Tensor] | None  # skipping.summaries of this rank's slice, if its plan needed them

    @property
    def cut(self) -> Tensor:
        """(B, H_kv): the first key, on the axis of halo and slice."""
        return self.first[self.slices.rank] - (self.slices.begin - self.halo)

    @property
    def sent(self) -> tuple[Tensor, Tensor, Tensor]:
        """Batch entry, token on the axis of the slice, and key head of every row that is sent."""
        begin, end, rank = self.slices.begin, self.slices.end, self.slices.rank
        return _rows(self.first[rank + 1 :].clamp(min=begin) - begin, end - begin, sum(self.send))

    @property
    def received(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same of the rows that are received, on the axis of halo and slice."""
        offsets = on_device(tuple(self.slices.offsets), self.first.device)[: self.slices.rank + 1, None, None]
        start = self.slices.begin - self.halo
        first = torch.maximum(self.first[self.slices.rank], offsets[:-1]) - start
        return _rows(first, offsets[1:] - start, sum(self.receive))


def fetch(
    slices: Slices, problem: AttentionProblem, q: Tensor, k: Tensor, log_decay: Tensor | None, scale: Tensor | float,
    sight: Sight, tolerance: float,
) -> Fetch:
    """What every rank fetches, so that no row loses more than the tolerance; 0 fetches all that a row sees.

    problem is the slice on its own. Without a decay or with a reach, and without packed sequences, nothing is asked of
    other ranks, nor does the host wait for a GPU; else it does, once.
    """
    shape = (slices.ranks, problem.batch, problem.num_kv_heads)
    offsets, length = slices.offsets, problem.query_length
    if sight.reach is not None or (log_decay is None and sight.cu_seqlens is None):
        reach = min(x for x in (sight.reach, sight.left, offsets[-1]) if x is not None and x >= 0)
        begins = [max(0, begin - reach) for begin in offsets[:-1]]
        hosts = [[begin] * (problem.batch * problem.num_kv_heads) for begin in begins]
        sees = length if sight.left < 0 else min(length, sight.left)
        return _fetch(slices, on_device(tuple(begins), q.device)[:, None, None].expand(shape), hosts, sees, None)
    found, terms = first_keys(slices, problem, q, k, log_decay, scale, sight, tolerance)
    everyone = gather(found, slices.ranks, slices.group)
    hosts = everyone.tolist()
    seeing = hosts[slices.rank][-1]
    if terms is not None:
        seeing = min(length, -(-seeing // GRANULE) * GRANULE)  # the other rows are whole granules of the terms
    return _fetch(slices, everyone[:, :-1].reshape(shape), [begins[:-1] for begins in hosts], seeing, terms)


def _fetch(
    slices: Slices, first: Tensor, hosts: list[list[int]], rows: int, terms: tuple[Tensor, Tensor] | None
) -> Fetch:
    """hosts: first, as the host knows it."""
    rank, offsets = slices.rank, slices.offsets

    def number(to: int, of: int) -> int:
        """Rows of one rank that another one fetches."""
        return sum(max(0, offsets[of + 1] - max(begin, offsets[of])) for begin in hosts[to])

    ranks = range(slices.ranks)
    send = [number(to, rank) if to > rank else 0 for to in ranks]
    receive = [number(rank, of) if of < rank else 0 for of in ranks]
    halo = slices.begin - min(hosts[rank], default=slices.begin)
    of_others = [begin for to in ranks[rank + 1 :] for begin in hosts[to]]
    kept = min(slices.end, max(slices.begin, min(of_others, default=slices.end))) - slices.begin
    return Fetch(slices, first, rows, halo, kept, send, receive, terms)


def first_keys(
    slices: Slices, problem: AttentionProblem, q: Tensor, k: Tensor, log_decay: Tensor | None, scale: Tensor | float,
    sight: Sight, tolerance: float,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Flat int64: for every (B, H_kv) the first token that this rank fetches, on the axis of all slices, its own first
    one if none; and a number of rows: those from it on see nothing before their slice. And Fetch's terms."""
    begin, length, left = slices.begin, problem.query_length, sight.left
    # what the window leaves
    lowest, rows = (0, length) if left < 0 else (max(0, begin - left), min(length, left))
    pairs = problem.batch * problem.num_kv_heads
    if tolerance == 0 or log_decay is None:
        return _first_seen(slices, problem, log_decay, sight.cu_seqlens, lowest, rows), None
    from decayattn.backends.planning import halo as planning  # imports Triton

    cu_seqlens = None if sight.cu_seqlens is None else sight.cu_seqlens.contiguous()
    offsets = on_device(tuple(slices.offsets), q.device)
    place = planning.Place(slices.lengths, slices.rank, offsets, lowest, rows, cu_seqlens)
    launch = planning.launch_for(problem, place, q, k, log_decay, scale if isinstance(scale, Tensor) else None)
    summary = planning.summarise(problem, q, k, log_decay, scale, place.blocks, launch)
    everyone = gather(summary.keys, slices.ranks, slices.group)
    if not begin or not pairs:
        return on_device((0,) * (pairs + 1), q.device), summary.terms
    return planning.first_keys(problem, place, everyone, summary, tolerance, launch), summary.terms


def _first_seen(
    slices: Slices, problem: AttentionProblem, log_decay: Tensor | None, cu_seqlens: Tensor | None, lowest: int,
    rows: int,
) -> Tensor:
    """The same of all that rows see."""
    begin, heads = slices.begin, (problem.batch, problem.num_heads)
    pairs = problem.batch * problem.num_kv_heads
    device = problem.device
    if problem.decay == "scalar":
        assert log_decay is not None
        first_reset, last_reset = _resets(log_decay)
        last_resets = gather(last_reset.flatten(), slices.ranks, slices.group).unflatten(1, heads)
    if not begin or not pairs:
        return on_device((0,) * (pairs + 1), device)
    first, seeing = (torch.full(heads, number, device=device) for number in (lowest, rows))
    if cu_seqlens is not None:
        start, end = _sequence_at(cu_seqlens, begin)
        first, seeing = torch.maximum(first, start), torch.minimum(seeing, (end - begin).clamp(min=0))
    if problem.decay == "constant":
        assert log_decay is not None
        seeing = torch.where(is_reset(log_decay), 0, seeing)  # such a rate leaves a row its own key
    elif problem.decay == "scalar":
        seeing = torch.minimum(seeing, first_reset)
        last_resets = last_resets[: slices.rank].long()
        of_ranks = on_device(tuple(slices.offsets[: slices.rank]), device)[:, None, None]
        first = torch.maximum(first, torch.where(last_resets < 0, last_resets, last_resets + of_ranks).amax(0))
    first = torch.where(seeing > 0, first, begin).clamp(max=begin)
    seeing = torch.where(first < begin, seeing, 0)
    return torch.cat([first.unflatten(1, (problem.num_kv_heads, -1)).amin(2).flatten(), seeing.amax()[None]])


def _resets(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H) int64: the first reset of a slice, or more than it has tokens; and the last one, or −1."""
    reset = is_reset(log_decay)
    token = torch.arange(reset.shape[1], device=reset.device, dtype=torch.int32)[:, None]
    first = pad(token.where(reset, token.new_full((), _NEVER)), (0, 0, 0, 1), value=_NEVER).amin(1)
    last = pad(token.where(reset, token.new_full((), -1)), (0, 0, 0, 1), value=-1).amax(1)
    return first.long(), last.long()


def _sequence_at(cu_seqlens: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """Where the sequence of a token begins and ends; the token itself, twice, where it belongs to none."""
    cu = cu_seqlens.long().cummax(0).values
    at = torch.full((), token, device=cu.device)
    n = torch.searchsorted(cu, at, right=True)
    inside = (n > 0) & (n < len(cu))
    return torch.where(inside, cu[(n - 1).clamp(min=0)], at), torch.where(inside, cu[n.clamp(max=len(cu) - 1)], at)


def _rows(begin: Tensor, end: Tensor | int, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Batch entry, token and key head of begin ≤ token < end, for every (rank, entry, head) one after the other; total
    of them, which the host knows."""
    entries, heads = begin.shape[1:]
    if not total:
        nothing = begin.new_empty(0)
        return nothing, nothing, nothing
    number = (end - begin).clamp(min=0).flatten()
    segment = torch.repeat_interleave(torch.arange(len(number), device=begin.device), number, output_size=total)
    before = number.cumsum(0) - number
    token = torch.arange(total, device=begin.device) - before[segment] + begin.flatten()[segment]
    return segment // heads % entries, token, segment % heads


class Halo(torch.autograd.Function):
    """k, v and λ per token of a slice → the same of its first tokens, with the halo before them: one exchange; its
    gradient goes back to the owners by another one.

    Heads that fetch less than others have zeros before their first key, and a reset there: nothing before is visible.
    """

    @staticmethod
    def forward(ctx, k, v, log_decay, fetch, tokens):
        batch, _, kv_heads, _ = k.shape
        halo, received = fetch.halo, fetch.received
        tensors = [k, v] if log_decay is None else [k, v, log_decay.unflatten(2, (kv_heads, -1))]
        ctx.fetch, ctx.asked = fetch, [n for n in range(len(tensors)) if ctx.needs_input_grad[n]]
        sent = fetch.sent
        rows = all_to_all(pack([x[sent] for x in tensors]), fetch.send, fetch.receive, fetch.slices.group)
        result = []
        for own, fetched in zip(tensors, unpack(rows, tensors), strict=True):
            extended = torch.cat([own.new_zeros(batch, halo, *own.shape[2:]), own[:, :tokens]], 1)
            extended[received] = fetched
            result.append(extended)
        if log_decay is None:
            result.append(None)
        else:
            if halo + tokens:
                # a head's first key needs no λ of its own, for no row sees past it; with nothing before it, it is left
                cut = fetch.cut[:, None, :, None].expand(batch, 1, *result[2].shape[2:])
                at = cut.clamp(max=halo + tokens - 1)
                hides = (cut > 0) & (cut == at)
                result[2].scatter_(1, at, torch.where(hides, -torch.inf, result[2].gather(1, at)))
            result[2] = result[2].flatten(2)
        ctx.mark_non_differentiable(*(x for n, x in enumerate(result) if x is not None and n not in ctx.asked))
        return tuple(result)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        fetch, sent, received = ctx.fetch, ctx.fetch.sent, ctx.fetch.received
        own = [grads[n] for n in ctx.asked]
        heads = fetch.first.shape[2]
        own = [x if x.ndim == 4 else x.unflatten(2, (heads, -1)) for x in own]
        rows = pack([x[received] for x in own])
        rows = all_to_all(rows, fetch.receive, fetch.send, fetch.slices.group)
        result = [None, None, None, None, None]
        for n, x, part in zip(ctx.asked, own, unpack(rows, own), strict=True):
            x = x[:, fetch.halo :]
            others = fetch.slices.end - fetch.slices.begin - x.shape[1]  # tokens that were no input of a halo's call
            if others:
                x = pad(x, (0, 0, 0, 0, 0, others))
            result[n] = _added(x, part, sent, fetch)
            if n == 2:
                result[n] = result[n].flatten(2)
        return tuple(result)


def _added(own: Tensor, rows: Tensor, where: tuple[Tensor, ...], fetch: Fetch) -> Tensor:
    """A gradient plus what every rank sends back for some rows, in float32 at least and rank by rank: the same bits
    every time."""
    if not len(rows):
        return own
    total = own[:, fetch.kept :].to(torch.promote_types(own.dtype, torch.float32), copy=True)
    entry, token, head = where
    begin = 0
    for number in fetch.send:
        part = slice(begin, begin + number)
        total[entry[part], token[part] - fetch.kept, head[part]] += rows[part]
        begin += number
    return torch.cat([own[:, : fetch.kept], total.to(own.dtype)], 1)
