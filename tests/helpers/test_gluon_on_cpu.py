"""Arithmetic and memory of gluon_on_cpu. The order of warps is in backends/hopper/test_hopper_on_cpu.py."""

import numpy as np
import pytest
import torch
from gluon_on_cpu import arrays, values
from gluon_on_cpu.arrays import Array, Pointer


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bits_round_as_in_torch(name):
    x = torch.cat([torch.randn(10_000) * 10.0 ** torch.randint(-12, 8, (10_000,)), torch.tensor([torch.inf, -0.0])])
    rounded = Array(x.numpy(), arrays.TYPES[name]).data
    assert torch.equal(torch.from_numpy(rounded), x.to(getattr(torch, name)).float())
    assert np.isnan(Array(np.float32(np.nan), arrays.TYPES[name]).data)


def test_access_outside_a_storage_raises():
    memory = torch.arange(10, dtype=torch.float32)
    pointer = Pointer.to(memory[2:]) + Array(np.arange(4), arrays.int32)
    assert values.load(pointer).data.tolist() == [2, 3, 4, 5]
    beyond = pointer + 6
    assert values.load(beyond, Array(np.arange(4) < 2, arrays.int1), -1.0).data.tolist() == [8, 9, -1, -1]
    with pytest.raises(IndexError, match="elements 8 to 11 of a storage of 10"):
        values.load(beyond)
    with pytest.raises(IndexError):
        values.store(pointer + -3, 0.0)
