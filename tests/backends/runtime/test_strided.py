"""Buffers that kernels fill."""

import torch

from decayattn.backends.runtime.strided import contiguous_like, uninitialised


def test_deterministic_algorithms_fill_no_buffer(device):
    x = torch.ones(5, 7, device=device)[:, 1:].mT
    torch.use_deterministic_algorithms(True)
    try:
        like, other = contiguous_like(x), uninitialised(x, 3, 5, dtype=torch.int32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (like.shape, like.dtype, like.device, like.stride()) == (x.shape, x.dtype, x.device, (5, 1))
    # the tests' poison; torch's is the largest integer
    assert torch.equal(other, torch.full((3, 5), -1, dtype=torch.int32, device=device))
