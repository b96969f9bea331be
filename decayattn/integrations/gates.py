"""Decays in pretrained models of transformers: a learned decay for every attention layer.

A log-decay per token travels with its key. Its bits are appended to the key as extra channels before the key enters the
cache, and `attention` removes them again. So every cache of transformers stores, crops, reorders and slides the decay
with the keys. Caches that change the bits of keys cannot; a quantised cache raises.
"""

import copy
import functools
import re
import threading
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization
from transformers.cache_utils import Cache

from decayattn.nn.attention import DecayFlashAttention
from decayattn.nn.decay import ConstantDecay, Decay, ScalarDecay, Spared, spread_log_decays
from decayattn.validation import check_half_lives, check_log_decays

NAME = "decayattn"  # of the attention function
AddedDecay = Literal["scalar", "constant"]
# names of attention to another sequence in models of transformers, as their checkpoints have them
_CROSS_ATTENTION = re.compile("cross_?att|encoder_attn|EncDecAtt")
_USE_NO_CACHE = "use decay='constant', or use_cache=False"


def add_decay(
    model: PreTrainedModel, decay: AddedDecay = "scalar", *, half_lives: Sequence[float] | Tensor = (1e5, 1e6)
) -> PreTrainedModel:
    """Add a learned decay to every attention layer of a pretrained decoder, and return the model.

    Scores get λ_{j+1} + … + λ_i as in decay_attention, next to the model's own position embeddings. Weights do not
    change. With the default half-lives the model starts close to its own logits: after 1,000 tokens the decay alone has
    changed a weight by less than 1 %. Each layer has the decay as a module, `self_attn.decay` in Llama, in float32. The
    attention becomes attn_implementation="decayattn"; a forward with another one raises. Generation works with every
    cache except quantised ones. A model runs in one thread at a time. With a cache, a "scalar" decay raises in layers
    that cache latents (MLA), attend to the keys of other layers, or have cross-attention. Layers with two attentions
    raise in the first forward. Trainer gives the decays no weight decay; for PEFT, name them in
    modules_to_save=["decay"]. The configuration records the decay as `added_decay`, so programs that import
    decayattn.integrations.transformers save and load it.

    Args:
        model: a causal model with flash attention by transformers' AttentionInterface: Llama, Mistral, Qwen2, Qwen3,
            Phi-3, GPT-NeoX, OLMo and others.
        decay: "scalar", a forget gate per token and head (ScalarDecay), or "constant", a rate per head (ConstantDecay,
            learned).
        half_lives: initial half-lives in tokens, as in ScalarDecay: (shortest, longest), spread over the heads, or one
            number per head.

    Raises:
        TypeError, ValueError: for a bad argument, by name, and for a model that already has a decay or lacks such
            attention.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a transformers.PreTrainedModel, got a {type(model).__name__}")
    if decay not in ("scalar", "constant"):
        raise ValueError(f"decay: expected 'scalar' or 'constant', got {decay!r}")
    config = model.config.get_text_config()
    for name in ("added_decay", "log_decay"):
        if getattr(config, name, None) is not None:
            raise ValueError(f"model: expected one without a decay, got config.{name} = {getattr(config, name)!r}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: expected a decoder, got the encoder and decoder of {type(model).__name__}")
    added = {"decay": decay, "half_lives": list(check_half_lives("half_lives", half_lives, config.num_attention_heads))}
    model.set_attn_implementation(NAME)  # refuses models without flash attention
    if not _insert(model, added):
        raise ValueError(f"model: expected causal attention layers with layer_idx, got none in {type(model).__name__}")
    config.added_decay = added
    return model


def split_key(module: nn.Module, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor]:
    """log_decay of a layer's keys, (H,) or (B, T_k, H), or None; and the keys (B, H_kv, T_k, D) without its channels.

    A layer without an added decay has the rates of config.log_decay, one number per head, if given.
    """
    if not hasattr(module, "_log_decay"):
        rates = getattr(getattr(module, "config", None), "log_decay", None)
        crosses = "CrossAttention" in type(module).__name__ or getattr(module, "is_cross_attention", False)
        if crosses and rates is not None:
            raise ValueError(f"log_decay: expected a model without cross-attention, got {type(module).__name__}")
        return None if rates is None else _rates(rates, query.dtype, query.device), key
    found: Any = module._log_decay
    module._log_decay = None  # type: ignore[assignment]  # consumed
    if found is None or not (torch.compiler.is_compiling() or found[1] in (None, threading.get_ident())):
        raise RuntimeError(
            f"decay: expected one attention in each call of {type(module).__name__}, got another, a call of its "
            "forward without hooks, or a call in another thread; add_decay takes none of these (threads need a lock)"
        )
    log_decay: Any = found[0]
    width, heads = query.shape[-1], log_decay.shape[-1]
    if key.shape[-1] > width and module._carried != (key.shape[1], width):
        raise ValueError(f"cache: expected the keys of {type(module).__name__} itself, got others; {_USE_NO_CACHE}")
    if log_decay.ndim == 3 and log_decay.requires_grad and key.shape[2] != log_decay.shape[1]:
        raise RuntimeError(
            "cache: expected an empty one, as cached decays get no gradient; use torch.no_grad(), or use_cache=False"
        )
    if key.shape[-1] > width and not log_decay.requires_grad:
        channels = key[..., width : width + heads // key.shape[1] * log_decay.dtype.itemsize // key.dtype.itemsize]
        log_decay = channels.contiguous().view(log_decay.dtype).transpose(1, 2).flatten(2)
    return log_decay, key[..., :width]


def _rates(rates: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    numbers = tuple(rates) if isinstance(rates, (list, tuple)) else check_log_decays("config.log_decay", rates, False)
    make: Any = torch.tensor if torch.compiler.is_compiling() else _rates_on_device
    return make(numbers, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)


@functools.lru_cache(maxsize=256)
def _rates_on_device(rates: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cached, because each copy to a GPU synchronises."""
    with torch.inference_mode(False):
        return torch.tensor(rates, dtype=dtype, device=device)


class _CarryingCache:
    """Wrapper of a transformers cache that appends the log-decay (B, T, H) of new tokens to their keys."""

    def __init__(self, cache: Cache, module: nn.Module, log_decay: Tensor) -> None:
        if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
            raise ValueError(f"cache: expected a Cache with layers, got {type(cache).__name__}; {_USE_NO_CACHE}")
        quantised = [type(layer).__name__ for layer in cache.layers if "Quantized" in type(layer).__name__]
        if quantised:
            raise ValueError(f"cache: expected one that keeps the bits of keys, for the decay, got {quantised[0]}")
        vars(self).update(_cache=cache, _module=module, _log_decay=log_decay)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        heads, width = key_states.shape[1], key_states.shape[3]
        if width == getattr(self._module, "kv_lora_rank", None):
            raise ValueError(f"cache: expected one of keys, got one of latents (kv_lora_rank); {_USE_NO_CACHE}")
        self._module._carried = heads, width
        channels = self._log_decay.unflatten(2, (heads, -1)).transpose(1, 2).contiguous().view(key_states.dtype)
        missing = -channels.shape[-1] % (16 // key_states.dtype.itemsize)  # to 16 bytes, for TMA and vector loads
        keys = torch.cat([key_states, channels, key_states.new_zeros(*key_states.shape[:3], missing)], -1)
        for layer in self._cache.layers[self._module.layer_idx :][:1]:
            if layer.is_initialized and layer.keys.numel() and layer.keys.shape[-1] != keys.shape[-1]:
                if layer.get_seq_length():
                    raise ValueError(f"cache: expected keys with a decay, got others, as of a prefix; {_USE_NO_CACHE}")
                layer.is_initialized = False  # static, allocated for keys without a decay
        return self._cache.update(keys, value_states, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._cache, name, value)


def _check_attention(config: Any, decay: str) -> None:
    """Refuse an attention that ignores the model's decay."""
    if config._attn_implementation != NAME:
        raise RuntimeError(
            f"attn_implementation: expected {NAME!r}, because the model has {decay}, got "
            f"{config._attn_implementation!r}; call model.set_attn_implementation({NAME!r})"
        )


def _check_rates(model: PreTrainedModel, _: tuple, given: dict[str, Any]) -> None:
    """Pre-hook of a model with fixed rates, unless layers of ours read them."""
    config, states = model.config, given.get("encoder_hidden_states")
    may_cross = states is not None or config.is_encoder_decoder or getattr(config, "add_cross_attention", False)
    is_plain = config._attn_implementation == NAME and not may_cross and not config.sub_configs
    if is_plain or getattr(config, "log_decay", None) is None or any(isinstance(m, Spared) for m in model.modules()):
        return
    # with a cache, every query would be at the last key; an encoder alone has the configuration of the whole model
    attends = states is not None and getattr(config, "is_decoder", False)
    if may_cross and (attends or _CROSS_ATTENTION.search(" ".join(dict(model.named_modules())))):
        raise ValueError(f"log_decay: expected a model without cross-attention, got {type(model).__name__}")
    parts = [m.config for m in model.modules() if "Attention" in type(m).__name__ and hasattr(m, "config")]
    parts = [part for part in parts if getattr(part, "log_decay", None) is not None]
    unread = f"log_decay: no layer reads that of {type(config).__name__}"
    if not parts:
        raise ValueError(f"{unread}; set it in a part, as text_config")
    for part in parts if all(x is not config for x in parts) else []:
        read, top = (check_log_decays("config.log_decay", x.log_decay, False) for x in (part, config))
        if read != top:
            raise ValueError(f"{unread}, and {type(part).__name__} has other rates; remove the former")
    _check_attention(config, "the fixed rates of config.log_decay")


def guard_rates(model: PreTrainedModel) -> None:
    """Add that hook to a model of transformers with config.log_decay; others may read it themselves."""
    rates = getattr(model.config, "log_decay", None)
    if rates is None or not any(kind.__module__.startswith("transformers.models.") for kind in type(model).__mro__):
        return
    model.config.log_decay = check_log_decays("config.log_decay", rates, False)  # a tensor has no JSON
    if _check_rates not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_check_rates, with_kwargs=True)


def _decay(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Pre-hook of an attention layer: compute its log_decay for `split_key` and for the cache."""
    _check_attention(module.config, "an added decay")
    log_decay = module.decay(args[0] if args else kwargs["hidden_states"])  # type: ignore[operator]
    thread = None if torch.compiler.is_compiling() else threading.get_ident()  # another may replace them
    module._log_decay, module._carried = (log_decay, thread), None  # type: ignore[assignment]

    def carrying(x: Any) -> Any:
        is_cache = isinstance(x, Cache) or "Cache" in type(x).__name__  # transformers 5.4 has others in some models
        return _CarryingCache(x, module, log_decay) if is_cache and log_decay.ndim == 3 else x

    return tuple(map(carrying, args)), {name: carrying(x) for name, x in kwargs.items()}


def _insert(model: nn.Module, added: dict[str, Any]) -> bool:
    """Add a decay to every causal attention layer without one. True if there was such a layer."""
    found, modules = False, list(model.modules())  # type: bool, list[Any]
    for module in modules:
        is_layer = isinstance(getattr(module, "layer_idx", None), int) and getattr(module, "is_causal", False) is True
        if not is_layer or hasattr(module, "decay"):
            continue
        found, heads, half_lives = True, module.config.num_attention_heads, added["half_lives"]
        options: dict[str, Any] = {"device": next(module.parameters()).device}
        if added["decay"] == "scalar":
            decay: Decay = ScalarDecay(module.config.hidden_size, heads, initial_half_lives=half_lives, **options)
        else:
            decay = ConstantDecay(spread_log_decays(half_lives, heads), learned=True, **options)
        module.decay, module._log_decay = decay, None
        module.register_forward_pre_hook(_decay, with_kwargs=True)
    return found


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    """Write our modules' own initial values, except where a checkpoint brought values: `initialization` skips those."""
    if isinstance(module, DecayFlashAttention):
        for parameter in module._spared():
            initialization.zeros_(parameter)
    elif isinstance(module, Decay) and hasattr(module, "reset_parameters"):
        start = copy.deepcopy(module)
        start.reset_parameters()  # type: ignore[operator]
        own, values = ((*m.parameters(), *m.buffers()) for m in (module, start))
        for tensor, value in zip(own, values, strict=True):
            initialization.copy_(tensor, value)


_initialize_weights, _post_init = PreTrainedModel._initialize_weights, PreTrainedModel.post_init


@functools.wraps(_initialize_weights)  # called for every module that may lack values
def _initialize_ours(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Also initialise our modules, except those of a new model, which have their values already."""
    is_new = vars(module).pop("_is_new", False)
    if isinstance(module, Spared) and not (is_new or getattr(module, "_is_hf_initialized", False)):
        initialise(module)
    _initialize_weights(self, module, *args, **kwargs)  # the model's own rule may replace the values


@functools.wraps(_post_init)  # called when a model is created
def _restoring_post_init(self: PreTrainedModel) -> None:
    """Also restore the decay of the configuration, and mark our modules that have values already."""
    added = getattr(self.config, "added_decay", None)
    if added is not None:
        _insert(self, added)
        self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), "decay"}
    for module in self.modules():
        if isinstance(module, Spared):
            module._is_new = not any(x.is_meta for x in (*module.parameters(), *module.buffers()))
    guard_rates(self)
    _post_init(self)
    if added is not None:
        self.set_attn_implementation(NAME)


PreTrainedModel._initialize_weights, PreTrainedModel.post_init = _initialize_ours, _restoring_post_init
