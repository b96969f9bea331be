"""Exchanges of a halo: keys to the ranks with rows that see them, and gradients back to the keys' owners.

k, v and λ per token have the shapes (B, T, H_kv, D), (B, T, H_kv, D_v) and (B, T, H), and so do their gradients; None
for an absent one. A row of an exchange is one token of one key head. The steps around an exchange are the kernels of
backends/planning/halo_rows.py, or EagerRows with the same bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decayattn.distributed.collectives import all_to_all, pack, unpack
from decayattn.distributed.halo_plan import HaloPlan
from decayattn.distributed.option_check import OptionCheck

Parts = Sequence[Tensor | None]


def fetch_halo(
    plan: HaloPlan, parts: Parts, tokens: int, runs_kernels: bool, check: OptionCheck
) -> list[Tensor | None]:
    """Halo from other ranks, and first tokens of each part of a slice. The check of options comes before the exchange.

    Heads that fetch less than others have zeros before their first key, and a reset there that hides these.
    """
    steps, where = _steps(plan, runs_kernels)
    rows = steps.pack_sent(where, parts)
    check.compare()
    received, _ = all_to_all(rows, plan.send, plan.receive, plan.slices.group)
    if not plan.halo:
        return [None if x is None else x[:, :tokens] for x in parts]
    return steps.extend(where, received, parts, tokens)


def return_gradients(plan: HaloPlan, grads: Parts, runs_kernels: bool) -> tuple[Tensor, Any]:
    """Start to send the halo's gradients, on the axis of halo and slice, to their owners. Return the gradients that
    other ranks send to this one, and the work to wait for."""
    steps, where = _steps(plan, runs_kernels)
    return all_to_all(steps.pack_returned(where, grads), plan.receive, plan.send, plan.slices.group, async_op=True)


def add_returned(
    plan: HaloPlan, returned: tuple[Tensor, Any], totals: Parts, grads: Parts, tokens: int, runs_kernels: bool
) -> list[Tensor | None]:
    """Sum of the slice's gradients, those of its first tokens on the axis of halo and slice, and the returned ones.

    May change totals in place.
    """
    steps, where = _steps(plan, runs_kernels)
    rows, work = returned
    work.wait()
    return steps.add_returned(where, rows, totals, grads, tokens)


def _steps(plan: HaloPlan, runs_kernels: bool) -> tuple[Any, Any]:
    """Functions for the steps around an exchange, and their first argument."""
    if not runs_kernels:
        return EagerRows, plan
    from decayattn.backends.planning import halo_rows  # imports Triton

    return halo_rows, plan.segments


class EagerRows:
    """Steps around an exchange in eager PyTorch, for any device."""

    @staticmethod
    def pack_sent(plan: HaloPlan, parts: Parts) -> Tensor:
        """Rows of this rank's slice that other ranks fetch, (rows, ·)."""
        return _rows(_by_kv_head(plan, parts), _sent(plan))

    @staticmethod
    def pack_returned(plan: HaloPlan, grads: Parts) -> Tensor:
        """Gradients (rows, ·) of the rows that this rank has fetched, on the axis of halo and slice."""
        return _rows(_by_kv_head(plan, grads), _received(plan))

    @staticmethod
    def extend(plan: HaloPlan, rows: Tensor, parts: Parts, tokens: int) -> list[Tensor | None]:
        """Halo and first tokens of the slice, for each part. Rows that a head has not fetched are 0."""
        tensors, segments, result = _by_kv_head(plan, parts), _received(plan), []
        for own, fetched in zip(tensors, unpack(rows, tensors), strict=True):
            extended = torch.cat([own.new_zeros(own.shape[0], plan.halo, *own.shape[2:]), own[:, :tokens]], 1)
            for at, values in _split(fetched, segments):
                extended[at] = values
            result.append(extended)
        if parts[2] is not None:
            for n, first in enumerate(_first_keys(plan)):
                # no row sees past a head's first key; with nothing before that key, its λ stays
                if 0 < first < plan.halo + tokens:
                    result[-1][n // plan.kv_heads, first, n % plan.kv_heads] = -torch.inf
        return _by_head(parts, result)

    @staticmethod
    def add_returned(plan: HaloPlan, rows: Tensor, totals: Parts, grads: Parts, tokens: int) -> list[Tensor | None]:
        """Sum of the slice's gradients, those of its first tokens on the axis of halo and slice, and every rank's rows.
        In float32 at least and rank by rank, so the bits repeat."""
        own, segments, result = _by_kv_head(plan, totals), _sent(plan), []
        for x, other, returned in zip(own, _by_kv_head(plan, grads), unpack(rows, own), strict=True):
            total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
            total[:, :tokens] += other[:, plan.halo : plan.halo + tokens]
            for at, values in _split(returned, segments):
                total[at] += values
            result.append(total.to(x.dtype))
        return _by_head(totals, result)


# consecutive rows of an exchange as an index of (B, T, H_kv): batch entry, tokens, key head
_Segments = Sequence[tuple[int, slice, int]]


def _sent(plan: HaloPlan) -> _Segments:
    """Rows that other ranks fetch, in order of ranks, with tokens on the axis of the slice."""
    rank, begin = plan.slices.rank, plan.slices.begin
    return [at for to in range(rank + 1, plan.slices.ranks) for at in _fetched(plan, to, rank, begin)]


def _received(plan: HaloPlan) -> _Segments:
    """Rows that this rank fetches, in order of ranks, with tokens on the axis of halo and slice."""
    rank, start = plan.slices.rank, plan.slices.begin - plan.halo
    return [at for of in range(rank) for at in _fetched(plan, rank, of, start)]


def _fetched(plan: HaloPlan, to: int, of: int, start: int) -> _Segments:
    """Rows that rank `to` fetches from rank `of`, with tokens on an axis that begins at `start`."""
    begin, end = plan.slices.offsets[of : of + 2]
    return [
        (n // plan.kv_heads, slice(max(first, begin) - start, end - start), n % plan.kv_heads)
        for n, first in enumerate(plan.hosts[to]) if first < end
    ]


def _first_keys(plan: HaloPlan) -> list[int]:
    """First key of every batch entry and key head on the axis of halo and slice."""
    return [first - (plan.slices.begin - plan.halo) for first in plan.hosts[plan.slices.rank]]


def _rows(tensors: Sequence[Tensor], segments: _Segments) -> Tensor:
    """Rows (rows, ·) of tensors (B, T, H_kv, ·)."""
    return pack([torch.cat([x.new_empty(0, x.shape[-1]), *(x[at] for at in segments)]) for x in tensors])


def _split(rows: Tensor, segments: _Segments) -> Any:
    """Segments with their rows."""
    return zip(segments, rows.split([tokens.stop - tokens.start for _, tokens, _ in segments]), strict=True)


def _by_kv_head(plan: HaloPlan, parts: Parts) -> list[Tensor]:
    """The parts that are not None, as (B, T, H_kv, ·)."""
    return [x if x.ndim == 4 else x.unflatten(2, (plan.kv_heads, -1)) for x in parts if x is not None]


def _by_head(parts: Parts, found: Sequence[Tensor]) -> list[Tensor | None]:
    """Inverse of `_by_kv_head`: None where parts have None, and λ as (B, T, H)."""
    left = iter(found)
    return [None if x is None else next(left).flatten(2, 6 - x.ndim) for x in parts]
