"""Layers over several devices: sharded data parallelism (FSDP2) and tensor parallelism, with torch's own engines."""

from typing import TYPE_CHECKING, Any

from torch import nn

from decayattn.nn.attention import DecayFlashAttention

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def fully_shard_attention(module: nn.Module, **options: Any) -> None:
    """Shard every DecayFlashAttention in the module by torch's fully_shard, with per-head parameters in float32.

    FSDP2's MixedPrecisionPolicy(param_dtype=torch.bfloat16) rounds every parameter that it gathers. A rounded decay
    raises, and the gradient of a rounded sink is off by 3 %. Here the policy applies only to the projections; all
    others keep their stored dtype. Without a policy a layer is one group, unless its decay or position module has
    another dtype.

    Call it before the fully_shard of the modules around the layer, as FSDP2 shards the innermost first::

        for block in model.blocks:
            fully_shard_attention(block, mesh=mesh, mp_policy=policy)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    Names in the state dict do not change. If several layers share a decay or a position module, shard it first and
    separately: `fully_shard(decay, mesh=mesh)`.

    FSDP1 (FullyShardedDataParallel) flattens a block into one tensor of one dtype. There, wrap each decay separately,
    without mixed precision. For a decay module that does not derive from `Decay`, add its class to the condition::

        from torch.distributed.fsdp.wrap import CustomPolicy

        policy = CustomPolicy(lambda m: {"mixed_precision": None} if isinstance(m, Decay) else isinstance(m, Block))
        FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, mixed_precision=precision)

    Args:
        module: a DecayFlashAttention, or a module that contains at least one.
        options: of fully_shard: mesh, mp_policy, reshard_after_forward, offload_policy and so on.

    Raises:
        ValueError: if there is no DecayFlashAttention in the module, and for a shared decay or position module that is
            not sharded separately.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    layers = _layers(module)
    _refuse_shared(layers, options.get("ignored_params") or set())
    policy = options.get("mp_policy")
    as_stored = {name: value for name, value in options.items() if name != "mp_policy"}
    for _, layer in layers:
        parts = [part for part in (layer.decay, layer.position) if isinstance(part, nn.Module)]
        rest = _without(list(layer.parameters()), [part for part in parts if isinstance(part, FSDPModule)])
        # a group has one dtype, and a 16-bit model has a float32 decay
        if policy is None and len({p.dtype for p in rest}) == 1:
            fully_shard(layer, **options)  # one group: one collective instead of three
            continue
        for projection in (layer.in_proj, layer.out_proj):
            fully_shard(projection, **options)
        rest = _without(rest, [layer.in_proj, layer.out_proj])
        for part in parts:
            others = _without(rest, [part])
            if len(others) < len(rest) and len({p.dtype for p in rest}) > 1:
                fully_shard(part, **as_stored)
                rest = others
        if rest:
            fully_shard(layer, **as_stored)


def tensor_parallel_plan(module: nn.Module) -> "dict[str, ParallelStyle]":
    """Plan for torch's parallelize_module that shards the heads of every DecayFlashAttention in the module.

    Use it on one dimension of a mesh, with a number of ranks that divides H_kv::

        mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("tensor",))
        parallelize_module(model, mesh, tensor_parallel_plan(model))

    A rank has some heads: their rows of every part of in_proj, their columns of out_proj, and their decay, sink,
    log_scale and gains. A gain that all heads share is on every rank. The layer takes x whole, a plain tensor or a
    DTensor, and returns y whole. This costs one sum over the ranks in the forward and one in the backward. `num_heads`
    and `num_kv_heads` become those of a rank. Rates and slopes are those of the whole model's heads.

    Every parameter is a DTensor. Those of in_proj are weight_0, weight_1, … (q, k, v, gate and the two of kv_shift),
    and its `weight` is a read-only copy. The state dict has the same names and shapes as without the plan.
    `state_dict()` joins the parts of in_proj, and `reset_parameters()` draws whole tensors and divides them. Both are
    collectives: every rank calls them, even if only one rank saves; a rank that calls alone would wait for the others.

    If other parameters of the model stay plain tensors, pass `foreach=False` to its optimiser: torch cannot update both
    kinds as one list, the default on GPUs. If a gradient of theirs is a sum in no fixed order, for example an
    embedding's, average it over the ranks; otherwise the copies drift apart.

    The plan is a dict that can be changed: `plan["attention.out_proj"] = RowwiseParallel(output_layouts=Shard(1))`
    returns y sharded along the sequence. PartwiseParallel is for other projections that hold several matrices, such as
    a SwiGLU's.

    Args:
        module: a DecayFlashAttention, or a module that contains at least one.

    Raises:
        ValueError: if there is no DecayFlashAttention in the module. parallelize_module raises it, by name, if the
            number of ranks does not divide the heads, and if a decay is neither a ScalarDecay nor a ConstantDecay.
    """
    from torch.distributed.tensor.parallel import RowwiseParallel

    from decayattn.nn.tensor_parallel import HeadwiseParallel

    plan: dict[str, ParallelStyle] = {}
    for name, _ in _layers(module):
        plan[name] = HeadwiseParallel()
        plan[f"{name}.out_proj" if name else "out_proj"] = RowwiseParallel()
    return plan


def _without(parameters: list[nn.Parameter], modules: list[nn.Module]) -> list[nn.Parameter]:
    """Parameters that are in none of the modules."""
    inside = {id(p) for module in modules for p in module.parameters()}
    return [p for p in parameters if id(p) not in inside]


def _refuse_shared(layers: list[tuple[str, DecayFlashAttention]], ignored: set[nn.Parameter]) -> None:
    """Refuse shared modules: FSDP2 puts a parameter into one group, and only that group's module gathers it."""
    from torch.distributed.fsdp import FSDPModule

    seen: set[int] = set()
    for name, layer in layers:
        for kind, part in (("decay", layer.decay), ("position", layer.position)):
            # a module with its own group is gathered in every call, from any layer
            if not isinstance(part, nn.Module) or isinstance(part, FSDPModule) or isinstance(layer, FSDPModule):
                continue
            if all(p in ignored for p in part.parameters()):
                continue
            # torch's mark on the modules of a group, from an earlier call; without it torch itself raises
            if id(part) in seen or getattr(part, "_is_fsdp_managed_module", False):
                raise ValueError(
                    f"{name}{'.' if name else ''}{kind}: expected a module of this layer alone, got a "
                    f"{type(part).__name__} that FSDP2 shards with another module; shard a shared module first "
                    f"and separately: fully_shard({kind}, mesh=mesh)"
                )
            seen.add(id(part))


def _layers(module: nn.Module) -> list[tuple[str, DecayFlashAttention]]:
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, DecayFlashAttention)]
    if not layers:
        raise ValueError(f"module: expected a DecayFlashAttention or a module with some, got {type(module).__name__}")
    return layers
