"""Exchanges of a halo: keys to the ranks with rows that see them, and gradients back to the keys' owners.

k, v and λ per token have the shapes (B, T, H_kv, D), (B, T, H_kv, D_v) and (B, T, H), and so do their gradients; None
for an absent one. A row of an exchange is one token of one key head. Rows are sent and received in this order:

    rank | batch entry | key head | token        rank: the receiver when sending, the sender when receiving
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from decayattn.distributed.collectives import all_to_all, row_bytes, unpack
from decayattn.distributed.halo_plan import HaloPlan, Rows
from decayattn.distributed.option_check import OptionCheck

Parts = Sequence[Tensor | None]


def fetch_halo(plan: HaloPlan, parts: Parts, tokens: int, kernels: bool, check: OptionCheck) -> list[Tensor | None]:
    """Halo (zeros, hidden by a reset, before a head's first key) and first tokens of each part, after the check.

    kernels: True to move rows by a Triton kernel, False by PyTorch's operators, with the same bits.
    """
    rows = _packed(_by_kv_head(plan, parts), plan.sent, kernels)
    check.compare()
    received, _ = all_to_all(rows, plan.sent.counts, plan.fetched.counts, plan.slices.group)
    return _extend(plan, received, parts, tokens, kernels)


def return_gradients(plan: HaloPlan, grads: Parts, kernels: bool) -> tuple[Tensor, Any]:
    """Start to send the halo's gradients to their owners. Return those sent to this rank, and the work to wait for."""
    rows = _packed(_by_kv_head(plan, grads), plan.fetched, kernels)
    return all_to_all(rows, plan.fetched.counts, plan.sent.counts, plan.slices.group, async_op=True)


def add_returned(
    plan: HaloPlan, returned: tuple[Tensor, Any], totals: Parts, grads: Parts, tokens: int, kernels: bool
) -> None:
    """Add to the slice's gradients, in place, those of its first tokens on the axis of halo and slice, and the returned
    ones. Sums of more than two terms are at least float32, rank by rank, so that their bits repeat."""
    rows, work = returned
    work.wait()
    own, ends = _by_kv_head(plan, totals), [0, *itertools.accumulate(filter(None, plan.sent.counts))]
    one_term = plan.sent.first_token >= tokens and len(ends) <= 2
    wide = [x if x is None or one_term else x.to(torch.promote_types(x.dtype, torch.float32)) for x in own]
    for x, other in zip(wide, _by_kv_head(plan, grads), strict=True):
        if x is not None and other is not None:
            x[:, :tokens].add_(other[:, plan.halo : plan.halo + tokens])
    for first, last in itertools.pairwise(ends):
        _move("add", wide, unpack(rows, own), plan.sent.runs, (first, last), kernels)
    for x, total in zip(own, wide, strict=True):
        if x is not None and total is not None and x is not total:
            x.copy_(total)


def _extend(plan: HaloPlan, rows: Tensor, parts: Parts, tokens: int, kernels: bool) -> list[Tensor | None]:
    """Halo and first tokens of the slice, for each part. Rows that a head has not fetched are 0."""
    if not plan.halo:
        return [None if x is None else x[:, :tokens] for x in parts]
    own = _by_kv_head(plan, parts)
    result = [None if x is None else pad(x[:, :tokens], (0, 0, 0, 0, plan.halo, 0)) for x in own]
    _move("write", result, unpack(rows, own), plan.fetched.runs, (0, len(rows)), kernels)
    if (log_decay := result[2]) is not None:
        # no row sees past a head's first key; λ of the first token of all has no part in any score
        first = first_keys(plan).view(-1, 1, plan.kv_heads, 1)
        log_decay.scatter_(1, first.expand(-1, -1, -1, log_decay.shape[3]), -torch.inf)
        result[2] = log_decay.flatten(2)
    return result


def first_keys(plan: HaloPlan) -> Tensor:
    """First key of every batch entry and key head on the axis of halo and slice."""
    return plan.begins[plan.slices.rank] - (plan.slices.begin - plan.halo)


def _by_kv_head(plan: HaloPlan, parts: Parts) -> list[Tensor | None]:
    """The parts as (B, T, H_kv, ·)."""
    return [x if x is None or x.ndim == 4 else x.unflatten(2, (plan.kv_heads, -1)) for x in parts]


def _packed(tensors: Parts, where: Rows, kernels: bool) -> Tensor:
    """Rows of the tensors, (rows, ·) as bytes."""
    rows = where.runs.new_empty(sum(where.counts), row_bytes(tensors), dtype=torch.uint8)
    _move("read", tensors, unpack(rows, tensors), where.runs, (0, len(rows)), kernels)
    return rows


def _move(mode: str, tensors: Parts, rows: Parts, runs: Tensor, span: tuple[int, int], kernels: bool) -> None:
    """halo_rows.move, by its kernel or in PyTorch's operators."""
    if span[0] == span[1]:
        return
    if kernels:
        from decayattn.backends.planning import halo_rows  # imports Triton

        return halo_rows.move(mode, tensors, rows, runs, span)
    number = next(len(x) for x in rows if x is not None)
    index = runs[:, :3].repeat_interleave(runs[:, 3], 0, output_size=number)
    entry, token, head = index[slice(*span)].unbind(1)
    here = entry, token + torch.arange(*span, device=token.device), head
    for x, row in zip(tensors, rows, strict=True):
        if x is None or row is None:
            continue
        values = row[slice(*span)]
        if mode == "read":
            values.copy_(x[here])
        elif mode == "write":
            x[here] = values
        else:
            x[here] += values
