"""The public functions as callers meet them: what they accept, what they refuse, what tools can make of them."""

import inspect
import sys

import numpy as np
import pytest
import torch
from torch.export import Dim, export

from decayattn import DecayFlashAttention, decay_attention, decay_attention_varlen, reference, visited_fraction
from decayattn.functional import _DenseOptions, _PackedOptions
from decayattn.testing import assert_within_budget, verify_attention, verify_attention_varlen
from decayattn.validation import _HINTS

FUNCTIONS = (decay_attention, decay_attention_varlen)


def make(device="cpu", batch=2, rows=5, keys=None) -> dict:
    """q, k, v and a log-decay per token: H 4 over H_kv 2, D 8, D_v 6."""
    keys = rows if keys is None else keys
    return dict(
        q=torch.randn(batch, rows, 4, 8, device=device),
        k=torch.randn(batch, keys, 2, 8, device=device),
        v=torch.randn(batch, keys, 2, 6, device=device),
        log_decay=-torch.rand(batch, keys, 4, device=device),
    )


def packed(arguments: dict, *offsets: int, dtype=torch.int32) -> dict:
    """The first batch entry, cut into sequences."""
    arguments = {name: x[0] for name, x in arguments.items()}
    cu = torch.tensor(offsets, dtype=dtype, device=arguments["q"].device)
    longest = max(0, *cu.diff().tolist())
    return arguments | dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest)


# A log-decay that broadcasts

@pytest.mark.parametrize(("backend", "shape"), [
    *(("reference", shape) for shape in [(2, 9, 1), (1, 9, 4), (1, 9, 1), (9, 1)]), ("triton", (1, 9, 1)),
])
def test_log_decay_broadcasts_over_batch_and_heads(backend, shape, device):
    """Its gradient has its own shape, and the kernels do not copy it. Two dimensions: packed sequences."""
    arguments = make(device, rows=9) | dict(log_decay=-torch.rand(shape, device=device))
    if len(shape) == 3:
        assert_within_budget(verify_attention(**arguments, backend=backend))
    else:
        offsets = packed(make(device, rows=9), 0, 4, 4, 8) | dict(log_decay=arguments["log_decay"])
        assert_within_budget(verify_attention_varlen(**offsets, backend=backend))


@pytest.mark.parametrize(("function", "shape", "hint"), [
    (decay_attention, (5, 4), r"; log_decay\[None\] would fit$"),
    (decay_attention, (2, 5), r"; log_decay\[\.\.\., None\] would fit$"),
    (decay_attention, (2, 4, 5), r"; log_decay.mT would fit$"),
    (decay_attention, (1, 1, 1), r"got \(1, 1, 1\)$"),
    (decay_attention, (1, 2, 5, 4), r"; log_decay\.squeeze\(0\) would fit$"),
    (decay_attention, (5,), r"; q, k, v: expected \(B, T, H, D\); these look like \(B, H, T, D\).*$"),
    (decay_attention, (2,), r"got \(2,\)$"),
    (decay_attention_varlen, (40,), r"; log_decay\[\.\.\., None\] would fit"),
    (decay_attention_varlen, (1, 4), r"got \(1, 4\)$"),
])
def test_errors_name_log_decays_that_would_fit(function, shape, hint):
    arguments, expected = make(), r"\(B, T_k, H\) = \(2, 5, 4\)"
    if function is decay_attention_varlen:
        arguments, expected = packed(make(rows=40), 0, 40), r"\(total_k, H\) = \(40, 4\)"
    with pytest.raises(ValueError, match=rf"^log_decay: .*{expected}.*{hint}"):
        function(**arguments | {"log_decay": torch.zeros(shape)})


# Counts and offsets of other integer types


@pytest.fixture
def asked(monkeypatch):
    """The problems and bounds of the calls so far, as a backend gets them."""
    seen, attend = [], reference.attention

    monkeypatch.setattr(reference, "attention", lambda *call: seen.append((call[0], call[1].bounds)) or attend(*call))
    return seen


def test_int64_offsets_equal_int32_offsets(asked):
    """Clamped to the axis before they are narrowed; mixed with int32 ones, too."""
    arguments, huge = make(rows=12), torch.tensor([-(2**40), 5, 2**40])
    narrow, wide = (packed(arguments, 0, 5, 12, dtype=dtype) for dtype in (torch.int32, torch.int64))
    expected = decay_attention_varlen(**narrow)
    for changes in (wide, dict(cu_seqlens_q=huge), dict(cu_seqlens_k=huge), dict(cu_seqlens_q=huge, cu_seqlens_k=huge)):
        assert torch.equal(decay_attention_varlen(**narrow | changes), expected)
    assert all(bounds.dtype == torch.int32 and bounds.tolist() == asked[0][1].tolist() for _, bounds in asked)


@pytest.mark.parametrize("names", [("seqused_k",), ("leftpad_q", "leftpad_k"), ("seqused_q", "seqused_k", "leftpad_k")])
def test_int64_lengths_equal_int32_lengths(names, asked):
    """Mixed with int32 ones, too."""
    arguments = make()
    lengths = {name: torch.tensor([3, 2], dtype=torch.int32) for name in names}
    expected = decay_attention(**arguments, **lengths)
    for wide in (names, names[:1]):
        found = decay_attention(**arguments, **lengths | {name: lengths[name].long() for name in wide})
        assert torch.equal(found, expected)
    huge = {name: torch.tensor([2**40, -(2**40)]) for name in names}
    ends = {name: torch.tensor([5, 0], dtype=torch.int32) for name in names}
    assert torch.equal(decay_attention(**arguments, **huge), decay_attention(**arguments, **ends))
    assert all(bounds.dtype == torch.int32 for _, bounds in asked)


@pytest.mark.parametrize("integer", [np.int64, np.uint8])
def test_numpy_integers_reach_backends_as_ints(integer, asked):
    arguments = packed(make(rows=12), 0, 5, 12) | dict(window_size=(2, 0), causal=False)
    counted = {name: integer(arguments[name]) for name in ("max_seqlen_q", "max_seqlen_k")}
    counted["window_size"] = tuple(map(integer, arguments["window_size"]))
    assert torch.equal(decay_attention_varlen(**arguments | counted), decay_attention_varlen(**arguments))
    (found, _), (expected, _) = asked
    assert found == expected
    assert {type(x) for x in (*found.window, found.longest_query, found.longest_key)} == {int}


# Heads before tokens


@pytest.mark.parametrize(("refused", "rows", "others"), [
    ("k", 3, {}), ("log_decay", 5, {}), ("log_decay", 5, {"log_decay": torch.zeros(4)}),
    ("scale", 5, {"log_decay": None, "scale": torch.ones(2, 5, 4)}),
    ("sink", 5, {"log_decay": None, "sink": torch.zeros(4)}),
    ("bias", 5, {"log_decay": None, "bias": torch.zeros(4, 5, 5)}),
])
def test_errors_recognise_heads_before_tokens(refused, rows, others):
    """(B, H, T, D), as scaled_dot_product_attention takes it, where the shapes cannot be (B, T, H, D)."""
    arguments = {x: tensor.transpose(1, 2) if x in "qkv" else tensor for x, tensor in make(rows=rows, keys=5).items()}
    with pytest.raises(ValueError, match=rf"^{refused}: .*; q, k, v: expected \(B, T, H, D\); .*like \(B, H, T, D\)"):
        decay_attention(**arguments | others)
    in_heads = {x: tensor.transpose(0, 1) if x in "qkv" else tensor for x, tensor in packed(make(), 0, 5).items()}
    with pytest.raises(ValueError, match=r"^log_decay: .*; q, k, v: expected \(T, H, D\); these look like \(H, T, D\)"):
        decay_attention_varlen(**in_heads)


# Keywords of other libraries


@pytest.mark.parametrize(("name", "hint"), [
    ("softmax_scale", "use scale"), ("cu_seqlens", "decay_attention_varlen"),
    ("log_decays", r"did you mean log_decay\?"), ("xyz", r"it takes q, k, v, log_decay, .*scale, causal, "),
])
def test_errors_translate_names_of_other_libraries(name, hint):
    for function, arguments in zip(FUNCTIONS, (make(), packed(make(), 0, 5)), strict=True):
        message = rf"^{name}: unexpected keyword argument of {function.__name__}; .*{hint}"
        with pytest.raises(TypeError, match=message):
            function(**arguments, **{name: None})


def test_errors_name_arguments_of_the_other_function():
    with pytest.raises(TypeError, match=r"^cu_seqlens_k: .*; decay_attention_varlen takes cu_seqlens_q"):
        decay_attention(**make(), cu_seqlens_k=None)
    for name in ("bias", "seqused_k", "leftpad_q"):
        with pytest.raises(TypeError, match=f"^{name}: .*; decay_attention takes it"):
            decay_attention_varlen(**packed(make(), 0, 5), **{name: None})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_hints_contain_no_argument(function):
    known = inspect.signature(function).parameters
    ours = {name for name, hint in _HINTS.items() if hint not in (_HINTS["cu_seqlens"], _HINTS["bias"])}
    assert not ours & set(known)
    assert not any(x.kind is x.VAR_KEYWORD for x in known.values())  # what help() shows has no catch-all


@pytest.mark.parametrize(("function", "options"), [
    (decay_attention, _DenseOptions), (decay_attention_varlen, _PackedOptions)
])
def test_type_checkers_see_the_same_keywords(function, options):
    """The overloads name q, k, v, log_decay and return_lse; everything else comes from the dict."""
    parameters = inspect.signature(function).parameters.values()
    keywords = {x.name: x for x in parameters if x.kind is x.KEYWORD_ONLY and x.name != "return_lse"}
    assert set(options.__annotations__) == set(keywords)
    assert {name: x.annotation for name, x in keywords.items()} == dict(options.__annotations__)
    assert {name for name, x in keywords.items() if x.default is x.empty} == options.__required_keys__


# Meta tensors: shapes and dtypes, and nothing runs


@pytest.mark.parametrize("backend", ["auto", "reference", "triton", "hopper"])
def test_meta_tensors_give_meta_results(backend, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # what import finds where it is not installed
    arguments = make("meta", rows=3, keys=5) | dict(backend=backend)
    lengths = torch.empty(2, dtype=torch.int32, device="meta")
    for decay in (arguments["log_decay"], None, -0.5):
        for options in ({}, dict(causal=False, window_size=(2, 1)), dict(seqused_k=lengths, leftpad_q=lengths)):
            q = arguments["q"].detach().requires_grad_()
            out, lse = decay_attention(**arguments | dict(q=q, log_decay=decay), **options, return_lse=True)
            assert out.is_meta
            assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 3, 4, 6), q.dtype, (2, 4, 3), torch.float32)
            (dq,) = torch.autograd.grad(out.sum() + lse.sum(), q)
            assert (dq.shape, dq.device.type) == (q.shape, "meta")
    halves = {name: x.half() if name in "qkv" else x for name, x in arguments.items()}
    assert decay_attention(**halves).dtype == torch.float16
    assert visited_fraction(*(arguments[name] for name in ("q", "k", "log_decay"))).shape == (2, 4)
    with pytest.raises(ValueError, match=r"^k: expected the head dimension of q, 8, got 7"):
        decay_attention(**arguments | dict(k=torch.empty(2, 5, 2, 7, device="meta")))
    tokens, cu = {name: x[0] for name, x in make("meta").items()}, torch.empty(3, dtype=torch.int64, device="meta")
    offsets = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4, backend=backend)
    out, lse = decay_attention_varlen(**tokens, **offsets, return_lse=True)
    assert (out.shape, lse.shape, out.device.type) == ((5, 4, 6), (4, 5), "meta")


@pytest.mark.parametrize("decay", ["scalar", "constant", "none"])
def test_layer_is_built_and_called_on_meta(decay):
    with torch.device("meta"):
        layer = DecayFlashAttention(16, 4, decay=decay, sink=True, scale="learned", qk_norm=True, output_gate=True)
        x, mask = torch.empty(2, 5, 16), torch.ones(2, 5, dtype=torch.bool)
        cu_seqlens = torch.zeros(3, dtype=torch.int32)
        calls = [(x, {}), (x, dict(padding_mask=mask)), (x[:1], dict(cu_seqlens=cu_seqlens))]
        results = [layer(tokens, **options) for tokens, options in calls]
    results.append(layer(x))  # outside of the context, too
    assert [y.shape for y in results] == [(2, 5, 16), (2, 5, 16), (1, 5, 16), (2, 5, 16)]
    assert all(y.is_meta for y in results)
    results[0].sum().backward()
    assert all(x.grad.is_meta for x in layer.parameters())
    with torch.no_grad():
        cache = layer.make_cache(2, 9)
        assert [layer(tokens, cache=cache).shape for tokens in (x, x[:, :1])] == [(2, 5, 16), (2, 1, 16)]


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k", "leftpad_q", "leftpad_k"])
def test_vmap_takes_bounds_alone(name):
    arguments, bounds = make(), torch.tensor([[0, 1], [1, 1], [5, 3]])
    found = torch.vmap(lambda x: decay_attention(**arguments, **{name: x}))(bounds)
    torch.testing.assert_close(found, torch.stack([decay_attention(**arguments, **{name: x}) for x in bounds]))


# torch.export: one graph for every batch and length

BATCH, ROWS, KEYS, OFFSETS = Dim("batch"), Dim("rows"), Dim("keys"), Dim("offsets", min=3)


class Call(torch.nn.Module):
    """A function with its options, as export wants it."""

    def __init__(self, function=decay_attention, **options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, q, k, v, log_decay, lengths):
        return self.function(q, k, v, log_decay, **lengths, **self.options, return_lse=True)


def check_export(module, make_inputs, dynamic_shapes, sizes) -> None:
    """Exported with the first sizes, the module gives with all of them what it gives itself."""
    exported = export(module, *make_inputs(*sizes[0]), dynamic_shapes=dynamic_shapes).module()
    for size in sizes:
        args, kwargs = make_inputs(*size)
        found, expected = exported(*args, **kwargs), module(*args, **kwargs)
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, expected)), strict=True):
            torch.testing.assert_close(a, b)


def test_export_has_dynamic_batch_and_lengths():
    def inputs(batch, rows, keys):
        return (*make(batch=batch, rows=rows, keys=keys).values(), {}), {}

    of_keys = {0: BATCH, 1: KEYS}
    shapes = ({0: BATCH, 1: ROWS}, of_keys, of_keys, of_keys, {})
    call = Call(causal=False, window_size=(3, 2))
    check_export(call, inputs, shapes, [(2, 5, 9), (4, 1, 4), (1, 1, 1), (1, 130, 130)])


@pytest.mark.slow
def test_export_takes_packed_sequences():
    def inputs(sequences, rows):
        cu = torch.linspace(0, rows, sequences + 1).long()
        tensors = [x[0] for x in make(batch=1, rows=rows).values()]
        return (*tensors, dict(cu_seqlens_q=cu, cu_seqlens_k=cu)), {}

    shapes = (*[{0: ROWS}] * 4, {name: {0: OFFSETS} for name in ("cu_seqlens_q", "cu_seqlens_k")})
    call = Call(decay_attention_varlen, max_seqlen_q=9, max_seqlen_k=9)  # a sequence of the last case is longer
    check_export(call, inputs, shapes, [(2, 5), (3, 12), (2, 21)])


@pytest.mark.slow
def test_export_takes_the_layer():
    def inputs(batch, rows):
        lengths = torch.randint(1, rows + 1, (batch, 1))
        return (torch.randn(batch, rows, 16),), dict(padding_mask=torch.arange(rows) < lengths)

    layer = DecayFlashAttention(16, 4, num_kv_heads=2, sink=True, scale="learned")
    shapes = {name: {0: BATCH, 1: ROWS} for name in ("x", "padding_mask")}
    check_export(layer, inputs, shapes, [(2, 5), (3, 9), (4, 4), (1, 1)])


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_export_takes_the_operator(layout, device):
    """Lengths on both sides of a block of 128 tokens of the decay prefix."""

    def inputs(rows):
        q = torch.randn(1, rows, 2, 4, device=device)
        log_decay = -torch.rand(1, rows, 2, device=device)
        if layout == "dense":
            return (q, q.clone(), q.clone(), log_decay, {}), {}
        cu = torch.tensor([0, rows // 2, rows], device=device)
        lengths = dict(cu_seqlens_q=cu, cu_seqlens_k=cu.clone())
        return (q[0], q[0].clone(), q[0].clone(), log_decay[0], lengths), {}

    if layout == "dense":
        call, shapes = Call(backend="triton"), (*[{1: ROWS}] * 4, {})
    else:
        call = Call(decay_attention_varlen, backend="triton", max_seqlen_q=70, max_seqlen_k=70)
        shapes = (*[{0: ROWS}] * 4, {name: {} for name in ("cu_seqlens_q", "cu_seqlens_k")})
    check_export(call, inputs, shapes, [(5,), (130,)])


@pytest.mark.slow
def test_compile_takes_converted_arguments():
    """A log-decay that broadcasts, int64 offsets: one graph, for other numbers, too."""
    torch.compiler.reset()
    compiled = torch.compile(decay_attention_varlen, fullgraph=True, backend="aot_eager")
    for middle, stance in ((4, "default"), (7, "fail_on_recompile")):
        arguments = packed(make(rows=9), 0, middle, 9, dtype=torch.int64) | dict(max_seqlen_q=9, max_seqlen_k=9)
        arguments["log_decay"] = -torch.rand(9, 1)
        with torch.compiler.set_stance(stance):
            found = compiled(**arguments)
        torch.testing.assert_close(found, decay_attention_varlen(**arguments))  # eager, sequences alike go together
