"""The layer on sequences as people have them: padded, packed, cut into documents; windows, sinks, and a cache."""

import contextlib
import itertools
import math
import subprocess
import sys

import pytest
import torch
from cached_layers import PRO
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from decayattn import DecayFlashAttention
from decayattn.nn import DecayCache


def layer_of(**options) -> DecayFlashAttention:
    layer = DecayFlashAttention(16, 4, num_kv_heads=2, output_gate=True, **options).double()
    nn.init.normal_(layer.decay.weight)
    return layer


@pytest.mark.parametrize(("kind", "backend"), [
    *itertools.product(["padded", "reset", "packed", "memory"], ["triton"]),
    *(pytest.param(kind, backend, marks=pytest.mark.slow) for kind, backend in (
        ("plain", "triton"), *itertools.product(["plain", "padded", "reset", "packed", "memory"], ["reference"])
    )),
])
def test_layer_compiles_to_one_graph_for_every_length(kind, backend, device):
    layer = DecayFlashAttention(16, 4, window_size=(5, 0), sink=True, **PRO, backend=backend, device=device)
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


def test_layer_ignores_values_after_packed_sequences(device):
    """Outputs and gradients, those of the weights included, which are sums over all tokens."""
    layer = layer_of(bias=True, qk_norm=True).to(device)
    x, grad = torch.randn(2, 1, 9, 16).double().to(device)
    results = []
    for filling in (0.0, math.nan, math.inf):
        x[:, 7:] = filling
        leaf = x.clone().requires_grad_()
        out = layer(leaf, cu_seqlens=torch.tensor([0, 4, 7], device=device))
        results.append([out, *torch.autograd.grad(out, [leaf, *layer.parameters()], grad)])
    assert not results[0][1][:, 7:].any()
    for want, *others in zip(*results, strict=True):
        assert want.isfinite().all()
        assert all(torch.equal(got, want) for got in others)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_masks_and_offsets_may_be_integers(dtype):
    layer, x = layer_of(), torch.randn(2, 9, 16).double()
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 2:], mask[1, :5] = True, True
    assert torch.equal(layer(x, padding_mask=mask.to(dtype)), layer(x, padding_mask=mask))
    resets = torch.zeros_like(mask)
    resets[0, 4] = True
    assert torch.equal(layer(x, resets=resets.to(dtype)), layer(x, resets=resets))
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    assert torch.equal(layer(x[:1], cu_seqlens=offsets.to(dtype)), layer(x[:1], cu_seqlens=offsets))


NOT_A_STRETCH = "padding_mask: expected in every row one stretch of tokens"


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
    "gap": ("padding_mask", [[True, True, False, True, True, True, True, True]], NOT_A_STRETCH),
    "numbered": ("padding_mask", [[1, 1, 1, 2, 2, 2, 0, 0]], NOT_A_STRETCH),  # documents of a packed data set
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_layer_refuses_values_of_another_meaning(case):
    """Eager and compiled code raise, and any sample of vmap."""
    name, values, message = BAD_VALUES[case]
    layer, x, bad = DecayFlashAttention(16, 4, backend="reference"), torch.randn(1, 8, 16), torch.tensor(values)
    good = torch.full_like(bad, name == "padding_mask")
    with pytest.raises(ValueError, match=message):
        layer(x, **{name: bad})
    if case in ("lengths", "decreasing"):
        with pytest.raises(ValueError, match=message):
            layer(x, **{name: bad.to(torch.uint8)})
    with pytest.raises(ValueError, match=message):
        torch.vmap(lambda values: layer(x, **{name: values}))(torch.stack([good, bad]))
    if case == "gap":
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


def test_vmap_gives_per_sample_gradients_with_padding():
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
def test_layer_refuses_nested_tensors_by_name():
    layer, nested = DecayFlashAttention(16, 4), torch.nested.nested_tensor([torch.ones(3, 16), torch.ones(5, 16)])
    for name, call in (
        ("x", layer), ("padding_mask", lambda x: layer(X, padding_mask=x.bool())),
        ("k", lambda x: DecayCache(2, 9, num_heads=4, head_dim=4).append(x, x)),
    ):
        with pytest.raises(TypeError, match=f"^{name}: expected a dense tensor, got a nested .* cu_seqlens"):
            call(nested)


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
def test_gpu_refuses_a_mask_with_a_gap():
    """Runs in a separate process: a failed assertion on the device ends the use of it."""
    run = subprocess.run([sys.executable, "-c", GAP_ON_A_GPU], capture_output=True, text=True, timeout=300, check=False)
    assert run.stdout == "launched\n", run.stderr
    assert run.returncode != 0
    assert NOT_A_STRETCH in run.stderr
    assert "device-side assert" in run.stderr


def test_fake_tensors_may_be_padded():
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
    (dict(padding_mask=MASK[:, :4]), ValueError, r"padding_mask: expected shape \(B, T\) = \(2, 5\), got \(2, 4\)"),
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
def test_errors_name_arguments_of_a_call(arguments, error, message):
    with pytest.raises(error, match=message):
        DecayFlashAttention(16, 4)(X, **arguments)
