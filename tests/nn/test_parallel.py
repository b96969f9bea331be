"""The layer over two ranks, with FSDP2 and with tensor parallelism: equal to one process, and checkpoints of both."""

import copy
import functools
import inspect
import itertools
import re
import textwrap
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed_pool import on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from decayattn import DecayFlashAttention, decay_attention
from decayattn.nn import ConstantDecay, Decay, ScalarDecay, attention, fully_shard_attention, tensor_parallel_plan
from decayattn.nn.tensor_parallel import PartwiseParallel
from decayattn.nn.training import parameter_groups, record_half_lives

WIDTH, HEADS, B, T = 32, 4, 2, 24
DECAYS = {
    "scalar": lambda: ScalarDecay(WIDTH, HEADS),
    "directions": lambda: ScalarDecay(WIDTH, HEADS, directions=2),
    "learned": lambda: ConstantDecay.retnet(HEADS, learned=True),
    "frozen": lambda: ConstantDecay.alibi(HEADS),
    "none": lambda: "none",
}
EVERYTHING = dict(num_kv_heads=2, qk_norm=True, output_gate=True, bias=True, sink=True, scale="learned")
PRO = EVERYTHING | dict(qk_norm="per_head", output_norm=True, kv_shift=True)


class Block(nn.Module):
    def __init__(self, decay: str, **options):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        options |= {"causal": decay != "directions", "backend": "reference"}
        self.attention = DecayFlashAttention(WIDTH, HEADS, decay=DECAYS[decay](), **options)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


def model_of(decay: str, device: str, dtype: torch.dtype = torch.float64, **options) -> nn.Sequential:
    """The same on every rank, no parameter at a symmetric value."""
    torch.manual_seed(1)
    model = nn.Sequential(Block(decay, **options), Block(decay, **options)).to(device, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard(model: nn.Sequential, device: str, **options) -> None:
    mesh = init_device_mesh(device, (2,))
    for block in model:
        fully_shard_attention(block, mesh=mesh, **options)
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def divide(model: nn.Module, device: str) -> None:
    parallelize_module(model, init_device_mesh(device, (2,)), tensor_parallel_plan(model))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole ones, under the names of a model in one process."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        gradient = whole(parameter.grad)
        base, _, index = name.rpartition("_")
        if index.isdigit():  # the parts of in_proj follow one another
            name, gradient = base, torch.cat([*([found[base]] if base in found else []), gradient])
        found[name] = gradient
    return found


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference, over the largest expected value."""
    assert found.keys() == expected.keys()
    return {name: float((found[name] - x).detach().abs().max() / x.abs().max()) for name, x in expected.items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-11) -> None:
    errors = worst(found, expected)
    assert max(errors.values()) < bound, errors


def batch(device: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(B, T, WIDTH, device=device, dtype=dtype), torch.randn(B, T, WIDTH, device=device, dtype=dtype)


def groups(model: nn.Module) -> list[str]:
    """Names of modules with a collective of their own."""
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def two_steps(single: nn.Module, shared: nn.Module, device: str) -> None:
    """single's gradients of both sequences, shared's of this rank's; twice: the second finds what the first left."""
    x, target = batch(device)
    mine = slice(torch.distributed.get_rank(), torch.distributed.get_rank() + 1)
    for _ in range(2):
        for one, part in ((single, slice(None)), (shared, mine)):
            one.zero_grad()
            (one(x[part]) - target[part]).square().mean().backward()


# DistributedDataParallel and FSDP2

# never freed: a process group that is freed waits for its thread with the GIL held, and that thread may need it to let
# go of its last piece of work. It happened once
_PARALLEL = []


def twins(decay: str, device: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Sequential, nn.Sequential]:
    options = PRO if decay == "learned" else EVERYTHING
    return model_of(decay, device, dtype, **options), model_of(decay, device, dtype, **options)


@on_ranks
@pytest.mark.parametrize(("kind", "decay"), [
    *(("ddp", decay) for decay in DECAYS), *itertools.product(["fsdp", "fsdp, checkpointed"], ["scalar", "learned"]),
    ("fsdp", "directions"),
])
def test_parallel_gradients_equal_one_process(device, kind, decay):
    """DDP's second step raises where the first has left a parameter without its gradient."""
    expected, model = twins(decay, device)
    if kind == "ddp":
        _PARALLEL.append(called := nn.parallel.DistributedDataParallel(model))
    else:
        shard(called := model, device)
        assert groups(model[0]) == ["", "attention"]
    for block in model if kind == "fsdp, checkpointed" else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    two_steps(expected, called, device)
    assert_close(gradients(model), gradients(expected))


@on_ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", ["scalar", "learned", "frozen"])
def test_bfloat16_policy_keeps_values_per_head_in_float32(device, decay, dtype):
    """Arguments of the attention are those of the same model in one process."""
    model, single = twins(decay, device, dtype)
    shard(model, device, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    x, target = batch(device, dtype)
    calls = []

    def look(*arguments: Tensor, **options: Any) -> Tensor:
        # copies, because FSDP2 frees what it has gathered
        calls.append([x.detach().clone() for x in (*arguments, options["scale"], options["sink"])])
        return decay_attention(*arguments, **options)

    with mock.patch.object(attention, "decay_attention", look):
        (model(x).float() - target).square().mean().backward()
        with torch.autocast(device, torch.bfloat16):
            single(x)
    q, *_, sharded_decay, scale, sink = calls[0]
    *_, single_decay, single_scale, single_sink = calls[2]
    assert (q.dtype, sharded_decay.dtype) == (torch.bfloat16, torch.float32)
    # a gate sees x, which the policy rounds; a rate does not, and bfloat16 would change it by 1e-3
    assert_close({"decay": sharded_decay}, {"decay": single_decay}, 2e-2 if decay == "scalar" else 1e-7)
    assert torch.equal(scale, single_scale)
    assert torch.equal(sink, single_sink)
    assert {p.grad.dtype for p in model.parameters()} <= {dtype} | ({torch.float32} if decay != "frozen" else set())
    parts = {"attention.in_proj", "attention.out_proj"}
    assert set(groups(model[0])) - {"attention.decay"} == {"", "attention"} | parts
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in single.named_parameters()]


class Scaled(nn.Module):
    """A position module with a float32 parameter."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH // HEADS))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q * self.factor).to(q.dtype), (k * self.factor).to(k.dtype)


@on_ranks
@pytest.mark.parametrize("decay", ["scalar", "frozen"])
def test_16_bit_layer_takes_a_float32_position_module(device, decay):
    torch.manual_seed(1)
    layer = DecayFlashAttention(
        WIDTH, HEADS, decay=DECAYS[decay](), position=Scaled(), qk_norm=True, dtype=torch.bfloat16
    ).to(device)
    single = copy.deepcopy(layer)
    fully_shard_attention(layer, mesh=init_device_mesh(device, (2,)))
    x, _ = batch(device, torch.bfloat16)
    for one in (layer, single):
        one(x).float().square().mean().backward()
    factor = whole(layer.position.factor.grad)
    # a gradient of 16 bits is rounded between the kernels of one process as well
    assert_close({"factor": factor}, {"factor": single.position.factor.grad}, 1e-5)
    assert factor.dtype == torch.float32
    assert set(groups(layer)) == {"", "in_proj", "out_proj", "position"} | ({"decay"} if decay == "scalar" else set())


@on_ranks
def test_fsdp_refuses_shared_modules(device):
    mesh = init_device_mesh(device, (2,))
    for at_once, name in ((True, "1.attention.decay"), (False, "attention.decay")):
        model = model_of("scalar", device, **EVERYTHING)
        model[1].attention.decay = model[0].attention.decay
        if not at_once:
            fully_shard_attention(model[0], mesh=mesh)
        with pytest.raises(ValueError, match=rf"^{name}: expected a module of this layer alone"):
            fully_shard_attention(model if at_once else model[1], mesh=mesh)


@on_ranks
def test_fsdp_takes_shared_modules_that_are_sharded(device):
    expected, model = twins("scalar", device)
    for one in (expected, model):
        one[0].attention.position = one[1].attention.position = Scaled().to(device, torch.float64)
    fully_shard(model[0].attention.position, mesh=init_device_mesh(device, (2,)))
    shard(model, device)
    two_steps(expected, model, device)
    assert_close(gradients(model), gradients(expected))


@on_ranks
@pytest.mark.parametrize(("decay", "dtypes", "expected"), [
    ("scalar", None, torch.float32), ("learned", {}, torch.float32),
    ("learned", {"param_dtype": torch.bfloat16}, torch.bfloat16),
    ("scalar", {"param_dtype": torch.bfloat16, "output_dtype": torch.float32}, torch.float32),
])
def test_sharded_layer_makes_caches_and_score_bounds(device, decay, dtypes, expected):
    """A cache, its eviction and half-lives, outside of the layer's forward."""
    single, model = (model[0].attention for model in twins(decay, device, torch.float32))
    options = {} if dtypes is None else {"mp_policy": MixedPrecisionPolicy(**dtypes)}
    parent = nn.Sequential(model)
    fully_shard_attention(parent, mesh=init_device_mesh(device, (2,)), **options)
    x, _ = batch(device, torch.float32)
    with torch.no_grad():
        bound, lives = model.score_bound(), model.decay.half_lives(x)
        assert torch.equal(bound, single.score_bound())
        assert torch.equal(lives, single.decay.half_lives(x))
        cache = model.make_cache(B, T)
        model(x, cache=cache)
        rates = None if decay == "scalar" else -0.7 / lives.to(torch.float64)
        assert cache.evict(0.5, bound, rates).shape == (B, HEADS)
    assert cache.dtype == expected


@on_ranks
@pytest.mark.parametrize("given", ["memory", "log_decay"])
def test_sharded_layer_takes_a_memory_and_a_decay(device, given):
    single, model = (model[0].attention for model in twins("scalar", device, torch.float32))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard_attention(parent := nn.Sequential(model), mesh=init_device_mesh(device, (2,)), mp_policy=policy)
    fully_shard(parent, mesh=init_device_mesh(device, (2,)))
    x, memory = batch(device, torch.float32)
    given = {"memory": memory} if given == "memory" else {"log_decay": -memory[..., :HEADS].abs()}
    for one in (single, model):
        one(x, **given).float().square().mean().backward()
    found, expected = (
        {name: whole(p.grad) for name, p in one.named_parameters() if p.grad is not None} for one in (model, single)
    )
    assert_close(found, expected, 0.1)


@on_ranks
@pytest.mark.parametrize(("decay", "dtype", "mixed", "largest"), [
    ("scalar", torch.float32, None, 1e-5), ("learned", torch.bfloat16, None, 2e-2),
    *((decay, torch.float32, torch.bfloat16, 2e-2) for decay in ("scalar", "frozen")),
])
def test_fsdp1_trains_by_the_documented_policy(device, decay, dtype, mixed, largest):
    """FullyShardedDataParallel as the docstring of fully_shard_attention has it, compared with one process."""
    source = inspect.getdoc(fully_shard_attention).split("the condition::\n\n")[1].split("\nArgs:")[0]
    single, model = twins(decay, device, dtype)
    x, target = batch(device, dtype)
    precision = mixed and MixedPrecision(param_dtype=mixed, reduce_dtype=torch.float32, buffer_dtype=mixed)
    names = {
        "model": model, "precision": precision, "Block": Block, "Decay": Decay,
        "FullyShardedDataParallel": functools.partial(FullyShardedDataParallel, device_id=x.device),
    }
    exec(textwrap.dedent(source).replace("FullyS", "sharded = FullyS", 1), names)
    _PARALLEL.append(sharded := names["sharded"])
    (single(x).double() - target).square().mean().backward()
    mine = slice(torch.distributed.get_rank(), torch.distributed.get_rank() + 1)
    (sharded(x[mine]).double() - target[mine]).square().mean().backward()
    with pytest.raises(ValueError, match="model: expected parameters in their own shapes, got FullyShardedDataPar"):
        parameter_groups(sharded, 0.1)
    with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
        found = dict(zip(gradients(single), (p.grad for p in sharded.parameters()), strict=True))
        errors = worst(found, gradients(single))
    assert sorted(errors.values())[len(errors) // 2] < largest, errors


@on_ranks
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tensor"])
def test_training_tools_take_sharded_models(device, kind):
    """Compared with one process: the groups, the marks, and half-lives of this rank's tokens or heads."""
    single, model = twins("scalar", device)
    called = {"ddp": nn.parallel.DistributedDataParallel, "fsdp": lambda m: shard(m, device),
              "tensor": lambda m: divide(m, device)}[kind](model) or model
    _PARALLEL.append(called)
    names = {id(p): re.sub(r"_\d+$", "", name) for one in (model, single) for name, p in one.named_parameters()}
    found, expected = ([list(dict.fromkeys(names[id(p)] for p in group["params"])) for group in
                        parameter_groups(one, 0.1)] for one in (called, single))
    assert found == expected
    marked = {name for name, p in model.named_parameters() if getattr(p, "_no_weight_decay", False)}
    decays = {n for n, _ in single.named_parameters() if ".decay." in n or n.endswith(("sink", "log_scale"))}
    assert marked == decays
    x, rank = batch(device)[0], torch.distributed.get_rank()
    with record_half_lives(called) as lives, record_half_lives(single) as whole_lives:
        called(x if kind == "tensor" else x[rank : rank + 1])
        single(x if kind == "tensor" else x[rank : rank + 1])
    heads = slice(2 * rank, 2 * rank + 2) if kind == "tensor" else slice(None)
    assert len(lives) == 2
    assert_close(lives, {name: whole_lives[name.removeprefix("module.")][heads] for name in lives}, 1e-9)


# Tensor parallelism


@on_ranks
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_tensor_parallelism_gives_gradients_of_one_process(device, decay, checkpointed):
    expected, model = (model_of(decay, device, **{"none": {}, "scalar": PRO}.get(decay, EVERYTHING)) for _ in range(2))
    divide(model, device)
    for block in model if checkpointed else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    x, target = batch(device)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    results = [one(given) for one, given in zip((model, expected), inputs, strict=True)]
    for out in results:
        (out - target).square().mean().backward()
    found, wanted = (
        gradients(one) | {"out": out, "x": given.grad}
        for one, out, given in zip((model, expected), results, inputs, strict=True)
    )
    assert_close(found, wanted)
    for name, parameter in model.named_parameters():
        if ".attention." in name:
            assert parameter.placements == parameter.grad.placements, name
    if decay in ("learned", "frozen"):  # of all heads, without x
        assert torch.equal(model[0].attention.decay.half_lives(), expected[0].attention.decay.half_lives())


@on_ranks
def test_plan_shards_heads_and_their_gains(device):
    layer = model_of("scalar", device, **PRO)[0].attention
    divide(layer, device)
    assert (layer.num_heads, layer.num_kv_heads) == (2, 1)
    found = {name: p.to_local().shape for name, p in layer.named_parameters()}
    # of q, k, v, the gate and the shifts: 32, 16, 16, 32, 2 and 2 rows in all
    for n, rows in enumerate((16, 8, 8, 16, 1, 1)):
        assert (*found.pop(f"in_proj.weight_{n}"), *found.pop(f"in_proj.bias_{n}")) == (rows, WIDTH, rows)
    assert found.pop("out_proj.weight") == (WIDTH, 16)
    assert {name: shape[0] for name, shape in found.items()} == {
        "sink": 2, "log_scale": 2, "decay.weight": 2, "decay.bias": 2, "out_proj.bias": WIDTH, "q_norm.weight": 16,
        "k_norm.weight": 8, "output_norm.weight": 16,
    }


@on_ranks
@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
@pytest.mark.parametrize("same_seed", [True, False])
def test_sharded_layer_resets_as_in_one_process(device, kind, same_seed):
    """Or as on rank 0. The layer is built without data, and reset in FSDP's order: parents first."""
    with torch.device("meta"):
        layer = DecayFlashAttention(WIDTH, HEADS, **EVERYTHING)
    single = copy.deepcopy(layer)
    if kind == "tensor":
        divide(layer, device)
    else:
        fully_shard_attention(layer, mesh=init_device_mesh(device, (2,)))
    for one in (layer, single):
        one.to_empty(device=device)
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.fill_(torch.nan)
        torch.manual_seed(3 if same_seed else torch.distributed.get_rank())
        for module in one.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    expected = single.state_dict()
    found = {name: whole(x) for name, x in layer.state_dict().items()}
    assert not torch.equal(*found["out_proj.weight"].chunk(2, 1))
    for name, x in expected.items():
        torch.distributed.broadcast(x, 0)
        assert torch.equal(x, found[name]), name
        assert found[name].isfinite().all(), name


@on_ranks
def test_divided_parameters_refuse_changes_as_a_whole(device):
    layer = model_of("scalar", device, **EVERYTHING)[0].attention
    divide(layer, device)
    weight = layer.in_proj.weight
    for write in (
        lambda: nn.init.zeros_(weight), lambda: nn.init.kaiming_uniform_(weight), lambda: weight.data.normal_(),
        lambda: weight[0].zero_(), lambda: weight.split(2)[0].copy_(weight[2:4]), lambda: weight.detach().fill_(0),
        lambda: weight.__setitem__(0, 0.0), lambda: setattr(weight, "data", weight),
        lambda: weight.requires_grad_(False), lambda: setattr(weight, "requires_grad", False),
        lambda: layer.in_proj.bias.zero_(),
    ):
        with torch.no_grad(), pytest.raises(RuntimeError, match="expected no change of a PartwiseLinear"):
            write()
    parts = [p.to_local() for name, p in layer.in_proj.named_parameters() if name.startswith("weight")]
    assert torch.equal(weight, torch.cat(parts))
    plain = torch.zeros_like(weight)
    assert {type(x) for x in (weight.clone().zero_(), weight * 2, plain.copy_(weight))} == {Tensor}
    layer.in_proj.requires_grad_(False)
    frozen = [name for name, p in layer.named_parameters() if not p.requires_grad]
    assert frozen == [f"in_proj.{name}_{index}" for name in ("weight", "bias") for index in range(4)]


@on_ranks
def test_divided_layer_loads_dtensors(device):
    """Ranks gather weight and bias in the same order, even if a set of these names has another order on each."""
    single, divided = (model_of("scalar", device, **EVERYTHING)[0].attention for _ in range(2))
    for parameter in divided.in_proj.parameters():
        parameter.data.zero_()
    divide(divided, device)
    mesh, names = init_device_mesh(device, (2,)), ("in_proj.weight", "in_proj.bias")
    expected = {name: single.state_dict()[name] for name in names}
    loaded = {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in expected.items()}
    assert not divided.load_state_dict(loaded, strict=False).unexpected_keys
    found = divided.state_dict()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


@on_ranks
@pytest.mark.parametrize("options", [{}, {"scale": None}, {"scale": 0.5, "qk_norm": "per_head"}])
def test_divided_layer_bounds_its_own_heads(device, options):
    single = model_of("scalar", device, **EVERYTHING | options)[0].attention
    with torch.no_grad():
        single.decay.bias.sub_(9)  # fast, so that something is evicted
    divided = copy.deepcopy(single)
    divide(divided, device)
    x, _ = batch(device)
    rank = torch.distributed.get_rank()
    mine = slice(2 * rank, 2 * rank + 2)
    with torch.no_grad():
        lost, caches = [], []
        for layer in (divided, single):
            caches.append(layer.make_cache(B, T))
            layer(x, cache=caches[-1])
            lost.append(caches[-1].evict(1e-3, layer.score_bound()))
        assert torch.equal(divided.score_bound(), single.score_bound()[mine])
        assert (caches[0].dropped > 0).all()
        found = {"lost": lost[0], "lives": divided.decay.half_lives(x)}
        assert_close(found, {"lost": lost[1][:, mine], "lives": single.decay.half_lives(x)[..., mine]}, 1e-9)


@on_ranks
def test_tensor_parallelism_takes_options_of_the_layer(device):
    """With their gradients, caches, and norms that are sharded along the sequence."""
    layer = model_of("scalar", device, **PRO)[0].attention
    divided = copy.deepcopy(layer)
    divide(divided, device)
    x, _ = batch(device)
    padding = torch.ones(B, T, dtype=torch.bool, device=device)
    padding[0, :5] = False
    cases = {
        "padding": (x.masked_fill(~padding[..., None], torch.nan), {"padding_mask": padding}),
        "packed": (x[:1], {"cu_seqlens": torch.tensor([0, 7, T], device=device)}),
        "resets": (x, {"resets": torch.arange(T, device=device).expand(B, T) == 9}),
        "log_decay": (x, {"log_decay": -torch.rand(B, T, HEADS, device=device, dtype=x.dtype)}),
        "rates": (x, {"log_decay": -torch.rand(HEADS, device=device, dtype=x.dtype)}),
        "memory": (x[:, 9:], {"memory": x.sin(), "memory_padding_mask": padding}),
        "memory with rates": (x[:, 9:], {"memory": x.sin(), "log_decay": -torch.rand(HEADS, device=device).double()}),
    }
    for name, (given, options) in cases.items():
        results = []
        for one in (divided, layer):
            leaves = {"x": given} | {key: x for key, x in options.items() if x.is_floating_point()}
            leaves = {key: x.clone().requires_grad_() for key, x in leaves.items()}
            out = one(**options | leaves)[padding if name == "padding" else slice(None)]
            out.sin().sum().backward()
            results.append({"out": out} | {key: x.grad for key, x in leaves.items()})
        assert_close(*results)
    with torch.no_grad():
        cache = divided.make_cache(B, T)
        steps = torch.cat([divided(x[:, :9], cache=cache), divided(x[:, 9:], cache=cache)], 1)
        assert_close({"cache": steps}, {"cache": layer(x)})
        caches = divided.make_cache(B, 2 * T), layer.make_cache(B, 2 * T)
        for log_decay in (-torch.rand(B, T, HEADS, device=device, dtype=x.dtype), None):
            options = {"padding_mask": padding, "log_decay": log_decay}
            assert_close(*(
                {"padded": one(x, cache=cache, **options)} for one, cache in zip((divided, layer), caches, strict=True)
            ))

    mesh = init_device_mesh(device, (2,))
    in_sequence = copy.deepcopy(layer)
    plan = tensor_parallel_plan(in_sequence) | {
        "out_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    }
    parallelize_module(in_sequence, mesh, plan)
    given = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    out = in_sequence(given)
    assert out.placements == (Shard(1),)
    plain = x.clone().requires_grad_()
    out.full_tensor().square().sum().backward()
    (expected := layer(plain)).square().sum().backward()
    assert_close({"out": out.full_tensor(), "x": given.grad.full_tensor()}, {"out": expected, "x": plain.grad})


@on_ranks
def test_errors_name_layers_that_cannot_be_divided(device):
    for layer, message in (
        (DecayFlashAttention(WIDTH, HEADS, num_kv_heads=1), "num_kv_heads: expected a multiple of the 2 ranks, got 1"),
        (DecayFlashAttention(WIDTH, 1), "num_heads: expected a multiple of the 2 ranks, got 1"),
        (
            DecayFlashAttention(WIDTH, HEADS, decay=nn.Linear(WIDTH, HEADS)),
            "decay: expected ScalarDecay, ConstantDecay or none, got Linear",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            divide(layer, device)
    for function in (tensor_parallel_plan, fully_shard_attention):
        with pytest.raises(ValueError, match="module: expected a DecayFlashAttention or a module with some, got Lin"):
            function(nn.Linear(2, 2))


# Checkpoints


def prepared(kind: str, device: str, gain: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of("scalar", device, **EVERYTHING)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(gain)
    {"single": lambda *_: None, "fsdp": shard, "tensor": divide}[kind](model, device)
    # parameters outside of the plan are plain, and a GPU's default is to update DTensors and plain tensors as one list
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, target = batch(next(model.parameters()).device.type)
    optimizer.zero_grad()
    (model(x) - target).square().mean().backward()
    optimizer.step()


def save(device: str, kind: str, folder: str) -> dict[str, Tensor]:
    """A model trained for a step, as sharded files; what comes of a second step."""
    model, optimizer = prepared(kind, device)
    step(model, optimizer)
    state = {"model": states.get_model_state_dict(model)}
    state["optimizer"] = states.get_optimizer_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=folder, no_dist=kind == "single")
    step(model, optimizer)
    return {name: whole(x).cpu() for name, x in model.state_dict().items()}


def load(device: str, kind: str, folder: str, with_optimizer: bool) -> dict[str, Tensor]:
    """Loaded model after the second step; without an optimiser's state, before it."""
    model, optimizer = prepared(kind, device, gain=0.0)
    step(model, optimizer)  # makes a state to load into
    state = {"model": states.get_model_state_dict(model)}
    if with_optimizer:
        state["optimizer"] = states.get_optimizer_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=folder, no_dist=kind == "single")
    states.set_model_state_dict(model, state["model"])
    if with_optimizer:
        states.set_optimizer_state_dict(model, optimizer, state["optimizer"])
        step(model, optimizer)
    return {name: whole(x).cpu() for name, x in model.state_dict().items()}


def test_divided_checkpoint_loads_in_one_and_two(ranks, tmp_path):
    folder = str(tmp_path / "saved")
    [trained, _] = ranks(save, ranks.device, "tensor", folder)
    for again in ranks(load, ranks.device, "tensor", folder, True):
        assert_close(again, trained, 1e-8)
    [once, _] = ranks(load, ranks.device, "tensor", folder, False)
    # an optimiser of divided parts has another state
    assert_close(load(ranks.device, "single", folder, False), once, 1e-8)


@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_checkpoint_of_one_process_loads_in_two(ranks, kind, tmp_path):
    folder = str(tmp_path / "saved")
    trained = save(ranks.device, "single", folder)
    expected = trained if kind == "fsdp" else load(ranks.device, "single", folder, False)
    for found in ranks(load, ranks.device, kind, folder, kind == "fsdp"):
        assert_close(found, expected, 1e-8)


def load_whole(device: str, kind: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    model, _ = prepared(kind, device, gain=0.0)
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    states.set_model_state_dict(model, dict(state), options=options)  # which changes the dict
    full = states.get_model_state_dict(model, options=options)
    if kind == "tensor":
        name = "0.attention.in_proj.weight"
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.attention\.in_proj\.weight"):
            states.set_model_state_dict(model, {**state, name: state[name][:-1]}, options=options)
        with pytest.raises(RuntimeError, match=r"Missing .*0\.attention\.in_proj\.weight"):
            states.set_model_state_dict(model, {key: x for key, x in state.items() if key != name}, options=options)
    return full


@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_full_state_dict_loads_and_saves(ranks, kind):
    """One file with the names and shapes of a model in one process."""
    state = {name: torch.randn_like(x) for name, x in model_of("scalar", "cpu", **EVERYTHING).state_dict().items()}
    found, _ = ranks(load_whole, ranks.device, kind, state)
    assert_close(found, state, 1e-8)


# Both, and projections of others


@on_ranks
def test_swiglu_is_divided_part_by_part(device):
    torch.manual_seed(1)
    both, down = nn.Linear(WIDTH, 48, device=device), nn.Linear(24, WIDTH, device=device)
    expected, model = (nn.ModuleList(copy.deepcopy([both, down])) for _ in range(2))
    mesh = init_device_mesh(device, (2,))
    parallelize_module(model, mesh, {"0": PartwiseParallel((24, 24)), "1": RowwiseParallel()})
    x = torch.randn(3, WIDTH, device=device)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for (up, out), given in zip((expected, model), inputs, strict=True):
        gate, value = up(given).chunk(2, -1)
        out(gate.sigmoid() * value).square().sum().backward()
    assert_close(gradients(model) | {"x": inputs[1].grad}, gradients(expected) | {"x": inputs[0].grad}, 1e-5)
