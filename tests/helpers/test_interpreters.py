"""Kernels without a GPU: arithmetic and memory of Triton's interpreter and of gluon_on_cpu; and groups of tests.

The order of warps is in backends/hopper/test_hopper_on_cpu.py.
"""

import json
import os
from copy import copy as copy_of
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import quick_interpreter
import torch
import triton
import triton.language as tl
from gluon_on_cpu import arrays, values
from gluon_on_cpu.arrays import Array, Pointer
from processes import run_python
from repository_files import ROOT
from triton.runtime import interpreter as triton_interpreter

SCRIPT = """
import hashlib, json, sys, torch
from decayattn import decay_attention_varlen
from decayattn.nn import DecayCache
from quick_interpreter import hurry
hurry() if sys.argv[1] == "hurry" else None
digest, added_up, offsets = hashlib.sha256(), [], torch.tensor([0, 13, 40], dtype=torch.int32)
for dtype in (torch.float16, torch.float32, torch.float64):
    wide = torch.promote_types(dtype, torch.float32)
    for causal in (True, False):
        torch.manual_seed(0)
        q, k, v = (torch.randn(40, heads, 8).to(dtype).requires_grad_() for heads in (4, 2, 2))
        log_decay, scale, sink = -torch.rand(40, 4, dtype=wide), torch.rand(40, 4, dtype=wide), torch.randn(4).to(wide)
        log_decay[[5, 35], 0] = -torch.inf
        leaves = [q, k, v, scale.requires_grad_(), sink.requires_grad_(), log_decay.requires_grad_()]
        out, lse = decay_attention_varlen(
            q, k, v, log_decay, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=27, max_seqlen_k=27,
            scale=scale, sink=sink, window_size=(9, 0 if causal else 3), causal=causal, return_lse=True,
            backend="triton",
        )
        *grads, of_decay = torch.autograd.grad(out.double().square().sum() + lse.double().sin().sum(), leaves)
        for x in (out, lse, *grads):
            digest.update(x.detach().contiguous().numpy().tobytes())
        added_up += of_decay.flatten().tolist()
cache = DecayCache(2, 70, num_heads=4, num_kv_heads=2, head_dim=8)
for tokens in (60, 1, 3):
    q, k, v = (torch.randn(2, tokens, heads, 8) for heads in (4, 2, 2))
    digest.update(cache.attend(q, k, v, -torch.rand(2, tokens, 4), backend="triton").contiguous().numpy().tobytes())
print(json.dumps([digest.hexdigest(), added_up]))
"""


@pytest.mark.slow  # two processes that import torch
def test_results_equal_the_plain_interpreter(interpreter):
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    (expected, expected_sums), (found, sums) = (
        json.loads(run_python("-c", SCRIPT, how, **environment)) for how in ("plain", "hurry")
    )
    assert found == expected
    assert sums == pytest.approx(expected_sums, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("rounding", [None, triton_interpreter._ir.ROUNDING_MODE.RTNE])
def test_bfloat16_is_converted_bit_by_bit(rounding):
    convert = getattr(triton_interpreter._convert_float, "__wrapped__", triton_interpreter._convert_float)
    bits = np.arange(2**16, dtype=np.uint32) * 40503 + (np.arange(2**16, dtype=np.uint32) << 16)
    for wide in (bits, bits & np.where(bits & 0x7F800000, 2**32 - 1, 2**31).astype(np.uint32)):  # without subnormals
        for data, *types in (
            (wide.view(np.float32).reshape(256, 256), tl.float32, tl.bfloat16),
            ((wide >> 16).astype(np.uint16), tl.bfloat16, tl.float32),
        ):
            found, expected = (f(data, *types, rounding) for f in (quick_interpreter.convert_bits(convert), convert))
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            assert np.array_equal(found, expected)


@triton.jit
def copy(source, target, first, count, SIZE: tl.constexpr):
    index = first + tl.arange(0, SIZE)
    value = tl.load(source + index, mask=index < count, other=0.0)
    tl.store(target + index, value, mask=index < count)


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted on a GPU")
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


@pytest.mark.xdist_group("alone")
def test_groups_of_xdist_reach_its_scheduler(request):
    """The scheduler reads groups at the end of a test's name."""
    remote = pytest.importorskip("xdist.remote")
    item, loadgroup = copy_of(request.node), SimpleNamespace(getvalue=lambda _: True)
    remote.WorkerInteractor.pytest_collection_modifyitems(None, loadgroup, [item])
    request.config.hook.pytest_collection_modifyitems(session=request.session, config=request.config, items=[item])
    assert item.nodeid.endswith("@alone")
