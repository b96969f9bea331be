"""Tools for training loops: groups of parameters for the optimiser, and half-lives to log."""

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from decayattn.compatibility import is_transformed
from decayattn.nn.attention import DecayFlashAttention
from decayattn.nn.decay import Decay, Spared, half_life
from decayattn.nn.sharded_parameters import whole
from decayattn.problem import is_reset
from decayattn.validation import check_number


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of parameters for torch.optim: weight decay for matrices, none for decays, sinks, norms and biases.

    Weight decay pulls a forget gate's bias to 0, a half-life of one token, and a learned rate to −1 per token. The
    first group has the parameters of two or more dimensions, embeddings included. The second has all others: those of
    fewer dimensions, those of decay modules (`Decay`, and any `decay` of a DecayFlashAttention), sink and log_scale. It
    also has those with the attribute `_no_weight_decay`, which a model may set. Each parameter that requires a gradient
    is in one group, once, in the model's order. A group may be empty.

    Args:
        model: with or without DecayFlashAttention layers; it may be compiled, sharded by FSDP2 or tensor parallelism,
            or wrapped by DistributedDataParallel.
        weight_decay: of the first group.

    Raises:
        TypeError, ValueError: for a bad argument, and for FullyShardedDataParallel (FSDP1), which flattens parameters.
    """
    _check_model(model)
    expected = "a finite number of at least 0"
    weight_decay = check_number("weight_decay", weight_decay, expected, lambda number: 0 <= number < math.inf)
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "model: expected parameters in their own shapes, got FullyShardedDataParallel (FSDP1), which flattens "
            "them; use FSDP2: decayattn.nn.fully_shard_attention, then torch's fully_shard"
        )
    spared = spared_parameters(model) | {parameter for parameter in model.parameters() if parameter.ndim < 2}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed, others = [x for x in trained if x not in spared], [x for x in trained if x in spared]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def spared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of a model that weight decay must spare, of any shape."""
    spared = {parameter for parameter in model.parameters() if getattr(parameter, "_no_weight_decay", False)}
    for module in model.modules():
        if isinstance(module, Spared):
            spared.update(module._spared())
        if isinstance(module, DecayFlashAttention) and module.decay is not None:
            spared.update(module.decay.parameters())
    return spared


@contextlib.contextmanager
def record_half_lives(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the half-lives, in tokens, of a model's heads over the tokens that it reads inside the context.

    The half-life of a head over a text is ln 2 / mean(−λ), with the mean of its log-decay over the text's tokens. The
    dict has an entry (H,) for each DecayFlashAttention with a decay, and for each `Decay` outside of one, under its
    name in model.named_modules(). Several forwards give one mean. A constant decay gives its rates. With a gate per
    direction it is the mean of both.

    The mean leaves out λ that no score uses: padding, resets (also λ below −746), and the first λ of each sequence. The
    half-life is inf if the mean is 0 or more, and NaN before a head has used a token. Padding counts if the layer does
    not know of it. That is so for a `Decay` outside of a layer, and for the layers of DecayModel without a cache, where
    padding follows the tokens and no token sees it. Record such models on texts without padding, and read by one
    forward: for a `Decay` outside of a layer, each call is a sequence, so a token after a cache is left out. A
    log_decay that the caller passes is not recorded.

    torch.compile is off inside the context: compiled models run eagerly. A forward repeated by activation checkpointing
    counts once. CUDA graphs replay without Python and are not recorded. On several devices each rank records its own
    tokens, and under tensor parallelism its own heads; nothing is communicated.

    Raises:
        TypeError: if model is not a torch.nn.Module.
        RuntimeError: in a forward under a transform of torch.func (vmap, grad).
    """
    _check_model(model)
    modules = dict(model.named_modules())
    layers = {name: m for name, m in modules.items() if isinstance(m, DecayFlashAttention) and m.decay is not None}
    of_layers: dict[str, Any] = {name: layer.decay for name, layer in layers.items()}
    inside = {part for decay in of_layers.values() for part in decay.modules()}
    alone = {name: m for name, m in modules.items() if isinstance(m, Decay) and m not in inside}
    half_lives = {name: torch.full((m.num_heads,), math.nan) for name, m in (layers | alone).items()}
    sums: dict[str, tuple[Any, Any]] = dict.fromkeys(half_lives, (0, 0))
    running: dict[str, dict[str, Any]] = {}  # layers in their forward, with the options of the call
    backward = ModuleTracker()

    def begin(name: str, _: nn.Module, __: tuple, options: dict[str, Any]) -> None:
        running[name] = options

    def end(name: str, *_: Any) -> None:
        running.pop(name, None)

    def record(decay: nn.Module, _: tuple, log_decay: Tensor | float) -> None:
        # layers may share a decay, and other modules may call it
        found = [name for name in running if of_layers[name] is decay] or [n for n in alone if alone[n] is decay]
        if not found or backward.is_bw:
            return
        if is_transformed():
            raise RuntimeError("record_half_lives: expected no transform of torch.func (vmap, grad); record outside it")
        name, given = found[-1], torch.as_tensor(log_decay).detach()
        rates = whole(given).double()
        used = torch.ones_like(rates)
        if rates.ndim > 1:
            if rates.ndim == 4 or getattr(decay, "directions", 1) == 2:
                rates = torch.where(is_reset(rates).any(-1), -torch.inf, rates.mean(-1))
            rates = rates[None].flatten(0, -3)  # a user's packed text is (total, H)
            used = _used(rates, layers.get(name), running.get(name, {}))[..., None] & ~is_reset(rates)
            rates, used = torch.where(used, rates, 0).sum((0, 1)), used.sum((0, 1)).double()
        total, count = sums[name]
        sums[name] = total, count = total + rates, count + used
        half_lives[name] = half_life(total / count).to(given.dtype).expand_as(half_lives[name])

    with contextlib.ExitStack() as hooks:
        hooks.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code does not see a new hook
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(partial(begin, name), with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(partial(end, name), always_call=True).remove)
        for decay in {*of_layers.values(), *alone.values()}:
            hooks.callback(decay.register_forward_hook(record).remove)
        yield half_lives


def _used(rates: Tensor, layer: DecayFlashAttention | None, options: dict[str, Any]) -> Tensor:
    """True, (B, T) or (1, T), for tokens with a λ (B, T, H) that a score uses. The options are those of the layer."""
    mask = "padding_mask" if options.get("memory") is None else "memory_padding_mask"
    given: dict[str, Any] = {name: whole(value) for name, value in options.items()}
    names = (mask, "cu_seqlens", "resets", "cache", "new_lengths")
    padding_mask, cu_seqlens, resets, cache, new_lengths = map(given.get, names)
    token = torch.arange(rates.shape[1], device=rates.device)[None]
    if layer is not None and layer.context is not None:
        token = token + layer.context.first_token(rates.shape[1])
    if cache is not None:
        position = token + (cache.lengths + cache.dropped)[:, None]
        if padding_mask is not None:  # the layer has moved the padding after the tokens
            new_lengths = (padding_mask != 0).sum(1)
        used = (position > 0) & (True if new_lengths is None else token < new_lengths[:, None])
    elif padding_mask is not None:
        used = (padding_mask != 0) & ((padding_mask != 0).cumsum(1) > 1)
    elif cu_seqlens is not None:
        used = (token < cu_seqlens[-1]) & ~torch.isin(token, cu_seqlens)
    else:
        used = token > 0
    return used if resets is None else used & (resets == 0)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
