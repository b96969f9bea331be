"""Tools for training loops: groups of parameters, recorded half-lives, and modules that are reset in any order."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from decayattn import DecayFlashAttention
from decayattn.nn import ConstantDecay, Decay, ScalarDecay, half_life, parameter_groups, record_half_lives

WIDTH, HEADS, LENGTH = 8, 4, 10


class Plain(nn.Module):
    """A user's decay that derives from nothing of ours."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, HEADS)

    def forward(self, x):
        return nn.functional.logsigmoid(self.gate(x).float())


DECAYS = {
    "scalar": lambda: ScalarDecay(WIDTH, HEADS),
    "learned": lambda: ConstantDecay.alibi(HEADS, learned=True),
    "frozen": lambda: ConstantDecay.retnet(HEADS),
    "plain": Plain,
    "none": lambda: "none",
}


class Block(nn.Module):
    def __init__(self, decay, **options):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = DecayFlashAttention(WIDTH, HEADS, decay=decay, backend="reference", **options)
        self.checkpointed = None

    def forward(self, x, **options):
        if self.checkpointed is None:
            return x + self.attention(self.norm(x), **options)
        return x + checkpoint(self.attention, self.norm(x), use_reentrant=self.checkpointed)


class Model(nn.Module):
    def __init__(self, *decays, **options):
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block(decay, **options) for decay in decays)

    def forward(self, x, **options):
        x = x if x.is_floating_point() else self.embedding(x)
        for block in self.blocks:
            x = block(x, **options)
        return x


def model(*kinds, **options):
    """With gates that depend on their input."""
    torch.manual_seed(0)
    built = Model(*(DECAYS[kind]() for kind in kinds), **options)
    for name, parameter in built.named_parameters():
        if "decay" in name:
            nn.init.normal_(parameter)
    return built


# Groups of parameters


def grouped(of, **options):
    """Names of the parameters with and without weight decay."""
    names = {id(parameter): name for name, parameter in of.named_parameters()}
    decayed, others = parameter_groups(of, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    found = [[names[id(parameter)] for parameter in group["params"]] for group in (decayed, others)]
    assert sorted(found[0] + found[1]) == sorted(n for n, p in of.named_parameters() if p.requires_grad)
    return found


@pytest.mark.parametrize("decay", DECAYS)
def test_parameter_groups_decay_matrices_alone(decay):
    of = model(decay, sink=True, scale="learned", bias=True, qk_norm="per_head", output_norm=True)
    of.blocks[0].attention.q_norm.requires_grad_(False)
    decayed, others = grouped(of)
    assert decayed == ["embedding.weight", "blocks.0.attention.in_proj.weight", "blocks.0.attention.out_proj.weight"]
    assert {"blocks.0.attention.sink", "blocks.0.attention.log_scale", "blocks.0.norm.bias"} < set(others)
    assert ([name for name in others if "decay" in name] == []) == (decay in ("frozen", "none"))


def test_parameter_groups_name_wrapped_shared_and_marked():
    of = model("scalar", "plain")
    of.blocks[1].attention.decay.gate.weight = of.blocks[0].attention.decay.weight  # shared
    of.head = nn.Linear(WIDTH, 20)
    of.head.weight = of.embedding.weight
    expected = grouped(of)
    of.embedding.weight._no_weight_decay = True
    marked = grouped(of)
    assert expected[0] == ["embedding.weight", *marked[0]]
    for wrapped in (torch.compile(of), nn.DataParallel(of)):
        prefix = "_orig_mod." if isinstance(wrapped, torch._dynamo.eval_frame.OptimizedModule) else "module."
        assert [[name.removeprefix(prefix) for name in names] for names in grouped(wrapped)] == marked
    alone = nn.ModuleDict({"gate": ScalarDecay(WIDTH, HEADS)})  # in an attention that is not ours
    assert grouped(alone) == [[], ["gate.weight", "gate.bias"]]
    torch.optim.AdamW(parameter_groups(alone, 0.1)).step()


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ((nn.Linear(2, 2).parameters(), 0.1), TypeError, "model: expected a torch.nn.Module, got generator"),
    ((nn.Linear(2, 2), "0.1"), TypeError, "weight_decay: expected a finite number of at least 0, got .0.1. of type"),
    ((nn.Linear(2, 2), -0.1), ValueError, "weight_decay: expected a finite number of at least 0, got -0.1"),
])
def test_errors_name_arguments_of_parameter_groups(arguments, error, message):
    with pytest.raises(error, match=message):
        parameter_groups(*arguments)


# Half-lives


def tokens(batch=2, length=LENGTH):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1))


def only(*chosen, batch=2):
    used = torch.zeros(batch, LENGTH, dtype=torch.bool)
    for row, columns in chosen:
        used[row, columns] = True
    return used


USED = {
    "plain": ({}, only((slice(None), slice(1, None)))),
    "padding_mask": (
        {"padding_mask": torch.tensor([[0] * 3 + [1] * 7, [1] * 6 + [0] * 4])},
        only((0, slice(4, None)), (1, slice(1, 6))),
    ),
    "cu_seqlens": ({"cu_seqlens": torch.tensor([0, 4, 4, 9])}, only((0, [1, 2, 3, 5, 6, 7, 8]), batch=1)),
    "resets": ({"resets": torch.tensor([[0, 0, 1] + [0] * 7] * 2)}, only((slice(None), [1, *range(3, LENGTH)]))),
}


@pytest.mark.parametrize("case", USED)
@pytest.mark.parametrize("decay", ["scalar", "plain", "shared"])
def test_half_lives_are_those_of_the_mean_over_used_tokens(decay, case):
    options, used = USED[case]
    kind = "scalar" if decay == "shared" else decay
    of, x = model(kind, kind, *(["none"] if case != "resets" else [])), tokens(len(used))
    if decay == "shared":
        of.blocks[1].attention.decay = of.blocks[0].attention.decay
    with record_half_lives(of) as found, torch.no_grad():
        assert found["blocks.0.attention"].isnan().all()
        of(x, **options)
        first = {name: value.clone() for name, value in found.items()}
        of(x, **options)
        of.blocks[0].attention.decay(x + 1)  # not in a forward of the layer
    assert list(found) == ["blocks.0.attention", "blocks.1.attention"]
    block = of.blocks[0]
    expected = half_life(block.attention.decay(block.norm(x))[used].double().mean(0)).float()
    torch.testing.assert_close(found["blocks.0.attention"], expected)
    assert not torch.equal(found["blocks.0.attention"], found["blocks.1.attention"])
    assert all(torch.equal(found[name], value) for name, value in first.items())
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in of.modules())


@pytest.mark.parametrize(("padding", "last"), [
    ({"new_lengths": torch.tensor([6, 1])}, 4), ({"padding_mask": torch.tensor([[1] * 6, [1] + [0] * 5])}, 4),
    ({"padding_mask": torch.tensor([[1] * 6, [0] * 5 + [1]])}, 9),
])
def test_half_lives_of_a_cache_are_those_of_its_tokens(padding, last):
    """The text comes in two pieces, and the second one is padded."""
    of, x = model("scalar", qk_norm=True), tokens()
    layer = of.blocks[0].attention
    with torch.no_grad(), record_half_lives(of) as found:
        cache = layer.make_cache(2, 2 * LENGTH)
        layer(x[:, :4], cache=cache)
        layer(x[:, 4:], cache=cache, **padding)
    used = only((0, slice(1, None)), (1, [1, 2, 3, last]))
    torch.testing.assert_close(found["blocks.0.attention"], half_life(layer.decay(x)[used].double().mean(0)).float())


def test_half_lives_of_a_memory_are_those_of_its_tokens():
    of, x, mask = model("scalar"), tokens(), torch.tensor([[1] * LENGTH, [0] * 4 + [1] * (LENGTH - 4)])
    layer = of.blocks[0].attention
    with record_half_lives(of) as found:
        layer(x[:, :3], memory=x, memory_padding_mask=mask, padding_mask=mask[:, -3:])
        layer(x, log_decay=torch.zeros(layer.num_heads))  # not recorded
    used = only((0, slice(1, None)), (1, slice(5, None)))
    torch.testing.assert_close(found["blocks.0.attention"], half_life(layer.decay(x)[used].double().mean(0)).float())


@pytest.mark.parametrize("decay", ["learned", "frozen"])
def test_half_lives_of_constant_decays_are_their_rates(decay):
    of = model(decay)
    with record_half_lives(of) as found:
        of(tokens(length=1))
        of(tokens())
    assert torch.equal(found["blocks.0.attention"], of.blocks[0].attention.decay.half_lives())


class Given(Decay):
    """x's first channels as log-decays."""

    def forward(self, x):
        return x[..., :HEADS].float()


def test_half_lives_of_two_gates_are_those_of_their_mean():
    decay, x = ScalarDecay(WIDTH, 3, directions=2), torch.randn(9, WIDTH)  # packed: (total, H, 2)
    decay.weight.data[::2] = torch.rand(3, WIDTH)
    x[4] = -1e4  # a reset in one direction of every head
    with record_half_lives(nn.Sequential(decay)) as found:
        rates = decay(x)
    torch.testing.assert_close(found["0"], half_life(rates[[1, 2, 3, 5, 6, 7, 8]].mean((0, 2))))


def test_half_lives_omit_resets_and_are_inf_with_growth():
    x = torch.zeros(1, 5, WIDTH)
    x[0, :, :HEADS] = torch.tensor([
        [9.0, 9.0, 9.0, 9.0], [-1.0, 1.0, -torch.inf, -0.5], [-1e9, -0.5, -800.0, 0.0], [-3.0, 0.0, -747.0, torch.nan],
        [-2.0, 0.0, -torch.inf, -1.0],
    ])
    layer = DecayFlashAttention(WIDTH, HEADS, decay=Given(HEADS), backend="reference")
    for of, name in ((layer, ""), (nn.Sequential(layer.decay), "0")):  # in a layer, and in a user's attention
        with record_half_lives(of) as found:
            of(x)
        expected = torch.tensor([math.log(2) / 2, torch.inf, torch.nan, torch.nan])
        torch.testing.assert_close(found[name], expected, equal_nan=True)


@pytest.mark.parametrize("how", ["autocast", "reentrant", "checkpoint", "compiled", "compile", "inference", "16 bits"])
def test_record_half_lives_takes_every_kind_of_forward(how):
    of, x = model("scalar"), tokens()
    name, called, dtype = "blocks.0.attention", of, x.dtype
    of.blocks[0].checkpointed = {"reentrant": True, "checkpoint": False}.get(how)
    if how == "compiled":
        called, name = torch.compile(of, backend="eager"), f"_orig_mod.{name}"
    elif how == "compile":
        of.compile(backend="eager")
    elif how == "16 bits":
        dtype = of.bfloat16().embedding.weight.dtype
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"), torch.inference_mode(how == "inference"):
        called(x.to(dtype))
        with record_half_lives(called) as found:
            out = called(x.to(dtype).requires_grad_(how != "inference"))
            called(x[:, :2].to(dtype))
            if how != "inference":
                out.sum().backward()  # a checkpoint runs the forward of this text once more, not that of the other
    block = of.blocks[0]
    used = torch.cat([block.attention.decay(block.norm(text.to(dtype)))[:, 1:].flatten(0, 1) for text in (x, x[:, :2])])
    expected = half_life(used.double().mean(0)).float()
    torch.testing.assert_close(found[name], expected, rtol=2e-2 if how == "autocast" else 1e-5, atol=0)


def test_record_half_lives_ends_with_exceptions():
    of, x = model("scalar"), tokens()
    with pytest.raises(ValueError, match="x: expected shape"), record_half_lives(of):
        of.blocks[0].attention(x[..., 1:])
    with pytest.raises(RuntimeError, match="record_half_lives: expected no transform"), record_half_lives(of):
        torch.vmap(of)(x[None])
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got list"), record_half_lives([of]):
        pass
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in of.modules())


# Resets


@pytest.mark.parametrize("order", [list, reversed])
def test_modules_reset_in_any_order_as_a_new_layer(order):
    """FSDP's loop after to_empty: parents first (pytorch#104187)."""
    options = dict(bias=True, qk_norm=True, sink=True, scale="learned", output_gate=True)
    fresh = DecayFlashAttention(WIDTH, HEADS, **options)
    with torch.device("meta"):
        layer = DecayFlashAttention(WIDTH, HEADS, **options)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.constant_(parameter, torch.nan)
    for module in order([*layer.modules()]):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert {type(part).__name__ for part in (layer.in_proj, layer.out_proj)} == {"Linear"}
    for name, value in layer.state_dict().items():
        if name in ("in_proj.weight", "out_proj.weight"):
            bound = 1 / math.sqrt(value.shape[1])
            assert 0.8 * bound < value.abs().max() <= bound
        else:
            assert torch.equal(value, fresh.state_dict()[name]), name
