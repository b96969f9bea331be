"""The plan of a halo: the keys that a rank fetches from before its slice, and its rows that see any of them.

The bound of backends/planning/halo_bound.py keeps the sum over all keys that are not fetched below a share of the
tolerance.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from decayattn.distributed.agreement import Handshake, refuse_raised
from decayattn.distributed.exchange import Slices, gather, on_device
from decayattn.problem import AttentionProblem, DecayPrefix, is_reset

if TYPE_CHECKING:
    from decayattn.backends.planning import halo_rows

_NEVER = 2**31 - 1

class Sight(NamedTuple):
    """Limits on how far the rows of a slice see, apart from decay and resets."""

    left: int  # the window; −1: none
    reach: int | None  # given by the caller
    cu_seqlens: Tensor | None  # on the axis of all slices


def can_plan(problem: AttentionProblem) -> bool:
    """True if a decay and a tolerance allow keys to be left out."""
    return problem.skip_tolerance > 0 and problem.decay != "none"


def shares(problem: AttentionProblem) -> int:
    """Number of equal shares of the tolerance: for keys that are not fetched, and for keys that the call then skips.

    A constant rate has a third one: for the zeros of heads that fetch fewer keys than others, which it cannot hide.
    Zeros take no more probability than those keys would.
    """
    return 3 if problem.decay == "constant" else 2


@dataclass(frozen=True)
class Fetch:
    """Keys that every rank fetches. For each batch entry and key head they run from one token up to the rank's slice.

    Properties that only the exchange needs are computed on demand.
    """

    slices: Slices
    begins: Tensor  # (ranks, B·H_kv) int64: that token on the axis of all slices, at most the slice's start
    kv_heads: int
    hosts: list[list[int]]  # copy of begins on the host
    rows: Sequence[int]  # for every rank: its rows from here on see nothing before the slice

    @classmethod
    def last(cls, slices: Slices, tokens: int, k: Tensor, rows: Sequence[int]) -> "Fetch":
        """Fetch in which every rank takes the last `tokens` tokens before its slice."""
        batch, _, kv_heads, _ = k.shape
        begins = tuple(max(0, begin - tokens) for begin in slices.offsets[:-1])
        of_all = on_device(begins, k.device)[:, None].expand(slices.ranks, batch * kv_heads)
        return cls(slices, of_all, kv_heads, [[begin] * batch * kv_heads for begin in begins], rows)

    @property
    def first(self) -> Tensor:
        """Begins as (ranks, B, H_kv)."""
        return self.begins.unflatten(1, (-1, self.kv_heads))

    @functools.cached_property
    def halo(self) -> int:
        """Number of tokens from this rank's first fetched one to its slice, over all heads."""
        begin = self.slices.begin
        return begin - min(self.hosts[self.slices.rank], default=begin)

    @functools.cached_property
    def kept(self) -> int:
        """Number of tokens of this rank's slice before the first one that another rank fetches."""
        slices = self.slices
        of_others = [begin for begins in self.hosts[slices.rank + 1 :] for begin in begins]
        return min(slices.end, max(slices.begin, min(of_others, default=slices.end))) - slices.begin

    @functools.cached_property
    def send(self) -> list[int]:
        """Rows (a row is one token of one key head) to send to every rank."""
        rank, ranks = self.slices.rank, range(self.slices.ranks)
        return [self._number(to, rank) if to > rank else 0 for to in ranks]

    @functools.cached_property
    def receive(self) -> list[int]:
        rank, ranks = self.slices.rank, range(self.slices.ranks)
        return [self._number(rank, of) if of < rank else 0 for of in ranks]

    def _number(self, to: int, of: int) -> int:
        """Number of rows that rank `to` fetches from rank `of`."""
        begin, end = self.slices.offsets[of : of + 2]
        return sum(end - max(first, begin) for first in self.hosts[to] if first < end)

    @property
    def offsets(self) -> Tensor:
        return on_device(self.slices.offsets, self.begins.device)

    @property
    def cut(self) -> Tensor:
        """First key (B, H_kv) on the axis of halo and slice."""
        return self.first[self.slices.rank] - (self.slices.begin - self.halo)

    @functools.cached_property
    def segments(self) -> "halo_rows.Segments":
        """The fetch as the kernels' argument."""
        from decayattn.backends.planning import halo_rows  # imports Triton

        slices = self.slices
        return halo_rows.Segments(
            self.begins, self.offsets, slices.rank, self.kv_heads, slices.end - slices.begin, self.halo, self.kept,
            sum(self.send), sum(self.receive),
        )


def fetch(
    slices: Slices, problem: AttentionProblem, q: Tensor, k: Tensor, log_decay: Tensor | None, scale: Tensor | float,
    sight: Sight, tolerance: float, handshake: Handshake, prefix: DecayPrefix | None = None,
) -> tuple[Fetch, tuple[Tensor, Tensor] | None]:
    """Choose the keys that every rank fetches, so that no row loses more than the tolerance. Tolerance 0 fetches all
    keys that a row sees. Also return skipping.summaries of this rank's slice, or None if the plan did not need them.

    problem is that of the slice alone. Without packed sequences, a call with no decay or with a reach needs no
    collective, and the host does not wait for a GPU. Otherwise it waits once, and the handshake comes before the first
    collective. prefix: that of log_decay, if already computed.
    """
    offsets = slices.offsets
    if sight.reach is not None or (log_decay is None and sight.cu_seqlens is None):
        reach = min(x for x in (sight.reach, sight.left, offsets[-1]) if x is not None and x >= 0)
        sees = slices.lengths if sight.left < 0 else [min(length, sight.left) for length in slices.lengths]
        return Fetch.last(slices, reach, k, sees), None
    found, terms = first_keys(slices, problem, q, k, log_decay, scale, sight, tolerance, handshake, prefix)
    handshake.width = 0
    everyone = gather(found, slices.ranks, slices.group)
    hosts = everyone.tolist()
    refuse_raised(hosts)
    begins, rows = [of_rank[:-1] for of_rank in hosts], [of_rank[-1] for of_rank in hosts]
    return Fetch(slices, everyone[:, :-1], problem.num_kv_heads, begins, rows), terms


def first_keys(
    slices: Slices, problem: AttentionProblem, q: Tensor, k: Tensor, log_decay: Tensor | None, scale: Tensor | float,
    sight: Sight, tolerance: float, handshake: Handshake, prefix: DecayPrefix | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """First keys and rows of this rank, as flat int64, and the terms of `fetch`.

    For every (B, H_kv) the first token that this rank fetches, on the axis of all slices, or its own first token if
    none. Then a number of rows: rows from it on see nothing before their slice.

    After the handshake the other ranks wait for these values, or for an error instead of them.
    """
    begin, length, left = slices.begin, problem.query_length, sight.left
    # keys and rows within the window
    lowest, rows = (0, length) if left < 0 else (max(0, begin - left), min(length, left))
    pairs = problem.batch * problem.num_kv_heads
    if tolerance == 0 or log_decay is None:
        return _first_seen(slices, problem, log_decay, sight.cu_seqlens, lowest, rows, handshake), None
    from decayattn.backends.planning import halo_bound as planning  # imports Triton

    cu_seqlens = None if sight.cu_seqlens is None else sight.cu_seqlens.contiguous()
    offsets = on_device(slices.offsets, q.device)
    place = planning.Place(slices.lengths, slices.rank, offsets, lowest, rows, cu_seqlens)
    launch = planning.launch_for(problem, place, q, k, log_decay, scale if isinstance(scale, Tensor) else None)
    summary = planning.summarise(problem, q, k, log_decay, scale, place.blocks, launch, prefix)
    handshake.meet()  # after the launches, so that the GPU is busy meanwhile
    everyone = gather(summary.keys, slices.ranks, slices.group)
    handshake.width = pairs + 1
    if not begin or not pairs:
        return on_device((0,) * (pairs + 1), q.device), summary.terms
    return planning.first_keys(problem, place, everyone, summary, tolerance, launch), summary.terms


def _first_seen(
    slices: Slices, problem: AttentionProblem, log_decay: Tensor | None, cu_seqlens: Tensor | None, lowest: int,
    rows: int, handshake: Handshake,
) -> Tensor:
    """`first_keys` without a tolerance: all keys that rows see."""
    begin, heads = slices.begin, (problem.batch, problem.num_heads)
    pairs = problem.batch * problem.num_kv_heads
    device = problem.device
    if problem.decay == "scalar":
        assert log_decay is not None
        first_reset, last_reset = _resets(log_decay)
    handshake.meet()
    if problem.decay == "scalar":
        last_resets = gather(last_reset.flatten(), slices.ranks, slices.group).unflatten(1, heads)
    handshake.width = pairs + 1
    if not begin or not pairs:
        return on_device((0,) * (pairs + 1), device)
    first, seeing = (torch.full(heads, number, device=device) for number in (lowest, rows))
    if cu_seqlens is not None:
        start, end = _sequence_at(cu_seqlens, begin)
        first, seeing = torch.maximum(first, start), torch.minimum(seeing, (end - begin).clamp(min=0))
    if problem.decay == "constant":
        assert log_decay is not None
        seeing = torch.where(is_reset(log_decay), 0, seeing)  # with such a rate a row sees only its own key
    elif problem.decay == "scalar":
        seeing = torch.minimum(seeing, first_reset)
        last_resets = last_resets[: slices.rank].long()
        of_ranks = on_device(slices.offsets[: slices.rank], device)[:, None, None]
        first = torch.maximum(first, torch.where(last_resets < 0, last_resets, last_resets + of_ranks).amax(0))
    first = torch.where(seeing > 0, first, begin).clamp(max=begin)
    seeing = torch.where(first < begin, seeing, 0)
    return torch.cat([first.unflatten(1, (problem.num_kv_heads, -1)).amin(2).flatten(), seeing.amax()[None]])


def _resets(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H) int64: the first reset of a slice, or a number above its length; and the last one, or −1."""
    reset = is_reset(log_decay)
    token = torch.arange(reset.shape[1], device=reset.device, dtype=torch.int32)[:, None]
    first = pad(token.where(reset, token.new_full((), _NEVER)), (0, 0, 0, 1), value=_NEVER).amin(1)
    last = pad(token.where(reset, token.new_full((), -1)), (0, 0, 0, 1), value=-1).amax(1)
    return first.long(), last.long()


def _sequence_at(cu_seqlens: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """Begin and end of the sequence that contains a token; the token itself, twice, if none does."""
    cu = cu_seqlens.long().cummax(0).values
    at = torch.full((), token, device=cu.device)
    n = torch.searchsorted(cu, at, right=True)
    inside = (n > 0) & (n < len(cu))
    return torch.where(inside, cu[(n - 1).clamp(min=0)], at), torch.where(inside, cu[n.clamp(max=len(cu) - 1)], at)
