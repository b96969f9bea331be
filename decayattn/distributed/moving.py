"""Exchanges of a halo with the steps around them, as kernels or as PyTorch operators.

k, v and λ per token have the shapes (B, T, H_kv, D), (B, T, H_kv, D_v) and (B, T, H), and so do their gradients; None
for an absent one.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from decayattn.distributed import rows as eager_rows
from decayattn.distributed.agreement import Handshake
from decayattn.distributed.exchange import all_to_all, all_to_all_beside
from decayattn.distributed.fetching import Fetch

Parts = Sequence[Tensor | None]


def extend(fetch: Fetch, parts: Parts, tokens: int, runs_kernels: bool, handshake: Handshake) -> list[Tensor | None]:
    """Halo from other ranks, and first tokens of each part of a slice.

    Heads that fetch less than others have zeros before their first key, and a reset there, so nothing before it is
    visible. The handshake comes before the exchange.
    """
    steps, where = _steps(fetch, runs_kernels)
    rows = steps.pack_sent(where, parts)
    handshake.meet()
    received = all_to_all(rows, fetch.send, fetch.receive, fetch.slices.group)
    if not fetch.halo:
        return [None if x is None else x[:, :tokens] for x in parts]
    return steps.extend(where, received, parts, tokens)


def send_back(fetch: Fetch, grads: Parts, runs_kernels: bool) -> Callable[[], Tensor]:
    """Start to send the halo's gradients, on the axis of halo and slice, to their owners. Return a function for the
    gradients that other ranks send to this one."""
    steps, where = _steps(fetch, runs_kernels)
    return all_to_all_beside(steps.pack_returned(where, grads), fetch.receive, fetch.send, fetch.slices.group)


def add_returned(
    fetch: Fetch, returned: Callable[[], Tensor], totals: Parts, grads: Parts, tokens: int, runs_kernels: bool
) -> list[Tensor | None]:
    """Sum of the slice's gradients, those of its first tokens on the axis of halo and slice, and the returned ones.

    May change totals in place.
    """
    steps, where = _steps(fetch, runs_kernels)
    return steps.add_returned(where, returned(), totals, grads, tokens)


def _steps(fetch: Fetch, runs_kernels: bool) -> tuple[ModuleType, Any]:
    """Module with the steps around an exchange, and the positions of its rows."""
    if not runs_kernels:
        return eager_rows, fetch
    from decayattn.backends.planning import halo_rows  # imports Triton

    return halo_rows, fetch.segments
