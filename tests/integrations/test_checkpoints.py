"""Weights of other libraries' layers: what the layer computes with them, as a formula, is what ours computes."""

import re

import other_libraries
import pytest
import torch

from decayattn import DecayFlashAttention
from decayattn.integrations.checkpoints import from_fla, from_fox
from decayattn.nn import ConstantDecay

WIDTH, HEADS = 24, 4


def randomised(layer):
    """Return the layer in float64, every parameter and buffer changed at random."""
    torch.manual_seed(0)
    for tensor in layer.double().state_dict().values():
        tensor.add_(0.5 * torch.randn_like(tensor))
    return layer


def check(theirs, ours, weights):
    ours.double().load_state_dict(weights)
    x = torch.randn(2, 11, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x)[0])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_from_fla_gives_outputs_of_the_layer(kv_heads, gate, bias):
    options = dict(num_kv_heads=kv_heads, qkv_bias=bias, use_output_gate=gate)
    theirs = randomised(other_libraries.ForgettingAttention(WIDTH, HEADS, **options))
    ours = DecayFlashAttention(WIDTH, HEADS, num_kv_heads=kv_heads, bias=bias, output_gate=gate)
    check(theirs, ours, from_fla(theirs.state_dict()))


@pytest.mark.parametrize(("heads", "norm", "of_all"), [
    (HEADS, False, False), (HEADS, True, True), (1, True, True), (1, True, False),
])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("fgate", ["full", "bias_only", "fixed", "none"])
def test_from_fox_gives_outputs_of_the_layer(fgate, gate, heads, norm, of_all):
    theirs = randomised(other_libraries.ForgettingAttentionLayer(
        WIDTH, heads, fgate_type=fgate, use_output_gate=gate, qk_norm=norm, qk_norm_share_param_across_head=of_all
    ))
    if (fgate, heads, norm) == ("none", 1, True):
        with pytest.raises(ValueError, match=r"k_norm.weight: cannot tell one head from one gain per head"):
            from_fox(theirs.state_dict())
        return
    decay = {"full": "scalar", "none": "none"}.get(fgate) or ConstantDecay.from_values([0.0] * heads)
    ours = DecayFlashAttention(WIDTH, heads, decay=decay, qk_norm=norm, output_gate=gate)
    if norm:
        ours.q_norm.eps = ours.k_norm.eps = 1e-5
    check(theirs, ours, from_fox(theirs.state_dict()))


@pytest.mark.parametrize(("heads", "kv_heads", "of_all"), [(4, 1, True), (4, 4, True), (1, 1, True), (1, 1, False)])
def test_from_fla_takes_one_gain_for_all_heads(heads, kv_heads, of_all):
    """With one key head, it has as many values as a gain for every head."""
    theirs = other_libraries.ForgettingAttention(WIDTH, heads, num_kv_heads=kv_heads, qk_norm=True)
    if of_all:  # as early versions had it
        theirs.q_norm, theirs.k_norm = (OneGain(1, WIDTH // heads) for _ in "qk")
    randomised(theirs)
    ours = DecayFlashAttention(WIDTH, heads, num_kv_heads=kv_heads, qk_norm=True)
    ours.q_norm.eps = ours.k_norm.eps = 1e-5
    check(theirs, ours, from_fla(theirs.state_dict()))


class OneGain(other_libraries.GroupNorm):
    def forward(self, x):
        return super().forward(x.unflatten(-1, (-1, self.head_dim))).flatten(-2)


def test_prefix_selects_a_layer_of_a_model():
    theirs = randomised(torch.nn.ModuleDict({x: other_libraries.ForgettingAttention(WIDTH, HEADS) for x in "ab"}))
    model = {f"model.{name}": x for name, x in theirs.state_dict().items()}
    check(theirs["b"], DecayFlashAttention(WIDTH, HEADS), from_fla(model, prefix="model.b."))
    for convert in (from_fla, from_fox):
        for prefix in ("", "model.b", "b.", "model."):
            message = re.escape(f"prefix: expected that of one layer, for example 'model.a.', got {prefix!r}")
            with pytest.raises(ValueError, match=message):
                convert(model, prefix=prefix)


@pytest.mark.parametrize(("options", "message"), [
    ({"qk_norm": True}, r"layer\.[qk]_norm.weight: expected one gain for all heads"),
    ({"use_output_norm": True}, "layer.output_norm.weight: DecayFlashAttention does not normalise"),
    ({"use_k_shift": True}, "layer.k_proj.shift_proj.weight: it mixes every token with the one before"),
    ({"use_v_shift": True}, "layer.v_proj.shift_proj.weight: it mixes every token with the one before"),
])
def test_from_fox_names_parts_without_equivalent(options, message):
    theirs = torch.nn.ModuleDict({"layer": other_libraries.ForgettingAttentionLayer(WIDTH, HEADS, **options)})
    with pytest.raises(ValueError, match=message):
        from_fox(theirs.state_dict(), prefix="layer.")


def test_errors_name_parameters_and_prefixes():
    theirs = other_libraries.ForgettingAttentionLayer(WIDTH, HEADS, use_output_gate=True).state_dict()
    with pytest.raises(ValueError, match=r"ogate_act: expected 'sigmoid', .* got 'silu'"):
        from_fox(theirs, ogate_act="silu")
    with pytest.raises(ValueError, match=r"f_proj.weight: expected in the state dict"):
        from_fla(theirs)
    with pytest.raises(ValueError, match=r"attn.q_proj.weight: expected in the state dict"):
        from_fla({}, prefix="attn.")
    with pytest.raises(ValueError, match=r"q_conv1d.weight: expected no such parameter"):
        from_fox(theirs | {"q_conv1d.weight": torch.zeros(3)})
    normed = other_libraries.ForgettingAttention(WIDTH, HEADS, num_kv_heads=2, qk_norm=True)
    with pytest.raises(ValueError, match=r"[qk]_norm.weight: expected one gain for all heads"):
        from_fla(normed.state_dict())
