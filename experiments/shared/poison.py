"""NaN in memory that torch allocates."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill fresh buffers with NaN (integers: a huge number): a kernel that reads or leaves an unwritten entry shows."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if torch.compiler.is_compiling() or not isinstance(tensor, Tensor) or tensor.is_meta:
                return tensor
            if tensor.is_floating_point():
                tensor.detach().fill_(torch.nan)
            elif tensor.dtype in (torch.int32, torch.int64):
                tensor.fill_(torch.iinfo(tensor.dtype).max // 2)
            return tensor

        return wrapper

    def poison(storage: torch.UntypedStorage, size: object = None, **options) -> None:
        if isinstance(size, int) and storage.device.type != "meta":
            storage.fill_(255)  # NaN in all formats

    with (
        mock.patch.object(torch, "empty", poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", poisoned(torch.empty_like)),
        mock.patch.object(Tensor, "new_empty", poisoned(Tensor.new_empty)),
        mock.patch.object(torch.UntypedStorage, "__init__", poison),
    ):
        yield
