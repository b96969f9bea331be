"""Arithmetic and memory of gluon_on_cpu. The order of warps is in backends/hopper/test_hopper_on_cpu.py."""

import numpy as np
import pytest
import torch
from gluon_on_cpu import arrays, machine, shared_memory, values
from gluon_on_cpu.arrays import Array, Pointer
from triton.experimental.gluon import language as gl

INTEGERS = np.array([-7, -4, -1, 0, 1, 4, 7])


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bits_round_as_in_torch(name):
    x = torch.cat([torch.randn(10_000) * 10.0 ** torch.randint(-12, 8, (10_000,)), torch.tensor([torch.inf, -0.0])])
    rounded = Array(x.numpy(), arrays.TYPES[name]).data
    assert torch.equal(torch.from_numpy(rounded), x.to(getattr(torch, name)).float())
    assert np.isnan(Array(np.float32(np.nan), arrays.TYPES[name]).data)


@pytest.mark.parametrize("divisor", [3, -3, 1])
def test_integers_are_divided_towards_0(divisor):
    x = Array(INTEGERS, arrays.int32)
    expected = torch.div(torch.from_numpy(INTEGERS), divisor, rounding_mode="trunc")
    assert ((x // divisor).data == expected.numpy()).all()
    assert ((x % divisor).data == torch.fmod(torch.from_numpy(INTEGERS), divisor).numpy()).all()


def test_common_types():
    integer, long, half, single = (Array(3, arrays.TYPES[name]) for name in ("int32", "int64", "float16", "float32"))
    assert (integer + 1).dtype is arrays.int32
    assert (integer + 2**40).dtype is (integer + long).dtype is arrays.int64
    assert (integer * 0.5).dtype is (half + single).dtype is (long * single).dtype is arrays.float32
    assert (half * 2).dtype is (half * 0.1).dtype is arrays.float16
    assert (integer + (integer > 2)).dtype is arrays.int32
    assert (1 << Array(31, arrays.int32)).data == -(2**31)


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


def test_shared_memory_consists_of_panels():
    """128 bytes wide: the operand of 16 rows × 128 columns is two consecutive tiles of 16 × 64."""
    wide, narrow = ([gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16) for shape in ([16, 128], [8, 64])])
    program = machine.Program(machine.Machine(0), 0, 1)
    buffer = shared_memory.allocate(program, arrays.bfloat16, [2, 16, 128], wide)
    tiles = buffer.reinterpret(arrays.bfloat16, [8, 8, 64], narrow)
    assert (tiles.index(0).at == buffer.index(0).slice(0, 8).slice(0, 64, 1).at).all()
    assert (tiles.index(1).at == buffer.index(0).slice(8, 8).slice(0, 64, 1).at).all()
    assert (tiles.index(6).at == buffer.index(1).slice(0, 8).slice(64, 64, 1).at).all()
    assert sorted(tiles.at.flatten()) == sorted(buffer.at.flatten()) == list(range(2 * 16 * 128))
    with pytest.raises(ValueError, match="as 512 elements, a buffer of 4096"):
        buffer.reinterpret(arrays.bfloat16, [8, 64], narrow)
