"""Triton's interpreter with a check of addresses: a kernel reads and writes only inside of its tensors.

A GPU seldom notices: its allocator hands out large blocks, and memory next to a tensor in one can be read. Here every
address counts, except those of masked lanes.
"""

import bisect
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter


class OutsideOfTensors(Exception):
    """A kernel's load or store at an address of no tensor that it was given."""


# where storages begin and end, in order, of the kernel that runs
_begins: list[int] = []
_ends: list[int] = []


def watch() -> None:
    """From now on every interpreted kernel is watched."""
    arguments = interpreter.GridExecutor._init_args_hst
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def with_storages(self, args: Any, kwargs: Any):
        global _begins, _ends
        on_host = arguments(self, args, kwargs)
        ranges = sorted({x for arg in on_host for x in _storages(list(arg.values()) if isinstance(arg, dict) else arg)})
        _begins, _ends = [begin for begin, _ in ranges], [end for _, end in ranges]
        return on_host

    def checked_load(self, ptrs, mask, *rest):
        _check("reads", ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def checked_store(self, ptrs, value, mask, *rest):
        _check("writes", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    interpreter.GridExecutor._init_args_hst = with_storages
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store


def _storages(arg: Any) -> Iterator[tuple[int, int]]:
    if isinstance(arg, (tuple, list)):
        for part in arg:
            yield from _storages(part)
    elif isinstance(getattr(arg, "base", None), torch.Tensor):  # a tensor descriptor, too
        yield from _storages(arg.base)
    elif isinstance(arg, torch.Tensor):
        storage = arg.untyped_storage()
        yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _check(does: str, ptrs: Any, mask: Any) -> None:
    seen = np.atleast_1d(mask.data).astype(bool, copy=False)
    addresses = np.atleast_1d(ptrs.data)[seen].astype(np.uint64, copy=False)
    if not addresses.size:
        return
    size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
    storage = bisect.bisect_right(_begins, int(addresses.min())) - 1
    if storage >= 0 and int(addresses.max()) + size <= _ends[storage]:
        return  # all of them in one, which is nearly always so
    storages = np.searchsorted(np.array(_begins, np.uint64), addresses, "right").astype(np.int64) - 1
    outside = storages < 0
    if not outside.all():
        outside |= addresses + np.uint64(size) > np.array(_ends, np.uint64)[storages]
    if outside.any():
        raise OutsideOfTensors(f"it {does} {outside.sum()} of {outside.size} values outside of its tensors")
