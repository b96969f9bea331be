"""What FlashAttention, PyTorch, fla and others call our arguments, for the error that names ours."""

import difflib
import inspect
from collections.abc import Callable

_SCALE = "use scale"
_DECAY = "use log_decay, natural logarithms of the gates"
_SLOPES = "use log_decay, (H,), the negated slopes"
_MASK = "use bias: boolean (True = visible) or added to the scores; padding is seqused_k and leftpad_k"
_SINK = "use sink, one logit per head"
_WINDOW = "use window_size=(left, right)"
_LSE = "use return_lse"
_DROPOUT = "there is no dropout"
_PACKED = "decay_attention_varlen takes cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k"
_PADDED = "decay_attention takes it; packed sequences have none"
_ORDER = "the order is (batch, tokens, heads, head dimension): give x.transpose(1, 2)"

_HINTS = {
    "softmax_scale": _SCALE,
    "sm_scale": _SCALE,
    "is_causal": "use causal",
    "alibi_slopes": _SLOPES,
    "slopes": _SLOPES,
    "g": _DECAY,
    "log_fgate": _DECAY,
    "log_forget": _DECAY,
    "log_f": _DECAY,
    "fgate_logit": "use log_decay=F.logsigmoid(fgate_logit.float())",
    "decay": _DECAY,
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "attn_bias": _MASK,
    "mask": _MASK,
    "key_padding_mask": _MASK,
    "padding_mask": _MASK,
    "block_mask": f"{_MASK}; a window is window_size",
    "score_mod": "use log_decay, bias, window_size or scale",
    "window": _WINDOW,
    "sliding_window": _WINDOW,
    "sinks": _SINK,
    "s_aux": _SINK,
    "sink_bias": _SINK,
    "learnable_sink": _SINK,
    "return_attn_probs": _LSE,
    "return_softmax_lse": _LSE,
    "dropout": _DROPOUT,
    "dropout_p": _DROPOUT,
    "softcap": "there is no soft cap",
    "block_table": "decay_attention_paged takes it",
    "adaptive_threshold": "use skip_tolerance, the probability that a row may lose: math.exp(-10) for 'auto'",
    "enable_gqa": "leave it out: k and v may always have fewer heads than q",
    "deterministic": "leave it out: torch.use_deterministic_algorithms asks for that",
    "head_first": _ORDER,
    "cache_seqlens": "use seqused_k",
    "seq_start": "use leftpad_k",
    "cu_seqlens": _PACKED,
    "cu_seqlens_q": _PACKED,
    "cu_seqlens_k": _PACKED,
    "max_seqlen": _PACKED,
    "max_seqlen_q": _PACKED,
    "max_seqlen_k": _PACKED,
    "bias": _PADDED,
    "seqused_q": _PADDED,
    "seqused_k": _PADDED,
    "leftpad_q": _PADDED,
    "leftpad_k": _PADDED,
}


def named(function: Callable) -> Callable:
    """The function without its catch-all of unknown keywords in what help() and inspect.signature show."""
    signature = inspect.signature(function)
    known = [x for x in signature.parameters.values() if x.kind != x.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=known)  # type: ignore[attr-defined]
    return function


def refuse(function: Callable, unknown: dict[str, object]) -> None:
    """Raise the TypeError that Python would, and say what the first unknown keyword is called here."""
    name = next(iter(unknown))
    known = inspect.signature(function).parameters
    similar = difflib.get_close_matches(name, known, n=1)
    hint = _HINTS.get(name) or (f"did you mean {similar[0]}?" if similar else f"it takes {', '.join(known)}")
    raise TypeError(f"{name}: unexpected keyword argument of {function.__name__}; {hint}")
