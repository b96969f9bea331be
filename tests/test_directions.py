"""A gate per direction, against its definition in float64: biases as explicit sums, and autograd through them."""

import functools
import math

import pytest
import torch
from cached_layers import BACKENDS, DEVICE
from judged_calls import int32

from decayattn import DecayFlashAttention, decay_attention
from decayattn.nn import ScalarDecay, record_half_lives
from decayattn.probabilities import attention_rows, decay_matrix
from decayattn.testing import assert_within_budget, verify_attention, verify_attention_varlen

F64 = torch.float64
new = functools.partial(torch.randn, dtype=F64, device=DEVICE)


def make(length=37, dtype=F64, resets=0.05, batch=2):
    torch.manual_seed(0)
    gates = 0.1 - torch.rand(batch, length, 4, 2, dtype=F64 if dtype == F64 else torch.float32)
    found = {"log_decay": gates.masked_fill(torch.rand(gates.shape) < resets, -math.inf).to(DEVICE)}
    sizes = {"q": (4, 8), "k": (2, 8), "v": (2, 5)}
    return found | {name: new(batch, length, *size).to(dtype) for name, size in sizes.items()}


def sums(gates):
    """(B, H, T, T) from (B, T, H, 2): of the left gate over j < t ≤ i, of the right gate over i < t ≤ j."""
    tokens = range(gates.shape[1])
    return torch.stack([
        torch.stack([gates[:, min(i, j) + 1 : max(i, j) + 1, :, int(j > i)].sum(1) for j in tokens], -1) for i in tokens
    ], 2)


def define(q, k, v, log_decay, *, scale=None, window_size=(-1, -1), bias=None, sink=None):
    """out and lse."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scale = q.shape[3] ** -0.5 if scale is None else scale[..., None]
    token, (left, right) = torch.arange(q.shape[1], device=q.device), (99 if n < 0 else n for n in window_size)
    distance, hidden = token[:, None] - token, log_decay < -746
    seen = (sums(hidden.double()) == 0) & (distance <= left) & (distance >= -right)
    scores = torch.einsum("bihd,bjhd->bhij", q * scale, k) + sums(torch.where(hidden, 0.0, log_decay))
    if bias is not None:
        scores, seen = (scores, seen & bias) if bias.dtype == torch.bool else (scores + bias, seen)
    weights = scores.masked_fill(~seen, -math.inf).exp()
    total = weights.sum(-1) + (0.0 if sink is None else sink.exp()[:, None])
    weights = weights / torch.where(total > 0, total, 1.0)[..., None]
    return torch.einsum("bhij,bjhe->bihe", weights, v), total.log()


def results(attend, inputs, options):
    """out, lse and every gradient of a loss of both; rows that see nothing have lse −inf."""
    inputs = inputs | {name: x for name, x in options.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out, lse = attend(**options | leaves)
    torch.manual_seed(9)
    loss = (out * new(out.shape)).sum() + (lse * new(lse.shape))[~lse.isneginf()].sum()
    return [out, lse, *torch.autograd.grad(loss, list(leaves.values()))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [
    lambda: {},
    lambda: {"window_size": (5, 3), "sink": new(4)},
    lambda: {"window_size": (0, 1), "bias": new(4, 1, 37)},
    lambda: {"window_size": (-1, 0)},
    lambda: {"scale": new(2, 37, 4), "bias": new(37, 37)},
    lambda: {"bias": torch.rand(2, 1, 37, 37, device=DEVICE) < 0.1},
])
def test_two_gates_are_their_definition(options, backend):
    inputs, options = make(), options()
    expected = results(define, inputs, options)
    found = results(decay_attention, inputs, options | dict(causal=False, return_lse=True, backend=backend))
    p = attention_rows(inputs["q"], inputs["k"], inputs["log_decay"], range(37), causal=False, **options)
    out = torch.einsum("bhij,bjhe->bihe", p, inputs["v"].repeat_interleave(2, 2))
    for one, other in zip([out, *found], [expected[0], *expected], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert not found[2][:, 0].any()  # no pair has the first token between its two


def test_equal_gates_are_one():
    inputs = make() | {"causal": False}
    gates = inputs["log_decay"]
    both = decay_attention(**inputs | {"log_decay": gates[..., :1].expand(-1, -1, -1, 2)}, backend="reference")
    assert torch.equal(both, decay_attention(**inputs | {"log_decay": gates[..., 0]}, backend="reference"))
    both, left, right = (decay_matrix(x, causal=False) for x in (gates, *gates.unbind(-1)))
    assert torch.equal(both, left.tril() + right.triu(1))


@pytest.mark.parametrize("dtype", [
    torch.float32, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float16, F64)),
])
def test_two_gates_are_within_the_error_budget(dtype):
    inputs, options = make(150, dtype), dict(causal=False, backend="triton")
    for x in inputs.values():
        x[0, :3] = x[:, 140:] = math.nan
    ends = {"leftpad": int32(3, 0), "seqused": int32(140, 131)}
    bounds = {f"{name}_{side}": x.to(DEVICE) for side in "qk" for name, x in ends.items()}
    few = dict(sink=torch.randn(4, device=DEVICE), bias=torch.rand(150, 150, device=DEVICE) < 0.03)
    assert_within_budget(verify_attention(**inputs, **bounds, **options))
    assert_within_budget(verify_attention(**inputs, **bounds, **few, **options))
    packed = {name: x[0] for name, x in make(90, dtype, batch=1).items()}
    packed["q"][:4] = packed["k"][:4] = packed["log_decay"][85:] = math.nan
    options |= {f"cu_seqlens_{side}": int32(4, 40, 40, 41, 84).to(DEVICE) for side in "qk"}
    assert_within_budget(verify_attention_varlen(**packed, **options, sink=torch.randn(4, device=DEVICE)))


@pytest.mark.slow
def test_two_gates_compile_into_one_graph():
    attend = functools.partial(decay_attention, causal=False, window_size=(-1, 9), backend="triton", return_lse=True)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (20, 23):
        expected, found = (results(f, make(length, resets=0.0), {}) for f in (attend, compiled))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layer_with_two_gates_restarts_at_resets(backend):
    torch.manual_seed(0)
    decay = ScalarDecay(12, 4, directions=2, dtype=F64).to(DEVICE)
    torch.nn.init.normal_(decay.weight)
    options = dict(num_kv_heads=2, kv_shift=True, sink=True, qk_norm=True, dtype=F64, causal=False, backend=backend)
    layer = DecayFlashAttention(12, 4, decay=decay, **options).to(DEVICE)
    x, first = new(1, 30, 12), (torch.arange(30, device=DEVICE) == 11)[None]
    with record_half_lives(layer) as half_lives:
        parts = torch.cat([layer(x[:, :11]), layer(x[:, 11:])], 1)
    assert half_lives[""].shape == (4,)
    gates = decay(x).masked_fill(first[..., None, None], -math.inf)
    for given in ({"cu_seqlens": int32(0, 11, 30).to(DEVICE)}, {"resets": first}, {"log_decay": gates}):
        torch.testing.assert_close(layer(x, **given), parts)
    padded = torch.nn.functional.pad(x[:, :11], (0, 0, 3, 1), value=math.nan)
    mask = ~padded[..., 0].isnan()
    torch.testing.assert_close(layer(padded, padding_mask=mask)[mask], parts[0, :11])


@pytest.mark.parametrize(("change", "match"), [
    ({"causal": True}, r"log_decay: expected \(B, T_k, H\) with causal=True, got a gate per direction"),
    ({"q": torch.zeros(2, 5, 4, 8, dtype=F64)}, "q: expected the sequence length of k with a gate per direction, 37"),
    ({"log_decay": torch.zeros(2, 37, 4, 3)}, r"\(and \(B, T_k, H, 2\) with causal=False\), got \(2, 37, 4, 3\)"),
    ({"seqused_k": int32(3, 4)}, "log_decay: expected the same queries and keys in every sequence"),
])
def test_two_gates_refuse_other_arguments_by_name(change, match):
    inputs = {name: x.cpu() for name, x in make().items()} | {"causal": False}
    with pytest.raises(ValueError, match=match):
        decay_attention(**inputs | change)
    with pytest.raises(ValueError, match="causal: expected False with a gate per direction"):
        DecayFlashAttention(12, 4, decay=ScalarDecay(12, 4, directions=2))
    with pytest.raises(ValueError, match="directions: expected 1 or 2, got 3"):
        ScalarDecay(12, 4, directions=3)
