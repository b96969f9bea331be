"""decay_attention as the attention of ordinary transformers models: attn_implementation="decayattn".

Importing this module (or decayattn.integrations.transformers) registers it with transformers' AttentionInterface. A
model must support flash attention or sdpa through that interface. Any other model raises: when it is created, or in a
call that needs an option missing here. results/architectures.json lists every architecture.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

from decayattn.functional import decay_attention, decay_attention_varlen
from decayattn.integrations.gates import NAME, guard_rates, split_key
from decayattn.nn.attention import mask_bounds

_REFUSED = {
    "softcap": "there is no soft cap",
    "cache": "there is no paged cache",
    "indices": "there is no sparse attention",
    "block_indices": "there is no sparse attention",
    "sinks": "there are no sinks per token, only s_aux per head",
}
# in the source of a model that selects its attention by name, or treats unknown names differently
_KNOWS_NAMES = re.compile(r"_CLASSES\[[\w.]*_attn_implementation\]|_attn_implementation in \(")
_IGNORED_CACHE = "a layer that ignores the cache needs use_cache=False"
# dtypes of a mask (B, 1, 1, columns), 0 for padding: a query sees all columns, the past, or a window of it.
# A last stride of 0 means that there is no padding; a copy loses the stride, and is slower. _WRITTEN is the dtype of a
# complete mask (B, 1, T_q, columns) without the unwritten keys of a static cache, where that matters
_ALL, _PAST, _WINDOW, _WRITTEN = torch.uint8, torch.int8, torch.int16, torch.int32
# By the type of a config: True if all its models so far support flash attention. Then `mask` describes padding alone.
# Other masks are complete, as in a process that unpickles a model
_DESCRIBES_PADDING: dict[type, bool] = {}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers. Returns (out (B, T_q, H, D_v), None): flash attention has no weights.

    Args:
        query, key, value: (B, H, T_q, D), (B, H_kv, T_k, D) and (B, H_kv, T_k, D_v).
        attention_mask: None; (B, columns) of the keys so far, 0 for padding; a result of `mask`; or another mask of 4
            dimensions, boolean (True = visible) or added to the scores.
        scaling: of the scores; default 1/√D.
        is_causal: default module.is_causal. A mask of 4 dimensions replaces it.
        sliding_window: number of keys that a query sees, including its own. A mask of 4 dimensions replaces it, unless
            it is a result of `mask` for a window.
        s_aux: (H,) sinks.
        position_bias: added to the scores; broadcastable to (B, H, T_q, T_k).
        kwargs: for packed sequences cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k, or, for a batch of 1,
            position_ids (1, T): every smallest position starts a sequence, as in transformers' flash attention. They
            also apply if the model received a mask of ones, which sdpa takes for one sequence, but not with padding.
            Other arguments of transformers have no effect.

    Raises:
        ValueError: for options that flash attention does not have, by name, and for a mask of more tokens than there
            are keys, as in a layer that ignores the cache. If the first layer ignores it, only padding shows this, and
            a static cache hides it: `generate` then writes other tokens without an error.
    """
    for name, reason in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: {reason}")
    if dropout:
        raise ValueError(f"dropout: expected 0, because attention weights have no dropout, got {dropout}")
    log_decay, key = split_key(module, query, key)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None if sliding_window is None else (sliding_window - 1, sliding_window - 1)
    options: dict[str, Any] = dict(scale=scaling, causal=causal, window_size=window, sink=s_aux, bias=position_bias)
    real = None
    if attention_mask is not None:
        kind, columns = attention_mask.dtype, attention_mask.shape[-1]
        attention_mask = attention_mask != 0 if kind == _WRITTEN else attention_mask
        if attention_mask.ndim not in (2, 4):
            raise ValueError(f"attention_mask: expected 2 or 4 dimensions, got {tuple(attention_mask.shape)}")
        if attention_mask.ndim == 2:
            real = attention_mask != 0
        elif kind not in (_ALL, _PAST, _WINDOW) or attention_mask.shape[1:3] != (1, 1):
            if s_aux is not None and getattr(log_decay, "ndim", 0) == 1 and q.shape[1] != columns and kind != _WRITTEN:
                # unwritten keys of a static cache would add to a query's distances, but not to the sink
                raise ValueError("s_aux: expected none with constant rates, a cache and such a mask; do not compile")
            if position_bias is not None and attention_mask.dtype == torch.bool:
                attention_mask = torch.where(attention_mask, position_bias, -torch.inf)
            elif position_bias is not None:
                attention_mask = position_bias + attention_mask
            options |= {"causal": False, "window_size": None, "bias": attention_mask}
        elif kind == _WINDOW and window is None:
            raise ValueError("sliding_window: expected the window of the mask, got None")
        else:
            options |= {"causal": kind != _ALL, "window_size": window if kind == _WINDOW else None}
            real = None if attention_mask.stride(3) == 0 else attention_mask[:, 0, 0] != 0
        if real is not None or kind in (_PAST, _WINDOW, _WRITTEN):
            if columns > k.shape[1]:
                raise ValueError(f"attention_mask: expected up to {k.shape[1]} keys, got {columns}; {_IGNORED_CACHE}")
            k, v = k[:, :columns], v[:, :columns]  # a static cache has unwritten keys after them
            log_decay = log_decay[:, :columns] if log_decay is not None and log_decay.ndim == 3 else log_decay
        if options["bias"] is attention_mask:
            return decay_attention(q, k, v, log_decay, **options).contiguous(), None
    if real is not None:
        begin, end = mask_bounds("attention_mask", real, "pass a mask of 4 dimensions")
        options |= {"leftpad_k": begin, "seqused_k": end}
        # the last query is at the last column; cross-attention, without a limit or a decay, may have more queries
        first = real.shape[1] - q.shape[1]
        if (options["causal"] or options["window_size"] is not None or log_decay is not None) and first >= 0:
            options |= {"leftpad_q": (begin - first).clamp(min=0), "seqused_q": (end - first).clamp(min=0)}
    elif kwargs.get("cu_seq_lens_q") is not None:
        return _packed(q, k, v, log_decay, kwargs, options), None
    options["skip_tolerance"] = None if log_decay is None else "auto"
    if real is None or options["causal"]:
        log_decay = _with_resets(log_decay, q, k, kwargs.get("position_ids"), real)
    return decay_attention(q, k, v, log_decay, **options).contiguous(), None


def mask(
    *, batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int, mask_function: Callable,
    attention_mask: Tensor | None, device: torch.device | str, config: Any, **kwargs: Any,
) -> Tensor:
    """Mask function for transformers. Returns the attention_mask of `attention`, with 4 dimensions.

    A model that supports flash attention gets (B, 1, 1, columns) if mask_function is bidirectional, causal or a causal
    sliding window. For any other mask_function it gets (B, 1, T_q, T_k), True for a visible key. A model without flash
    attention gets the mask of eager attention.

    Raises:
        ValueError: if attention_mask has more tokens than the cache and the new ones together.
    """
    complete = kwargs | dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, device=device, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
    )
    if attention_mask is not None and attention_mask.shape[1] > kv_offset + kv_length:
        raise ValueError(
            f"attention_mask: expected at most {kv_offset + kv_length} tokens, cached and new, got "
            f"{attention_mask.shape[1]}; {_IGNORED_CACHE}"
        )
    if not _DESCRIBES_PADDING.get(type(config), False):
        return masking_utils.eager_mask(**complete)
    kind, tracing = _kind(mask_function), masking_utils.is_tracing(attention_mask)
    if tracing and isinstance(q_offset, Tensor):  # a static cache has its length on the device
        return masking_utils.sdpa_mask(**complete)
    past = int(q_offset) if isinstance(q_offset, Tensor) else q_offset
    columns = kv_length if kind == _ALL else min(kv_length, past + q_length - kv_offset)
    real = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + columns]
    if kind is None or (real is not None and real.shape[1] < columns):
        seen = masking_utils.sdpa_mask(**complete)
        marked = tracing if columns == kv_length else not (tracing or seen[..., columns:].any())
        return seen[..., :columns].to(_WRITTEN) if marked else seen
    if real is not None and (tracing or not real.all()):
        return real[:, None, None].to(kind, memory_format=torch.contiguous_format)
    return torch.ones((), dtype=kind, device=device).expand(batch_size, 1, 1, columns)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)


def _kind(mask_function: Callable) -> torch.dtype | None:
    """_ALL, _PAST or _WINDOW; None for a mask_function that is not recognised as one of these."""
    if mask_function is masking_utils.bidirectional_mask_function:
        return _ALL
    if mask_function is masking_utils.causal_mask_function:
        return _PAST
    if torch.compiler.is_compiling():  # torch.compile does not look into closures
        return None
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    parts = cells[0] if len(cells) == 1 and isinstance(cells[0], tuple) else ()
    windows = [getattr(part, "__qualname__", "").startswith("sliding_window_overlay.") for part in parts]
    both = mask_function.__qualname__.startswith("and_masks.") and len(parts) == 2
    return _WINDOW if both and any(windows) and masking_utils.causal_mask_function in parts else None


def _packed(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, kwargs: dict, options: dict) -> Tensor:
    if options.pop("bias") is not None:
        raise ValueError("position_bias: expected none with cu_seq_lens_q; pass a boolean mask (B, 1, T_q, T_k)")
    offsets_q, offsets_k = kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k")
    rows, keys, values = (x.flatten(0, 1) for x in (q, k, v))
    longest_q, longest_k = kwargs.get("max_length_q"), kwargs.get("max_length_k")
    out = decay_attention_varlen(
        rows, keys, values, log_decay if log_decay is None or log_decay.ndim == 1 else log_decay.flatten(0, 1),
        cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_q if offsets_k is None else offsets_k,
        # a tensor is an upper bound, and reading it would synchronise
        max_seqlen_q=longest_q if isinstance(longest_q, int) else rows.shape[0],
        max_seqlen_k=longest_k if isinstance(longest_k, int) else keys.shape[0],
        **options,
    )
    return out.unflatten(0, q.shape[:2])


def _with_resets(
    log_decay: Tensor | None, q: Tensor, k: Tensor, positions: Tensor | None, real: Tensor | None
) -> Tensor | None:
    """log_decay with a reset at the smallest of position_ids (1, T); unchanged if they cannot pack sequences.

    Unlike offsets, resets stay on the device: nothing synchronises, and compiled code has one graph. If real (1, T) has
    padding, there are no resets.
    """
    length = q.shape[1]
    if positions is None or q.shape[0] != 1 or positions.shape != (1, length) or not 1 < length == k.shape[1]:
        return log_decay
    starts = (positions == positions.min()) & (real is None or real.all())
    if log_decay is None:
        log_decay = q.new_zeros(1, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return log_decay.expand(1, length, -1).masked_fill(starts[..., None], -torch.inf)


# ----------------------------------------------------------------------------------------------------------------------
# Support by models: transformers checks it only for its own names

_get_correct, _set = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation


@functools.wraps(_get_correct)  # called when a model is created
def _get_checked(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
    name = _get_correct(self, requested_attention, *args, **kwargs)
    if name == NAME:
        _check_support(self)
    return name


@functools.wraps(_set)  # which only warns about models that cannot change
def _set_checked(self: PreTrainedModel, attn_implementation: str | dict, *args: Any, **kwargs: Any) -> None:
    for model in self.modules():
        if isinstance(model, PreTrainedModel):
            guard_rates(model)
            if attn_implementation == NAME:
                _check_support(model)
    _set(self, attn_implementation, *args, **kwargs)


PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation = _get_checked, _set_checked


def _check_support(model: PreTrainedModel) -> None:
    """Refuse a model that NAME cannot run, and record if all models that share its config support flash attention."""
    if model.config.model_type == NAME:  # DecayModel has no other attention
        return
    kinds = {type(x): None for x in model.modules() if isinstance(x, PreTrainedModel) and x.config is model.config}
    for kind in kinds:
        # transformers looks for its interface in a class's source; a class of a notebook has none
        known: list[Any] = [c for c in kind.__mro__ if issubclass(c, PreTrainedModel)]
        written = next(c for c in known if getattr(sys.modules.get(c.__module__), "__file__", None))
        if (
            not ((kind._supports_flash_attn or kind._supports_sdpa) and written._can_set_attn_implementation())
            or _KNOWS_NAMES.search(inspect.getsource(sys.modules[written.__module__]))
        ):
            raise ValueError(
                f"attn_implementation: expected a model with flash or sdpa attention by transformers' "
                f'AttentionInterface for "{NAME}", got {kind.__name__}; pass attn_implementation="eager", or name the '
                f'parts of a model that have it, such as {{"text_config": "{NAME}"}}'
            )
    of = type(model.config)
    _DESCRIBES_PADDING[of] = _DESCRIBES_PADDING.get(of, True) and all(kind._supports_flash_attn for kind in kinds)
