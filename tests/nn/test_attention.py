"""The layer's construction, state, names, errors and values of its masks; test_calls.py has its results."""

import contextlib
import copy
import functools
import inspect
import itertools
import math
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from cached_layers import DEVICE, EVERYTHING, PRO, WIDTH, build
from cached_layers import tokens as random_tokens
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import decayattn.nn.attention
from decayattn import DecayFlashAttention, validation
from decayattn.nn import ConstantDecay, DecayCache, ScalarDecay

BATCH, TOKENS = 2, 9
tokens = functools.partial(random_tokens, batch=BATCH, length=TOKENS)


def test_kernels_get_slices_of_one_projection(monkeypatch):
    monkeypatch.setattr(decayattn.nn.attention, "decay_attention", spy := mock.Mock(wraps=decayattn.decay_attention))
    build(num_kv_heads=2, value_dim=5, output_gate=True)(tokens())
    [call] = spy.call_args_list
    q, k, v = call.args[:3]
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert all(t.stride(-1) == 1 for t in (q, k, v))
    assert (q.shape, k.shape, v.shape) == ((2, 9, 4, 3), (2, 9, 2, 3), (2, 9, 2, 5))


@pytest.mark.parametrize("length", [0, 1])
def test_layer_takes_sequences_of_0_and_1_tokens(length):
    layer, x = build(), tokens(length=length).requires_grad_()
    out = layer(x)
    out.square().sum().backward()
    assert out.shape == x.grad.shape == (BATCH, length, WIDTH)
    assert not any(p.grad.any() for p in layer.decay.parameters())  # a sequence's first log-decay is never used


# The framework around it


def test_autocast_leaves_inputs_of_the_gate_in_float32():
    layer, x = build(dtype=torch.float32), tokens(dtype=torch.float32)
    seen = []
    layer.decay.register_forward_hook(lambda module, arguments, log_decay: seen.append(log_decay))
    layer(x)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        layer(x)
    assert torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("decay", ["scalar", "alibi-learned", "constant", "none"])
def test_state_dict_and_deepcopy_keep_outputs(decay):
    layer = build(decay=decay, **EVERYTHING)
    other, x = build(decay=decay, **EVERYTHING), tokens()
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_layer_starts_with_zero_biases_and_unit_norms():
    layer = DecayFlashAttention(96, 4, bias=True, qk_norm="per_head", output_norm=True, scale="learned", sink=True)
    for parameter in (layer.in_proj.bias, layer.out_proj.bias, layer.log_scale, layer.sink):
        assert not parameter.any()
    assert all((norm.weight == 1).all() for norm in (layer.q_norm, layer.k_norm, layer.output_norm))
    layer.decay.bias.data.fill_(5.0)
    layer.reset_parameters()
    assert (layer.decay.bias == 5.0).all()  # the decay resets itself


def test_repr_names_sizes_and_options():
    text = repr(DecayFlashAttention(WIDTH, 4, num_kv_heads=2, scale=0.5, backend="reference"))
    assert "embed_dim=12, num_heads=4, num_kv_heads=2, head_dim=3, value_dim=3, causal=True, qk_norm=False" in text
    assert "scale=0.5, backend='reference'" in text
    assert "(decay): ScalarDecay(" in text


# Errors


def test_error_names_a_decay_without_a_result():
    layer = DecayFlashAttention(16, 4, decay=nn.Linear(16, 4))
    layer.decay.forward = lambda x: None  # without `return`
    with pytest.raises(TypeError, match="decay: expected a log_decay, got None; return one from Linear"):
        layer(torch.zeros(2, 5, 16))


@pytest.mark.parametrize(("arguments", "options", "error", "message"), [
    ((0, 4), {}, ValueError, "embed_dim: expected at least 1, got 0"),
    ((12.0, 4), {}, TypeError, "embed_dim: expected an int, got 12.0 of type float"),
    ((12, 5), {}, ValueError, "embed_dim: expected a multiple of num_heads = 5 without head_dim, got 12"),
    ((12, 4), {"num_kv_heads": 3}, ValueError, "num_kv_heads: expected a divisor of num_heads = 4, got 3"),
    ((12, 4), {"head_dim": 257}, ValueError, "head_dim: expected at most 256, got 257"),
    ((1200, 4), {}, ValueError, "head_dim: expected at most 256, got 300"),
    ((12, 4), {"decay": "rope"}, ValueError, "decay: expected 'scalar', 'alibi', .* or a module, got 'rope'"),
    ((12, 4, 0.1), {}, TypeError, "DecayFlashAttention: expected embed_dim and num_heads, .* got 1 more"),
    ((12, 4), {"decay": None}, TypeError, "decay: expected .* or a module, got None of type NoneType"),
    ((12, 4), {"decay": ConstantDecay.alibi(8)}, ValueError, "decay: expected a module for 4 heads, got one for 8"),
    ((12, 4), {"decay": ScalarDecay(8, 4)}, ValueError, "decay: expected a module for embed_dim = 12, got one for 8"),
    *(((12, 4), {name: 1}, TypeError, f"{name}: expected a bool, got 1 of type int")
      for name in ("causal", "bias", "output_gate", "sink", "kv_shift", "output_norm")),
    ((12, 4), {"qk_norm": None}, TypeError, "qk_norm: expected a bool or .per_head., got None"),
    ((12, 4), {"position": "rotary"}, TypeError, "position: expected a torch.nn.Module, got 'rotary' of type str"),
    ((12, 4), {"scale": "big"}, ValueError, "scale: expected a number, 'learned' or None, got 'big'"),
    ((12, 4), {"scale": float("nan")}, ValueError, "scale: expected a finite number, 'learned' or None, got nan"),
    ((12, 4), {"backend": "flash"}, ValueError, "backend: expected one of 'auto', 'reference', .* got 'flash'"),
    ((12, 4), {"skip_tolerance": 2}, ValueError, "skip_tolerance: expected .* between 0 and 1, got 2"),
    ((12, 4), {"window_size": (-2, 0)}, ValueError, "window_size: expected numbers of tokens"),
])
def test_errors_of_construction_name_the_argument(arguments, options, error, message):
    with pytest.raises(error, match=message):
        DecayFlashAttention(*arguments, **options)


@pytest.mark.parametrize("owner", validation._LAYER_HINTS)
def test_errors_translate_names_of_other_libraries(owner):
    layer, hints = DecayFlashAttention(WIDTH, 4), validation._LAYER_HINTS[owner]
    function = layer.forward if owner.endswith("forward") else DecayFlashAttention
    known = inspect.signature(function).parameters
    assert not known.keys() & hints.keys()
    assert {x.kind for x in known.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    for name, hint in {**hints, "window_sizes": "", "xyz": "it takes "}.items():
        with pytest.raises(TypeError, match=f"^{name}: unexpected keyword argument of {owner}; {re.escape(hint)}"):
            function(*([tokens()] if owner.endswith("forward") else [WIDTH, 4]), **{name: 0.0})
    with pytest.raises(TypeError, match=r"window_sizes: .* did you mean window_size\?"):
        DecayFlashAttention(WIDTH, 4, window_sizes=(4, 0))


def test_forward_refuses_query_key_and_value_by_name():
    x = tokens()
    message = r"DecayFlashAttention.forward: expected x, .* got 2 more; cross-attention is layer\(x, memory="
    layer = DecayFlashAttention(WIDTH, 4)
    with pytest.raises(TypeError, match=message):
        layer(x, x, x, need_weights=False)
    with pytest.raises(TypeError, match=r"query: unexpected keyword argument .* use x, and memory for cross-attention"):
        layer(query=x, key=x, value=x)
    with pytest.raises(TypeError, match=r"x: expected a torch.Tensor, got nothing"):
        layer()
    with pytest.raises(TypeError, match=r"hidden_size: unexpected keyword argument .* use embed_dim"):
        DecayFlashAttention(hidden_size=WIDTH, num_heads=4)
    with pytest.raises(TypeError, match=r"num_heads: expected an int, got nothing"):
        DecayFlashAttention(WIDTH)


@pytest.mark.parametrize(("name", "expected"), [
    ("alibi", lambda: ConstantDecay.alibi(4)), ("constant", lambda: ConstantDecay.alibi(4)),
    ("alibi-learned", lambda: ConstantDecay.alibi(4, learned=True)), ("retnet", lambda: ConstantDecay.retnet(4)),
    ("retnet-learned", lambda: ConstantDecay.retnet(4, learned=True)), ("scalar", lambda: ScalarDecay(WIDTH, 4)),
])
def test_named_decays_are_modules(name, expected):
    decay, expected = DecayFlashAttention(WIDTH, 4, decay=name, dtype=torch.bfloat16).decay, expected()
    assert repr(decay) == repr(expected)
    x = torch.randn(1, 5, WIDTH)
    assert torch.equal(decay(x), expected(x))
    assert {x.dtype for x in decay.state_dict().values()} == {torch.float32}
    assert list(decay.state_dict()) == list(expected.state_dict())


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit")
@pytest.mark.parametrize("options", [EVERYTHING, {"scale": 0.5, "decay": "alibi"}, PRO], ids=["all", "scale", "pro"])
def test_jit_trace_gives_the_layer(options):
    layer, x = build(**options), tokens()
    torch.testing.assert_close(torch.jit.trace(layer, x)(x[:1, 2:]), layer(x[:1, 2:]), rtol=1e-14, atol=1e-14)
    q = torch.randn(2, 9, 4, 3, dtype=torch.float64)
    traced = torch.jit.trace(lambda q: decayattn.decay_attention(q, q, q, -0.1, backend="reference"), q)
    torch.testing.assert_close(traced(-q), decayattn.decay_attention(-q, -q, -q, -0.1), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("function", "error", "message"), [
    (lambda q, k: q, TypeError, r"position: expected a module that returns \(q, k\), got a Tensor"),
    (lambda q, k: (q, k.mT), ValueError, r"position: expected k back as \(2, 9, 4, 3\) .*, got \(2, 9, 3, 4\)"),
    (lambda q, k: (q.double(), k), ValueError, "position: expected q back as .* in torch.float32, got .*float64"),
])
def test_layer_checks_results_of_a_position_module(function, error, message):
    layer, x = DecayFlashAttention(WIDTH, 4, position=nn.Identity()), torch.randn(BATCH, TOKENS, WIDTH)
    layer.position.forward = function
    with pytest.raises(error, match=message):
        layer(x)
    layer.position.forward = lambda q, k: (q.float(), k.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


# Sequences as people have them: padded, packed, cut into documents


def layer_of(**options) -> DecayFlashAttention:
    layer = DecayFlashAttention(16, 4, num_kv_heads=2, output_gate=True, **options).double()
    nn.init.normal_(layer.decay.weight)
    return layer


@pytest.mark.parametrize(("kind", "backend"), [
    ("reset", "triton"), ("packed", "triton"),
    *(pytest.param(kind, backend, marks=pytest.mark.slow) for kind, backend in (
        *itertools.product(["plain", "padded", "memory"], ["triton"]),
        *itertools.product(["plain", "padded", "reset", "packed", "memory"], ["reference"]),
    )),
])
def test_layer_compiles_to_one_graph_for_every_length(kind, backend, device):
    layer = DecayFlashAttention(16, 4, window_size=(5, 0), sink=True, **PRO, backend=backend, device=device)
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for length in (9, 14):
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
    "far beyond": ("cu_seqlens", [0, 2**32 + 5], OFFSET_VALUES),
    "negative": ("cu_seqlens", [0, -2, 8], OFFSET_VALUES),
    "late": ("cu_seqlens", [2, 8], OFFSET_VALUES),
    "documents": ("resets", [[0, 0, 0, 1, 1, 2, 2, 2]], RESET_VALUES),
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


def test_context_checks_offsets_and_positions_by_name():
    """With a context of the first of two ranks: the checks come before any exchange."""
    layer, x = DecayFlashAttention(16, 4), X[:1]
    layer.context = SimpleNamespace(
        group=None, lengths=(5, 4), reporting=contextlib.nullcontext, first_token=lambda length: 0,
        attend=lambda q, *_, **__: q,
    )
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
    (dict(x=[1.0]), TypeError, r"x: expected a torch.Tensor, got \[1.0\] of type list"),
    (dict(x=torch.zeros(2, 9, 12)), ValueError, r"x: expected shape \(B, T, embed_dim = 16\), got \(2, 9, 12\)"),
    (dict(x=X.long()), TypeError, "x: expected a floating dtype, got torch.int64"),
])
def test_errors_name_arguments_of_a_call(arguments, error, message):
    with pytest.raises(error, match=message):
        DecayFlashAttention(16, 4)(**{"x": X} | arguments)
