"""Calls for the error budget: inputs of every decay, padded and packed sequences, sinks; CUDA graphs; a compiler."""

import functools
import math
import os
import shutil

import torch

from decayattn import decay_attention
from decayattn.testing import assert_within_budget, verify_attention, verify_attention_varlen

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# for torch.compile; on a CPU, inductor calls a C++ compiler, and without one, tests are about one graph that is right
_CAN_COMPILE = ON_GPU or shutil.which(os.environ.get("CXX", "g++"))
COMPILER = "inductor" if _CAN_COMPILE else "aot_eager"


def make_inputs(
    dtype, decay="scalar", row_scale=False, rows=23, keys=23, heads=4, kv_heads=2, seed=0, *, batch=2, dim=16,
    device="cpu",
):
    """Keyword arguments of verify_attention; D_v = 8."""
    torch.manual_seed(seed)
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    new = dict(device=device, dtype=accumulator)
    gate = -torch.rand(batch, keys, heads, **new)
    log_decay = {
        "none": None,
        "number": -0.1,
        "constant": gate.new_tensor([-0.01, -0.1, 0.05, -1.0])[:heads],
        "scalar": gate,
        "resets": gate.masked_fill(torch.rand(gate.shape, device=device) < 0.1, -math.inf),
        "growth": gate + 0.5,
    }[decay]
    return {
        "q": torch.randn(batch, rows, heads, dim, device=device).to(dtype),
        "k": torch.randn(batch, keys, kv_heads, dim, device=device).to(dtype),
        "v": torch.randn(batch, keys, kv_heads, 8, device=device).to(dtype),
        "log_decay": log_decay,
        "scale": torch.randn(batch, rows, heads, **new) if row_scale else None,
    }


def int32(*numbers, device="cpu"):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def verify(inputs, backend, **options):
    """Judge a call, of packed sequences if it has their ends."""
    check = verify_attention_varlen if "cu_seqlens_q" in inputs.keys() | options else verify_attention
    assert_within_budget(check(**inputs, **options, backend=backend))


def captured(run, before=1):
    """(CUDA graph of a run, its results). before: number of runs before the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(before):
            run()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, run()


# rows and tokens outside of the sequences; sequences without rows, without keys, with more rows than keys
PACKING = dict(cu_seqlens_q=int32(1, 6, 6, 7, 18, 20), cu_seqlens_k=int32(0, 4, 6, 6, 19, 21))
PADDING = dict(seqused_q=int32(12, 23), seqused_k=int32(20, 9), leftpad_q=int32(2, 0), leftpad_k=int32(3, 0))


def first_entry(inputs):
    """Inputs of one batch entry as arguments of verify_attention_varlen."""
    return {name: x[0] if isinstance(x, torch.Tensor) and x.ndim > 1 else x for name, x in inputs.items()}


def make_packed_inputs(*args, **options):
    return first_entry(make_inputs(*args, **options)) | PACKING


def sink_rounds_once(backend, dtype, device, dim=64):
    """P is not rounded if all scores are 0: out is Σ v / (i + 1 + e^sink), rounded once. Rounded
    twice, one value of four differs."""
    v = torch.randn(1, 150, 2, dim, device=device, dtype=dtype)
    sink = torch.tensor([1.0, 4.0], device=device)
    out = decay_attention(torch.zeros_like(v), torch.zeros_like(v), v, sink=sink, backend=backend)
    rows = torch.arange(1, 151, device=device)[:, None].double()
    exact = v.double().cumsum(1) / (rows + sink.double().exp())[None, ..., None]
    assert (out == exact.to(dtype)).double().mean() > 0.98


def leading_sink_keeps_its_bits(backend, dtype, device, causal=True):
    """lse is that of the sink for a decay of thousands, of which a tile's scores lack a row's common part."""
    q, k, v = torch.randn(3, 1, 130, 2, 64, device=device, dtype=dtype)
    log_decay = -40 * torch.rand(1, 130, 2, device=device)
    sink = torch.tensor([8.3, 11.0], device=device)  # float16 would hold no other key next to e²⁰
    assert_within_budget(verify_attention(q, k, v, log_decay, sink=sink, causal=causal, backend=backend))


def sink_of_little_weight_counts(backend, dtype, device):
    """lse of a row that sees one key, of score 0, is the logarithm of 1 and a little, as exact as their sum."""
    q, k, v = torch.randn(3, 1, 130, 2, 64, device=device, dtype=dtype)
    sink = torch.tensor([-6.0, -9.0], device=device)
    assert_within_budget(verify_attention(q * 1e-3, k, v, sink=sink, window_size=(0, 0), backend=backend))


def sink_of_minus_infinity_is_none(backend, dtype, device):
    """Also in rows without a key."""
    q, k, v = (torch.randn(1, rows, 2, 64, device=device, dtype=dtype) for rows in (150, 90, 90))
    sink = torch.full((2,), -math.inf, device=device, requires_grad=True)
    options = dict(return_lse=True, backend=backend)
    found, expected = decay_attention(q, k, v, sink=sink, **options), decay_attention(q, k, v, **options)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        assert torch.equal(got.isneginf(), want.isneginf())
    found[0].sum().backward()
    assert not sink.grad.any()


# of (backend, dtype, device)
SINK_CHECKS = [
    sink_rounds_once, leading_sink_keeps_its_bits, functools.partial(leading_sink_keeps_its_bits, causal=False),
    sink_of_little_weight_counts, sink_of_minus_infinity_is_none,
]
