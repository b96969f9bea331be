"""The layer's construction, state, names and errors; test_calls.py has its results."""

import copy
import functools
import inspect
import re
import textwrap

import pytest
import torch
from cached_layers import DEVICE, WIDTH, build
from cached_layers import tokens as random_tokens
from torch import nn

import decayattn.nn.attention
from decayattn import DecayFlashAttention, validation
from decayattn.nn import ConstantDecay, ScalarDecay

BATCH, TOKENS = 2, 9
EVERYTHING = {
    "num_kv_heads": 2, "head_dim": 6, "value_dim": 5, "bias": True, "qk_norm": True, "output_gate": True,
    "scale": "learned",
}
DECAYS = {
    "scalar": lambda: "scalar",
    "learned": lambda: ConstantDecay.alibi(4, learned=True),
    "frozen": lambda: "constant",
    "none": lambda: "none",
}
tokens = functools.partial(random_tokens, batch=BATCH, length=TOKENS)


def test_kernels_get_slices_of_one_projection(monkeypatch):
    seen = []

    def spy(q, k, v, *arguments, **options):
        seen.append((q, k, v))
        return decayattn.decay_attention(q, k, v, *arguments, **options)

    monkeypatch.setattr(decayattn.nn.attention, "decay_attention", spy)
    build(num_kv_heads=2, value_dim=5, output_gate=True)(tokens())
    [(q, k, v)] = seen
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


@pytest.mark.parametrize("decay", DECAYS)
def test_state_dict_and_deepcopy_keep_outputs(decay):
    layer = build(decay=DECAYS[decay](), **EVERYTHING)
    other, x = build(decay=DECAYS[decay](), **EVERYTHING), tokens()
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


def test_documented_block_trains():
    _, example = inspect.getdoc(DecayFlashAttention).split("A pre-norm transformer block around it::\n\n")
    source = textwrap.dedent(example.split("\n\nArgs:")[0])
    assert len(source.splitlines()) < 15
    names = {"nn": nn, "DecayFlashAttention": DecayFlashAttention}
    exec(source, names)
    block = names["Block"](WIDTH, 4)
    out = block(torch.randn(BATCH, TOKENS, WIDTH))
    out.square().sum().backward()
    assert out.shape == (BATCH, TOKENS, WIDTH)
    assert all(parameter.grad.any() for parameter in block.parameters())


# Errors


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
    *(((12, 4), {name: 1}, TypeError, f"{name}: expected a bool, got 1 of type int")
      for name in ("causal", "bias", "output_gate", "sink", "kv_shift", "output_norm")),
    ((12, 4), {"qk_norm": None}, TypeError, "qk_norm: expected a bool or .per_head., got None"),
    ((12, 4), {"position": "rotary"}, TypeError, "position: expected a torch.nn.Module, got 'rotary' of type str"),
    ((12, 4), {"scale": "big"}, ValueError, "scale: expected a number, 'learned' or None, got 'big'"),
    ((12, 4), {"scale": float("nan")}, ValueError, "scale: expected a finite number, got nan"),
    ((12, 4), {"backend": "flash"}, ValueError, "backend: expected one of 'auto', 'reference', .* got 'flash'"),
    ((12, 4), {"skip_tolerance": 2}, ValueError, "skip_tolerance: expected .* between 0 and 1, got 2"),
    ((12, 4), {"window_size": (-2, 0)}, ValueError, "window_size: expected numbers of tokens"),
])
def test_errors_of_construction_name_the_argument(arguments, options, error, message):
    with pytest.raises(error, match=message):
        DecayFlashAttention(*arguments, **options)


@pytest.mark.parametrize(("x", "error", "message"), [
    ([1.0], TypeError, r"x: expected a torch.Tensor, got \[1.0\] of type list"),
    (torch.zeros(2, 9, 16), ValueError, r"x: expected shape \(B, T, embed_dim = 12\), got \(2, 9, 16\)"),
    (torch.zeros(2, 9, 12).long(), TypeError, "x: expected a floating dtype, got torch.int64"),
])
def test_errors_of_a_call_name_the_argument(x, error, message):
    with pytest.raises(error, match=message):
        DecayFlashAttention(WIDTH, 4)(x)


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
@pytest.mark.parametrize("options", [EVERYTHING, {"scale": 0.5, "decay": "alibi"}], ids=["all", "scale"])
def test_jit_trace_gives_the_layer(options):
    layer, x = build(**options), tokens()
    torch.testing.assert_close(torch.jit.trace(layer, x)(x + 1), layer(x + 1), rtol=1e-14, atol=1e-14)
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


def test_numpy_integers_are_counts():
    numpy = pytest.importorskip("numpy")
    three = numpy.int64(3)
    layer = DecayFlashAttention(numpy.int64(WIDTH), numpy.int32(4), num_kv_heads=numpy.uint8(2), head_dim=three)
    assert {type(n) for n in (layer.embed_dim, layer.num_heads, layer.num_kv_heads, layer.head_dim)} == {int}
    assert layer.make_cache(numpy.int64(2), numpy.int64(9)).max_length == 9
    with pytest.raises(TypeError, match="num_heads: expected an int"):
        DecayFlashAttention(WIDTH, numpy.float64(4))
