"""Ranks that call with different options: an error that names the option, where they would wait for one another."""

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from decayattn import compatibility
from decayattn.distributed.exchange import gather, on_device

# options of a call that are compared, at most: the first collective has the same size whatever they are
_MOST = 32
_REFUSED = -1
# options of a group that are remembered: lengths may be others in every step
_REMEMBERED = 4096
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
        RuntimeError: another rank has refused its arguments; or a CUDA graph is captured, and no call before it had
            these options.
    """
    digests = _digests(options)
    agreed = _agreed.setdefault(group, set())
    known = device.type != "cpu" and digests in agreed
    if device.type == "cuda" and not known and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "context_parallel_attention: a CUDA graph expects a call with the same options before it is captured, "
            "gradients asked for or not included"
        )
    own = on_device(digests, device)
    everyone = gather(own, dist.get_world_size(group), group)
    if known:
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
    if len(agreed) >= _REMEMBERED:
        agreed.clear()
    agreed.add(digests)


@contextlib.contextmanager
def telling(group: dist.ProcessGroup, x: object) -> Iterator[None]:
    """Where this rank refuses arguments: the other ranks, which are or will be in `check`, are told so. x: what they
    have on the device of its collectives, if it is a tensor."""
    try:
        yield
    except Exception:  # whatever it is, they would wait
        of_group = "cuda" if "nccl" in str(dist.get_backend_config(group)) else "cpu"
        device = x.device if isinstance(x, torch.Tensor) else torch.device(of_group)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        gather(on_device((_REFUSED,) * _MOST, device), dist.get_world_size(group), group)
        raise


@functools.lru_cache(maxsize=256)
def _digests(options: tuple[Option, ...]) -> tuple[int, ...]:
    assert len(options) <= _MOST
    hashed = (hashlib.blake2b(repr(option).encode(), digest_size=7).digest() for option in options)
    return *(int.from_bytes(digest, "big") for digest in hashed), *(0,) * (_MOST - len(options))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
