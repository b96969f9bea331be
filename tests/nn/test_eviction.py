"""Eviction from a cache: lost probability stays below its bound, and a layer generates far beyond its cache."""

import math

import pytest
import torch
from cached_layers import DEVICE, HEADS, WIDTH, Rotary, build, tokens
from torch import nn

import decayattn.nn.attention
from decayattn import attention_rows
from decayattn.nn import ConstantDecay, DecayCache, ScalarDecay

pytestmark = pytest.mark.usefixtures("no_gradients")
KV_HEADS = 2


class Stream:
    """A long random sequence that comes in parts, and everything about it in float64 without a cache.

    Queries and keys have length 1, and the scale is the bound on the scores.
    """

    def __init__(self, kind, *, bound=1.5, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(2, 240, *shape, generator=generator, dtype=torch.float64)

        self.q, self.k = (nn.functional.normalize(random(n, 6), dim=-1).to(DEVICE) for n in (HEADS, KV_HEADS))
        self.v, self.bound = random(KV_HEADS, 5).to(DEVICE), bound
        rates = -torch.linspace(0.2, 1.5, HEADS, dtype=torch.float64)
        self.log_decay = (rates if kind == "constant" else rates * random(HEADS).abs()).to(DEVICE)
        self.constant = self.log_decay if kind == "constant" else None

    def decay(self):
        """(α_i − α_j, whether i sees j), (B, H, T, T)."""
        i = torch.arange(self.q.shape[1], device=DEVICE)
        if self.constant is not None:
            alpha, segment = self.log_decay[:, None] * i, torch.zeros_like(i)
        else:
            resets = self.log_decay.isneginf()
            alpha = self.log_decay.masked_fill(resets, 0).cumsum(1).mT
            segment = resets.cumsum(1).mT
        seen = (i[:, None] >= i) & (segment[..., :, None] == segment[..., None, :])
        difference = alpha[..., :, None] - alpha[..., None, :]
        return difference.expand(2, HEADS, -1, -1), seen.expand(2, HEADS, -1, -1)

    def probabilities(self):
        """(B, H, T, T) of the whole sequence."""
        return attention_rows(self.q, self.k, self.log_decay, range(self.q.shape[1]), scale=self.bound)

    def cache(self, max_length):
        return DecayCache(
            2, max_length, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=6, value_dim=5, device=DEVICE,
            dtype=torch.float64,
        )

    def hidden(self, cache):
        """(B, H, T), True for the tokens that the cache has evicted or hides."""
        first = cache.first + cache.dropped[:, None]
        return torch.arange(self.q.shape[1], device=DEVICE) < first[..., None]

    def run(self, tolerance, max_length, parts):
        """Evict before every part; (largest lost probability, outputs, cache), the bound held in every row."""
        cache, (decay, seen), p = self.cache(max_length), self.decay(), self.probabilities()
        start, out, worst = 0, [], 0.0
        for count in parts:
            bound = cache.evict(tolerance, self.bound, self.constant)
            assert (bound <= tolerance * (1 + 1e-12)).all()
            rows, hidden = slice(start, start + count), self.hidden(cache)
            if start:
                terms = (decay + 2 * self.bound).exp().masked_fill(~seen, 0)[:, :, start - 1]
                torch.testing.assert_close(bound, (terms * hidden).sum(-1), rtol=1e-9, atol=0)
            lost = (p[:, :, rows] * hidden[:, :, None]).sum(-1)
            assert (lost <= bound[..., None] * (1 + 1e-12)).all()
            worst = max(worst, lost.max().item())
            log_decay = self.log_decay if self.constant is not None else self.log_decay[:, rows]
            own = (x[:, rows] for x in (self.q, self.k, self.v))
            out.append(cache.attend(*own, log_decay, scale=self.bound, backend="reference"))
            start += count
        return worst, torch.cat(out, 1), cache


@pytest.mark.parametrize("kind", ["constant", "scalar", "resets"])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-6])
@pytest.mark.parametrize("seed", range(3))
def test_evicted_probability_stays_below_its_bound(kind, tolerance, seed):
    """The cache is far too short for the whole sequence."""
    stream = Stream(kind, seed=seed)
    if kind == "resets":
        at = torch.rand(stream.log_decay.shape, generator=torch.Generator().manual_seed(seed)) < 0.02
        stream.log_decay[at.to(DEVICE)] = -torch.inf
    worst, out, cache = stream.run(tolerance, 200, [40, 1, 1, 8, 50, 20, 20, 20, 30, 49, 1])
    v = stream.v.repeat_interleave(HEADS // KV_HEADS, 2)
    want = torch.einsum("bhij,bjhe->bihe", stream.probabilities(), v)
    assert (out - want).abs().max() <= 2 * tolerance * v.abs().max() + 1e-13
    assert (cache.dropped + cache.lengths == 240).all()
    assert (cache.dropped > 0).all()
    assert worst > 0  # something that mattered a little was dropped


def test_evictions_are_remembered():
    """By every head of every entry: nothing more goes when nothing has come, and lost tokens count until a reset."""
    stream, tolerance = Stream("scalar"), 1e-3
    stream.log_decay[1] *= 2
    cache = stream.cache(240)
    part = slice(0, 100)
    cache.append(stream.k[:, part], stream.v[:, part], stream.log_decay[:, part])
    bound, dropped, first = cache.evict(tolerance, stream.bound), cache.dropped.clone(), cache.first.clone()
    assert (bound > 0).all()
    assert dropped[0] != dropped[1]
    for stricter in (tolerance, 1e-6):
        torch.testing.assert_close(cache.evict(stricter, stream.bound), bound, rtol=1e-12, atol=0)
    cache.reorder(torch.tensor([1, 0], device=DEVICE))
    torch.testing.assert_close(cache.evict(tolerance, stream.bound), bound.flip(0), rtol=1e-12, atol=0)
    assert torch.equal(cache.dropped, dropped.flip(0))
    assert torch.equal(cache.first, first.flip(0))

    token = (stream.k[:, :1], stream.v[:, :1], torch.zeros(2, 1, 4, dtype=torch.float64, device=DEVICE))
    token[2][:, :, 0] = -torch.inf
    cache.append(*token)
    bound = cache.evict(tolerance, stream.bound)
    assert (bound[:, 0] == 0).all()
    assert (bound[:, 1:] > 0).all()
    cache.reset()
    counts = torch.tensor([0, 100], device=DEVICE)
    cache.append(stream.k[:, part], stream.v[:, part], stream.log_decay[:, part], new_lengths=counts)
    bound = cache.evict(tolerance, stream.bound)
    assert (bound[0] == 0).all()
    assert cache.dropped[0] == cache.lengths[0] == 0
    assert cache.dropped[1] > 0
    assert cache.longest == cache.lengths[1]


def test_eviction_frees_tokens_hidden_by_a_reset():
    stream = Stream("scalar", bound=0.0)
    stream.log_decay[:] = 0
    stream.log_decay[:, 100] = -torch.inf
    _, _, cache = stream.run(1e-9, 241, [90, 30, 120])
    assert cache.dropped.tolist() == [100, 100]
    assert (cache.evict(1e-9, 0.0) == 0).all()


def test_evict_keeps_all_tokens_without_decay():
    cache = DecayCache(1, 9, num_heads=2, head_dim=4, device=DEVICE)
    k = torch.randn(1, 9, 2, 4, device=DEVICE)
    cache.attend(k, k, k)
    assert (cache.evict(0.1, torch.tensor([1.0, 0.5], device=DEVICE)) == 0).all()
    assert (cache.longest, cache.dropped.item()) == (9, 0)


@pytest.mark.parametrize("rates", [-2.0, [-2.0, -2.0]], ids=["number", "tensor"])
def test_evict_takes_the_constant_decay_of_attend(rates):
    rates = torch.tensor(rates, device=DEVICE) if isinstance(rates, list) else rates
    caches = [DecayCache(1, 40, num_heads=2, head_dim=4) for _ in range(2)]
    q = torch.randn(1, 40, 2, 4, device=DEVICE)
    for cache in caches:
        cache.attend(q[:, :30], q[:, :30], q[:, :30], rates)
    bounds = caches[0].evict(1e-3, 1.0), caches[1].evict(1e-3, 1.0, rates)
    assert torch.equal(*bounds)
    assert caches[0].longest == caches[1].longest < 30
    caches[0].reset()
    caches[0].append(q, q)
    with pytest.raises(ValueError, match=r"log_decay: expected the constant decay, .* `append` does not store it"):
        caches[0].evict(1e-3, 1.0)
    assert (caches[0].evict(1e-3, 1.0, 0.0) == 0).all()


@pytest.mark.parametrize(("kind", "backend"), [
    ("constant", "reference"), ("scalar", "reference"), ("scalar", "triton"),
    pytest.param("constant", "triton", marks=pytest.mark.slow),
])
def test_layer_generates_far_beyond_its_cache(kind, backend):
    """Entries of different lengths, reordered in between; positions go on, and the bound comes from qk_norm's gains."""
    constant = ConstantDecay.from_values([-2.0, -1.0, -0.5, -0.7])
    decay = constant if kind == "constant" else ScalarDecay(WIDTH, HEADS, initial_half_lives=(0.5, 1.0))
    layer = build(backend, decay=decay, qk_norm=True, head_dim=6, position=Rotary(), scale=0.05)
    cache, tolerance, prompts, rest = layer.make_cache(2, 100), 1e-9, tokens(2, 30), tokens(2, 120)
    layer(prompts, cache=cache, new_lengths=torch.tensor([30, 20], device=DEVICE))
    cache.reorder(torch.tensor([1, 0], device=DEVICE))
    out = []
    for part in rest.split(30, dim=1):
        assert (cache.evict(tolerance, layer.score_bound()) <= tolerance).all()
        out.append(layer(part, cache=cache))
    assert (cache.dropped > 40).all()
    assert (cache.dropped + cache.lengths).tolist() == [140, 150]
    for b, prompt in enumerate((prompts[1, :20], prompts[0])):
        want = layer(torch.cat([prompt, rest[b]])[None])[0, len(prompt) :]
        assert (torch.cat(out, 1)[b] - want).abs().max() <= 100 * tolerance * want.abs().max()


def largest_scores(layer, x, monkeypatch):
    """The largest |score| of every head, in float64; the layer has one key head."""
    seen = []
    monkeypatch.setattr(
        decayattn.nn.attention, "decay_attention", lambda q, k, v, *_, scale, **__: seen.append((q, k, scale)) or q
    )
    layer(x)
    [(q, k, scale)] = seen
    scale = layer.head_dim**-0.5 if scale is None else scale
    scores = torch.einsum("bihd,bjgd->bijh", q.double(), k.double()).abs() * torch.as_tensor(scale).double().abs()
    return scores.amax((0, 1, 2))


@pytest.mark.parametrize("scale", [None, -0.7, "learned"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_score_bound_bounds_the_scores(scale, dtype, monkeypatch):
    """With gains at random; and with gains of 1, as a norm rounded to bfloat16 may be longer than √D."""
    layer = build(qk_norm=True, scale=scale, num_kv_heads=1, dtype=dtype)
    largest = largest_scores(layer, 100 * tokens(2, 50, dtype), monkeypatch)
    assert (largest <= layer.score_bound()).all()
    assert (largest > 0.2 * layer.score_bound()).all()
    layer = build(qk_norm=True, scale=scale, head_dim=2, num_kv_heads=1, dtype=dtype)
    layer.q_norm.weight.fill_(1), layer.k_norm.weight.fill_(1)
    q, k = layer.in_proj.weight.split(layer.split_sizes)[:2]
    k.copy_(q[:2])  # as the first head's queries
    largest = largest_scores(layer, tokens(2, 200, dtype), monkeypatch)
    assert (largest > 2**0.5).any() or scale is not None or dtype == torch.float64
    assert (largest <= layer.score_bound()).all()
    with pytest.raises(ValueError, match="qk_norm: expected True"):
        build().score_bound()


def test_score_bound_is_that_of_each_head():
    layer = build(qk_norm="per_head", num_kv_heads=2, scale=0.5)
    q_gain, k_gain = (n.weight.view(-1, 3).abs().amax(1) for n in (layer.q_norm, layer.k_norm))
    bound = 0.5 * 3 * q_gain * k_gain.repeat_interleave(2)
    assert (layer.score_bound() >= bound).all()
    assert (layer.score_bound() <= 1.05 * bound).all()


# Errors


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ((0.0, 1.0), ValueError, "tolerance: expected a number between 0 and 1, got 0.0"),
    (("auto", 1.0), TypeError, "tolerance: expected a number between 0 and 1, got 'auto'"),
    ((0.1, torch.zeros(3)), ValueError, r"score_bound: expected a number or \(H,\) = \(2,\), got \(3,\)"),
    ((0.1, 10**400), ValueError, "score_bound: expected a finite number of at least 0 or a tensor .*, got 1000"),
    ((0.1, -1.0), ValueError, "score_bound: expected a finite number of at least 0 or a tensor .*, got -1"),
    ((0.1, 1.0, -0.5), ValueError, "log_decay: expected None, because the cache holds a decay per token"),
])
def test_errors_name_arguments_of_evict(arguments, error, message):
    cache = DecayCache(1, 9, num_heads=2, head_dim=4, device=DEVICE)
    k = torch.zeros(1, 5, 2, 4, device=DEVICE)
    cache.append(k, k, torch.zeros(1, 5, 2, device=DEVICE))
    with pytest.raises(error, match=message):
        cache.evict(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in arguments))
    assert cache.longest == 5


@pytest.mark.skipif(DEVICE != "cpu", reason="an assertion of a GPU fails, and nothing runs after it")
@pytest.mark.parametrize(("name", "number"), [
    ("score_bound", math.nan), ("score_bound", -1.0), ("log_decay", math.inf),
])
def test_evict_refuses_bad_numbers_in_tensors(name, number):
    k = torch.zeros(1, 5, 2, 4)
    cache = DecayCache(1, 9, num_heads=2, head_dim=4)
    cache.append(k, k)
    with pytest.raises(ValueError, match=f"{name}: expected finite numbers"):
        cache.evict(0.1, **{"score_bound": 1.0, "log_decay": -9.0} | {name: torch.tensor([1.0, number])})
    assert (cache.longest, cache.dropped.item()) == (5, 0)
    assert cache._log_evicted.isneginf().all()
