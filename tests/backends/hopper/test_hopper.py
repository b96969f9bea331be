"""The Hopper kernels against the float64 oracle by the error budget, and against themselves over many runs."""

import math

import pytest
import torch
from hopper_problems import (
    BF16,
    PACKINGS,
    assert_rows_beside_larger_ones_are_right,
    assert_sums_at_the_edge_of_float32_are_right,
    int32,
    make,
    make_packed,
    make_padded,
    random_packing,
    row_scales,
    verify,
)
from judged_calls import (
    assert_a_leading_sink_keeps_its_bits,
    assert_a_sink_of_little_weight_is_within_the_budget,
    assert_a_sink_of_minus_infinity_is_none,
    assert_a_sink_rounds_once,
)

from decayattn import DecayFlashAttention, decay_attention, decay_attention_varlen, visited_fraction
from decayattn.backends import registry
from decayattn.backends.hopper import config
from decayattn.testing import assert_within_budget, verify_attention, verify_attention_varlen

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")]

@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
def test_every_decay_and_dtype(decay, dtype, dim):
    verify(make(decay=decay, dtype=dtype, dim=dim))


@pytest.mark.parametrize("value_dim", [8, 64, 104, 128, 200])
@pytest.mark.parametrize("dim", [8, 40, 64, 96, 128, 192, 256])
def test_other_head_dims(dim, value_dim):
    """Tiles are filled up with zeros to 64 or 128 columns, and only those of the tensors are written."""
    dims = dict(dim=dim, value_dim=value_dim)
    verify(make(300, 427, heads=4, kv_heads=2, **dims))
    verify(make_packed([300, 1, 77], **dims, decay="constant"))
    inputs = make(**dims, dtype=torch.float16, decay="none")
    # columns beside a slice hold what must not be read
    verify({name: torch.cat([x, x * math.nan], -1)[..., : x.shape[-1]] for name, x in inputs.items() if x is not None})


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("length", [1, 15, 63, 65, 127, 129, 257, 1000])
def test_lengths_that_divide_nothing(length, dim):
    verify(make(length, dim=dim))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
def test_scales_of_rows(decay, dim, causal):
    for per, dtype in (("row", BF16), ("row", torch.float16), ("head", torch.float16)):
        inputs = make(300, 427, heads=4, kv_heads=2, decay=decay, dim=dim, dtype=dtype)
        verify(inputs, causal=causal, scale=row_scales(inputs, per))
    inputs = make_packed(*PACKINGS[2], decay=decay, dim=dim, resets=0.01)
    verify(inputs, causal=causal, scale=row_scales(inputs), window_size=(140, 0) if causal else (-1, -1))
    inputs = make_padded(decay=decay, dim=dim)
    verify(inputs, causal=causal, scale=row_scales(inputs))


@pytest.mark.parametrize("dims", [(8, 64), (40, 200), (136, 40), (136, 200), (192, 192), (248, 40), (64, 256)])
def test_scales_of_rows_at_other_head_dims(dims):
    inputs = make(300, 427, heads=4, kv_heads=2, dim=dims[0], value_dim=dims[1])
    verify(inputs, scale=row_scales(inputs))


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_a_scale_per_row_skips_and_does_tiles_again(dim):
    inputs = make(2000, heads=2, dim=dim, strength=0.5)
    verify(inputs, scale=row_scales(inputs))
    inputs = make(700, heads=3, dim=dim, strength=1e-3)
    inputs["k"][:, 5] *= 60
    verify(inputs, scale=row_scales(inputs))


LAST_ROWS = [(1, 1000), (37, 150), (130, 140), (300, 427), (150, 37), (300, 130), (200, 1), (200, 1000)]


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("lengths", LAST_ROWS)
def test_queries_are_the_last_rows(lengths, dim):
    for decay in ("none", "constant", "scalar"):
        verify(make(*lengths, decay=decay, dim=dim))


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("heads", [(2, 1), (6, 2), (8, 1)])
def test_grouped_queries(heads, dim):
    verify(make(500, heads=heads[0], kv_heads=heads[1], dim=dim))
    verify(make(77, 500, heads=heads[0], kv_heads=heads[1], dim=dim, decay="constant"))


@pytest.mark.parametrize("cache", [1, 2 << 20, 3 << 20])  # for 1, 2 and 3 heads of keys
def test_heads_that_are_worked_at_together(cache, monkeypatch):
    monkeypatch.setattr(config, "CACHE_BYTES", cache)
    monkeypatch.setattr(config, "MIN_CHUNK_TILES", 1)
    for decay in ("scalar", "constant"):
        verify(make(1000, heads=6, kv_heads=3, decay=decay))
        verify(make(300, batch=1, heads=7, decay=decay))
        verify(make(1000, heads=6, kv_heads=3, decay=decay, strength=2.0), skip_tolerance=1e-6)
    verify(make_packed([300, 1, 1000, 77], heads=6, kv_heads=3))


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("share", [0.003, 0.03, 0.5, 1.0])
def test_resets(share, dim):
    inputs = make(1025, dim=dim)
    inputs["log_decay"][torch.rand_like(inputs["log_decay"]) < share] = -torch.inf
    verify(inputs)
    verify(inputs | dict(q=inputs["q"][:, -700:]))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(1000, 1000), (700, 1100)])
@pytest.mark.parametrize(("dim", "dtype"), [(64, BF16), (64, torch.float16), (128, BF16), (128, torch.float16)])
def test_the_own_pair_has_no_part_in_the_gradient_of_a_rate(dim, dtype, lengths, causal):
    """Its dS is about the gradient of lse here, and all others are a millionth of it."""
    inputs = make(*lengths, heads=3, decay="constant", dim=dim, dtype=dtype)
    rates = torch.tensor([-14.0, -17.0, -20.0], device=inputs["q"].device)
    verify(inputs | dict(log_decay=rates), causal=causal)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_strong_decay_and_growth(dim):
    for strength in (2.5, 100.0):
        verify(make(600, dim=dim, strength=strength))
    inputs = make(600, dim=dim)
    verify(inputs | dict(log_decay=-inputs["log_decay"]))
    verify(inputs | dict(log_decay=torch.randn_like(inputs["log_decay"])))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("far", [slice(1), slice(640, 641), slice(None, None, 97)])
def test_far_keys_that_outweigh_the_own(far, dim):
    """By 0 to 120 in some heads: sums of some items overflow, which are sent again; of the last ones, too."""
    for decay in ("none", "constant", "scalar"):
        inputs = make(1500, batch=3, heads=8, kv_heads=4, dim=dim, decay=decay, strength=1e-3)
        inputs["q"][..., 0] = 8.0
        there = inputs["k"][:, far, ::3, 0]
        there.copy_(120 * dim**0.5 / 8 * torch.rand_like(there))
        verify(inputs)
    verify(make_packed([700, 1, 300, 77], dim=dim) | dict(scale=3.0))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
def test_sums_at_the_edge_of_float32(decay, dim):
    assert_sums_at_the_edge_of_float32_are_right(decay, dim)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_beside_ones_with_far_larger_scores(dim):
    assert_rows_beside_larger_ones_are_right(dim)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("size", "far"), [(1e25, 30.0), (1e34, 10.0), (3e36, 0.0)])
def test_large_values(size, far, dim):
    """Results are no larger than the values, but a sum of p v would be: where a far key outweighs the own, and where
    all keys weigh the same."""
    for decay, causal in (("none", True), ("constant", True), ("scalar", True), ("constant", False)):
        inputs = make(1100, heads=2, dim=dim, decay=decay, strength=1e-3)
        # where a key has all weight nothing is left of dq
        inputs["q"][:, ::2, :, 0], inputs["q"][:, 1::2, :, 0] = 8.0, 0.0
        inputs["k"][:, 7, :, 0] = far * (dim / 64) ** 0.5
        inputs["v"] = inputs["v"].sign() * size
        verify(inputs, causal=causal, skip_tolerance=None, grad_out=torch.randn_like(inputs["q"]) * 1e-3)
        out = decay_attention(**inputs, causal=causal, skip_tolerance=None, backend="hopper")
        again = decay_attention(**inputs, causal=causal, skip_tolerance=None, backend="hopper")
        assert torch.equal(out, again)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_a_nan_stays_in_its_row(dim):
    inputs = make(1500, dim=dim, decay="none")
    expected = decay_attention(**inputs, backend="hopper")
    inputs["q"][1, 1200, 2, 5] = math.nan
    out = decay_attention(**inputs, backend="hopper")
    assert out[1, 1200, 2].isnan().all()
    out[1, 1200, 2] = expected[1, 1200, 2]
    torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_strides(dim):
    q, k, v = torch.randn(2, 300, 3, 4, dim, device="cuda", dtype=BF16).unbind(2)
    verify(dict(q=q, k=k, v=v, log_decay=torch.tensor(-0.1, device="cuda")))
    expanded = torch.randn((), device="cuda", dtype=BF16).expand(2, 300, 4, dim)
    verify(dict(q=q, k=k, v=v, log_decay=None), grad_out=expanded)


@pytest.mark.parametrize("shift", [1, 3, 8])  # elements of 2 bytes; 16 bytes are an address that can be read from
def test_gradients_that_lie_anywhere(shift):
    """The gradient of a concatenation is a slice of another's: contiguous, at any address."""
    for inputs in (make(300), make_packed([300, 0, 77], outside=0)):
        memory = torch.randn(inputs["q"].numel() + shift, device="cuda", dtype=BF16)
        verify(inputs, grad_out=memory[shift:].view_as(inputs["q"]))


@pytest.mark.parametrize("backend", ["hopper", "auto"])
def test_the_gradient_of_a_concatenation(backend):
    """Twice: kernels that are remembered are those of aligned tensors."""
    leaves = [x.requires_grad_() for x in make(1500).values()]
    weights = torch.randn(3 + leaves[2].numel(), device="cuda", dtype=BF16)

    def gradients(beside: int) -> tuple[torch.Tensor, ...]:
        out = decay_attention(*leaves, backend=backend)
        together = torch.cat([torch.zeros(beside, device="cuda", dtype=BF16), out.flatten()])
        return torch.autograd.grad((together * weights[3 - beside :]).sum(), leaves)

    expected = gradients(0)
    for _ in range(2):
        for found, aligned in zip(gradients(3), expected, strict=True):
            assert (found - aligned).norm() < 0.01 * aligned.norm()


@pytest.mark.parametrize("backend", ["hopper", "auto"])
@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
def test_no_heads(decay, backend):
    leaves = {name: x.requires_grad_() for name, x in make(heads=0, kv_heads=2, decay=decay).items() if x is not None}
    out, lse = decay_attention(**leaves, return_lse=True, backend=backend)
    assert (out.shape, lse.shape) == ((2, 333, 0, 64), (2, 0, 333))
    for gradient in torch.autograd.grad(out.sum() + lse.sum(), list(leaves.values())):
        assert (gradient == 0).all()
    places = dict(cu_seqlens_q=int32(0, 300, 333), cu_seqlens_k=int32(0, 300, 333), max_seqlen_q=300, max_seqlen_k=300)
    packed = {name: x if x.ndim == 1 else x[0] for name, x in leaves.items()}
    assert decay_attention_varlen(**packed, **places, backend=backend).shape == (333, 0, 64)


# Windows


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("left", [0, 1, 63, 64, 200, 5000])
def test_windows(left, dim):
    for decay in ("none", "constant", "scalar"):
        verify(make(700, decay=decay, dim=dim), window_size=(left, 0))
    inputs = make(700, heads=6, kv_heads=2, dim=dim)
    inputs["log_decay"][torch.rand_like(inputs["log_decay"]) < 0.01] = -torch.inf
    verify(inputs, window_size=(left, -1))


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("lengths", [(1, 1000), (130, 140), (37, 700), (150, 37), (500, 130), (200, 1)])
def test_windows_of_the_last_rows(lengths, dim):
    for decay, left in (("none", 64), ("constant", 1), ("scalar", 129)):
        verify(make(*lengths, decay=decay, dim=dim), window_size=(left, 0))


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("window", [(0, 0), (64, -1), (-1, 1), (300, 127), (5, 5000)])
def test_windows_to_both_sides(window, dim):
    for decay in ("none", "constant", "scalar"):
        inputs = make(500, 700, heads=6, kv_heads=2, decay=decay, dim=dim)
        if decay == "constant":
            inputs["log_decay"][0] = -torch.inf
        elif decay == "scalar":
            inputs["log_decay"][torch.rand_like(inputs["log_decay"]) < 0.01] = -torch.inf
        verify(inputs, causal=False, window_size=window)
        if decay != "scalar":
            # rows before all keys, which see none or the first ones
            verify(make(700, 140, decay=decay, dim=dim), causal=False, window_size=window)


# Not causal: both sides of the diagonal


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
def test_both_sides(decay, dim):
    for lengths in [(1, 1), (333, 333), (65, 1000), (1, 700), (500, 501), (385, 385)]:
        verify(make(*lengths, decay=decay, dim=dim), causal=False)
    verify(make(300, heads=6, kv_heads=2, decay=decay, dim=dim, dtype=torch.float16), causal=False)
    verify(make(77, 500, heads=8, kv_heads=1, decay=decay, dim=dim), causal=False)
    if decay != "scalar":  # rows before the first key would have no decay
        verify(make(500, 130, decay=decay, dim=dim), causal=False)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("share", [0.003, 0.03, 0.5, 1.0])
def test_resets_on_both_sides(share, dim):
    inputs = make(1025, dim=dim)
    inputs["log_decay"][torch.rand_like(inputs["log_decay"]) < share] = -torch.inf
    verify(inputs, causal=False)
    verify(inputs | dict(q=inputs["q"][:, -700:]), causal=False)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_strong_decay_and_growth_on_both_sides(dim):
    # of stronger rates the gradient, 1e-6 and less, is lost in float32 sums of dS (i − j)
    verify(make(600, dim=dim, strength=2.5, decay="constant"), causal=False)
    for strength in (2.5, 100.0):
        verify(make(600, dim=dim, strength=strength), causal=False)
    inputs = make(600, dim=dim)
    verify(inputs | dict(log_decay=-inputs["log_decay"]), causal=False)
    verify(inputs | dict(log_decay=torch.randn_like(inputs["log_decay"])), causal=False)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
def test_both_sides_in_sequences(decay, dim):
    for packing in PACKINGS:
        verify(make_packed(*packing, decay=decay, dim=dim, heads=4, kv_heads=2, resets=0.01), causal=False)
    verify(make_padded(decay=decay, dim=dim), causal=False)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_far_keys_on_both_sides_that_outweigh_the_own(dim):
    for decay in ("none", "constant", "scalar"):
        inputs = make(1500, batch=3, heads=8, kv_heads=4, dim=dim, decay=decay, strength=1e-3)
        inputs["q"][..., 0] = 8.0
        there = inputs["k"][:, ::97, ::3, 0]
        there.copy_(120 * dim**0.5 / 8 * torch.rand_like(there))
        verify(inputs, causal=False)


@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
def test_both_sides_forward_here_and_backward_elsewhere(decay):
    torch.use_deterministic_algorithms(True)
    try:
        assert_within_budget(verify_attention(**make(1500, dim=128, decay=decay), causal=False, backend="auto"))
    finally:
        torch.use_deterministic_algorithms(False)


# Sequences. The oracle evaluates every one alone, so whatever crosses a boundary shows


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
@pytest.mark.parametrize("packing", range(len(PACKINGS)))
def test_packings(packing, decay, dim):
    verify(make_packed(*PACKINGS[packing], decay=decay, dim=dim, resets=0.01))


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_many_short_sequences(dim):
    verify(make_packed(*random_packing(1, 200, 40), heads=1, dim=dim))


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("heads", [(6, 2), (8, 1)])
def test_packings_of_groups_windows_and_sinks(heads, dim):
    for decay, left in (("none", 0), ("constant", 200), ("scalar", 63), ("scalar", -1)):
        inputs = make_packed(*PACKINGS[2], heads=heads[0], kv_heads=heads[1], dim=dim, decay=decay, dtype=torch.float16)
        verify(inputs, window_size=(left, 0))
        verify(inputs | dict(sink=torch.randn(heads[0], device="cuda")), window_size=(left, 0))


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 64), (torch.float16, 128)])
def test_a_sink_leaves_one_rounding(dtype, dim):
    assert_a_sink_rounds_once("hopper", dtype, "cuda", dim)


@pytest.mark.parametrize("causal", [True, False])
def test_a_leading_sink_keeps_its_bits(causal):
    assert_a_leading_sink_keeps_its_bits("hopper", torch.bfloat16, "cuda", causal)


def test_a_sink_of_little_weight():
    assert_a_sink_of_little_weight_is_within_the_budget("hopper", torch.bfloat16, "cuda")


def test_a_sink_of_minus_infinity_is_none():
    assert_a_sink_of_minus_infinity_is_none("hopper", torch.bfloat16, "cuda")


def test_packed_strides_and_what_lies_beyond_the_longest():
    inputs = make_packed([150, 0, 300, 77], dim=128)
    qkv = torch.stack([inputs[name] for name in "qkv"], 1)
    verify(inputs | dict(zip("qkv", qkv.unbind(1), strict=True)))
    verify(inputs, max_seqlen_q=200, max_seqlen_k=130)
    expanded = torch.randn((), device="cuda", dtype=BF16).expand(inputs["q"].shape)
    verify(inputs, grad_out=expanded)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
def test_padding(decay, dim):
    inputs = make_padded(decay=decay, dim=dim)
    verify(inputs)
    verify(inputs, window_size=(64, 0))


def test_lengths_that_change_under_a_cuda_graph():
    inputs = make_packed([300, 100, 200], [300, 100, 200], outside=0)
    offsets = inputs["cu_seqlens_q"]
    leaves = {name: inputs[name].nan_to_num().requires_grad_() for name in ("q", "k", "v", "log_decay")}
    grad_out = torch.randn_like(leaves["q"])

    def run() -> tuple[torch.Tensor, ...]:
        out = decay_attention_varlen(
            **leaves, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=600, max_seqlen_k=600, backend="hopper"
        )
        return out, *torch.autograd.grad(out, list(leaves.values()), grad_out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for ends in ([0, 300, 400, 600], [0, 0, 0, 600], [0, 1, 590, 595], [0, 0, 0, 0], [0, 200, 300, 600]):
        offsets.copy_(int32(*ends))
        graph.replay()
        for replayed, expected in zip(captured, run(), strict=True):
            torch.testing.assert_close(replayed, expected, rtol=1e-2, atol=1e-3)
        assert (captured[0][ends[-1] :] == 0).all()


# Runs


@pytest.mark.parametrize("decay", ["scalar", "constant"])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_far_tiles_are_skipped(dim, decay):
    """With far values, and the output gradients of far rows, NaN: what is visited turns NaN."""
    inputs = make(1500, heads=4, kv_heads=2, dim=dim, decay=decay)
    inputs["log_decay"] = inputs["log_decay"] * 5 - 0.5
    assert visited_fraction(inputs["q"], inputs["k"], inputs["log_decay"]).max() < 0.4
    verify(inputs)
    verify(inputs | dict(q=inputs["q"][:, -700:]))
    poisoned = inputs | dict(v=inputs["v"].clone())
    poisoned["v"][:, :256] = torch.nan
    assert decay_attention(**poisoned, backend="hopper")[:, 1024:].isfinite().all()
    assert decay_attention(**poisoned, backend="hopper", skip_tolerance=None)[:, 1024:].isnan().all()
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    grad_out = torch.randn_like(inputs["q"][..., : inputs["v"].shape[-1]])
    grad_out[:, 1024:] = torch.nan
    for tolerance, finite in (("auto", True), (None, False)):
        out = decay_attention(**leaves, backend="hopper", skip_tolerance=tolerance)
        _, d_k, d_v = torch.autograd.grad(out, [leaves[name] for name in "qkv"], grad_out)
        assert bool(d_k[:, :256].isfinite().all() and d_v[:, :256].isfinite().all()) == finite


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_skipping_in_packed_sequences_and_windows(dim):
    lengths = (700, 0, 65, 1300, 1)
    inputs = make(sum(lengths), batch=1, dim=dim)
    packed = {name: x[0] for name, x in inputs.items()}
    packed["log_decay"] = packed["log_decay"] * 5 - 0.3
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    places = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=1300, max_seqlen_k=1300)
    assert_within_budget(verify_attention_varlen(**packed, **places, backend="hopper"))
    assert_within_budget(verify_attention_varlen(**packed, **places, window_size=(300, 0), backend="hopper"))
    packed["v"][765 : 765 + 256] = torch.nan  # of the fourth sequence
    out = decay_attention_varlen(**packed, **places, backend="hopper")
    assert out[765 + 1024 :].isfinite().all()
    assert out[:765].isfinite().all()


@pytest.mark.parametrize("layout", ["dense", "packed", "both sides"])
@pytest.mark.parametrize("decay", ["none", "scalar"])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_runs_repeat(dim, decay, layout):
    """200 runs: a race moves results by more than rounding. Only what is added up by atomics may move at all.

    Every other run asks for lse: a kernel of its own, and the same results.
    """
    function, options = decay_attention, dict(causal=layout != "both sides")
    inputs = make(2048, heads=8, kv_heads=4, dim=dim, decay=decay)
    if layout == "packed":
        function = decay_attention_varlen
        inputs = make_packed(*random_packing(2, 20, 500), heads=8, kv_heads=4, dim=dim, decay=decay, outside=0)
        options = {name: inputs.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        options |= dict(max_seqlen_q=500, max_seqlen_k=500, window_size=(200, 0))
        inputs = {name: None if x is None else x.nan_to_num() for name, x in inputs.items()}
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if x is not None}
    grad_out = torch.randn_like(inputs["q"][..., : inputs["v"].shape[-1]])

    def run(return_lse: bool) -> dict[str, torch.Tensor]:
        out = function(**inputs, **options, return_lse=return_lse, backend="hopper")
        results = dict(zip(("out", "lse"), out if return_lse else (out,), strict=False))
        grads = torch.autograd.grad(results["out"], list(leaves.values()), grad_out)
        return results | dict(zip(leaves, grads, strict=True))

    first = run(True)
    for n in range(1, 200):
        for name, x in run(n % 2 == 0).items():
            if name in ("out", "lse", "k", "v"):
                assert torch.equal(x, first[name]), name
            else:
                # dλ is float32, and a small difference of sums: its rounding is many times that of a number
                error = (x.double() - first[name].double()).norm() / first[name].double().norm()
                assert error < (2**-14 if name == "log_decay" else torch.finfo(x.dtype).eps), name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(scale=0.0), "scale of at least"),
        (dict(v=torch.zeros(2, 333, 4, 36, dtype=BF16)), "multiples of 8 as D_v, not 36"),
    ],
)
def test_refusals_name_the_reason(change, reason):
    change = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    with pytest.raises(ValueError, match=reason):
        decay_attention(**make() | change, backend="hopper")


def test_tensors_that_tma_cannot_address_are_refused():
    q = torch.zeros(2, 333, 4, 65, device="cuda", dtype=BF16)[..., 1:]
    with pytest.raises(ValueError, match="TMA cannot address q"):
        decay_attention(**make() | dict(q=q), backend="hopper")


def test_padded_batches_that_are_not_one_token_axis_are_refused():
    x = torch.zeros(2, 4, 333, 64, device="cuda", dtype=BF16).transpose(1, 2)
    decay_attention(x, x, x, backend="hopper")
    with pytest.raises(ValueError, match="TMA cannot address sequences in q"):
        decay_attention(x, x, x, seqused_k=int32(5, 333), backend="hopper")


def test_packed_forward_here_and_backward_elsewhere():
    """torch.use_deterministic_algorithms: what these kernels save serves the portable backward."""
    inputs = make_packed(*PACKINGS[2], dim=128, resets=0.01)
    torch.use_deterministic_algorithms(True)
    try:
        assert_within_budget(verify_attention_varlen(**inputs, window_size=(100, 0), backend="auto"))
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_gradients():
    """By name there are none; "auto" takes these kernels forward, and a backward that repeats bit by bit."""
    leaves = {name: x.requires_grad_() for name, x in make(1500, dim=128).items()}
    grad_out = torch.randn_like(leaves["q"])

    def gradients(backend: str) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(decay_attention(**leaves, backend=backend), list(leaves.values()), grad_out)

    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="no deterministic backward"):
            gradients("hopper")
        first = gradients("auto")
        for _ in range(49):
            assert all(map(torch.equal, first, gradients("auto")))
        inputs = {name: x.detach() for name, x in leaves.items()}
        assert_within_budget(verify_attention(**inputs, backend="auto", grad_out=grad_out))
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="'hopper': it has no deterministic backward"):
            gradients("hopper")
    finally:
        torch.use_deterministic_algorithms(False)


def test_new_tokens_over_a_cache_are_refused():
    """Not decoded by other kernels, in silence; the first tokens of all are an ordinary call."""
    layer = DecayFlashAttention(256, 4, backend="hopper", device="cuda", dtype=BF16)
    x = torch.randn(2, 301, 256, device="cuda", dtype=BF16)
    with torch.no_grad():
        cache = layer.make_cache(2, 400)
        assert torch.equal(layer(x[:, :300], cache=cache), layer(x[:, :300]))
        with pytest.raises(ValueError, match="'hopper' cannot take this problem: it has no kernels for new tokens"):
            layer(x[:, 300:], cache=cache)
        layer.backend = "auto"
        layer(x[:, 300:], cache=cache)
    assert cache.longest == 301


def test_auto_takes_them_where_they_take_the_problem_and_pay(monkeypatch):
    ran = []
    for name in registry.KERNELS:
        module = registry.load(name)
        monkeypatch.setattr(module, "forward", lambda *a, n=name, f=module.forward: (ran.append(n), f(*a))[1])
    inputs = make(770, 2000)
    decay_attention(**inputs)
    decay_attention(**inputs, causal=False)
    decay_attention(**inputs | dict(q=torch.zeros(2, 770, 4, 65, device="cuda", dtype=BF16)[..., 1:]))
    decay_attention(**inputs, scale=-1.0)
    decay_attention(**inputs, window_size=(64, 0))
    decay_attention(**inputs, seqused_k=int32(150, 200))
    decay_attention(**inputs, bias=torch.zeros(770, 2000, device="cuda"))
    packed = make_packed([30, 40])
    decay_attention_varlen(**packed, max_seqlen_q=40, max_seqlen_k=40)
    decay_attention(**make(77, 200))  # so few tokens that Triton's kernels are faster
    assert ran == ["hopper", "hopper", "triton", "triton", "hopper", "hopper", "triton", "hopper", "triton"]
