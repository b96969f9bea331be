"""decay_attention without a decay as the attention of ordinary transformers models: attn_implementation="decayattn".

Importing this module (or decayattn.integrations.transformers) registers it with transformers' AttentionInterface, where
what wraps attentions by name finds it, such as accelerate's and DeepSpeed's Ulysses for long sequences::

    import decayattn.integrations.attention_interface
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="decayattn")

It needs the extra `decayattn[transformers]`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from decayattn.functional import decay_attention, decay_attention_varlen

NAME = "decayattn"
_REFUSED = {
    "softcap": "there is no soft cap",
    "position_bias": "there is no position bias; choose the sdpa or eager attention",
    "cache": "there is no paged cache",
}


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls an attention with; (out (B, T_q, H, D_v), None), for there are no weights.

    Args:
        query, key, value: (B, H, T_q, D), (B, H_kv, T_k, D) and (B, H_kv, T_k, D_v).
        attention_mask: None; (B, columns so far) of the keys, 0 for padding, as `mask` returns it; or any of 4
            dimensions, boolean (True = visible) or added to the scores, which says all there is to say.
        scaling: of the scores; default 1/√D.
        is_causal: default module.is_causal.
        sliding_window: a query sees so many keys, its own included.
        s_aux: (H,) sinks.
        kwargs: of packed sequences cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k, or position_ids that
            start anew. As with transformers' flash attention, such position_ids of a batch of 1 mean packed sequences
            even where the model was given a mask of ones, of which `mask` makes None; sdpa takes those for one
            sequence. The rest of what transformers passes changes nothing here.

    Raises:
        ValueError: for what flash attention does not have, by name.
    """
    for name, reason in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: {reason}")
    if dropout:
        raise ValueError(f"dropout: there is no dropout of attention weights, got {dropout}")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None if sliding_window is None else (sliding_window - 1, sliding_window - 1)
    options: dict[str, Any] = dict(scale=scaling, causal=causal, window_size=window, sink=s_aux)
    packing = _packing(q, k, attention_mask, kwargs)
    if packing is not None:
        out = decay_attention_varlen(q.squeeze(0), k.squeeze(0), v.squeeze(0), **packing, **options)
        return out[None], None
    if attention_mask is None:
        return decay_attention(q, k, v, **options), None
    if attention_mask.ndim == 4:
        options |= {"causal": False, "window_size": None, "bias": attention_mask[..., : k.shape[1]]}
        return decay_attention(q, k, v, **options), None
    # without a limit no row's position counts, and a mask of the keys says nothing of a decoder's queries
    by_position = causal or window is not None
    options |= _sequence_bounds(attention_mask, q.shape[1] if by_position else None)
    return decay_attention(q, k, v, **options), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """What transformers calls to make `attention`'s attention_mask.

    None or (B, columns) where a query sees the past, everything, or a sliding window of the past, which is_causal and
    sliding_window say; for any other mask_function all of it, (B, 1, T_q, T_k), True where a key is seen.
    """
    whole = dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask,
    )
    if not _is_plain(mask_function):
        return masking_utils.sdpa_mask(**whole, device=device, **{**kwargs, "allow_is_causal_skip": False})
    columns = masking_utils.flash_attention_mask(**whole)
    seen = int(q_offset) + q_length - int(kv_offset)
    if columns is None and seen < kv_length and mask_function is not masking_utils.bidirectional_mask_function:
        # a static cache, whose later columns are not yet written
        columns = torch.ones(batch_size, seen, dtype=torch.bool, device=device)
    return columns


def register() -> None:
    """Make transformers know the attention; importing this module does it."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def _is_plain(mask_function: Callable) -> bool:
    """Whether is_causal and sliding_window say all of it. What is not recognised is not plain."""
    if mask_function in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function):
        return True
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    parts = cells[0] if len(cells) == 1 and isinstance(cells[0], tuple) else ()
    windows = [getattr(part, "__qualname__", "").startswith("sliding_window_overlay.") for part in parts]
    causal = [part is masking_utils.causal_mask_function for part in parts]
    both = mask_function.__qualname__.startswith("and_masks.")
    return both and len(parts) == 2 and any(windows) and any(causal)


def _packing(q: Tensor, k: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """cu_seqlens and lengths of packed sequences; None where there are none."""
    if attention_mask is not None or q.shape[0] != 1:
        return None
    if kwargs.get("cu_seq_lens_q") is not None:
        offsets_q, offsets_k = kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k")
        offsets_k = offsets_q if offsets_k is None else offsets_k
        longest_q, longest_k = kwargs.get("max_length_q"), kwargs.get("max_length_k")
    else:
        positions = kwargs.get("position_ids")
        if positions is None or positions.shape != (1, q.shape[1]) or q.shape[1] != k.shape[1] or q.shape[1] < 2:
            return None
        begins = F.pad(positions[0].diff() != 1, (1, 0), value=True).nonzero()[:, 0]
        if len(begins) == 1:
            return None
        offsets_q = offsets_k = F.pad(begins, (0, 1), value=q.shape[1]).int()
        longest_q = longest_k = int(offsets_q.diff().max())
    return {
        "cu_seqlens_q": offsets_q, "cu_seqlens_k": offsets_k,
        "max_seqlen_q": q.shape[1] if longest_q is None else int(longest_q),
        "max_seqlen_k": k.shape[1] if longest_k is None else int(longest_k),
    }


def _sequence_bounds(columns: Tensor, queries: int | None) -> dict[str, Tensor]:
    """Where sequences lie, of a mask (B, columns): their keys, and so many queries, of which the last has its last
    column. None for queries that are not of these columns, or need not be."""
    real = columns != 0
    begin = (real.cumsum(1) == 0).sum(1, dtype=torch.int32)
    end = begin + real.sum(1, dtype=torch.int32)
    index = torch.arange(columns.shape[1], device=columns.device)
    if not bool((((index >= begin[:, None]) & (index < end[:, None])) == real).all()):
        raise ValueError("attention_mask: expected one stretch of tokens in every row, got a gap")
    bounds = {"leftpad_k": begin, "seqused_k": end}
    if queries is not None and queries <= columns.shape[1]:  # else it is of other tokens than the queries
        first = columns.shape[1] - queries
        bounds |= {"leftpad_q": (begin - first).clamp(min=0), "seqused_q": (end - first).clamp(min=0)}
    return bounds


register()
