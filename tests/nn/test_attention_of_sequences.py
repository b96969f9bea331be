"""The layer on sequences as people have them: padded, packed, cut into documents; windows, sinks, and a cache."""

import contextlib
import itertools
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from decayattn import DecayFlashAttention, decay_attention
from decayattn.nn import ConstantDecay, DecayCache

LENGTHS = [9, 0, 1, 23]
LONGEST = 25
DECAYS = ["scalar", "constant", "none"]


def layer_of(decay="scalar", **options) -> DecayFlashAttention:
    decay = ConstantDecay.alibi(4, learned=True) if decay == "constant" else decay
    layer = DecayFlashAttention(16, 4, num_kv_heads=2, decay=decay, output_gate=True, **options).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in ("sink", "decay.weight"):
                parameter.normal_()
    return layer


def gradients(layer: nn.Module, out: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(out, list(layer.parameters()), grad))


def alone(layer, sequences, grads):
    """Outputs of every sequence by itself, and the parameters' gradients of all of them."""
    outs = [layer(x[None])[0] if len(x) else x for x in sequences]
    joined = torch.cat(outs)
    return outs, gradients(layer, joined, torch.cat(grads))


@pytest.mark.parametrize("options", [{}, dict(window_size=(5, 2), sink=True), dict(causal=False)], ids=str)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_a_padded_batch_is_its_sequences(side, decay, options):
    layer = layer_of(decay, **options)
    sequences, grads = ([torch.randn(n, 16).double() for n in LENGTHS] for _ in range(2))
    x = 1e3 * torch.randn(len(LENGTHS), LONGEST, 16).double()
    mask = torch.zeros(len(LENGTHS), LONGEST, dtype=torch.bool)
    for row, (n, sequence) in enumerate(zip(LENGTHS, sequences, strict=True)):
        start = {"left": LONGEST - n, "right": 0, "both": (LONGEST - n) // 2}[side]
        mask[row, start : start + n] = True
        x[row, start : start + n] = sequence
    out = layer(x, padding_mask=mask)
    expected, expected_gradients = alone(layer, sequences, grads)
    torch.testing.assert_close(out[mask], torch.cat(expected))
    assert torch.equal(out[~mask], torch.zeros_like(out[~mask]))
    found = gradients(layer, out[mask], torch.cat(grads))
    torch.testing.assert_close(found, expected_gradients)


@pytest.mark.parametrize("options", [{}, dict(window_size=(5, 2), sink=True), dict(causal=False)], ids=str)
@pytest.mark.parametrize("decay", DECAYS)
def test_packed_sequences_are_themselves(decay, options):
    layer = layer_of(decay, **options)
    sequences, grads = ([torch.randn(n, 16).double() for n in LENGTHS] for _ in range(2))
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    expected, expected_gradients = alone(layer, sequences, grads)
    for max_seqlen in (None, max(LENGTHS)):
        out = layer(torch.cat(sequences)[None], cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)[0]
        torch.testing.assert_close(out, torch.cat(expected))
        torch.testing.assert_close(gradients(layer, out, torch.cat(grads)), expected_gradients)


@pytest.mark.parametrize("causal", [True, False])
def test_resets_and_packing_keep_documents_apart_alike(causal):
    layer = layer_of("scalar", causal=causal, sink=True)
    lengths = [n for n in LENGTHS if n]
    x, grad = torch.randn(2, 1, sum(lengths), 16).double()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    resets = torch.zeros(1, sum(lengths), dtype=torch.bool)
    resets[0, cu_seqlens[:-1].long()] = True
    packed, reset = layer(x, cu_seqlens=cu_seqlens), layer(x, resets=resets)
    torch.testing.assert_close(packed, reset)
    torch.testing.assert_close(gradients(layer, packed, grad), gradients(layer, reset, grad))
    assert not torch.allclose(packed, layer(x))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("decay", DECAYS)
def test_a_cache_with_a_window_and_a_sink(decay, backend, device):
    layer = layer_of(decay, window_size=(6, 0), sink=True, backend="reference").to(device)
    x = torch.randn(2, 20, 16).double().to(device)
    with torch.no_grad():
        expected = layer(x)
        layer.backend = backend
        cache = layer.make_cache(2, 20)
        steps = [layer(part, cache=cache) for part in x.split([7, 1, 1, 4, 1, 6], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), expected)


def test_a_cache_with_resets():
    layer = layer_of("scalar")
    x = torch.randn(2, 12, 16).double()
    resets = torch.zeros(2, 12, dtype=torch.bool)
    resets[0, 3] = resets[1, 9] = resets[1, 10] = True
    with torch.no_grad():
        cache = layer.make_cache(2, 12)
        steps = [
            layer(part, cache=cache, resets=which)
            for part, which in zip(x.split([5, 1, 6], 1), resets.split([5, 1, 6], 1), strict=True)
        ]
        torch.testing.assert_close(torch.cat(steps, 1), layer(x, resets=resets))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("kind", ["plain", "padded", "reset", "packed", "memory"])
def test_one_graph_for_every_length(kind, backend, device):
    layer = DecayFlashAttention(16, 4, window_size=(5, 0), sink=True, backend=backend, device=device)
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for length in (9, 14, 23):
        x = torch.randn(1 if kind == "packed" else 3, length, 16, device=device)
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=device)
        mask[0, :4] = False
        cu_seqlens = torch.tensor([0, 4, length], dtype=torch.int32, device=device)
        options = {
            "plain": {}, "padded": dict(padding_mask=mask), "reset": dict(resets=~mask),
            "packed": dict(cu_seqlens=cu_seqlens, max_seqlen=length),
            "memory": dict(memory=x[:, 2:] + 1, memory_padding_mask=mask[:, 2:], log_decay=-x[:, 2:, :4].abs()),
        }[kind]
        with torch.no_grad():
            expected = layer(x, **options)  # first, because einops learns of torch in its first call, and guards it
            torch.testing.assert_close(compiled(x, **options), expected)
    assert counter.frame_count == 1


def test_the_sink_is_learned_and_starts_at_zero():
    layer = DecayFlashAttention(16, 4, sink=True)
    assert torch.equal(layer.sink, torch.zeros(4))
    x = torch.randn(1, 10, 16)
    layer(x).square().sum().backward()
    assert (layer.sink.grad != 0).all()
    with torch.no_grad():
        layer.sink.fill_(-math.inf)
        plain = DecayFlashAttention(16, 4)
        plain.load_state_dict({name: value for name, value in layer.state_dict().items() if name != "sink"})
        torch.testing.assert_close(layer(x), plain(x))
    assert DecayFlashAttention(16, 4).sink is None


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("padding", [math.nan, math.inf])
def test_what_padding_holds_does_not_matter(padding, kind, device):
    """To outputs and gradients, those of the weights included, which are sums over all tokens."""
    layer = layer_of("scalar", bias=True, qk_norm=True).to(device)
    mask = torch.zeros(1 if kind == "packed" else 3, 9, dtype=torch.bool, device=device)
    mask[0, :7] = mask[1:, 4:] = True
    options = dict(cu_seqlens=torch.tensor([0, 4, 7], device=device)) if kind == "packed" else dict(padding_mask=mask)
    x, grad = torch.randn(2, *mask.shape, 16).double().to(device)
    results = []
    for filling in (0.0, padding):
        leaf = x.masked_fill(~mask[..., None], filling).requires_grad_()
        out = layer(leaf, **options)
        (of_x,) = torch.autograd.grad(out, leaf, grad, retain_graph=True)
        results.append([out, of_x, *gradients(layer, out, grad)])
    assert torch.equal(results[0][1][~mask], torch.zeros_like(x[~mask]))
    for want, got in zip(*results, strict=True):
        assert want.isfinite().all()
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integer_masks_and_offsets(dtype):
    layer, x = layer_of(), torch.randn(2, 9, 16).double()
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 2:], mask[1, :5] = True, True
    assert torch.equal(layer(x, padding_mask=mask.to(dtype)), layer(x, padding_mask=mask))
    resets = torch.zeros_like(mask)
    resets[0, 4] = True
    assert torch.equal(layer(x, resets=resets.to(dtype)), layer(x, resets=resets))
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    assert torch.equal(layer(x[:1], cu_seqlens=offsets.to(dtype)), layer(x[:1], cu_seqlens=offsets))


GAPS = {
    "gap": [[1, 1, 0, 1, 1], [1, 1, 1, 1, 1]],
    "two gaps": [[0, 0, 1, 1, 1], [1, 0, 1, 0, 1]],
    "documents": [[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]],  # numbered, as some packed data sets have them
}
NOT_A_STRETCH = "padding_mask: expected in every row one stretch of tokens"


@pytest.mark.parametrize("mask", GAPS)
def test_a_mask_with_a_gap_is_refused(mask):
    mask = torch.tensor(GAPS[mask])
    layer = DecayFlashAttention(16, 4)
    with pytest.raises(ValueError, match=NOT_A_STRETCH):
        layer(X, padding_mask=mask)
    if mask.amax() == 1:
        with pytest.raises(ValueError, match=NOT_A_STRETCH):
            layer(X, padding_mask=mask.bool())


def test_a_mask_with_a_gap_is_refused_in_compiled_code():
    torch.compiler.reset()
    compiled = torch.compile(DecayFlashAttention(16, 4), fullgraph=True, backend="eager")
    compiled(X, padding_mask=MASK)
    with pytest.raises(RuntimeError, match=NOT_A_STRETCH):
        compiled(X, padding_mask=torch.tensor(GAPS["gap"]).bool())


OFFSET_VALUES = "cu_seqlens: expected offsets that start with 0, never fall and end within the tokens, got others"
RESET_VALUES = r"resets: expected 0, or 1 .* F.pad\(numbers.diff\(\) != 0, \(1, 0\)\)"
BAD_VALUES = {
    "lengths": ("cu_seqlens", [3, 2, 3], OFFSET_VALUES),
    "decreasing": ("cu_seqlens", [0, 5, 3, 8], OFFSET_VALUES),
    "beyond": ("cu_seqlens", [0, 5, 9], OFFSET_VALUES),
    "far beyond": ("cu_seqlens", [0, 2**32 + 5], OFFSET_VALUES),
    "negative": ("cu_seqlens", [0, -2, 8], OFFSET_VALUES),
    "late": ("cu_seqlens", [2, 8], OFFSET_VALUES),
    "documents": ("resets", [[0, 0, 0, 1, 1, 2, 2, 2]], RESET_VALUES),
    "minus one": ("resets", [[-1, 0, 0, 0, 0, 0, 0, 0]], RESET_VALUES),
    "gap": ("padding_mask", [[1, 1, 0, 1, 1, 1, 1, 1]], NOT_A_STRETCH),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_values_with_another_meaning_are_refused(case):
    """Eager and compiled code raise, and any sample of vmap."""
    name, values, message = BAD_VALUES[case]
    layer, x, bad = DecayFlashAttention(16, 4, backend="reference"), torch.randn(1, 8, 16), torch.tensor(values)
    good = torch.zeros_like(bad) + (name == "padding_mask")
    with pytest.raises(ValueError, match=message):
        layer(x, **{name: bad})
    if case in ("lengths", "decreasing"):
        with pytest.raises(ValueError, match=message):
            layer(x, **{name: bad.to(torch.uint8)})
    with pytest.raises(ValueError, match=message):
        torch.vmap(lambda values: layer(x, **{name: values}))(torch.stack([good, bad]))
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    compiled(x, **{name: good})
    with pytest.raises(RuntimeError, match=message):
        compiled(x, **{name: bad})


@pytest.mark.parametrize("offsets", [[0], [0, 0, 8], [0, 3, 3, 5]])
def test_offsets_may_repeat_and_end_early(offsets):
    layer, x = layer_of(), torch.randn(1, 8, 16).double()
    out = layer(x, cu_seqlens=torch.tensor(offsets))
    for begin, end in itertools.pairwise(offsets):
        torch.testing.assert_close(out[:, begin:end], layer(x[:, begin:end]))
    assert (out[:, offsets[-1] :] == 0).all()


def test_per_sample_gradients_of_a_padded_layer():
    """By vmap over masks, of functions and of their gradients."""
    layer, mask = layer_of(backend="reference"), torch.ones(3, 2, 6, dtype=torch.bool)
    mask[0, 0, 4:] = mask[1, 1, :2] = mask[2, 0] = False
    x = torch.randn(3, 2, 6, 16).double()
    parameters = dict(layer.named_parameters())

    def loss(parameters, x, mask):
        return torch.func.functional_call(layer, parameters, x, {"padding_mask": mask}).square().sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, mask)
    for n in range(3):
        for name, gradient in torch.func.grad(loss)(parameters, x[n], mask[n]).items():
            torch.testing.assert_close(found[name][n], gradient)
    shared = torch.vmap(lambda x: layer(x, padding_mask=mask[0]))(x)
    torch.testing.assert_close(shared[1], layer(x[1], padding_mask=mask[0]))
    nested = torch.vmap(torch.vmap(lambda x, m: layer(x[None], padding_mask=m[None])))(x, mask)
    torch.testing.assert_close(nested[1, :, 0], layer(x[1], padding_mask=mask[1]))


class TwoSlices:
    """Context of the first of two ranks, for checks that come before any exchange."""

    group, lengths, reporting = None, (5, 4), contextlib.nullcontext

    def first_token(self, length):
        return 0

    def attend(self, q, k, v, log_decay, **options):
        return q


def test_context_checks_offsets_and_positions_by_name():
    layer, x = DecayFlashAttention(16, 4), X[:1]
    layer.context = TwoSlices()
    layer(x, cu_seqlens=torch.tensor([0, 7, 9]))
    for offsets in ([3, 2, 3], [0, 10], [0, 7, 6]):
        with pytest.raises(ValueError, match=OFFSET_VALUES):
            layer(x, cu_seqlens=torch.tensor(offsets))
    layer.position = nn.Bilinear(4, 4, 4)
    with pytest.raises(ValueError, match=r"context: expected a position module that takes .* start, .* Bilinear does"):
        layer(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("decay", DECAYS)
def test_nested_tensors_are_refused_by_name(decay, layout):
    layer, message = DecayFlashAttention(16, 4, decay=decay), "expected a dense tensor, got a nested .* cu_seqlens"
    sequences = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=layout)
    with pytest.raises(TypeError, match=f"^x: {message}"):
        layer(sequences)
    heads = torch.nested.nested_tensor([torch.randn(3, 4, 4), torch.randn(5, 4, 4)], layout=layout)
    with pytest.raises(TypeError, match=f"^q: {message}"):
        decay_attention(heads, heads, heads, -0.1)
    with pytest.raises(TypeError, match=f"^k: {message}"):
        DecayCache(2, 9, num_heads=4, head_dim=4).append(heads, heads)
    masks = torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=layout).bool()
    with pytest.raises(TypeError, match=f"^padding_mask: {message}"):
        layer(X, padding_mask=masks)


GAP_ON_A_GPU = """
import torch
from decayattn import DecayFlashAttention

layer, x = DecayFlashAttention(16, 4, device="cuda"), torch.zeros(2, 5, 16, device="cuda")
mask = torch.ones(2, 5, dtype=torch.bool, device="cuda")
gap = mask.clone()
gap[0, 2] = False  # which waits: a number from the host is copied
torch.cuda.set_sync_debug_mode("error")  # nothing waits for the device
layer(x, padding_mask=mask)
torch.cuda._sleep(2**32)  # cycles, two seconds: once the assertion has failed, nothing can be launched
layer(x, padding_mask=gap)
torch.cuda.set_sync_debug_mode("default")
print("launched", flush=True)
torch.cuda.synchronize()
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_mask_with_a_gap_is_refused_on_a_gpu():
    """Runs in a separate process: a failed assertion on the device ends the use of it."""
    run = subprocess.run([sys.executable, "-c", GAP_ON_A_GPU], capture_output=True, text=True, timeout=300, check=False)
    assert run.stdout == "launched\n", run.stderr
    assert run.returncode != 0
    assert NOT_A_STRETCH in run.stderr
    assert "device-side assert" in run.stderr


def test_padding_without_values():
    """Fake tensors have none to look at."""
    with FakeTensorMode():
        x, mask = torch.empty(2, 5, 16), torch.empty(2, 5, dtype=torch.int64)
        assert DecayFlashAttention(16, 4, backend="reference")(x, padding_mask=mask).shape == x.shape


X = torch.zeros(2, 5, 16)
MASK = torch.ones(2, 5, dtype=torch.bool)
OFFSETS = torch.tensor([0, 5], dtype=torch.int32)
CACHE = DecayCache(2, 9, num_heads=4, head_dim=4)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (dict(padding_mask=MASK.float()), TypeError, "padding_mask: expected a bool or .* got torch.float32"),
    (dict(padding_mask=[True]), TypeError, r"padding_mask: expected a bool or an integer tensor, got \[True\] of"),
    (dict(padding_mask=MASK[:, :4]), ValueError, r"padding_mask: expected shape \(B, T\) = \(2, 5\), got \(2, 4\)"),
    (dict(resets=MASK.float()), TypeError, "resets: expected a bool or an integer tensor, got torch.float32"),
    (dict(resets=MASK[:1]), ValueError, r"resets: expected shape \(B, T\) = \(2, 5\), got \(1, 5\)"),
    (dict(padding_mask=MASK, cu_seqlens=OFFSETS), ValueError, "cu_seqlens, padding_mask: expected at most one"),
    (dict(cu_seqlens=OFFSETS, cache=CACHE), ValueError, "cu_seqlens, cache: expected .* one of them; pad the"),
    (
        dict(padding_mask=MASK, cache=CACHE, new_lengths=torch.tensor([1, 1])), ValueError,
        "new_lengths, padding_mask: expected at most one of them",
    ),
    (dict(max_seqlen=3), ValueError, "max_seqlen: expected only with cu_seqlens"),
    (dict(cu_seqlens=OFFSETS), ValueError, r"x: expected shape \(1, total, embed_dim\) with cu_seqlens, got"),
    (dict(cu_seqlens=[0, 5]), TypeError, r"cu_seqlens: expected an integer tensor, got \[0, 5\] of type list"),
    (dict(cu_seqlens=OFFSETS.bool()), TypeError, "cu_seqlens: expected an integer tensor, got torch.bool"),
    (dict(cu_seqlens=OFFSETS[:0]), ValueError, r"cu_seqlens: expected shape \(sequences \+ 1,\), got \(0,\)"),
])
def test_wrong_arguments_are_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        DecayFlashAttention(16, 4)(X, **arguments)


def test_resets_need_a_decay_per_token():
    for decay in ("constant", "none"):
        with pytest.raises(ValueError, match=r"resets: expected a decay per token; with a constant .* use cu_seqlens"):
            DecayFlashAttention(16, 4, decay=decay)(X, resets=MASK)


def test_a_wrong_window_is_refused_when_the_layer_is_built():
    with pytest.raises(TypeError, match="window_size: expected None or a pair"):
        DecayFlashAttention(16, 4, window_size=8)
    with pytest.raises(TypeError, match="sink: expected a bool"):
        DecayFlashAttention(16, 4, sink=0.5)
