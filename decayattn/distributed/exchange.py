"""Rows that ranks send to one another, and where each rank's slice of the sequence lies."""

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from decayattn import compatibility


class Slices(NamedTuple):
    """Which tokens of a sequence the ranks of a group hold, in their order."""

    lengths: tuple[int, ...]
    rank: int
    # Weak, because a result's autograd graph keeps this. A strong reference keeps the group and gloo's threads alive
    # after destroy_process_group; a thread that drops a tensor after Python has ended aborts the process
    # (pytorch#190489).
    group_reference: "weakref.ref[dist.ProcessGroup]"

    @property
    def group(self) -> dist.ProcessGroup:
        group = self.group_reference()
        if group is None:
            raise RuntimeError("group: expected to live until the backward has run, got a destroyed process group")
        return group

    @property
    def ranks(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where every slice begins, and where the last one ends."""
        return _offsets(self.lengths)

    @property
    def begin(self) -> int:
        return self.offsets[self.rank]

    @property
    def end(self) -> int:
        return self.offsets[self.rank + 1]


@functools.lru_cache(maxsize=64)
def _offsets(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *itertools.accumulate(lengths))


# what CUDA graphs read: it has to stay where it is as long as they may be replayed
_of_graphs: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int64; kept, because a copy of new numbers to a GPU waits for it."""
    if compatibility.has_observers():  # who may want to have a tensor of another kind
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    kept = _kept(numbers, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _of_graphs.setdefault((numbers, device), kept)
    return kept


@functools.lru_cache(maxsize=64)
def _kept(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def on_host(x: Tensor) -> Callable[[], list]:
    """Its numbers as a list, for which the host waits no longer than for what was launched before this."""
    if x.device.type != "cuda":
        return x.tolist
    there = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    there.copy_(x, non_blocking=True)
    copied = torch.cuda.current_stream(x.device).record_event()

    def numbers() -> list:
        copied.synchronize()
        return there.tolist()

    return numbers


def gather(own: Tensor, ranks: int, group: dist.ProcessGroup) -> Tensor:
    """(ranks, ·): a tensor of every rank."""
    everyone = own.new_empty(ranks, *own.shape)
    compatibility.all_gather(everyone, own[None], group)
    return everyone


def all_to_all(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The first rows go to the first rank, and so on; so many come from each, in the order of the ranks."""
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=group)
    return received


def all_to_all_beside(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    """The same beside what is launched before the result is asked for."""
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    work = dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=group, async_op=True)

    def result() -> Tensor:
        work.wait()
        return received

    return result


def pack(parts: Sequence[Tensor], multiple: int = 1) -> Tensor:
    """Tensors (..., ·) side by side in the dtype of the first, their bits unchanged, filled up to a multiple of bytes.

    The others have its dtype, a wider one, as a few numbers of the first one's, or a narrower one, as one that holds
    all its values.
    """
    carrier = parts[0].dtype

    def carried(x: Tensor) -> Tensor:
        return x.contiguous().view(carrier) if x.dtype.itemsize > carrier.itemsize else x.to(carrier)

    carriers = [carried(x) for x in parts]
    filling = -sum(x.shape[-1] for x in carriers) % max(1, multiple // carrier.itemsize)
    if filling:
        carriers.append(carriers[0].new_zeros(*parts[0].shape[:-1], filling))
    return torch.cat(carriers, -1)


def unpack(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What `pack` has put side by side: as many numbers as these have in their last dimension, in their dtypes."""
    carrier = rows.dtype
    wider = [max(1, x.dtype.itemsize // carrier.itemsize) for x in like]
    widths = [x.shape[-1] * factor for x, factor in zip(like, wider, strict=True)]
    *parts, _ = rows.split([*widths, rows.shape[-1] - sum(widths)], -1)
    return [
        # a copy, for a single row would be left where it may not be aligned
        part.clone(memory_format=torch.contiguous_format).view(x.dtype) if factor > 1 else part.to(x.dtype)
        for part, x, factor in zip(parts, like, wider, strict=True)
    ]
