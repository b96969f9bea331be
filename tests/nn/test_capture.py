"""CapturedStep: a captured decoding step computes as called, and raises when its caches change."""

import contextlib

import pytest
import torch

import decayattn.nn.cache
from decayattn import DecayFlashAttention, reference
from decayattn.nn import CapturedStep, ScalarDecay

ON_GPU = torch.cuda.is_available()


class Replayed:
    """Replacement of a CUDA graph on a CPU: a replay changes the device's tensors, and no state of the host."""

    def __init__(self, step):
        self.step = step

    def replay(self):
        caches = self.step._caches
        longest = [cache.longest for cache in caches]
        for cache in caches:
            cache._in_trial = True
        outputs = self.step._function(*self.step._inputs)
        for own, new in zip(self.step._outputs, outputs, strict=True):
            own.copy_(new)
        for cache, number in zip(caches, longest, strict=True):
            cache.longest, cache._in_trial = number, False


@pytest.fixture(params=[
    "called", "replayed",
    pytest.param("graph", marks=pytest.mark.skipif(not ON_GPU, reason="needs a GPU, which has graphs")),
])
def capture(request, monkeypatch):
    """Device; CapturedStep calls its function as on a CPU, replays a substitute of a graph, or replays a graph."""
    if request.param == "replayed":
        init = CapturedStep.__init__

        def init_and_capture(step, *arguments):
            init(step, *arguments)
            step._tokens, step._outputs = step._run_trial(contextlib.nullcontext())
            step._graph = Replayed(step)

        monkeypatch.setattr(CapturedStep, "__init__", init_and_capture)
    return "cuda" if request.param == "graph" else "cpu"


def layers_of(device, number=2):
    torch.manual_seed(0)
    decays = [ScalarDecay(32, 4, initial_half_lives=(0.3, 0.6)) for _ in range(number)]
    options = {"num_kv_heads": 2, "qk_norm": True, "sink": True, "kv_shift": True}
    layers = [DecayFlashAttention(32, 4, decay=decay, **options) for decay in decays]
    return [layer.to(device).requires_grad_(False) for layer in layers]


def step_of(layers, caches):
    def step(x):
        for layer, cache in zip(layers, caches, strict=True):
            x = x + layer(x, cache=cache)
        return x, x.mean(-1)

    return step


@torch.no_grad()
def test_captured_step_computes_as_called(capture):
    """Compared with a called model, through evictions and forgotten tokens; entries have their own lengths."""
    layers, x = layers_of(capture), torch.randn(2, 60, 32, device=capture)
    captured, called = ([layer.make_cache(2, 80) for layer in layers] for _ in range(2))
    lengths = torch.tensor([40, 25], device=capture)
    steps = []
    for caches in (captured, called):
        y = x[:, :40]
        for layer, cache in zip(layers, caches, strict=True):
            y = y + layer(y, cache=cache, new_lengths=lengths)
        steps.append(step_of(layers, caches))
    step = CapturedStep(steps[0], captured, x[:, :1])
    assert [cache.lengths.tolist() for cache in captured] == [[40, 25]] * 2
    for t in range(40, 60):
        if t == 47:
            lost = [[cache.evict(1e-3, layer.score_bound()) for layer, cache in zip(layers, caches, strict=True)]
                    for caches in (captured, called)]
            torch.testing.assert_close(*lost)
            assert captured[0].longest < 47
        if t == 52:
            for cache in (*captured, *called):
                cache.crop(3)
        for got, want in zip(step(x[:, t : t + 1]), steps[1](x[:, t : t + 1]), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for one, other in zip(captured, called, strict=True):
        assert one.longest == other.longest
        assert torch.equal(one.lengths, other.lengths)
        assert torch.equal(one.first, other.first)


@torch.no_grad()
def test_trial_of_a_step_keeps_the_cache():
    """A reset among the tokens that were tried is forgotten, and launches are as large as the cache may become."""
    [layer] = layers_of("cpu", 1)
    cache = layer.make_cache(1, 20)
    layer(torch.randn(1, 7, 32), cache=cache)
    before = [x.clone() for x in (cache.lengths, cache.first, cache._log_evicted, cache._written, *cache._unshifted)]
    sizes = []
    q, k, v = torch.randn(1, 1, 4, 8), *torch.randn(2, 1, 1, 2, 8)
    with pytest.MonkeyPatch.context() as patch:
        decode = reference.decode
        patch.setattr(reference, "decode", lambda *a, longest, **o: sizes.append(longest) or decode(*a, **o))
        with cache._trial():
            cache.attend(q, k, v, torch.full((1, 1, 4), -torch.inf), unshifted=(k, v))
            assert cache.longest == 8
            assert (cache.first == 7).all()
        assert all(map(torch.equal, before[3:], (cache._written, *cache._unshifted)))
        cache.attend(q, k, v, torch.zeros(1, 1, 4))
    assert sizes == [20, 8]
    after = (cache.lengths - 1, cache.first, cache._log_evicted)
    assert all(map(torch.equal, before, after))


@torch.no_grad()
def test_captured_step_refuses_other_inputs_and_caches(capture):
    [layer] = layers_of(capture, 1)
    cache = layer.make_cache(1, 12)
    x = torch.randn(1, 12, 32, device=capture)
    with pytest.raises(ValueError, match="caches: expected filled caches, got an empty one"):
        CapturedStep(step_of([layer], [cache]), [cache], x[:, :1])
    layer(x[:, :9], cache=cache)
    step = CapturedStep(step_of([layer], [cache]), [cache], x[:, :1])
    for wrong in (x[:, :2], x[:, :1].double()):
        with pytest.raises(ValueError, match=r"inputs: expected \(shape, dtype, device\)"):
            step(wrong)
    for t in range(9, 12):
        step(x[:, t : t + 1])
    with pytest.raises(ValueError, match="expected tokens that fit, got 1 more"):
        step(x[:, :1])
    if step._graph is not None:
        cache.grow(40)
        with pytest.raises(RuntimeError, match=r"was emptied or reallocated .* create a new CapturedStep"):
            step(x[:, :1])
    cache.reset()
    if step._graph is not None:
        with pytest.raises(RuntimeError, match="was emptied"):
            step(x[:, :1])


@torch.no_grad()
def test_captured_step_goes_beyond_a_window(capture, monkeypatch):
    """Tokens move out between steps, never within one, and a longer call leaves the graph's buffers in place."""
    monkeypatch.setattr(decayattn.nn.cache, "_SLACK", 8)
    [layer], x = layers_of(capture, 1), torch.randn(2, 90, 32, device=capture)
    layer.window_size = (5, 0)
    cache = layer.make_cache(2, 80)
    layer(x[:, :12], cache=cache)
    function = step_of([layer], [cache])
    step, out = CapturedStep(function, [cache], x[:, :2]), [x[:, :12]]
    assert cache.lengths.tolist() == [12, 12] if step._graph is None else [9, 9]
    out += [step(x[:, t : t + 2])[0].clone() for t in range(12, 40, 2)]
    out.append(function(x[:, 40:70])[0])
    out += [step(x[:, t : t + 2])[0].clone() for t in range(70, 90, 2)]
    torch.testing.assert_close(torch.cat(out, 1)[:, 12:], (x + layer(x))[:, 12:], rtol=1e-5, atol=1e-5)
    if step._graph is not None:
        with pytest.raises(ValueError, match=r"got 5 more: .* room for 4 new tokens per captured step"):
            CapturedStep(function, [cache], x[:, :5])


def test_errors_name_arguments_of_captured_step():
    [layer] = layers_of("cpu", 1)
    x = torch.randn(1, 3, 32)
    with torch.no_grad():
        cache = layer.make_cache(1, 5)
        layer(x, cache=cache)
    for arguments, message in (
        ((3, [cache]), "function: expected a callable, got 3 of type int"),
        ((layer, ["a"]), "caches: expected DecayCaches, got 'a' of type str"),
        ((layer, []), "caches: expected at least one, got none"),
        ((layer, [cache], 1), "inputs: expected tensors, got 1 of type int"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            CapturedStep(*arguments)
