"""Interpreted kernels that leave their tensors raise."""

import pytest
import torch
import triton
import triton.language as tl

ON_GPU = torch.cuda.is_available()


@triton.jit
def copy(source, target, first, count, SIZE: tl.constexpr):
    index = first + tl.arange(0, SIZE)
    value = tl.load(source + index, mask=index < count, other=0.0)
    tl.store(target + index, value, mask=index < count)


@pytest.mark.skipif(ON_GPU, reason="nothing is interpreted on a GPU")
@pytest.mark.parametrize(("first", "count", "fault"), [
    (0, 10, None), (-1, 10, "reads 1 of 11"), (0, 11, "reads 1 of 11"), (2, 16, "reads 6 of 14"),
])
def test_an_address_outside_is_a_fault(first, count, fault):
    source, target = torch.arange(10.0), torch.empty(10)
    if fault is None:
        copy[(1,)](source, target, first, count, SIZE=16)
        assert torch.equal(source, target)
        return
    with pytest.raises(triton.runtime.errors.InterpreterError, match=fault):
        copy[(1,)](source, target, first, count, SIZE=16)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="writes"):
        copy[(1,)](torch.zeros(100)[50:], target, first, count, SIZE=16)
