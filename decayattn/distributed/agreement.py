"""Ranks that call with different options: an error that names the option, where they would wait for one another."""

import functools
import hashlib
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from decayattn import compatibility
from decayattn.distributed.exchange import gather, on_device

# options of a call that are compared, at most: the first collective has the same size whatever they are
_MOST = 32
_REFUSED = -1
# groups, and the options on which their ranks have been seen to agree
_agreed: "weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple]]" = weakref.WeakKeyDictionary()


class Option(NamedTuple):
    name: str
    value: Any  # the same repr on every rank


def check(options: tuple[Option, ...], group: dist.ProcessGroup, device: torch.device) -> None:
    """The first collective of every call: the ranks' digests of their options. No other one is launched before the
    assertion, for ranks that do not agree may wait for one another in it.

    On a GPU the host waits for it only where it has not seen these options in this group; else an assertion on the
    device ends a call on which the ranks do not agree.

    Raises:
        ValueError: names what differs, and the ranks.
        RuntimeError: another rank has refused its arguments.
    """
    digests = _digests(options)
    own = on_device(digests, device)
    everyone = gather(own, dist.get_world_size(group), group)
    agreed = _agreed.setdefault(group, set())
    if device.type != "cpu" and digests in agreed:
        compatibility.assert_on_device(
            (everyone == own).all(), "context_parallel_attention: ranks call with different options"
        )
        return
    rank, found = dist.get_rank(group), everyone.tolist()
    refused = [other for other, theirs in enumerate(found) if theirs[0] == _REFUSED]
    if refused:
        raise RuntimeError(f"context_parallel_attention: its arguments were refused on {_ranks(refused)}")
    for n, (name, value) in enumerate(options):
        others = [other for other, theirs in enumerate(found) if theirs[n] != digests[n]]
        if others:
            raise ValueError(
                f"{name}: expected the same on every rank of the group, got {value!r} on rank {rank} and something "
                f"else on {_ranks(others)}"
            )
    agreed.add(digests)


def refuse(group: dist.ProcessGroup, device: torch.device) -> None:
    """Tell the other ranks, which are in `check`, that this one has refused its arguments."""
    gather(on_device((_REFUSED,) * _MOST, device), dist.get_world_size(group), group)


@functools.lru_cache(maxsize=256)
def _digests(options: tuple[Option, ...]) -> tuple[int, ...]:
    assert len(options) <= _MOST
    hashed = (hashlib.blake2b(repr(option).encode(), digest_size=7).digest() for option in options)
    return *(int.from_bytes(digest, "big") for digest in hashed), *(0,) * (_MOST - len(options))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
