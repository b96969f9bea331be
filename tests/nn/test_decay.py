"""The decay modules: published rates, half-lives at the start, float32 whatever happens to the model, errors."""

import copy
import io
import itertools
import math
from unittest import mock

import pytest
import torch
from other_libraries import AlibiPositionalBias
from torch import nn

from decayattn import DecayFlashAttention, decay_attention
from decayattn.nn import ConstantDecay, Decay, ScalarDecay, alibi_log_decay, half_life, retnet_log_decay

EPS = torch.finfo(torch.float32).eps
NARROW = [torch.bfloat16, torch.float16]


def decays():
    """One of each kind, with parameters that are not at their start."""
    torch.manual_seed(0)
    scalar = ScalarDecay(6, 4)
    nn.init.normal_(scalar.weight)
    return {"scalar": scalar, "frozen": ConstantDecay.alibi(4), "learned": ConstantDecay.retnet(4, learned=True)}


KINDS = ["scalar", "frozen", "learned"]


# Published rates


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 40])
def test_alibi_slopes_follow_the_published_rule(num_heads):
    expected = torch.tensor(AlibiPositionalBias(num_heads).slopes, dtype=torch.float64)
    ours = -torch.tensor(alibi_log_decay(num_heads), dtype=torch.float64)
    torch.testing.assert_close(ours, expected, rtol=2 * torch.finfo(torch.float64).eps, atol=0)
    assert torch.equal(ConstantDecay.alibi(num_heads)(torch.zeros(1, 1, 1)), -ours.float())


@pytest.mark.parametrize("num_heads", [1, 8, 40])
def test_retnet_rates_follow_the_paper(num_heads):
    for head, rate in enumerate(retnet_log_decay(num_heads)):
        assert math.isclose(math.expm1(rate), -(2.0 ** (-5 - head)), rel_tol=4 * torch.finfo(torch.float64).eps)


# ScalarDecay


@pytest.mark.parametrize(("num_heads", "limits"), [
    (8, (4.0, 1024.0)), (5, (1.0, 1e6)), (2, (0.1, 0.2)), (3, (7, 7)), (1, (4.0, 1024.0)),
])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_half_lives_start_within_limits_for_any_input(num_heads, limits, dtype):
    decay = ScalarDecay(6, num_heads, initial_half_lives=limits, dtype=dtype)
    ratio = limits[1] / limits[0]
    places = [h / (num_heads - 1) for h in range(num_heads)] if num_heads > 1 else [0.5]  # one: the geometric mean
    expected = torch.tensor([limits[0] * ratio**place for place in places], dtype=torch.float64)
    # rounding a bias b moves log(half-life) by at most |b|·eps; logsigmoid and the division add a few roundings
    tolerance = (decay.bias.abs().max().item() + 8) * torch.finfo(dtype).eps
    x = 100 * torch.randn(2, 3, 6, dtype=dtype)
    assert decay.half_lives(x).shape == (2, 3, num_heads)
    torch.testing.assert_close(decay.half_lives(x).double(), expected.expand(2, 3, -1), rtol=tolerance, atol=0)


@pytest.mark.parametrize(("given", "heads"), [
    ([9, 2.5, 700.0, 9.0], 4), (torch.tensor([1e6, 3.0, 3.0]), 3), ([8.0, 4.0], 2), ([30.0], 1),
])
def test_half_lives_start_as_given_per_head(given, heads):
    decay = ScalarDecay(6, heads, initial_half_lives=given, dtype=torch.float64)
    with torch.no_grad():
        decay.bias.zero_()
    decay.reset_parameters()
    expected = torch.tensor([float(x) for x in given], dtype=torch.float64)
    torch.testing.assert_close(decay.half_lives(torch.randn(6).double()), expected, rtol=1e-12, atol=0)
    assert all(f"{value:g}" in repr(decay) for value in given)


def test_gate_is_the_log_of_a_sigmoid():
    decay = decays()["scalar"].double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    gate = torch.sigmoid(torch.einsum("btc,hc->bth", x, decay.weight) + decay.bias)
    torch.testing.assert_close(decay(x), gate.log(), rtol=0, atol=32 * torch.finfo(torch.float64).eps)
    fresh = ScalarDecay(6, 4)  # its weight is 0, and learns from the first step
    fresh(torch.randn(2, 5, 6)).sum().backward()
    assert (fresh.weight.grad != 0).all()
    assert (fresh.bias.grad != 0).all()


# Precision


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", NARROW)
def test_decay_is_float32_under_autocast_and_after_double(kind, dtype):
    decay, x = decays()[kind], torch.randn(2, 5, 6)
    expected, single = decay(x), copy.deepcopy(decay.state_dict())
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(decay(x), expected)
        assert decay(x.to(dtype)).dtype == torch.float32
    assert all(tensor.dtype == torch.float64 for tensor in decay.double().state_dict().values())
    assert decay(x.double()).dtype == torch.float64
    for name, tensor in decay.to(dtype).state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, single[name])


@pytest.mark.parametrize("default", NARROW)
def test_narrow_default_dtype_builds_decays_in_float32(default, torch_settings):
    torch.set_default_dtype(default)
    built = [ScalarDecay(6, 4), ConstantDecay.alibi(4), ConstantDecay.alibi(4, learned=True)]
    layer = DecayFlashAttention(8, 4)
    torch.set_default_dtype(torch.float32)
    for decay in (*built, layer.decay):
        assert all(tensor.dtype == torch.float32 for tensor in decay.state_dict().values())
    assert torch.equal(built[0].bias, ScalarDecay(6, 4).bias)
    assert layer.in_proj.weight.dtype == default


class TwoLayers(Decay):
    """A user's decay, with parameters in children and a buffer."""

    def __init__(self):
        super().__init__(4)
        self.gate = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x):
        return nn.functional.logsigmoid(self.gate(x.float()) + self.offset)


class Gate:
    def forward(self, x):
        return nn.functional.logsigmoid(x.float() @ self.weight.float().T)


class Mixed(Gate, Decay):
    """A user's decay with the forward of a class that is no module."""

    def __init__(self):
        super().__init__(4)
        self.weight = nn.Parameter(torch.ones(4, 6))


OWNERS = {
    **{kind: lambda kind=kind: decays()[kind] for kind in KINDS},
    "own": TwoLayers,
    "mixed": Mixed,
    "layer": lambda: DecayFlashAttention(8, 4, sink=True, scale="learned", bias=True, qk_norm=True),
}


def load(module, *, assign):
    state = {name: tensor.bfloat16() for name, tensor in module.state_dict().items()}
    before = {name: tensor.dtype for name, tensor in state.items()}
    module.load_state_dict(state, assign=assign)
    assert {name: tensor.dtype for name, tensor in state.items()} == before  # the caller's
    return module


def load_after_swaps(module):
    with mock.patch.object(torch.__future__, "_swap_module_params_on_conversion", True):
        return load(module.bfloat16(), assign=True)


def convert_by_new_parameters(module):
    with mock.patch.object(torch.__future__, "_overwrite_module_params_on_conversion", True):
        return module.bfloat16().double()


def save_and_load(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


EXACT = [
    lambda module: module.to(torch.bfloat16), lambda module: module.to(torch.zeros((), dtype=torch.float16)),
    lambda module: module.type(torch.float16), nn.Module.bfloat16, nn.Module.half,
    lambda module: nn.Sequential(module).to(torch.bfloat16)[0], copy.deepcopy, save_and_load, nn.Module.share_memory,
]


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("change", [
    *EXACT, nn.Module.double, load_after_swaps, convert_by_new_parameters,
    lambda module: module.to("meta").to_empty(device="cpu"), lambda module: load(module, assign=True),
    lambda module: load(module, assign=False), lambda module: load(nn.Sequential(module), assign=True)[0],
])
def test_changes_keep_decays_marked_and_float32(owner, change):
    """The parameters of decays, sink and log_scale carry the attribute by which optimisers spare them."""
    module = OWNERS[owner]()
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = copy.deepcopy(module)
    gradients = {name: x.grad.clone() for name, x in module.named_parameters()}
    changed = change(module)
    for name, parameter in changed.named_parameters():
        is_spared = owner != "layer" or name.startswith(("decay.", "sink", "log_scale"))
        assert getattr(parameter, "_no_weight_decay", False) == is_spared, name
        if change in EXACT and owner != "layer" and parameter.grad is not None:
            assert torch.equal(parameter.grad, gradients[name])
    decay, start = (x.decay if owner == "layer" else x for x in (changed, before))
    assert all(tensor.dtype.itemsize >= 4 for tensor in decay.state_dict().values())
    if change in EXACT:
        assert all(map(torch.equal, decay.state_dict().values(), start.state_dict().values()))
        x = torch.randn(2, 5, 8 if owner == "layer" else 6).bfloat16()
        assert decay(x).dtype == torch.float32
        assert torch.equal(decay(x), start(x.float()))


def narrow_in_place(module):
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = tensor.data.bfloat16()


def assign_parameter(module):
    for part in module.modules():
        for name, parameter in [*part.named_parameters(recurse=False)]:
            setattr(part, name, nn.Parameter(parameter.detach().bfloat16()))


def flatten(module):
    """Put plain tensors in place of parameters, as FSDP1 does without use_orig_params."""
    for part in module.modules():
        for name, parameter in [*part.named_parameters(recurse=False)]:
            delattr(part, name)
            setattr(part, name, parameter.detach().bfloat16())


@pytest.mark.parametrize(("kind", "narrow"), [
    *itertools.product(["scalar", "learned", "own", "mixed"], [narrow_in_place, assign_parameter, flatten]),
    ("frozen", narrow_in_place),
])
def test_forward_refuses_16_bits(kind, narrow):
    decay, x = OWNERS[kind](), torch.randn(2, 3, 6)
    narrow(decay)
    layer = DecayFlashAttention(6, 4, head_dim=2, decay=decay)
    for forward in (decay, decay.half_lives, layer):
        with pytest.raises(TypeError, match=rf"{type(decay).__name__}\.[\w.]+: expected float32 or float64, got torch"):
            forward(x)
    if narrow is not flatten:
        assert layer.float()(x).isfinite().all()  # what the error says


def test_forward_refuses_16_bits_of_a_call_or_a_parametrization():
    decay, x = decays()["scalar"], torch.randn(2, 3, 6)
    layer = DecayFlashAttention(6, 4, head_dim=2, decay=decay).bfloat16()
    narrow = {name: parameter.bfloat16() for name, parameter in layer.named_parameters()}
    with pytest.raises(TypeError, match=r"ScalarDecay\.weight: .* by decayattn\.nn\.fully_shard_attention"):
        torch.func.functional_call(layer, narrow, (x.bfloat16(),))

    class Narrow(nn.Module):
        def forward(self, tensor):
            return tensor.half()

    nn.utils.parametrize.register_parametrization(decay, "bias", Narrow(), unsafe=True)
    with pytest.raises(TypeError, match=r"ScalarDecay\.bias: expected float32 or float64, got torch\.float16"):
        decay(x)


# Moves, copies, checkpoints


@pytest.mark.parametrize("build", [
    lambda: ScalarDecay(6, 4), lambda: ConstantDecay.alibi(4), lambda: ConstantDecay.retnet(4, learned=True),
], ids=KINDS)
def test_decay_starts_from_meta_by_to_empty_and_reset(build):
    with torch.device("meta"):
        decay = build()
        log_decay = decay(torch.zeros(2, 5, 6, dtype=torch.bfloat16))
    assert (log_decay.is_meta, log_decay.dtype, log_decay.shape[-1]) == (True, torch.float32, 4)
    assert all(tensor.is_meta for tensor in decay.state_dict().values())
    decay = decay.bfloat16().to_empty(device="cpu")
    decay.reset_parameters()
    for (name, tensor), expected in zip(decay.state_dict().items(), build().state_dict().values(), strict=True):
        assert torch.equal(tensor, expected), name


# ConstantDecay


def test_values_are_exact_where_frozen_and_start_where_learned():
    numpy = pytest.importorskip("numpy")
    values, x = [-2.0, -0.01, 0.25], torch.zeros(1, 1, 6)
    for given in (values, torch.tensor(values).double(), numpy.array(values), list(numpy.array(values))):
        decay = ConstantDecay.from_values(given)
        assert list(decay.parameters()) == []
        assert torch.equal(decay(x), torch.tensor(values))
    assert ConstantDecay.from_values([-0.3, 0.0], dtype=torch.float64).log_decay.tolist() == [-0.3, 0.0]
    # log and exp: |log γ| ≤ 5 roundings, then exp's own and the product's
    learned = ConstantDecay.from_values(values, learned=True)(x)
    torch.testing.assert_close(learned, torch.tensor(values), rtol=8 * EPS, atol=0)


@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_steps_keep_the_sign_of_learned_values(direction):
    values = torch.tensor([-2.0, -0.01, 0.25])
    decay, x = ConstantDecay.from_values(values.tolist(), learned=True), torch.zeros(1, 1, 6)
    optimizer = torch.optim.SGD(decay.parameters(), lr=4.0)
    (direction * decay(x)).sum().backward()
    optimizer.step()
    moved = decay(x).detach()
    assert (direction * (moved - values) < 0).all()
    assert torch.equal(moved.sign(), values.sign())


def test_learned_rate_beyond_float32_is_reset_without_gradient():
    decay, q = ConstantDecay.from_values([-1e39, -0.1], learned=True), torch.randn(1, 5, 2, 8)
    out = decay_attention(q, q, q, decay(q))
    torch.testing.assert_close(out[:, :, 0], q[:, :, 0])
    out.square().sum().backward()
    assert decay.log_rate.grad[0] == 0
    assert decay.log_rate.grad[1] != 0


def test_half_life_of_rates():
    log_decay = torch.tensor([-math.log(2), -math.log(2) / 8, 0.0, -0.0, 0.5, -torch.inf, -1e9], dtype=torch.float64)
    expected = [1.0, 8.0, torch.inf, torch.inf, torch.inf, 0.0, 0.0]
    assert half_life(log_decay).tolist() == pytest.approx(expected, rel=1e-12, abs=0)
    assert half_life(torch.tensor(torch.nan)).isnan()
    assert ConstantDecay.from_values([-math.log(2) / 8]).half_lives().item() == pytest.approx(8.0, rel=4 * EPS)
    with pytest.raises(TypeError, match="x"):
        ScalarDecay(6, 4).half_lives()  # the biases alone hardly move while the gates learn


# Errors


def scalar_decay_with(initial_half_lives):
    return ScalarDecay(6, 4, initial_half_lives=initial_half_lives)


@pytest.mark.parametrize(("build", "error", "message"), [
    (lambda: ScalarDecay(0, 4), ValueError, "embed_dim: expected at least 1, got 0"),
    (lambda: scalar_decay_with(("1", "2")), TypeError, r"initial_half_lives: .* got \('1', '2'\)"),
    (lambda: scalar_decay_with((8.0, 4.0)), ValueError, r"initial_half_lives: .* got \(8.0, 4.0\)"),
    (lambda: scalar_decay_with((1.0, math.inf)), ValueError, r"initial_half_lives: .* got \(1.0, inf\)"),
    (lambda: scalar_decay_with((1.0, 2.0, 3.0)), ValueError, r"initial_half_lives: .* 4 heads, got \(1.0, 2.0,"),
    (lambda: scalar_decay_with(torch.ones(4, 1)), TypeError, r"initial_half_lives: .* got tensor\("),
    (lambda: ConstantDecay.retnet("8"), TypeError, "num_heads: expected an int, got '8' of type str"),
    (lambda: ConstantDecay.alibi(4, learned=1), TypeError, "learned: expected a bool, got 1 of type int"),
    (lambda: ConstantDecay.from_values(torch.zeros(2, 2)), TypeError, "values: expected one number per head"),
    (lambda: ConstantDecay.from_values([]), ValueError, "values: expected at least one head, got none"),
    (lambda: ConstantDecay.from_values([-math.inf]), ValueError, r"values: expected finite .* got \[-inf\]"),
    (lambda: ConstantDecay.from_values([-1, 0], learned=True), ValueError, r"values: .* no 0 .* got \[-1, 0\]"),
])
def test_errors_name_arguments_of_decays(build, error, message):
    with pytest.raises(error, match=message):
        build()
