"""The plan of a halo: the keys that a rank fetches, by the bound of halo_bound.py, and its rows that see one."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from decayattn.distributed.collectives import Slices, all_gather, copied, on_device
from decayattn.distributed.option_check import OptionCheck, refuse_raised
from decayattn.problem import AttentionProblem, Inputs, is_reset

_FAR = 2**62  # beyond any token


class ViewLimits(NamedTuple):
    """Limits on how far the rows of a slice see, apart from decay and resets."""

    left: int  # the window; −1: none
    reach: int | None  # given by the caller
    cu_seqlens: Tensor | None  # of packed sequences, on the axis of all slices
    max_seqlen: int = 0


class Rows(NamedTuple):
    """Rows of an exchange, in runs of consecutive tokens. A row is one token of one key head."""

    runs: Tensor  # (runs, 5) int64: batch entry, first token − first row, key head, rows, and the row after the last
    counts: list[int]  # rows for every rank, or of every rank
    first_token: int  # the least one


@dataclass(frozen=True)
class HaloPlan:
    """Keys that every rank fetches: for a batch entry and key head, all tokens from one up to the rank's slice."""

    slices: Slices
    begins: Tensor  # (ranks, B·H_kv) int64: that token on the axis of all slices, at most the slice's start
    kv_heads: int
    hosts: list[list[int]]  # copy of begins on the host
    rows: Sequence[int]  # for every rank: its rows from here on see nothing before the slice
    fixed: bool = False  # the same in every call, so that a CUDA graph can hold it

    @functools.cached_property
    def halo(self) -> int:
        """Number of tokens from this rank's first fetched one to its slice, over all heads."""
        begin = self.slices.begin
        return begin - min(self.hosts[self.slices.rank], default=begin)

    @functools.cached_property
    def sent(self) -> Rows:
        """Rows that other ranks fetch from this one, with tokens of its slice."""
        rank = self.slices.rank
        return self._rows([(to, rank) for to in range(self.slices.ranks)], self.slices.begin)

    @functools.cached_property
    def fetched(self) -> Rows:
        """Rows that this rank fetches, with tokens of halo and slice."""
        rank = self.slices.rank
        return self._rows([(rank, of) for of in range(self.slices.ranks)], self.slices.begin - self.halo)

    def _rows(self, exchanges: Sequence[tuple[int, int]], start: int) -> Rows:
        """Rows that rank `to` fetches from rank `of`, for pairs (to, of). The host lists them: it launches one operator
        on a GPU in the time of this list."""
        numbers, counts, row, first_token = [], [], 0, self.slices.offsets[-1]
        for to, of in exchanges:
            (begin, end), before = self.slices.offsets[of : of + 2], row
            for pair, first in enumerate(self.hosts[to] if of < to else ()):
                if first < end:
                    token, count = max(first, begin) - start, end - max(first, begin)
                    numbers += [pair // self.kv_heads, token - row, pair % self.kv_heads, count, row + count]
                    row, first_token = row + count, min(first_token, token)
            counts.append(row - before)
        device = self.begins.device
        runs = (on_device if self.fixed else copied)(tuple(numbers), device) if numbers else self.begins.new_empty(0)
        return Rows(runs.view(-1, 5), counts, first_token)


def tolerance_share(problem: AttentionProblem) -> float:
    """Tolerance for keys that are not fetched, and again for keys that the call then skips.

    A constant rate has a third share: for the zeros of heads that fetch fewer keys than others, which it cannot hide.
    Zeros take no more probability than those keys would.
    """
    return problem.skip_tolerance / (3 if problem.decay == "constant" else 2)


def make_plan(
    slices: Slices, problem: AttentionProblem, inputs: Inputs, limits: ViewLimits, tolerance: float, check: OptionCheck,
) -> tuple[HaloPlan, tuple[Tensor, Tensor] | None]:
    """Choose the keys that every rank fetches, so that no row loses more than the tolerance. Tolerance 0 fetches all
    keys that a row sees. Also return skipping.summaries of this rank's slice, or None if the plan did not need them.

    problem and inputs are those of the slice alone. Without packed sequences, a call with no decay or with a reach
    needs no collective, and the host does not wait for a GPU. Otherwise it waits once, and the check of options comes
    before the first collective.
    """
    batch, kv_heads = problem.batch, problem.num_kv_heads
    if limits.reach is not None or (inputs.log_decay is None and limits.cu_seqlens is None):
        reach = min(x for x in (limits.reach, limits.left, slices.offsets[-1]) if x is not None and x >= 0)
        rows = slices.lengths if limits.left < 0 else [min(length, limits.left) for length in slices.lengths]
        firsts = tuple(max(0, begin - reach) for begin in slices.offsets[:-1])
        begins = on_device(firsts, problem.device)[:, None].expand(slices.ranks, batch * kv_heads)
        return HaloPlan(slices, begins, kv_heads, [[first] * batch * kv_heads for first in firsts], rows, True), None
    if inputs.q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "reach: expected a number in a CUDA graph, because the host waits for the size of a planned halo, got "
            "None; pass reach, or mode='heads'"
        )
    found, terms = first_keys(slices, problem, inputs, limits, tolerance, check)
    check.width = 0
    everyone = all_gather(found, slices.ranks, slices.group)
    hosts = everyone.tolist()
    refuse_raised(hosts)
    begins_of_ranks, rows = [values[:-1] for values in hosts], [values[-1] for values in hosts]
    return HaloPlan(slices, everyone[:, :-1], kv_heads, begins_of_ranks, rows), terms


def first_keys(
    slices: Slices, problem: AttentionProblem, inputs: Inputs, limits: ViewLimits, tolerance: float, check: OptionCheck,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """HaloPlan.begins and rows, flat int64, for which the others wait after the check; and `make_plan`'s summaries."""
    begin, length, left = slices.begin, problem.query_length, limits.left
    lowest, rows = (0, length) if left < 0 else (max(0, begin - left), min(length, left))
    pairs = problem.batch * problem.num_kv_heads
    if tolerance == 0 or inputs.log_decay is None:
        return _first_visible(slices, problem, inputs.log_decay, limits.cu_seqlens, lowest, rows, check), None
    from decayattn.backends.planning import halo_bound  # imports Triton
    from decayattn.backends.runtime import launching

    q, k, log_decay = inputs.q, inputs.k, inputs.log_decay
    sequence = None if limits.cu_seqlens is None else _sequence_at(limits.cu_seqlens, begin)
    place = halo_bound.Place(slices.lengths, slices.rank, on_device(slices.offsets, q.device), lowest, rows, sequence)
    modes = problem, slices.lengths, slices.rank, lowest, rows
    launch = launching.of_call(problem.device, (q, k, log_decay, inputs.row_scale, sequence), *modes)
    summary = halo_bound.summarise(problem, q, k, log_decay, inputs.any_scale, place.blocks, launch)
    check.compare()  # after the launches, so that the GPU is busy meanwhile
    everyone = all_gather(summary.keys, slices.ranks, slices.group)
    check.width = pairs + 1
    if not begin or not pairs:
        return on_device((0,) * (pairs + 1), q.device), summary.terms
    return halo_bound.first_keys(problem, place, everyone, summary, tolerance, launch), summary.terms


def _first_visible(
    slices: Slices, problem: AttentionProblem, log_decay: Tensor | None, cu_seqlens: Tensor | None, lowest: int,
    rows: int, check: OptionCheck,
) -> Tensor:
    """`first_keys` without a tolerance: all keys that rows see."""
    begin, heads, device = slices.begin, (problem.batch, problem.num_heads), problem.device
    pairs = problem.batch * problem.num_kv_heads
    if log_decay is not None and problem.decay == "scalar":
        first_reset, last_reset = _resets(log_decay)
    check.compare()
    if problem.decay == "scalar":
        last_resets = all_gather(last_reset.flatten(), slices.ranks, slices.group).unflatten(1, heads)
    check.width = pairs + 1
    if not begin or not pairs:
        return on_device((0,) * (pairs + 1), device)
    first, seeing = (torch.full(heads, number, device=device) for number in (lowest, rows))
    if cu_seqlens is not None:
        start, end = _sequence_at(cu_seqlens, begin)
        first, seeing = torch.maximum(first, start), torch.minimum(seeing, end - begin)
    if log_decay is not None and problem.decay == "constant":
        seeing = torch.where(is_reset(log_decay), 0, seeing)  # with such a rate a row sees only its own key
    elif problem.decay == "scalar":
        seeing = torch.minimum(seeing, first_reset)
        last_resets = last_resets[: slices.rank].long()
        offsets = on_device(slices.offsets[: slices.rank], device)[:, None, None]
        first = torch.maximum(first, torch.where(last_resets < 0, last_resets, last_resets + offsets).amax(0))
    first = torch.where(seeing > 0, first, begin).clamp(max=begin)
    seeing = torch.where(first < begin, seeing, 0)
    return torch.cat([first.unflatten(1, (problem.num_kv_heads, -1)).amin(2).flatten(), seeing.amax()[None]])


def _resets(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H) int64: the first reset of a slice, or its length without one; and the last one, or −1."""
    resets = is_reset(log_decay).int()
    first, after_last = (pad(x, (0, 0, 0, 1), value=1).argmax(1) for x in (resets, resets.flip(1)))
    return first, resets.shape[1] - 1 - after_last


def _sequence_at(cu_seqlens: Tensor, token: int) -> Tensor:
    """Start and end, (2,) int64, of the sequence that contains a token; the token itself, twice, if none does."""
    offsets = cu_seqlens.long().cummax(0).values
    follows = offsets > token
    start, end = offsets.masked_fill(follows, -_FAR).amax(), offsets.masked_fill(~follows, _FAR).amin()
    return torch.stack([start, end]).where((start > -_FAR) & (end < _FAR), token)
