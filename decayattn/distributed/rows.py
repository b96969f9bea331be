"""Rows of a halo's exchange in eager PyTorch, for any device; backends/planning/halo_rows.py has the kernels.

k, v and λ per token have the shapes (B, T, H_kv, D), (B, T, H_kv, D_v) and (B, T, H), and so do their gradients; None
for an absent one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decayattn.distributed.exchange import pack, unpack
from decayattn.distributed.fetching import Fetch

Parts = Sequence[Tensor | None]  # see moving.py


def pack_sent(fetch: Fetch, parts: Parts) -> Tensor:
    """Rows of this rank's slice that other ranks fetch, (rows, ·)."""
    where = _sent(fetch)
    return pack([x[where] for x in _by_kv_head(fetch, parts)])


def pack_returned(fetch: Fetch, grads: Parts) -> Tensor:
    """Gradients (rows, ·) of the rows that this rank has fetched, on the axis of halo and slice."""
    where = _received(fetch)
    return pack([x[where] for x in _by_kv_head(fetch, grads)])


def extend(fetch: Fetch, rows: Tensor, parts: Parts, tokens: int) -> list[Tensor | None]:
    """Halo and first tokens of the slice, for each part.

    Rows that a head has not fetched are 0. The λ of a head's first key is −inf unless nothing is before it: no row sees
    past it.
    """
    halo, received = fetch.halo, _received(fetch)
    tensors = _by_kv_head(fetch, parts)
    result = []
    for own, fetched in zip(tensors, unpack(rows, tensors), strict=True):
        extended = torch.cat([own.new_zeros(own.shape[0], halo, *own.shape[2:]), own[:, :tokens]], 1)
        extended[received] = fetched
        result.append(extended)
    if parts[2] is not None:
        if halo + tokens:
            # a head's first key needs no λ of its own; with nothing before it, λ stays
            cut = fetch.cut[:, None, :, None].expand(result[2].shape[0], 1, *result[2].shape[2:])
            at = cut.clamp(max=halo + tokens - 1)
            hides = (cut > 0) & (cut == at)
            result[2].scatter_(1, at, torch.where(hides, -torch.inf, result[2].gather(1, at)))
        result[2] = result[2].flatten(2)
    return _in_place(parts, result)


def add_returned(fetch: Fetch, rows: Tensor, totals: Parts, grads: Parts, tokens: int) -> list[Tensor | None]:
    """Sum of the slice's gradients, those of its first tokens on the axis of halo and slice, and every rank's rows. In
    float32 at least and rank by rank, so the bits repeat."""
    where, own = _sent(fetch), _by_kv_head(fetch, totals)
    others = [x[:, fetch.halo : fetch.halo + tokens] for x in _by_kv_head(fetch, grads)]
    result = [
        _added(x, of_first, part, where, fetch)
        for x, of_first, part in zip(own, others, unpack(rows, own), strict=True)
    ]
    if totals[2] is not None:
        result[-1] = result[-1].flatten(2)
    return _in_place(totals, result)


def _by_kv_head(fetch: Fetch, parts: Parts) -> list[Tensor]:
    """The parts that are not None, as (B, T, H_kv, ·)."""
    return [x if x.ndim == 4 else x.unflatten(2, (fetch.kv_heads, -1)) for x in parts if x is not None]


def _in_place(parts: Parts, found: Sequence[Tensor]) -> list[Tensor | None]:
    """The results at the places of the parts that are not None."""
    left = iter(found)
    return [None if x is None else next(left) for x in parts]


def _sent(fetch: Fetch) -> tuple[Tensor, Tensor, Tensor]:
    """Batch entry, token on the axis of the slice, and key head of every sent row."""
    begin, end, rank = fetch.slices.begin, fetch.slices.end, fetch.slices.rank
    return _rows(fetch.first[rank + 1 :].clamp(min=begin) - begin, end - begin, sum(fetch.send))


def _received(fetch: Fetch) -> tuple[Tensor, Tensor, Tensor]:
    """Batch entry, token on the axis of halo and slice, and key head of every received row."""
    rank, start = fetch.slices.rank, fetch.slices.begin - fetch.halo
    offsets = fetch.offsets[: rank + 1, None, None]
    first = torch.maximum(fetch.first[rank], offsets[:-1]) - start
    return _rows(first, offsets[1:] - start, sum(fetch.receive))


def _rows(begin: Tensor, end: Tensor | int, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Batch entry, token and key head of begin ≤ token < end, for each (rank, entry, head) in order. total is their
    number, as the host knows it."""
    entries, heads = begin.shape[1:]
    if not total:
        nothing = begin.new_empty(0)
        return nothing, nothing, nothing
    number = (end - begin).clamp(min=0).flatten()
    segment = torch.repeat_interleave(torch.arange(len(number), device=begin.device), number, output_size=total)
    before = number.cumsum(0) - number
    token = torch.arange(total, device=begin.device) - before[segment] + begin.flatten()[segment]
    return segment // heads % entries, token, segment % heads


def _added(own: Tensor, of_first: Tensor, rows: Tensor, where: tuple[Tensor, ...], fetch: Fetch) -> Tensor:
    """Sum of a gradient, one of its first tokens, and the rows that every rank sends back."""
    if not len(rows) and not of_first.shape[1]:
        return own
    total = own.to(torch.promote_types(own.dtype, torch.float32), copy=True)
    total[:, : of_first.shape[1]] += of_first
    entry, token, head = where
    begin = 0
    for number in fetch.send:
        part = slice(begin, begin + number)
        total[entry[part], token[part], head[part]] += rows[part]
        begin += number
    return total.to(own.dtype)
