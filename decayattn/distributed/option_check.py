"""First collective of every call: the ranks compare their options. If one rank raises, all ranks raise."""

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decayattn import compatibility
from decayattn.distributed.collectives import all_gather, on_device

_MAX_OPTIONS = 32  # of a call: the size of the first collective must not depend on their number
_RAISED = -1  # gathered instead of a rank's values if it raises
_MAX_CACHED = 4096  # options of a group: lengths may change in every step
# groups, and the options on which their ranks have already agreed
_agreed: "weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple]]" = weakref.WeakKeyDictionary()


class OptionCheck:
    """Context manager: if this rank raises before the exchange of rows, the ranks that wait for it raise, too."""

    def __init__(self, group: dist.ProcessGroup, x: object) -> None:
        """x: a tensor of the call. The ranks gather on its device if the group's backend supports its type."""
        self.group, self.device_types = group, _device_types(group)
        self.device = x.device if isinstance(x, Tensor) else torch.device("meta")
        if self.device.type not in self.device_types:
            self.device = torch.device(self.device_types[0])
        self.options: dict[str, Any] = {}  # values with the same repr on every rank
        self.width = _MAX_OPTIONS  # int64 values per rank in the gather that other ranks wait in; 0: none
        self._compared = False

    def __enter__(self) -> "OptionCheck":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, Exception) or not self.width:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        with contextlib.suppress(Exception):  # the caller sees this rank's own error
            raised = torch.full((self.width,), _RAISED, dtype=torch.int64, device=self.device)
            all_gather(raised, dist.get_world_size(self.group), self.group)

    def restart(self) -> None:
        """Report errors again, in the gather of the ranks' next comparison, which has an OptionCheck of its own."""
        self.width, self._compared = _MAX_OPTIONS, False

    def compare(self) -> None:
        """Raise ValueError with the name of an option that differs, or RuntimeError if a rank has raised.

        Compares once per call, before any other collective: ranks with other options might wait for each other in it.
        On a GPU the host waits only for options that are new to the group; later, an assertion on the device fails.
        """
        if self._compared:
            return
        self._compared = True
        digests = _digests(tuple(self.options.items()))
        agreed = _agreed.setdefault(self.group, set())
        known = self.device.type != "cpu" and digests in agreed
        if self.device.type == "cuda" and not known and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "context_parallel_attention: expected a call with the same options before a CUDA graph is captured, "
                "got none; call it once outside of the graph, with or without gradients as inside"
            )
        own = on_device(digests, self.device)
        self.width = 0
        everyone = all_gather(own, dist.get_world_size(self.group), self.group)
        if known:
            compatibility.assert_on_device(
                (everyone == own).all(),
                "context_parallel_attention: expected the same options on every rank and an error on none",
            )
            return
        found = everyone.tolist()
        refuse_raised(found)
        for n, (name, value) in enumerate(self.options.items()):
            others = [other for other, theirs in enumerate(found) if theirs[n] != digests[n]]
            if others:
                raise ValueError(
                    f"{name}: expected the same on every rank of the group, got {value!r} on rank "
                    f"{dist.get_rank(self.group)} and something else on {_ranks(others)}"
                )
        if len(agreed) >= _MAX_CACHED:
            agreed.clear()
        agreed.add(digests)


def refuse_raised(of_ranks: Sequence[Sequence[int]]) -> None:
    """Raise RuntimeError if a rank has gathered an error instead of its values. The last value is never negative."""
    raised = [rank for rank, values in enumerate(of_ranks) if values[-1] == _RAISED]
    if raised:
        raise RuntimeError(
            f"context_parallel_attention: expected a call on every rank, got an error on {_ranks(raised)}; see the "
            "traceback there"
        )


def _device_types(group: dist.ProcessGroup) -> tuple[str, ...]:
    """Device types that a group exchanges, CPU first; only the accelerator's if the CPU has another backend."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if len(set(backends.values())) > 1:
        backends.pop("cpu", None)
    return tuple(sorted(backends, key=lambda type: type != "cpu"))  # CPU first: reporting an error then needs no GPU


@functools.lru_cache(maxsize=256)
def _digests(options: tuple[tuple[str, Any], ...]) -> tuple[int, ...]:
    assert len(options) <= _MAX_OPTIONS
    hashed = (hashlib.blake2b(repr(option).encode(), digest_size=7).digest() for option in options)
    return *(int.from_bytes(digest, "big") for digest in hashed), *(0,) * (_MAX_OPTIONS - len(options))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
