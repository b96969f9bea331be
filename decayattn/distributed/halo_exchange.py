"""Exchanges of a halo: keys to the ranks with rows that see them, and gradients back to the keys' owners.

k, v and λ per token have the shapes (B, T, H_kv, D), (B, T, H_kv, D_v) and (B, T, H), and so do their gradients; None
for an absent one. A row of an exchange is one token of one key head. Rows are sent and received in this order:

    rank | batch entry | key head | token        rank: the receiver when sending, the sender when receiving
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from decayattn.distributed.collectives import all_to_all, pack, unpack
from decayattn.distributed.halo_plan import HaloPlan
from decayattn.distributed.option_check import OptionCheck

Parts = Sequence[Tensor | None]


def fetch_halo(plan: HaloPlan, parts: Parts, tokens: int, check: OptionCheck) -> list[Tensor | None]:
    """Halo (zeros, hidden by a reset, before a head's first key) and first tokens of each part, after the check."""
    rows = pack([x[plan.sent_rows] if any(plan.send) else _no_row(x) for x in _by_kv_head(plan, parts)])
    check.compare()
    received, _ = all_to_all(rows, plan.send, plan.receive, plan.slices.group)
    return _extend(plan, received, parts, tokens)


def return_gradients(plan: HaloPlan, grads: Parts) -> tuple[Tensor, Any]:
    """Start to send the halo's gradients to their owners. Return those sent to this rank, and the work to wait for."""
    rows = pack([x[plan.fetched_rows] if plan.halo else _no_row(x) for x in _by_kv_head(plan, grads)])
    return all_to_all(rows, plan.receive, plan.send, plan.slices.group, async_op=True)


def add_returned(
    plan: HaloPlan, returned: tuple[Tensor, Any], totals: Parts, grads: Parts, tokens: int
) -> list[Tensor | None]:
    """Add to the slice's gradients, in place, those of its first tokens on the axis of halo and slice, and the returned
    ones. Sums are at least float32, rank by rank, so that their bits repeat."""
    rows, work = returned
    work.wait()
    own, counts = _by_kv_head(plan, totals), [count for count in plan.send if count]
    apart = plan.kept >= tokens  # other ranks fetched nothing before token `kept`
    one_term = apart and len(counts) < 2
    begin = plan.kept if apart and not one_term else 0
    of_ranks = list(zip(*(x.split(counts) for x in plan.sent_rows), strict=True)) if counts else []
    for x, other, values in zip(own, _by_kv_head(plan, grads), unpack(rows, own), strict=True):
        total = x[:, begin:].to(x.dtype if one_term else torch.promote_types(x.dtype, torch.float32))
        # not +=, which then copies the sum to itself
        (x if begin else total)[:, :tokens].add_(other[:, plan.halo : plan.halo + tokens])
        for (entry, token, head), of_rank in zip(of_ranks, values.split(counts), strict=True):
            total[entry, token - begin if begin else token, head] += of_rank
        if total.dtype != x.dtype:  # else it is x's memory
            x[:, begin:] = total
    return list(totals)


def _extend(plan: HaloPlan, rows: Tensor, parts: Parts, tokens: int) -> list[Tensor | None]:
    """Halo and first tokens of the slice, for each part. Rows that a head has not fetched are 0."""
    if not plan.halo:
        return [None if x is None else x[:, :tokens] for x in parts]
    tensors, result = _by_kv_head(plan, parts), []
    for own, fetched in zip(tensors, unpack(rows, tensors), strict=True):
        extended = pad(own[:, :tokens], (0, 0, 0, 0, plan.halo, 0))
        extended[plan.fetched_rows] = fetched
        result.append(extended)
    if parts[2] is not None:
        # no row sees past a head's first key; λ of the first token of all has no part in any score
        first = first_keys(plan).view(-1, 1, plan.kv_heads, 1)
        result[-1].scatter_(1, first.expand(-1, -1, -1, result[-1].shape[3]), -torch.inf)
    left = iter(result)
    return [None if x is None else next(left).flatten(2, 6 - x.ndim) for x in parts]  # λ as (B, T, H)


def first_keys(plan: HaloPlan) -> Tensor:
    """First key of every batch entry and key head on the axis of halo and slice."""
    return plan.begins[plan.slices.rank] - (plan.slices.begin - plan.halo)


def _by_kv_head(plan: HaloPlan, parts: Parts) -> list[Tensor]:
    """The parts that are not None, as (B, T, H_kv, ·)."""
    return [x if x.ndim == 4 else x.unflatten(2, (plan.kv_heads, -1)) for x in parts if x is not None]


def _no_row(x: Tensor) -> Tensor:
    """What an empty index takes of (B, T, H_kv, ·), in less of the host's time."""
    return x.new_empty(0, x.shape[3])
