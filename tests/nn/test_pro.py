"""The Pro block: shifted keys and values, norms with a gain per head; each entry by the formula, in every call."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cached_layers import BACKENDS, DEVICE, HEADS, WIDTH, Rotary, tokens
from pairwise import pairwise
from torch import nn

import decayattn.nn.cache
from decayattn import DecayFlashAttention, decay_attention
from decayattn.nn import CapturedStep, ConstantDecay, ScalarDecay, parameter_groups

PRO = {"kv_shift": True, "output_norm": True, "output_gate": True, "qk_norm": "per_head"}
LAYERS = {
    "pro": PRO,
    "grouped": PRO | {"num_kv_heads": 2, "head_dim": 6, "value_dim": 5, "bias": True, "position": Rotary()},
    "shift": {"kv_shift": True, "num_kv_heads": 1, "scale": "learned", "sink": True},
    "window": PRO | {"qk_norm": True, "window_size": (4, 0)},
    "norms": {"output_norm": True, "qk_norm": "per_head", "num_kv_heads": 2},
}


class Resets(nn.Module):
    """λ from x, and a reset of some heads wherever the first channel of x is above a threshold."""

    def forward(self, x):
        resets = x[..., :1] > torch.tensor([0.8, 1.5, 9.0, 0.8]).to(x)
        log_decay = x[..., :HEADS].to(torch.promote_types(x.dtype, torch.float32)).sigmoid() - 0.9
        return log_decay.masked_fill(resets, -torch.inf)


DECAYS = {
    "scalar": lambda: ScalarDecay(WIDTH, HEADS, initial_half_lives=(1.0, 30.0)), "resets": Resets,
    "constant": lambda: ConstantDecay.alibi(HEADS), "none": lambda: "none",
}


def build(options="pro", decay="scalar", dtype=torch.float64, **more):
    torch.manual_seed(0)
    layer = DecayFlashAttention(
        WIDTH, HEADS, decay=DECAYS[decay](), dtype=dtype, **{"backend": "reference"} | LAYERS[options] | more
    ).to(DEVICE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def by_hand(layer, x, resets=None, memory=None):
    """The paper's formulas for one sequence x (T, WIDTH), head by head and token by token."""
    source, kv_heads = x if memory is None else memory, layer.num_kv_heads
    parts = list(layer.in_proj.weight.split(layer.split_sizes))
    biases = [0] * len(parts) if layer.in_proj.bias is None else layer.in_proj.bias.split(layer.split_sizes)
    inputs = (x, source, source, x, source, source)
    q, k, v, gate, *mixing = (y @ w.T + b for y, w, b in zip(inputs, parts, biases, strict=False))
    q, k, v = (y.unflatten(-1, (heads, -1)) for y, heads in zip((q, k, v), (HEADS, kv_heads, kv_heads), strict=True))
    log_decay = None if layer.decay is None else layer.decay(source[None])
    if resets is not None:
        log_decay = log_decay.masked_fill(resets[None, :, None], -torch.inf)
    if layer.kv_shift:
        group = HEADS // kv_heads
        restarts = torch.zeros(len(source), kv_heads, dtype=torch.bool, device=x.device)
        if log_decay is not None and log_decay.ndim == 3:
            for h in range(HEADS):
                restarts[:, h // group] |= log_decay[0, :, h] == -torch.inf
        shifted = []
        for y, a in zip((k, v), mixing, strict=True):
            a, rows = a.sigmoid()[..., None], []
            for t in range(len(y)):
                previous = 0 * y[t] if t == 0 else torch.where(restarts[t, :, None], 0, y[t - 1])
                rows.append(a[t] * previous + (1 - a[t]) * y[t])
            shifted.append(torch.stack(rows) if rows else y)
        k, v = shifted

    def norm(y, weight):
        gain = weight if len(weight) == y.shape[-1] else weight.view(y.shape[-2:])
        return y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain

    if layer.qk_norm:
        q, k = norm(q, layer.q_norm.weight), norm(k, layer.k_norm.weight)
    if layer.position is not None:
        q, k = (y[0] for y in layer.position(q[None], k[None]))
    scale = layer.scale if layer.log_scale is None else layer.log_scale.exp() / layer.head_dim**0.5
    out = decay_attention(
        q[None], k[None], v[None], log_decay, scale=scale, sink=layer.sink, window_size=layer.window_size,
        causal=layer.causal, backend="reference",
    )[0]
    if layer.output_norm is not None:
        out = norm(out, layer.output_norm.weight)
    out = out.flatten(-2)
    return layer.out_proj(out * gate.sigmoid() if layer.output_gate else out)


def close(got, want, dtype=torch.float64):
    torch.testing.assert_close(got, want, rtol=0, atol={torch.float64: 1e-12, torch.float32: 2e-5}[dtype] * 10)


def close_all(results, expected):
    for got, want in zip(results, expected, strict=True):
        close(got, want)


def gradients(loss, inputs):
    return torch.autograd.grad(loss, list(inputs), allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("call", ["dense", "left", "right", "packed", "resets", "memory", "both ways"])
@pytest.mark.parametrize("options", LAYERS)
def test_calls_and_gradients_follow_the_formulas(options, call):
    """Entries of other lengths, one of them empty, NaN at padding; bias makes padding's keys other than 0."""
    if call == "memory" and LAYERS[options].get("position"):
        pytest.skip("a memory excludes a position module")
    decay = "none" if call == "memory" else "resets"
    layer = build(options, decay, causal=call not in ("memory", "both ways"))
    lengths, total = ([8, 8, 8] if call in ("dense", "resets", "both ways") else [8, 0, 5]), 8
    texts = [tokens(1, n)[0].requires_grad_() for n in lengths]
    memories = [tokens(1, n)[0] for n in (6, 3, 9)] if call == "memory" else [None] * 3
    resets = torch.rand(3, total, device=DEVICE) < 0.3 if call == "resets" else [None] * 3

    def padded(rows, on_left):
        longest = max(map(len, rows))
        sides = [(longest - len(row), 0) if on_left else (0, longest - len(row)) for row in rows]
        x = torch.stack([F.pad(row, (0, 0, *side), value=torch.nan) for row, side in zip(rows, sides, strict=True)])
        mask = [F.pad(torch.ones(len(r), device=DEVICE), side) for r, side in zip(rows, sides, strict=True)]
        return x, torch.stack(mask).bool()

    x, mask = padded(texts, call == "left")
    if call == "packed":
        offsets = torch.tensor([0, 8, 8, 13], device=DEVICE)
        out = layer(torch.cat([*texts, torch.full_like(texts[0], torch.nan)])[None], cu_seqlens=offsets)[0, :13]
    elif call == "memory":
        memory, memory_mask = padded(memories, True)
        out = layer(x, padding_mask=mask, memory=memory, memory_padding_mask=memory_mask)[mask]
    elif call == "resets":
        out = layer(x, resets=resets)[mask]
    else:
        out = layer(x, padding_mask=mask)[mask]
    want = torch.cat([by_hand(layer, *entry) for entry in zip(texts, resets, memories, strict=True)])
    close(out, want)
    target = torch.randn_like(want)
    close_all(*(gradients((y * target).sum(), [*layer.parameters(), *texts]) for y in (out, want)))


def test_gradcheck_passes_through_the_layer():
    layer, x = build("grouped", "resets"), tokens(1, 4).requires_grad_()
    assert torch.autograd.gradcheck(layer, x)
    for name in ("in_proj.bias", "k_norm.weight", "output_norm.weight"):
        def call(weight, name=name):
            return torch.func.functional_call(layer, {name: weight}, (x.detach(),))

        assert torch.autograd.gradcheck(call, layer.get_parameter(name).detach().requires_grad_())


@pytest.mark.parametrize("options", ["pro", "grouped"])
def test_kernels_give_results_of_the_reference(options):
    layer, x = build(options, "resets", torch.float32), tokens(2, 40, torch.float32)
    results = []
    for backend in BACKENDS:
        layer.backend = backend
        out = layer(x)
        results.append((out, *gradients(out.square().sum(), layer.parameters())))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def test_compiled_and_narrow_layers_agree_with_eager_ones():
    layer, x = build("grouped", "resets", torch.float32), tokens(2, 12, torch.float32)
    want = layer(x)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for length in (12, 7):
        packed = {"cu_seqlens": torch.tensor([0, 5, length], device=DEVICE)}
        close(compiled(x[:1, :length], **packed), layer(x[:1, :length], **packed), torch.float32)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        narrow = layer(x)
    assert narrow.dtype == torch.bfloat16
    for out in (narrow, copy.deepcopy(layer).bfloat16()(x.bfloat16())):
        assert (out.float() - want).norm() < 0.02 * want.norm()


# Caches


def in_parts(layer, x, parts, cache):
    return torch.cat([layer(part, cache=cache) for part in x.split(parts, 1)], 1)


@torch.no_grad()
@pytest.mark.parametrize(("parts", "backend", "decay", "options"), pairwise(
    [[19, *[1] * 5], [1] * 24, [7, 9, 8], [0, 3, 0, 1, 20]], BACKENDS, [*DECAYS], ["pro", "grouped", "shift", "window"],
))
def test_steps_give_rows_of_the_whole_sequence(parts, backend, decay, options, monkeypatch):
    monkeypatch.setattr(decayattn.nn.cache, "_UNSHIFTED", 4)
    monkeypatch.setattr(decayattn.nn.cache, "_SLACK", 8)
    layer, x = build(options, decay, backend=backend), tokens()
    cache, want = layer.make_cache(2, 24), layer(x)
    close(in_parts(layer, x, parts, cache), want)
    cache.reset()
    close(in_parts(layer, x, parts, cache), want)


@torch.no_grad()
@pytest.mark.parametrize("side", ["new_lengths", "left", "right"])
@pytest.mark.parametrize("options", ["grouped", "window"])
def test_cache_keeps_entries_through_every_change(options, side, monkeypatch):
    """Padded calls, then removed, reordered, repeated, grown and evicted entries; each alone by the whole sequence."""
    monkeypatch.setattr(decayattn.nn.cache, "_UNSHIFTED", 5)
    layer = build(options, "resets")
    cache, texts = layer.make_cache(3, 20), [tokens(1, 0)[0] for _ in range(3)]
    generator = torch.Generator().manual_seed(0)
    for call in range(24):
        rows = len(texts)
        counts = torch.randint(0, [3, 1, 8][call % 3] + 1, (rows,), generator=generator)
        x = tokens(rows, max(1, int(counts.max())))
        x[..., 0].clamp_(max=2 if call % 2 else 0.5)  # some calls without resets
        index = torch.arange(x.shape[1])
        mask = (index >= x.shape[1] - counts[:, None]) if side == "left" else (index < counts[:, None])
        mask = mask.to(DEVICE)
        given = {"new_lengths": counts.to(DEVICE)} if side == "new_lengths" else {"padding_mask": mask}
        cache.grow(cache.longest + 20)
        y = layer(torch.where(mask[..., None], x, torch.nan), cache=cache, **given)
        for b in range(rows):
            texts[b] = torch.cat([texts[b], x[b][mask[b]]])
            if len(texts[b]):
                close(y[b][mask[b]], by_hand(layer, texts[b])[len(texts[b]) - int(counts[b]) :])
        if call % 4 == 1:  # up to 2 of at most 5; those with a reset stay, which a crop does not undo
            removed = [min(n, len(text)) for n, text in zip((2, 1, 0), texts, strict=True)]
            removed = [n * bool((text[len(text) - n :, 0] < 0.8).all()) for n, text in zip(removed, texts, strict=True)]
            cache.crop(removed if call % 8 == 1 else torch.tensor(removed, device=DEVICE))
            texts = [text[: len(text) - n] for n, text in zip(removed, texts, strict=True)]
        if call % 4 == 2:
            order = torch.randint(0, rows, (rows,), generator=generator)
            (cache.reorder if call % 8 == 2 else cache.select)(order.to(DEVICE))
            texts = [texts[n].clone() for n in order]
        if call % 4 == 3:
            cache.evict(1e-14, layer.score_bound())
            cache = copy.deepcopy(cache)
    assert (cache.lengths + cache.dropped).tolist() == [len(text) for text in texts]


@torch.no_grad()
def test_crop_restores_unshifted_tokens_or_raises(monkeypatch):
    monkeypatch.setattr(decayattn.nn.cache, "_UNSHIFTED", 4)
    layer, x = build("pro"), tokens(2, 12)
    cache = layer.make_cache(2, 24)
    layer(x, cache=cache)
    for bad in (4, [0, 5], torch.tensor([11, 0], device=DEVICE)):
        with pytest.raises((ValueError, RuntimeError), match="tokens: expected fewer than 4, or all"):
            cache.crop(bad)
    cache.crop([3, 1])
    y = tokens(2, 2)
    out = layer(y, cache=cache)
    for b, kept in enumerate((9, 11)):
        close(out[b], by_hand(layer, torch.cat([x[b, :kept], y[b]]))[kept:])
    # entry 0 wrote 12 tokens and has 11: slots hold tokens 8 … 11
    with pytest.raises((ValueError, RuntimeError), match="tokens: expected fewer than 4, or all"):
        cache.crop([3, 0])
    cache.crop([2, 13])
    out = layer(y, cache=cache)
    close(out[1], by_hand(layer, y[1]))
    close(out[0], by_hand(layer, torch.cat([x[0, :9], y[0]]))[9:])


@torch.no_grad()
def test_cropped_reset_still_hides_earlier_tokens():
    layer, x = build("pro", "resets"), tokens(1, 9)
    x[..., 0] = 0
    x[:, 8, 0] = 10  # resets every head
    cache, y = layer.make_cache(1, 24), tokens(1, 3)
    y[..., 0] = 0
    layer(x, cache=cache)
    cache.crop(1)
    close(layer(y, cache=cache)[0], by_hand(layer, y[0]))


@torch.no_grad()
def test_captured_step_and_its_trial_keep_the_last_token():
    layer, x = build("grouped", "resets"), tokens(2, 20)
    cache, want = layer.make_cache(2, 20), layer(x)
    layer(x[:, :9], cache=cache)
    before = [y.clone() for y in (cache._written, *cache._unshifted)]
    with cache._trial():
        layer(tokens(2, 3), cache=cache)
    assert all(map(torch.equal, before, (cache._written, *cache._unshifted)))
    step = CapturedStep(lambda x: layer(x, cache=cache), [cache], x[:, :1])
    for t in range(9, 20):
        close(step(x[:, t : t + 1]), want[:, t : t + 1])


# Parameters and errors


def test_gains_are_vectors_without_weight_decay():
    layer = build("grouped")
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters() if "norm" in name}
    assert shapes == {"q_norm.weight": (24,), "k_norm.weight": (12,), "output_norm.weight": (20,)}
    spared = {id(p) for p in parameter_groups(layer, 0.1)[1]["params"]}
    assert all(id(layer.get_parameter(name)) in spared for name in shapes)
    layer.reset_parameters()
    assert all((layer.get_parameter(name) == 1).all() for name in shapes)
    assert layer.in_proj.weight.shape == (24 + 12 + 10 + 20 + 2 + 2, WIDTH)
    assert "qk_norm=per_head" in repr(layer)
    assert "kv_shift=True" in repr(layer)


@torch.no_grad()
def test_score_bound_is_that_of_each_head():
    layer = build("norms", scale=0.5)
    q_gain, k_gain = (n.weight.view(-1, 3).abs().amax(1) for n in (layer.q_norm, layer.k_norm))
    bound = 0.5 * 3 * q_gain * k_gain.repeat_interleave(2)
    assert (layer.score_bound() >= bound).all()
    assert (layer.score_bound() <= 1.05 * bound).all()


@torch.no_grad()
def test_layer_refuses_bad_options_and_caches_by_name():
    for bad in (None, 1, "heads"):
        with pytest.raises(TypeError, match="qk_norm: expected a bool or 'per_head', got"):
            DecayFlashAttention(12, 4, qk_norm=bad)
    for name in ("kv_shift", "output_norm"):
        with pytest.raises(TypeError, match=f"{name}: expected a bool, got 1"):
            DecayFlashAttention(12, 4, **{name: 1})
    layer, plain, x = build("shift"), build("shift", kv_shift=False), tokens()
    cache = layer.make_cache(2, 60)
    plain(x, cache=cache)
    with pytest.raises(ValueError, match="cache: expected tokens of a layer with kv_shift, got others"):
        layer(x, cache=cache)
    q, k = torch.randn(2, 3, HEADS, 3).to(x), torch.randn(2, 3, 1, 3).to(x)
    with pytest.raises(ValueError, match=r"unshifted: expected the shape and device of v, \(2, 3, 1, 3\)"):
        cache.attend(q, k, k, torch.zeros(2, 3, HEADS).to(x), unshifted=(k, k[:, :2]))
    assert cache.longest == 24
