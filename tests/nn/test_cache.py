"""Generation with a cache: row for row what the whole sequence gives, and what a cache is asked to do besides."""

import copy
import functools
import math
import pickle
from unittest import mock

import cached_layers
import pytest
import torch
from cached_layers import BACKENDS, DEVICE, GROUPED_PRO, HEADS, PRO, WIDTH, Resets, Rotary, build, by_hand, tokens
from pairwise import pairwise
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import decayattn.nn.attention
from decayattn import decay_attention
from decayattn.nn import ConstantDecay, DecayCache, ScalarDecay

pytestmark = pytest.mark.usefixtures("no_gradients")
OPTIONS = {
    "plain": {}, "everything": cached_layers.EVERYTHING, "window and sink": {"window_size": (6, 0), "sink": True},
    "pro": GROUPED_PRO | {"position": Rotary()}, "pro and window": PRO | {"window_size": (4, 0)},
    "shift": {"kv_shift": True, "num_kv_heads": 1, "sink": True},
}


DECAYS = {
    "scalar": lambda: ScalarDecay(WIDTH, HEADS, initial_half_lives=(1.0, 30.0)),
    "alibi": lambda: "constant",
    "learned": lambda: ConstantDecay.alibi(HEADS, learned=True),
    "none": lambda: "none",
    "custom": Resets,
}


@pytest.fixture
def few(monkeypatch):
    """8 tokens besides the window, and 5 unshifted ones, so that short sequences move many out."""
    monkeypatch.setattr(decayattn.nn.cache, "_SLACK", 8)
    monkeypatch.setattr(decayattn.nn.cache, "_UNSHIFTED", 5)


def in_parts(layer, x, parts, cache=None):
    """The layer's outputs when x comes in parts of these lengths, each behind the earlier ones."""
    assert sum(parts) == x.shape[1]
    cache = layer.make_cache(x.shape[0], x.shape[1]) if cache is None else cache
    return torch.cat([layer(part, cache=cache) for part in x.split(parts, dim=1)], dim=1)


def assert_close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=200 * torch.finfo(want.dtype).eps * want.abs().max().item())


@pytest.mark.parametrize(("parts", "backend", "decay", "options"), pairwise(
    [[12, *[1] * 4], [1] * 16, [4, 7, 5], [0, 3, 0, 1, 12]], BACKENDS, [*DECAYS], [*OPTIONS]
))
def test_parts_give_rows_of_the_whole_sequence(parts, backend, decay, options, few):
    layer, x = build(backend, decay=DECAYS[decay](), **OPTIONS[options]), tokens(2, 16)
    cache, whole = layer.make_cache(2, 16), layer(x)
    assert_close(in_parts(layer, x, parts, cache), whole)
    assert (cache.alpha is None) == (decay in ("alibi", "learned", "none"))
    if "window" not in options:  # its old tokens move out
        with pytest.raises(ValueError, match=r"k: expected tokens that fit, got 5 more: .* = 16, .* up to 16 tokens"):
            layer(x[:, :5], cache=cache)
        assert (cache.longest, cache.lengths.tolist()) == (16, [16, 16])


@pytest.mark.parametrize(("module", "name"), [
    (decayattn.nn.cache, "decay_attention"), (decayattn.nn.attention, "decay_attention"),
    (decayattn.nn.attention, "decay_attention_varlen"),
], ids=["prompt", "dense", "packed"])
def test_layer_passes_its_skip_tolerance_on(module, name, monkeypatch):
    monkeypatch.setattr(module, name, spy := mock.Mock(wraps=getattr(module, name)))
    offsets = torch.tensor([0, 24], device=DEVICE) if name == "decay_attention_varlen" else None
    for skip_tolerance in ("auto", None, 1e-3):
        layer = build(skip_tolerance=skip_tolerance)
        cache = layer.make_cache(1, 24) if module is decayattn.nn.cache else None
        layer(tokens(1), cu_seqlens=offsets, cache=cache)
    assert [call.kwargs["skip_tolerance"] for call in spy.call_args_list] == ["auto", None, 1e-3]


def test_attend_ignores_first_log_decay_of_an_entry():
    """Also where the entry was empty after earlier calls."""
    k, v = torch.randn(2, 2, 6, HEADS, 8, device=DEVICE)
    log_decay = -torch.rand(2, 6, HEADS, device=DEVICE)
    results = []
    for first in (0.0, torch.nan):
        log_decay[:, 0] = first
        cache = DecayCache(2, 20, num_heads=HEADS, head_dim=8, device=DEVICE)
        cache.append(k, v, log_decay, new_lengths=torch.tensor([-5, 2**40], device=DEVICE))  # 0 and 6
        log_decay[1, 0] = -0.1
        results.append(cache.attend(k, k, v, log_decay, backend="reference"))
    assert results[0].isfinite().all()
    assert torch.equal(*results)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strong", [-746.001, -torch.inf])
def test_constant_reset_leaves_a_row_its_own_token(backend, strong):
    """However much larger another score is."""
    q = 100 * torch.randn(1, 9, HEADS, 8, device=DEVICE)
    v = torch.randn(1, 9, HEADS, 8, device=DEVICE)
    rates, outs = torch.tensor([strong, -0.1, strong, 0.0], device=DEVICE), []
    for given in (rates, rates.clamp(min=-0.2)):
        cache = DecayCache(1, 9, num_heads=HEADS, head_dim=8, device=DEVICE)
        cache.append(q[:, :5], v[:, :5])
        outs.append(cache.attend(-q[:, 5:], q[:, 5:], v[:, 5:], given, backend=backend))
    own, other = [0, 2], [1, 3]
    assert torch.equal(outs[0][:, :, own], v[:, 5:, own])
    assert torch.equal(outs[0][:, :, other], outs[1][:, :, other])
    assert (cache.evict(1e-3, 1.0, rates)[:, own] < 1e-300).all()


def test_outputs_do_not_depend_on_strong_earlier_decays():
    """α is near −7e5, and its spacing in float32 is 0.06 there."""
    k, v = torch.randn(2, 1, 60, HEADS, 8, device=DEVICE)
    log_decay = -0.1 * torch.rand(1, 60, HEADS, device=DEVICE)
    strong = torch.full((1, 10, HEADS), -7e4 - 1 / 3, device=DEVICE)
    results = []
    for before in (0, 10):
        cache = DecayCache(1, 70, num_heads=HEADS, head_dim=8, device=DEVICE)
        if before:
            cache.append(torch.zeros(1, 10, HEADS, 8).to(k), torch.zeros(1, 10, HEADS, 8).to(k), strong)
        first = log_decay[:, :1] - (1e5 if before else 0)  # nothing of the earlier tokens is left
        cache.append(k[:, :1], v[:, :1], first)
        parts = zip(*(x[:, 1:].split(1, 1) for x in (k, k, v, log_decay)), strict=True)
        results.append(torch.cat([cache.attend(*part) for part in parts]))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=2e-6)


def test_16_bit_decoding_rounds_as_the_whole_call():
    """Both compute in float32 and round operands and outputs at the same places: at most a unit of the output apart."""
    layer, x = build(dtype=torch.bfloat16, decay=DECAYS["custom"](), scale="learned"), tokens(dtype=torch.bfloat16)
    cache, seen = layer.make_cache(2, 24), []
    layer.out_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    layer(x)
    in_parts(layer, x, [10] + [1] * 14, cache)
    assert cache.dtype == torch.bfloat16
    whole, parts = seen[0], torch.cat(seen[1:], 1)
    assert whole.dtype == parts.dtype == torch.bfloat16
    torch.testing.assert_close(parts, whole, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-6)


class Float32(Rotary):
    """Rotary embeddings that return float32, as those with tables in float32 do."""

    def forward(self, q, k, start=None):
        return super().forward(q.float(), k.float(), start)


def test_autocast_gives_16_bit_caches():
    layer, x = build(dtype=torch.float32, position=Float32(), head_dim=6), tokens(dtype=torch.float32)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        want, cache = layer(x), layer.make_cache(2, 24)
        got = in_parts(layer, x, [10, 1, 13], cache)
    assert got.dtype == cache.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0, atol=4 * torch.finfo(torch.bfloat16).eps * want.abs().max().item())


@pytest.mark.parametrize("decay", ["custom", "alibi"])
def test_inference_mode_cache_works_outside_of_it(decay):
    """A prefix is often computed once, under inference_mode, and continued elsewhere."""
    layer, x = build(decay=DECAYS[decay](), position=Rotary(), head_dim=6), tokens()
    index, cache = torch.tensor([1, 1, 0], device=DEVICE), layer.make_cache(2, 12)
    with torch.inference_mode():
        layer(x[:, :12], cache=cache)
        cache.grow(20)
        cache.select(index)
        cache.grow(30)
    assert_close(layer(x[index, 12:20], cache=cache), layer(x[index])[:, 12:20])
    with torch.inference_mode():
        assert_close(layer(x[index, 20:], cache=cache), layer(x[index])[:, 20:])
    cache.crop(4)
    cache.reorder(index)
    cache.evict(0.5, 1.0, *[layer.decay(x)] * (decay == "alibi"))
    cache.reset()
    assert_close(layer(x[index], cache=cache), layer(x[index]))


def test_reset_makes_a_new_cache():
    scalar, constant, x = build(decay=Resets(), **PRO), build(decay="constant", **PRO), tokens()
    cache, buffers = scalar.make_cache(2, 24), set()
    for layer in (scalar, scalar, constant, scalar):
        assert_close(in_parts(layer, x, [9, 1, 14], cache), layer(x))
        cache.reset()
        assert (cache.longest, cache.lengths.tolist()) == (0, [0, 0])
        buffers.add((cache.keys.data_ptr(), cache.values.data_ptr()))
    assert len(buffers) == 1


@pytest.mark.parametrize("kind", ["int8", "offloaded", "no parameter"])
def test_cache_takes_device_and_dtype_of_its_keys(kind):
    """The parameters of quantised and offloaded layers have others, or are none."""
    layer, x = build(dtype=torch.float32, qk_norm=True).cpu(), tokens(dtype=torch.float32).cpu()
    if kind == "offloaded":
        layer = pytest.importorskip("accelerate").cpu_offload(layer, execution_device=torch.device("cpu"))
        with pytest.raises(ValueError, match=r"qk_norm: expected gains with values, .* meta"):
            layer.score_bound()
    else:  # as quantize_dynamic and bitsandbytes leave it
        layer.in_proj.forward = lambda x, weight=layer.in_proj.weight: x @ weight.T
        del layer.in_proj.weight
        if kind == "int8":
            layer.in_proj.weight = nn.Parameter(torch.zeros(1, dtype=torch.int8), requires_grad=False)
    cache = layer.make_cache(2, 24)
    assert (cache.device, cache.dtype) == (None, None)
    whole = layer(x)
    torch.testing.assert_close(in_parts(layer, x, [9, 1, 14], cache), whole, rtol=1e-4, atol=1e-4)
    assert (cache.keys.device, cache.dtype) == (x.device, torch.float32)


@pytest.mark.parametrize("given", [{}, {"device": DEVICE}, {"device": DEVICE, "dtype": torch.float64}])
def test_empty_cache_takes_every_method(given):
    """Before its buffers are there, and after."""
    q = torch.randn(3, 5, HEADS, 8, dtype=torch.float64, device=DEVICE)
    cache, index = DecayCache(2, 3, num_heads=HEADS, head_dim=8, **given), torch.tensor([1, 0, 1], device=DEVICE)
    cache.reset()
    cache.reorder(index[:2])
    cache.select(index)
    cache.grow(5)
    cache.crop(0)
    assert (cache.evict(0.1, torch.ones(HEADS, device=DEVICE)) == 0).all()
    assert repr(cache).startswith("DecayCache(batch_size=3, max_length=5, longest=0")
    assert cache.lengths.tolist() == cache.dropped.tolist() == [0, 0, 0]
    assert cache.keys.shape[0] == cache.values.shape[0] == 3
    cache = copy.deepcopy(cache)
    torch.testing.assert_close(cache.attend(q, q, q, -0.1), decay_attention(q, q, q, -0.1))
    assert (cache.keys.shape, str(cache.device), cache.dtype) == ((3, 5, HEADS, 8), str(q.device), q.dtype)


def test_alpha_of_a_head_is_consecutive_in_memory():
    """The tokens of a head are together in memory, also after their order has changed: decoding reads them so."""
    layer = build()
    cache = layer.make_cache(2, 24)
    layer(tokens(), cache=cache)
    cache.reorder(torch.tensor([1, 0], device=cache.device))
    cache.evict(1e-3, 30.0)
    assert cache.alpha.stride() == (24 * cache.num_heads, 1, 24)
    cache.grow(30)
    assert cache.alpha.stride() == (30 * cache.num_heads, 1, 30)
    with pytest.raises(ValueError, match=r"max_length: expected at least the \d+ tokens held, got 1"):
        cache.grow(1)


@pytest.mark.parametrize("window_size", [None, (5, 0)])
def test_calls_do_not_synchronise(window_size, few):
    """Fake tensors have no values: whatever asks for one raises."""
    layer = build(decay="scalar", window_size=window_size)
    with FakeTensorMode(allow_non_fake_inputs=True):
        cache, counts = layer.make_cache(2, 30), torch.empty(2, dtype=torch.int32, device=DEVICE)
        for length in (12, 1, 30 if window_size else 3):
            x = torch.empty(2, length, WIDTH, dtype=torch.float64, device=DEVICE)
            assert layer(x, cache=cache, new_lengths=counts).shape == x.shape
        cache.reorder(counts)
        cache.crop(1)
        cache.reset()


# Windows


@pytest.mark.parametrize(
    ("parts", "backend", "decay", "dtype"),
    pairwise(
        [[17, *[1] * 13], [3, 16, 1, 4, 6], [0, 7, 9, 14]], BACKENDS, ["custom", "learned", "none"],
        [torch.float64, torch.float16],
    ),
)
def test_window_bounds_a_cache(parts, backend, decay, dtype, few):
    """Rows, positions and addresses stay those of a cache that holds every token."""
    layer = build(backend, dtype=dtype, decay=DECAYS[decay](), window_size=(5, 0), position=Rotary(), head_dim=6)
    x = tokens(2, 30, dtype)
    cache, rows, buffers = layer.make_cache(2, 1000), [], set()
    for part in x.split(parts, 1):
        rows.append(layer(part, cache=cache))
        buffers |= {(cache.keys.data_ptr(), *cache.keys.shape[:2])}
    assert [shape for _, *shape in buffers] == [[2, 13]]
    assert (cache.dropped + cache.lengths).tolist() == [30, 30]
    assert cache.longest <= 13
    if dtype == torch.float64:
        assert_close(torch.cat(rows, 1), layer(x))
    else:
        torch.testing.assert_close(torch.cat(rows, 1), layer(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("side", "backend", "decay", "options"), pairwise(
    ["new_lengths", "left", "right", "both"], BACKENDS, ["custom", "learned", "none"],
    [{"window_size": (5, 0), "sink": True}, {"position": Rotary(), "head_dim": 6}, GROUPED_PRO, PRO],
))
def test_cache_keeps_entries_through_every_change(side, backend, decay, options, few):
    """Padded calls, then removed, reordered, repeated, grown and evicted entries; each alone by the whole sequence."""
    layer = build(backend, decay=DECAYS[decay](), **{"qk_norm": True} | options)
    cache, texts = layer.make_cache(3, 20), [tokens(1, 0)[0] for _ in range(3)]
    generator = torch.Generator().manual_seed(0)
    for call in range(16 if backend == "reference" else 8):
        rows = len(texts)
        counts = torch.randint(0, [3, 1, 8][call % 3] + 1, (rows, 1), generator=generator)
        x = tokens(rows, max(1, int(counts.max())) + 2 * (side == "both"))
        x[..., 0].clamp_(max=2 if call % 2 else 0.4)  # some calls without resets
        x[..., 1] = torch.where(torch.rand_like(x[..., 1]) < 0.1 * (call % 2), 7.0, x[..., 1])  # marks given resets
        index, first = torch.arange(x.shape[1]), {"left": x.shape[1] - counts, "both": 1}.get(side, 0)
        mask = ((index >= first) & (index < first + counts)).to(DEVICE)
        given = {"new_lengths": counts[:, 0].to(DEVICE)} if side == "new_lengths" else {"padding_mask": mask}
        given |= {"resets": x[..., 1] == 7} if decay == "custom" else {}
        cache.grow(cache.longest + 20)
        y = layer(torch.where(mask[..., None], x, torch.nan), cache=cache, **given)
        for b, count in enumerate(counts[:, 0].tolist()):
            texts[b] = torch.cat([texts[b], x[b][mask[b]]])
            if count > 0:
                whole = by_hand(layer, texts[b], resets=texts[b][:, 1] == 7 if decay == "custom" else None)
                assert_close(y[b][mask[b]], whole[len(texts[b]) - count :])
        if call % 4 == 1:  # up to 2 of at most 5; those with a reset stay, which a crop does not undo
            removed = [text[len(text) - n :] for n, text in zip((2, 1, 0), texts, strict=False)]
            removed = [len(x) * bool(((x[:, 0] < 0.5) & (x[:, 1] != 7)).all()) for x in removed]
            cache.crop(removed if call % 8 == 1 else torch.tensor(removed, device=DEVICE))
            texts = [text[: len(text) - n] for n, text in zip(removed, texts, strict=True)]
        if call % 4 == 2:
            order = torch.randint(0, rows, (rows,), generator=generator)
            (cache.reorder if call % 8 == 2 else cache.select)(order.to(DEVICE))
            texts = [texts[n].clone() for n in order]
        if call % 4 == 3:
            cache.evict(1e-14, layer.score_bound())
            cache = copy.deepcopy(cache)
        assert (cache.dropped + cache.lengths).tolist() == [len(text) for text in texts]


def test_crop_refuses_to_empty_the_window(few):
    q, k, v = torch.randn(3, 1, 40, HEADS, 8, device=DEVICE)
    cache = DecayCache(1, 99, num_heads=HEADS, head_dim=8, window_size=(5, 0))
    attend = functools.partial(cache.attend, log_decay=-0.1, window_size=(5, 0))
    attend(q, k, v)
    assert cache.longest == cache.lengths.item() == 9
    attend(*(x[:, :2] for x in (q, k, v)))
    cache.crop(6)
    kept = [*range(36), 39]
    out = attend(*(x[:, 39:] for x in (q, k, v)))
    want = decay_attention(*(x[:, kept] for x in (q, k, v)), -0.1, window_size=(5, 0))[:, -1:]
    torch.testing.assert_close(out, want)
    if DEVICE == "cpu":  # elsewhere an assertion of the device fails, and nothing runs after it
        with pytest.raises(ValueError, match="tokens: expected fewer, because the next row sees tokens that have"):
            cache.crop(2)
        assert (cache.longest, cache.lengths.item()) == (6, 6)


def test_crop_checks_the_window_of_each_entry(few):
    """Tokens of entry 0 were evicted, and never moved out of the window; reordering takes that along."""
    q, k, v = torch.randn(3, 2, 40, HEADS, 8, device=DEVICE)
    cache = DecayCache(2, 99, num_heads=HEADS, head_dim=8, window_size=(5, 0))

    def attend(tokens: int, *counts: int) -> None:
        counted = torch.tensor(counts, device=DEVICE)
        cache.attend(*(x[:, :tokens] for x in (q, k, v)), -9.0, window_size=(5, 0), new_lengths=counted)

    attend(8, 8, 8)
    cache.evict(0.1, 0.0)
    attend(5, 5, 5)
    attend(20, 0, 20)
    assert (cache.lengths.tolist(), cache.dropped.tolist()) == ([6, 9], [7, 24])
    cache.crop(2)
    cache.reorder(torch.zeros(2, dtype=torch.int32, device=DEVICE))
    cache.crop(2)
    assert cache.lengths.tolist() == [2, 2]


def test_crop_restores_unshifted_tokens_or_raises(monkeypatch):
    monkeypatch.setattr(decayattn.nn.cache, "_UNSHIFTED", 4)
    layer, x = build(**PRO), tokens(2, 12)
    cache = layer.make_cache(2, 24)
    layer(x, cache=cache)

    def assert_refused(removed):
        if DEVICE == "cpu":  # a GPU's assertion would end this process's use of it
            with pytest.raises(ValueError, match="tokens: expected fewer than 4, or all"):
                cache.crop(removed)

    for bad in (4, [0, 5], torch.tensor([11, 0])):
        assert_refused(bad)
    cache.crop([3, 1])
    y = tokens(2, 2)
    out = layer(y, cache=cache)
    for b, kept in enumerate((9, 11)):
        assert_close(out[b], by_hand(layer, torch.cat([x[b, :kept], y[b]]))[kept:])
    # entry 0 wrote 12 tokens and has 11: slots hold tokens 8 … 11
    assert_refused([3, 0])
    cache.crop([2, 13])
    out = layer(y, cache=cache)
    assert_close(out[1], by_hand(layer, y[1]))
    assert_close(out[0], by_hand(layer, torch.cat([x[0, :9], y[0]]))[9:])


def test_cropped_reset_still_hides_earlier_tokens():
    layer, x = build(decay=Resets(), **PRO), tokens(1, 9)
    x[..., 0] = 0
    x[:, 8, 0] = 10  # resets every head
    cache, y = layer.make_cache(1, 24), tokens(1, 3)
    y[..., 0] = 0
    layer(x, cache=cache)
    cache.crop(1)
    assert_close(layer(y, cache=cache)[0], by_hand(layer, y[0]))


def test_errors_name_windows_wider_than_the_cache():
    q = torch.randn(1, 9, HEADS, 8, device=DEVICE)
    cache = DecayCache(1, 99, num_heads=HEADS, head_dim=8, window_size=(5, 0))
    for wider in (None, (-1, 0), (6, 0)):
        with pytest.raises(ValueError, match=r"window_size: expected one within the cache's, \(5, 0\), .* got"):
            cache.attend(q, q, q, window_size=wider)
    assert cache.longest == 0
    narrow = [cache.attend(x, x, x, window_size=(2, 0)) for x in q.split([6, 1, 2], 1)]
    torch.testing.assert_close(torch.cat(narrow, 1), decay_attention(q, q, q, window_size=(2, 0)))
    for unbounded in (None, (-1, 0)):
        cache = DecayCache(1, 9, num_heads=HEADS, head_dim=8, window_size=unbounded)
        torch.testing.assert_close(cache.attend(q, q, q), decay_attention(q, q, q))


@pytest.mark.parametrize("max_length", [5, 6])
def test_cache_shorter_than_its_window_is_bounded(max_length):
    layer, x = build(window_size=(5, 0)), tokens(2, 7)
    cache = layer.make_cache(2, max_length)
    layer(x[:, :max_length], cache=cache)
    with pytest.raises(ValueError, match=rf"k: expected tokens that fit, got 1 more: .* max_length = {max_length}"):
        layer(x[:, max_length : max_length + 1], cache=cache)
    cache.grow(7)
    assert_close(layer(x[:, max_length:], cache=cache), layer(x)[:, max_length:])


# Errors


def test_cache_refuses_gradients():
    layer, x = build(), tokens()
    cache = layer.make_cache(2, 24)
    refusal = pytest.raises(RuntimeError, match=r"expected no gradient, .* torch.no_grad.* use_cache=False")
    with torch.enable_grad(), refusal:
        layer(x, cache=cache)
    assert cache.longest == 0
    layer.requires_grad_(False)
    layer.decay.requires_grad_()
    with torch.enable_grad(), refusal:
        layer(x, cache=cache)
    layer.requires_grad_(False)
    with torch.enable_grad():
        layer(x, cache=cache)
    assert cache.longest == 24


def test_cache_refuses_tokens_without_a_shift():
    layer, plain, x = build(kv_shift=True, num_kv_heads=1), build(num_kv_heads=1), tokens()
    cache = layer.make_cache(2, 60)
    plain(x, cache=cache)
    with pytest.raises(ValueError, match="cache: expected tokens of a layer with kv_shift, got others"):
        layer(x, cache=copy.deepcopy(cache))
    q, k = torch.randn(2, 3, HEADS, 3).to(x), torch.randn(2, 3, 1, 3).to(x)
    with pytest.raises(ValueError, match=r"unshifted: expected the shape and device of v, \(2, 3, 1, 3\)"):
        cache.attend(q, k, k, torch.zeros(2, 3, HEADS).to(x), unshifted=(k, k[:, :2]))
    assert cache.longest == 24


def test_errors_name_layers_without_a_cache():
    layer = build(causal=False)
    with pytest.raises(ValueError, match=r"cache: expected a layer with causal=True"):
        layer.make_cache(2, 24)
    with pytest.raises(ValueError, match=r"cache: expected a layer with causal=True"):
        layer(tokens(), cache=build().make_cache(2, 24))
    with pytest.raises(ValueError, match=r"cache: expected a position module that takes the keyword start, .* Bili"):
        build(position=nn.Bilinear(1, 1, 1)).make_cache(2, 24)


def test_cache_of_another_layer_is_refused():
    first, second = build(), build()
    cache = first.make_cache(2, 30)
    first(tokens(), cache=cache)
    with pytest.raises(ValueError, match="cache: expected one without tokens of another layer"):
        second(tokens(), cache=cache)
    copy.deepcopy(first)(tokens()[:, :1], cache=cache)
    second(tokens()[:, :1], cache=pickle.loads(pickle.dumps(cache)))
    with pytest.raises(TypeError, match="resets"):
        second(tokens()[:, :1], cache=copy.deepcopy(cache), resets=7)
    first(tokens()[:, :1], cache=cache)
    cache.reset()
    second(tokens(), cache=cache)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"cache": 3}, TypeError, "cache: expected a DecayCache, got 3 of type int"),
    ({"batch": 3}, ValueError, r"cache: expected the .* \(2, 4, 4, 3, 3\), got \(3, 4, 4, 3, 3\)"),
    ({"heads": 2}, ValueError, r"cache: expected the .* got \(2, 2, 2, 3, 3\)"),
    ({"dtype": torch.float32}, TypeError, "k: expected the dtype of the cache, torch.float32, got .*64; make one"),
    ({"new_lengths": [1, 2]}, TypeError, r"new_lengths: expected a torch.Tensor, got \[1, 2\]"),
    ({"new_lengths": torch.tensor([1.0, 2.0])}, TypeError, "new_lengths: expected int32 or int64, got torch.float"),
    ({"new_lengths": torch.tensor([1])}, ValueError, r"new_lengths: expected shape \(B,\) = \(2,\), got \(1,\)"),
])
def test_errors_name_arguments_of_a_call(arguments, error, message):
    batch, heads, dtype = (arguments.pop(n, d) for n, d in (("batch", 2), ("heads", 4), ("dtype", torch.float64)))
    cache = DecayCache(batch, 24, num_heads=heads, head_dim=3, device=DEVICE, dtype=dtype)
    if isinstance(arguments.get("new_lengths"), torch.Tensor):
        arguments["new_lengths"] = arguments["new_lengths"].to(DEVICE)
    with pytest.raises(error, match=message):
        build()(tokens(), **{"cache": cache, **arguments})
    assert cache.longest == 0


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"q": (1, 3, 2, 8)}, ValueError, r"q: expected the tokens of k and the heads of the cache, .* \(5, 2\)"),
    ({"v": (1, 5, 2, 7)}, ValueError, r"v: expected the shape of the cache's tokens, \(1, T, 2, 8\), got"),
    ({"log_decay": (1, 4, 2)}, ValueError, r"log_decay: expected shape"),
    ({"log_decay": None}, ValueError, "log_decay: expected one per token, as for .*, got none"),
])
def test_errors_name_arguments_of_attend(change, error, message):
    shapes = {"q": (1, 5, 2, 8), "k": (1, 5, 2, 8), "v": (1, 5, 2, 8), "log_decay": (1, 5, 2)}
    good = {name: torch.zeros(shape, device=DEVICE) for name, shape in shapes.items()}
    cache = DecayCache(1, 20, num_heads=2, head_dim=8, device=DEVICE)
    cache.attend(**good)
    bad = {n: torch.zeros(x, device=DEVICE) if isinstance(x, tuple) else x for n, x in change.items()}
    with pytest.raises(error, match=message):
        cache.attend(**{**good, **bad})
    assert cache.longest == 5


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"max_length": 0}, ValueError, "max_length: expected at least 1, got 0"),
    ({"num_kv_heads": 3}, ValueError, "num_kv_heads: expected a divisor of num_heads = 4, got 3"),
    ({"dtype": torch.int8}, TypeError, "dtype: expected float16, .* got torch.int8"),
])
def test_errors_name_arguments_of_construction(change, error, message):
    with pytest.raises(error, match=message):
        DecayCache(**{"batch_size": 2, "max_length": 9, "num_heads": 4, "head_dim": 8, **change})


def test_errors_name_bad_entries_and_counts():
    cache, k = DecayCache(4, 12, num_heads=2, head_dim=4), torch.zeros(4, 5, 2, 4)
    cache.append(k, k)
    for index in ([0], torch.tensor([0.0]), torch.tensor(0)):
        with pytest.raises((TypeError, ValueError), match="index: expected"):
            cache.select(index)
    bad = [-1, 6, 1.0, True, [1, 2], [1, 2, -1, 0], [1, 2, 6, 0], (1, 2, 0.0, 1), "1234", torch.tensor(1)]
    bad += [torch.tensor(x) for x in ([1, 1, 1, -1], [1, 1, 1, 6], [1, 2], [[1]] * 4, [1.0] * 4, [True] * 4)]
    for count in bad:
        with pytest.raises((TypeError, ValueError), match="tokens: expected"):
            cache.crop(count)
    assert cache.lengths.tolist() == [5] * 4


@pytest.mark.parametrize(("window", "kind"), [
    (None, list), ((5, 0), tuple), (None, torch.tensor), ((5, 0), lambda x: torch.tensor(x, dtype=torch.int32)),
])
def test_crop_removes_drafts_of_each_entry(window, kind, few):
    """The cache has room for accepted tokens and one draft; an entry may accept none, or lose all it has."""
    layer = build(decay=DECAYS["scalar"](), window_size=window, position=Rotary(), head_dim=6)
    cache, texts = layer.make_cache(3, 24), [torch.zeros(0, WIDTH).to(tokens()) for _ in range(3)]
    cache.crop(kind([0, 0, 0]))  # without buffers yet
    for accepted in ([4, 1, 0], [0, 4, 4], [3, 2, 1], [1, 1, 4], [4, 4, 4], [4, 0, 4], [4, 4, 3]):
        drafts = tokens(3, 4)
        y = layer(drafts, cache=cache)
        for b, count in enumerate(accepted):
            texts[b] = torch.cat([texts[b], drafts[b, :count]])
            assert_close(y[b, :count], layer(texts[b][None])[0, len(texts[b]) - count :]) if count else None
        removed = kind([4 - count for count in accepted])
        cache.crop(removed.to(DEVICE) if isinstance(removed, torch.Tensor) else removed)
        assert (cache.dropped + cache.lengths).tolist() == [len(text) for text in texts]
    assert [len(text) for text in texts] == [20, 16, 20]
    y = layer(x := tokens(3, 4), cache=cache)
    assert_close(y, torch.stack([layer(torch.cat(pair)[None])[0, -4:] for pair in zip(texts, x, strict=True)]))
    if window is None:
        with pytest.raises(ValueError, match=r"k: expected tokens that fit, got 1 more: .* up to 24 tokens"):
            layer(x[:, :1], cache=cache)


def test_cropped_reset_hides_no_later_token():
    """A token sees itself, and not what the forgotten reset has hidden; also behind an eviction, which then leaves
    one hidden token."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 12, 2, 16, device=DEVICE)
    log_decay = -torch.rand(2, 12, 2, device=DEVICE)
    log_decay[:, 9, 0] = -math.inf  # of one head, and of both in the last entry
    log_decay[1, 9, 1] = -math.inf
    part, last = slice(0, 10), slice(10, 12)
    for evicts in (False, True):
        cache = DecayCache(2, 12, num_heads=2, head_dim=16, device=DEVICE)
        cache.attend(*(x[:, part] for x in (q, k, v, log_decay)), backend="reference")
        cache.crop(3)
        assert (cache.first <= cache.lengths[:, None]).all()
        if evicts:
            cache.evict(1e-12, 20.0)
            assert cache.lengths.tolist() == [7, 1]
            assert (cache.lengths + cache.dropped == 7).all()
        out = cache.attend(*(x[:, last] for x in (q, k, v, log_decay)), backend="reference")
        kept = [*range(7), 10, 11]
        log_decay_of_kept = log_decay[:, kept].clone()
        for entry, head in ((0, 0), (1, 0), (1, 1)):  # as if the first new token reset
            log_decay_of_kept[entry, 7, head] = -math.inf
        expected = decay_attention(*(x[:, kept] for x in (q, k, v)), log_decay_of_kept)[:, -2:]
        torch.testing.assert_close(out, expected)


def test_entry_cropped_whole_is_empty():
    """With resets, evictions and positions of what was: as after `reset`."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 14, 2, 4, dtype=torch.float64, device=DEVICE)
    log_decay = torch.full((2, 14, 2), -8.0, dtype=torch.float64, device=DEVICE)
    log_decay[:, 9, 0] = -math.inf
    cache = DecayCache(2, 14, num_heads=2, head_dim=4, device=DEVICE, dtype=torch.float64)
    counts = torch.tensor([10, 8], device=DEVICE)
    cache.append(k[:, :10], v[:, :10], log_decay[:, :10], new_lengths=counts)
    cache.evict(1e-3, 1.0)
    assert (cache.dropped > 0).all()
    cache.crop(cache.longest)
    for state in (cache.first, cache.lengths, cache.dropped):
        assert (state == 0).all()
    rest = [x[:, 10:] for x in (q, k, v, log_decay)]
    out = [cache.attend(*(x[:, rows] for x in rest)) for rows in (slice(0, 3), slice(3, 4))]
    torch.testing.assert_close(torch.cat(out, 1), decay_attention(*rest))
    assert (cache.evict(1e-12, 20.0) == 0).all()  # nothing has been lost
