"""The exchanges of a halo, and what is done around them: by kernels, or by PyTorch's operators without them.

k, v and λ per token come as (B, T, H_kv, D), (B, T, H_kv, D_v) and (B, T, H), and so do their gradients; None for what
is not there.
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
    """Halo, from other ranks, and first tokens of each part of a slice.

    Heads that fetch less than others have zeros before their first key, and a reset there: nothing before is visible.
    The handshake comes before the exchange.
    """
    steps, where = _steps(fetch, runs_kernels)
    rows = steps.pack_sent(where, parts)
    handshake.meet()
    received = all_to_all(rows, fetch.send, fetch.receive, fetch.slices.group)
    if not fetch.halo:
        return [None if x is None else x[:, :tokens] for x in parts]
    return steps.extend(where, received, parts, tokens)


def send_back(fetch: Fetch, grads: Parts, runs_kernels: bool) -> Callable[[], Tensor]:
    """The gradients of the halo, on the axis of halo and slice, on their way to its owners; and what comes back, once
    it is asked for."""
    steps, where = _steps(fetch, runs_kernels)
    return all_to_all_beside(steps.pack_returned(where, grads), fetch.receive, fetch.send, fetch.slices.group)


def add_returned(
    fetch: Fetch, returned: Callable[[], Tensor], totals: Parts, grads: Parts, tokens: int, runs_kernels: bool
) -> list[Tensor | None]:
    """Gradients of the slice, plus those of its first tokens on the axis of halo and slice, plus what came back.

    totals may be changed in place.
    """
    steps, where = _steps(fetch, runs_kernels)
    return steps.add_returned(where, returned(), totals, grads, tokens)


def _steps(fetch: Fetch, runs_kernels: bool) -> tuple[ModuleType, Any]:
    """The steps around an exchange, and where their rows are."""
    if not runs_kernels:
        return eager_rows, fetch
    from decayattn.backends.planning import exchange  # imports Triton

    return exchange, fetch.segments
