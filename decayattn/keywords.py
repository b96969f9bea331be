"""Hints for keywords of FlashAttention, PyTorch, fla and others: the error names our argument."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable)


class _Required:
    def __repr__(self) -> str:
        return "nothing"


# default of a required argument, so that the error for an unknown keyword comes before that for a missing one
REQUIRED: Any = _Required()


def _by_name(names: dict[str, str]) -> dict[str, str]:
    """{name: hint} from {hint: names}. {} in a hint becomes the name."""
    return {name: hint.replace("{}", name) for hint, together in names.items() for name in together.split()}


_SCALE = "use scale"
_WINDOW = "use window_size=(left, right)"
_DROPOUT = "there is no dropout; leave it out"
_SOFT_CAP = "there is no soft cap"
_TOLERANCE = "use skip_tolerance, the probability that a row may lose: math.exp(-10) for 'auto'"
_PACKED = "decay_attention_varlen takes cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k"
_PADDED = "decay_attention takes it; packed sequences have none"

# hints of the functions; _OF_LAYER has those of the layer
_HINTS = _by_name({
    _SCALE: "softmax_scale sm_scale",
    "use causal": "is_causal",
    "use log_decay, (H,), the negated slopes": "alibi_slopes slopes",
    "use log_decay, natural logarithms of the gates": "g log_fgate log_forget log_f decay",
    "use log_decay=F.logsigmoid(fgate_logit.float())": "fgate_logit",
    "use bias: boolean (True = visible) or added to the scores; padding is seqused_k and leftpad_k; a window is "
    "window_size": "attn_mask attention_mask attn_bias mask key_padding_mask padding_mask block_mask",
    "use log_decay, bias, window_size or scale": "score_mod",
    _WINDOW: "window sliding_window",
    "use sink, one logit per head": "sinks s_aux sink_bias learnable_sink",
    "use return_lse": "return_attn_probs return_softmax_lse",
    _DROPOUT: "dropout dropout_p",
    _SOFT_CAP: "softcap",
    "decay_attention_paged takes it": "block_table",
    _TOLERANCE: "adaptive_threshold",
    "leave it out: k and v may always have fewer heads than q": "enable_gqa",
    "leave it out: torch.use_deterministic_algorithms asks for that": "deterministic",
    "the order is (batch, tokens, heads, head dimension): give x.transpose(1, 2)": "head_first",
    "use seqused_k": "cache_seqlens",
    "use leftpad_k": "seq_start",
    _PACKED: "cu_seqlens cu_seqlens_q cu_seqlens_k max_seqlen max_seqlen_q max_seqlen_k",
    _PADDED: "bias seqused_q seqused_k leftpad_q leftpad_k",
})
_OF_LAYER = {
    "DecayFlashAttention": _by_name({
        _DROPOUT: "dropout dropout_p attn_dropout attention_dropout resid_dropout attn_drop proj_drop",
        "leave it out: x is (batch, tokens, embed_dim)": "batch_first",
        "use sink=True, a learned logit per head with a zero value vector": "add_bias_kv add_zero_attn sinks",
        "leave it out: x and memory have embed_dim channels; value_dim is D_v of a head": "kdim vdim",
        "use embed_dim": "hidden_size d_model dim width n_embd",
        "use num_heads": "heads n_heads n_head nhead num_attention_heads",
        "use num_kv_heads": "num_key_value_heads n_kv_heads kv_heads num_heads_kv",
        "use head_dim": "dim_head head_size d_head",
        "use position=module, which rotates q and k": "rope use_rope rope_theta rope_base rope_scaling rotary "
        "use_rotary rotary_emb rotary_emb_dim rotary_dim rotary_embedding position_embedding",
        "use causal": "is_causal",
        "use bias, for both projections": "qkv_bias use_bias add_bias attention_bias qkv_proj_bias out_proj_bias",
        "use output_gate": "use_output_gate gate use_gate",
        "use qk_norm": "use_qk_norm qk_layernorm qk_rms_norm",
        _SCALE: "softmax_scale sm_scale scaling qk_scale",
        "use decay: a name as 'alibi', or a module as ConstantDecay.from_values(-slopes)":
            "alibi use_alibi alibi_slopes alibi_pos_bias slopes log_decay g fgate fgate_type forget_gate",
        _WINDOW: "window sliding_window",
        _SOFT_CAP: "softcap logit_softcapping",
        _TOLERANCE: "adaptive_threshold",
        "leave it out: a cache is an argument of the call": "layer_idx",
        "it is an argument of the call, layer(x, {}=...)":
            "padding_mask cu_seqlens max_seqlen resets cache new_lengths memory memory_padding_mask",
        "set it afterwards: layer.context = ContextParallel(group)": "context",
    }),
    "DecayFlashAttention.forward": _by_name({
        "use padding_mask (B, T), True for tokens; documents are cu_seqlens or resets, and window_size is an option of "
        "the layer": "attn_mask attention_mask mask attn_bias bias block_mask",
        "use padding_mask, which is True for tokens: PyTorch's key_padding_mask is True for padding":
            "key_padding_mask src_key_padding_mask",
        "leave it out: flash attention has no weights, and the layer returns one tensor":
            "need_weights average_attn_weights output_attentions return_attn_probs",
        "use cache=layer.make_cache(batch_size, max_length)":
            "past_key_value past_key_values layer_past past kv_cache use_cache inference_params cache_params",
        "leave it out: a cache knows the positions; a module for them is an option of the layer, position=module":
            "position_ids cache_position cache_seqlens start_pos position_embeddings rotary_pos_emb freqs_cis",
        "use cu_seqlens and max_seqlen for packed sequences, padding_mask for padded ones, new_lengths with a cache":
            "cu_seqlens_q cu_seqlens_k cu_seq_lens cu_seq_lens_q cu_seq_lens_k max_seqlen_q max_seqlen_k max_length_q "
            "max_length_k lengths seq_lens seqlens seqused_q seqused_k leftpad_q leftpad_k",
        "use resets, True for the first token of a document, or cu_seqlens":
            "document_ids segment_ids seq_idx sequence_ids",
        "use x, and memory for cross-attention: the layer projects them itself; decay_attention takes q, k and v":
            "query key value q k v",
        "use memory, which keys and values come from":
            "key_value_states encoder_hidden_states encoder_output encoder_out context kv context_states",
        "use memory_padding_mask, which is True for tokens of memory":
            "memory_key_padding_mask encoder_attention_mask encoder_padding_mask context_mask memory_mask",
        "use log_decay, natural logarithms, or leave it out: the layer's decay module computes it":
            "g log_fgate alibi_slopes decay",
        "it is an option of the layer, DecayFlashAttention(..., {}=...)":
            "causal window_size scale sink skip_tolerance backend position",
        "causal is an option of the layer, DecayFlashAttention(..., causal=...)": "is_causal",
        "window_size is an option of the layer, DecayFlashAttention(..., window_size=...)": "sliding_window",
        "scale is an option of the layer, DecayFlashAttention(..., scale=...)": "softmax_scale sm_scale",
        "decay_attention returns it": "return_lse",
        _DROPOUT: "dropout dropout_p",
    }),
}


def named(function: _F) -> _F:
    """Hide the function's catch-alls from help() and inspect.signature."""
    signature = inspect.signature(function)
    known = [x for x in signature.parameters.values() if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)]
    known = [x.replace(default=x.empty) if x.default is REQUIRED else x for x in known]
    function.__signature__ = signature.replace(parameters=known)  # type: ignore[attr-defined]
    return function


def refuse(function: Callable, unknown: dict[str, object], others: tuple[object, ...] = ()) -> None:
    """Raise a TypeError for surplus arguments, or for the first unknown keyword with a hint to ours."""
    owner, parameters = function.__qualname__, inspect.signature(function).parameters
    known = [name for name in parameters if name != "self"]
    if others:
        first = [name for name in known if parameters[name].kind != parameters[name].KEYWORD_ONLY]
        hint = "; cross-attention is layer(x, memory=memory)" if owner.endswith("forward") else ""
        raise TypeError(
            f"{owner}: expected {' and '.join(first)}, and the rest by keyword, got {len(others)} more{hint}"
        )
    name = next(iter(unknown))
    similar = difflib.get_close_matches(name, known, n=1)
    guess = f"did you mean {similar[0]}?" if similar else f"it takes {', '.join(known)}"
    hint = _OF_LAYER.get(owner, _HINTS).get(name, guess)
    raise TypeError(f"{name}: unexpected keyword argument of {owner}; {hint}")
