"""Position schemes of the experiments equal their formulas, and differ in nothing else."""

import copy
import math

import pytest
import torch
from language_models.positions import LARGEST_TOTAL, PerChannelDecay
from language_models.schemes import SCHEMES, attention_layer
from toy_lm.model import ByteLM, next_byte_loss, parameter_groups

from decayattn import DecayFlashAttention, decay_attention

CONTEXT = 48


def model(scheme: str) -> ByteLM:
    torch.manual_seed(0)
    return ByteLM(
        2, 32, 2, make_attention=lambda: attention_layer(scheme, 32, 2, context=CONTEXT, backend="reference")
    )


def decay_parameters(of: ByteLM) -> dict[str, torch.Tensor]:
    return {name: p for name, p in of.named_parameters() if ".decay." in name or ".position." in name}


def tokens(batch: int = 2, length: int = CONTEXT + 1) -> torch.Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def per_channel_layer(width: int = 16, heads: int = 2) -> DecayFlashAttention:
    """Layer in float64, with gates that depend on the input."""
    torch.manual_seed(0)
    layer = attention_layer("per-channel", width, heads, context=CONTEXT, backend="reference").double()
    torch.nn.init.normal_(layer.position.weight)
    return layer


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_start_alike_and_train_without_the_future(scheme):
    of, x = model(scheme), tokens()
    own = decay_parameters(of)
    found = {name: p for name, p in of.named_parameters() if name not in own}
    expected = dict(model("none").named_parameters())
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    next_byte_loss(of, x).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in of.parameters())
    assert all(p.grad.any() for p in own.values())
    decayed, _ = parameter_groups(of, 0.1)
    assert not set(own.values()) & set(decayed["params"])
    y = x[:, :-1].clone()
    y[:, 30:] = 255 - y[:, 30:]
    with torch.no_grad():
        torch.testing.assert_close(of(x[:, :-1])[:, :30], of(y)[:, :30])


def test_decay_per_channel_equals_its_formula():
    layer = per_channel_layer()
    x = torch.randn(2, CONTEXT, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = (part.unflatten(-1, (2, 8)) for part in layer.in_proj(x).chunk(3, dim=-1))
    prefix = layer.position.log_decay(x).cumsum(1)
    kept = (prefix[:, :, None] - prefix[:, None]).exp()
    scores = torch.einsum("bihd,bjhd,bijhd->bhij", q, k, kept) / math.sqrt(8)
    future = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
    p = scores.masked_fill(future, -math.inf).softmax(-1)
    expected = layer.out_proj(torch.einsum("bhij,bjhd->bihd", p, v).flatten(2))
    torch.testing.assert_close(layer(x), expected)


def test_a_decay_per_channel_has_its_gradient():
    """The middle of the range takes no part in it, and need not."""
    layer = per_channel_layer()
    x = torch.randn(1, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"position.weight": weight}, (x,))

    assert torch.autograd.gradcheck(call, (x, layer.position.weight))


def test_strongest_channel_decay_fits_bfloat16():
    layer = attention_layer("per-channel", 16, 2, context=CONTEXT, backend="reference")
    torch.nn.init.constant_(layer.position.bias, 100.0)  # λ = −r in every channel
    x = torch.randn(1, CONTEXT, 16)
    taken = {}

    def keep(_, arguments, result):
        taken["q"], taken["k"] = result

    layer.position.register_forward_hook(keep)
    assert layer(x).isfinite().all()
    assert all(t.bfloat16().isfinite().all() for t in taken.values())
    assert layer.position.log_decay(x).sum(1).min().item() == pytest.approx(-LARGEST_TOTAL, rel=1e-5)
    layer(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_channels_start_with_half_lives_spread_in_the_logarithm():
    position = PerChannelDecay(16, 2, 8, context=1024)
    half_lives = -math.log(2) / position.log_decay(torch.randn(1, 1, 16))[0, 0]
    assert half_lives[0, 0].item() == pytest.approx(math.log(2) / (0.9 * 140 / 1024), rel=1e-4)
    assert half_lives[0, -1].item() == pytest.approx(1024, rel=1e-4)
    ratios = half_lives[:, 1:] / half_lives[:, :-1]
    torch.testing.assert_close(ratios, ratios[:, :1].expand_as(ratios), rtol=1e-3, atol=0)


def test_a_copy_of_a_layer_has_its_own_decay_per_channel():
    layer = per_channel_layer()
    other = copy.deepcopy(layer)
    torch.nn.init.constant_(other.position.bias, -3.0)
    x = torch.randn(1, CONTEXT, 16, dtype=torch.float64)
    layer.position._x = None
    assert not torch.allclose(other(x), layer(x))
    assert layer.position._x is None
    assert other.position._x is None


def test_texts_too_long_for_a_decay_per_channel_are_refused():
    with pytest.raises(ValueError, match="expected at most 48 tokens with a decay per channel, got 49"):
        model("per-channel")(tokens(1, 49))
    with pytest.raises(ValueError, match="context: expected a length with scheme 'per-channel'"):
        attention_layer("per-channel", 16, 2)
    with pytest.raises(RuntimeError, match="expected to be attached"):
        PerChannelDecay(16, 2, 8, context=8)(torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 8))


def test_the_scalar_schemes_have_the_gate_of_fox():
    """With a decay per channel too weak to matter, it is the scalar decay alone."""
    layer = attention_layer("per-channel-scalar", 16, 2, context=CONTEXT, backend="reference")
    torch.nn.init.constant_(layer.position.bias, -100.0)
    x = torch.randn(1, CONTEXT, 16)
    q, k, v = (part.unflatten(-1, (2, 8)) for part in layer.in_proj(x).chunk(3, dim=-1))
    expected = layer.out_proj(decay_attention(q, k, v, layer.decay(x), backend="reference").flatten(2))
    torch.testing.assert_close(layer(x), expected)
