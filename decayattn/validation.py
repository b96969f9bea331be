"""Checks of arguments: every bad one raises by name first. Keywords of other libraries raise with a hint to ours."""

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from decayattn.compatibility import refuse_unless
from decayattn.problem import MAX_HEAD_DIM, SUPPORTED_DTYPES, SkipTolerance

_F = TypeVar("_F", bound=Callable)
_LARGEST_FLOAT32, _LARGEST_FLOAT64 = torch.finfo(torch.float32).max, torch.finfo(torch.float64).max


def check_arguments(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | float | None, scale: Tensor | float | None, causal: bool,
    window_size: tuple[int, int] | None = None, sink: Tensor | None = None, bias: Tensor | None = None,
    skip_tolerance: SkipTolerance = None, **lengths: Tensor | None,
) -> None:
    """Refuse every bad argument of decay_attention by name; lengths: seqused_q, seqused_k, leftpad_q, leftpad_k."""
    _check_tensors(q, k, v, ("batch", "sequence", "heads", "head_dim"))
    check_same("k", "batch size of q", q.shape[0], k.shape[0])
    check_same("v", "batch size of q", q.shape[0], v.shape[0])
    check_bool("causal", causal)
    per_token = _check_log_decay(log_decay, q, k, "(B, T_k, H)", causal)
    _check_scale(scale, q, "(B, T_q, H)")
    check_window(window_size)
    _check_sink(sink, q)
    check_bias(bias, q, k)
    check_skip_tolerance(skip_tolerance)
    for name, numbers in lengths.items():
        if numbers is not None:
            check_counts(name, numbers, q.device, "(B,)", (q.shape[0],))
    if per_token and not causal and q.shape[1] > k.shape[1]:
        raise ValueError(
            "causal: expected T_q <= T_k with causal=False and a log_decay per token, because the first "
            f"{q.shape[1] - k.shape[1]} query rows precede the first log-decay, "
            f"got T_q = {q.shape[1]}, T_k = {k.shape[1]}; leave these rows out"
        )


def check_packed_arguments(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | float | None, scale: Tensor | float | None, causal: bool,
    window_size: tuple[int, int] | None, sink: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, skip_tolerance: SkipTolerance = None,
) -> None:
    """Refuse every bad argument of decay_attention_varlen by name."""
    _check_tensors(q, k, v, ("tokens", "heads", "head_dim"))
    check_bool("causal", causal)
    _check_log_decay(log_decay, q, k, "(total_k, H)", causal)
    _check_scale(scale, q, "(total_q, H)")
    check_window(window_size)
    _check_sink(sink, q)
    check_skip_tolerance(skip_tolerance)
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_offsets(name, offsets, q)
    check_same("cu_seqlens_k", "shape of cu_seqlens_q", tuple(cu_seqlens_q.shape), tuple(cu_seqlens_k.shape))
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        check_count(name, longest)


def refuse_gradients(**inputs: Tensor | float | None) -> None:
    """Refuse inputs that require a gradient: a cache of keys and values has none."""
    if not torch.is_grad_enabled():
        return
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.requires_grad:
            remedy = "call it under torch.no_grad(), or without a cache (transformers: use_cache=False)"
            raise RuntimeError(f"{name}: expected no gradient, because a cache is for inference; {remedy}")


def check_offsets(name: str, offsets: Tensor, q: Tensor) -> None:
    """Refuse anything but offsets of packed sequences on the device of q."""
    check_counts(name, offsets, q.device, "(sequences + 1,)", None)
    if offsets.ndim != 1 or offsets.shape[0] == 0:
        raise ValueError(f"{name}: expected shape (sequences + 1,), got {tuple(offsets.shape)}")
    if type(offsets) is Tensor and offsets.device.type == "cpu":  # on a GPU it would take longer than a small call
        refuse_unless(
            (offsets.diff() >= 0).all(),
            f"{name}: expected offsets that never fall, got others; from lengths, use F.pad(lengths.cumsum(0), (1, 0))",
        )


def check_count(name: str, number: int, least: int = 0) -> int:
    """Return the number as Python's int, if it is not symbolic; refuse anything but an integer of at least `least`."""
    if not is_integer(number):
        raise wrong_type(name, "an int", number)
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    return integer(number)


check_positive_int = functools.partial(check_count, least=1)


def integer(number: int) -> int:
    """A checked integer, possibly of numpy, as Python's int, which operators and launches require."""
    return number if isinstance(number, (int, torch.SymInt)) else int(number)


def check_number(name: str, value: float, expected: str, fits: Callable[[float], bool]) -> float:
    """Return the value as a float; refuse anything but a number that fits."""
    if not is_real(value):
        raise wrong_type(name, expected, value)
    if not fits(value):
        raise ValueError(f"{name}: expected {expected}, got {value}")
    return float(value)


def is_finite(number: float, dtype: torch.dtype = torch.float64) -> bool:
    """True if a number is finite in the arithmetic of inputs of this dtype: float32, or float64 for float64."""
    # an int may be too large for a float; a numpy number casts the other operand of a comparison
    number = number if isinstance(number, int) else float(number)
    return abs(number) <= (_LARGEST_FLOAT64 if dtype == torch.float64 else _LARGEST_FLOAT32)


def check_bool(name: str, value: bool) -> bool:
    """Return the value; refuse anything but a bool."""
    if not isinstance(value, bool):
        raise wrong_type(name, "a bool", value)
    return value


def check_window(window_size: tuple[int, int] | None) -> None:
    if window_size is None:
        return
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise wrong_type("window_size", "None or a pair (left, right)", window_size)
    for side in window_size:
        if not is_integer(side):
            raise wrong_type("window_size", "two ints", window_size)
        if side < -1:
            raise ValueError(f"window_size: expected numbers of tokens, or -1 for no limit, got {window_size}")


def check_skip_tolerance(skip_tolerance: SkipTolerance) -> None:
    if skip_tolerance is None or (isinstance(skip_tolerance, str) and skip_tolerance == "auto"):
        return
    expected = "'auto', None or a number between 0 and 1"
    if isinstance(skip_tolerance, str):
        raise ValueError(f"skip_tolerance: expected {expected}, got {skip_tolerance!r}")
    check_number("skip_tolerance", skip_tolerance, expected, lambda number: 0 < number < 1)


def check_bias(bias: Tensor | None, q: Tensor, k: Tensor, tokens: int | None = None) -> None:
    """Refuse anything but a bias for the scores of q and k; tokens: T of the sequence if they are slices of it."""
    if bias is None:
        return
    _check_term("bias", bias, q, or_bool=True)
    rows, keys = (q.shape[1], k.shape[1]) if tokens is None else (tokens, tokens)
    swapped = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    _check_broadcast("bias", bias.shape, q, "(B, H, T_q, T_k)", (q.shape[0], q.shape[2], rows, keys), swapped)


def check_tensor(
    name: str, x: object, device: torch.device | None = None, owner: str = "q", expected: str = "a torch.Tensor"
) -> Tensor:
    """Return x; refuse anything but a dense tensor on this device, that of its owner; None: on any device."""
    if not isinstance(x, Tensor):
        raise wrong_type(name, expected, x)
    if x.is_nested:
        raise TypeError(
            f"{name}: expected a dense tensor, got a nested tensor; pack the sequences, nested.values() of the jagged "
            "layout, and pass cu_seqlens, nested.offsets(), to decay_attention_varlen or to the layer"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got one of layout {x.layout}")
    if device is not None:
        check_same(name, f"device of {owner}", device, x.device)
    return x


def check_same(name: str, quality: str, expected: object, given: object, error: type[Exception] = ValueError) -> None:
    """Refuse an argument with another quality than expected; quality: "batch size of q"."""
    if given != expected:
        raise error(f"{name}: expected the {quality}, {expected}, got {given}")


def check_counts(
    name: str, numbers: Tensor, device: torch.device | None, axes: str, shape: tuple[int, ...] | None, owner: str = "q"
) -> None:
    """Refuse anything but integers of this shape (None: any) on this device, that of their owner."""
    check_tensor(name, numbers, device, owner)
    if numbers.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {numbers.dtype}")
    if shape is not None and numbers.shape != shape:
        raise ValueError(f"{name}: expected shape {axes} = {shape}, got {tuple(numbers.shape)}")


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuse a dtype that no backend has."""
    if dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {dtype}")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, axes: tuple[str, ...]) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor, None if tensor is q else q.device)
        if tensor.ndim != len(axes):
            raise ValueError(f"{name}: expected {len(axes)} dimensions ({', '.join(axes)}), got {tuple(tensor.shape)}")
        check_dtype(name, tensor.dtype)
    check_same("k", "dtype of q", q.dtype, k.dtype, TypeError)
    check_same("v", "dtype of q", q.dtype, v.dtype, TypeError)
    (*_, rows, heads, dim), (*_, keys, kv_heads, key_dim), (*_, values, value_heads, value_dim) = (
        q.shape, k.shape, v.shape
    )
    check_same("v", "sequence length of k", keys, values)
    check_same("v", "number of heads of k", kv_heads, value_heads)
    check_same("k", "head dimension of q", dim, key_dim)
    if kv_heads == 0 or heads % kv_heads != 0:
        # more key heads than query heads: rather another order of dimensions than a wrong number of heads
        raise ValueError(
            f"k: expected heads that divide those of q (grouped queries), got {kv_heads} for {heads}"
            f"{_order_hint(q, kv_heads > heads and keys > 0 and rows % keys == 0)}"
        )
    for name, number in (("q", dim), ("v", value_dim)):
        if not 1 <= number <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: expected a head dimension from 1 to {MAX_HEAD_DIM}, got {number}")


def _check_term(name: str, x: object, q: Tensor, expected: str = "None or a tensor", or_bool: bool = False) -> Tensor:
    """Return x; refuse anything but a floating tensor on the device of q, float64 only with float64 q."""
    x = check_tensor(name, x, q.device, expected=expected)
    fits = x.dtype in SUPPORTED_DTYPES and (x.dtype != torch.float64 or q.dtype == torch.float64)
    if not fits and not (or_bool and x.dtype == torch.bool):
        dtypes = f"{'bool, ' if or_bool else ''}float32, bfloat16 or float16 (float64 with float64 q, k, v)"
        raise TypeError(f"{name}: expected {dtypes}, got {x.dtype}")
    return x


def _check_log_decay(log_decay: Tensor | float | None, q: Tensor, k: Tensor, axes: str, causal: bool) -> bool:
    """Check log_decay. True if there is one per token."""
    if log_decay is None:
        return False
    if is_real(log_decay):
        # a number too low for the dtype, and −inf, is a reset, like any below −746
        if not is_finite(log_decay, q.dtype) and not log_decay < 0:
            raise ValueError(f"log_decay: expected a finite number or -inf, got {log_decay} (q: {q.dtype})")
        return False
    log_decay = check_tensor("log_decay", log_decay, q.device, expected="None, a number or a tensor")
    dtype, shape = log_decay.dtype, log_decay.shape
    if dtype in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"log_decay: expected float32, got {dtype}; its rounding errors add up over "
            "tokens: compute the gate in float32, or pass log_decay.float()"
        )
    if dtype != torch.float32 and not (dtype == q.dtype == torch.float64):
        raise TypeError(f"log_decay: expected float32 (or float64 with float64 q, k, v), got {dtype}")
    per_token = (*k.shape[:-2], q.shape[-2])
    # compare ndim first: tuples compare entry by entry whatever their lengths, which guards a symbolic batch
    if len(shape) > 1 and shape == per_token:
        return True
    if _is_decay(shape, per_token):
        return len(shape) > 1
    if len(shape) > 2 and shape[-1] == 2 and _is_decay(shape[:-1], per_token):
        if causal:
            raise ValueError(
                f"log_decay: expected {axes} with causal=True, got a gate per direction, {tuple(shape)}; "
                "pass log_decay[..., 0], or causal=False"
            )
        check_same("q", "sequence length of k with a gate per direction", k.shape[-3], q.shape[-3])
        return True
    raise ValueError(
        f"log_decay: expected shape () or (H,) = ({per_token[-1]},) for a constant decay, or {axes} = {per_token} for "
        f"one per token, where batch and heads may be 1 (and {axes[:-1]}, 2) with causal=False), got {tuple(shape)}"
        f"{_decay_hint(shape, q, k, per_token)}"
    )


def _is_decay(shape: Sequence[int], per_token: Sequence[int]) -> bool:
    """True if a log-decay may have this shape. T is never broadcast: a constant decay is (H,), and a single token's λ
    for many keys is a mistake."""
    if len(shape) < 2:
        return len(shape) == 0 or shape[0] == per_token[-1]
    return len(shape) == len(per_token) and _broadcasts(shape, per_token) and shape[-2] == per_token[-2]


def _decay_hint(shape: Sequence[int], q: Tensor, k: Tensor, per_token: tuple[int, ...]) -> str:
    """Hint for a log-decay that fits in another order, or with one dimension more or less."""
    others = {
        "log_decay[..., None]": (*shape, 1),
        "log_decay[None]": (1, *shape),
        "log_decay.squeeze(0)": shape[1:] if shape[:1] == (1,) else (),
        "log_decay.mT": (*shape[:-2], *shape[:-3:-1]),
    }
    fitting = [name for name, other in others.items() if len(other) > 1 and _is_decay(other, per_token)]
    swapped = (*k.shape[:-3], k.shape[-2], q.shape[-3])
    return "".join(f"; {name} would fit" for name in fitting) + _order_hint(q, _is_decay(shape, swapped))


def _check_scale(scale: Tensor | float | None, q: Tensor, axes: str) -> None:
    if scale is None:
        return
    if is_real(scale):
        if not is_finite(scale, q.dtype):
            raise ValueError(f"scale: expected a finite number, got {scale} (q: {q.dtype})")
        return
    scale = _check_term("scale", scale, q, "None, a number or a tensor")
    _check_broadcast("scale", scale.shape, q, axes, tuple(q.shape[:-1]), (*q.shape[:-3], q.shape[-2], q.shape[-3]))


def _check_sink(sink: Tensor | None, q: Tensor) -> None:
    if sink is None:
        return
    _check_term("sink", sink, q)
    if sink.shape != (q.shape[-2],):
        raise ValueError(
            f"sink: expected one logit per head, (H,) = ({q.shape[-2]},), got {tuple(sink.shape)}"
            f"{_order_hint(q, sink.shape == (q.shape[-3],))}"
        )


def is_integer(value: object) -> bool:
    """True for an int of Python, numpy or torch (symbolic), not for a bool."""
    return type(value) is int or (isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool))


def _broadcasts(shape: Sequence[int], full: Sequence[int]) -> bool:
    """True if a tensor of this shape broadcasts to the full one."""
    missing = len(full) - len(shape)
    # the full size first: of two symbols for one length, only that comparison needs no guard
    return missing >= 0 and all(have == want or have == 1 for have, want in zip(shape, full[missing:], strict=True))


def _check_broadcast(name: str, shape: torch.Size, q: Tensor, axes: str, full: tuple, swapped: tuple) -> None:
    if not _broadcasts(shape, full):
        hint = _order_hint(q, _broadcasts(shape, swapped))
        raise ValueError(f"{name}: expected a tensor broadcastable to {axes} = {full}, got shape {tuple(shape)}{hint}")


def _order_hint(q: Tensor, fits: bool) -> str:
    """Hint if the shapes would fit with heads before tokens in q, k and v."""
    if not fits:
        return ""
    batch = "B, " if q.ndim == 4 else ""
    return f"; q, k, v: expected ({batch}T, H, D); these look like ({batch}H, T, D): pass q.transpose(-3, -2) etc."


def is_real(value: object) -> TypeGuard[float]:
    """True for a number of Python or numpy, not for a bool."""
    # Real, an abstract class, takes longest
    return not isinstance(value, (Tensor, bool)) and isinstance(value, Real)


def wrong_type(name: str, expected: str, value: object) -> TypeError:
    if value is REQUIRED:
        return TypeError(f"{name}: expected {expected}, got nothing")
    kind = type(value)
    # numpy.bool and bool may have the same name
    given = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return TypeError(f"{name}: expected {expected}, got {value!r} of type {given}")


def check_kv_heads(name: str, num_kv_heads: int | None, heads_name: str, num_heads: int) -> int:
    """Return the number of key heads, by default num_heads."""
    num_kv_heads = check_positive_int(name, num_heads if num_kv_heads is None else num_kv_heads)
    if num_heads % num_kv_heads != 0:
        raise ValueError(f"{name}: expected a divisor of {heads_name} = {num_heads}, got {num_kv_heads}")
    return num_kv_heads


def check_head_dim(name: str, value: int | None, whole: str = "", width: int = 0, of: str = "", heads: int = 1) -> int:
    """Return the value, by default width / heads; refuse anything but a head dimension. whole, of: names of the two."""
    if value is None and width % heads:
        raise ValueError(f"{whole}: expected a multiple of {of} = {heads} without head_dim, got {width}")
    value = check_positive_int(name, width // heads if value is None else value)
    if value > MAX_HEAD_DIM:
        raise ValueError(f"{name}: expected at most {MAX_HEAD_DIM}, got {value}")
    return value


def check_half_lives(name: str, half_lives: Sequence[float] | Tensor, num_heads: int) -> tuple[float, ...]:
    """Return a pair, or one number per head, as floats."""
    expected = (
        f"{name}: expected two numbers of tokens, 0 < shortest <= longest < inf, or one number for each of the "
        f"{num_heads} heads, got {half_lives!r}"
    )
    numbers = _numbers(half_lives)
    if numbers is None:
        raise TypeError(expected)
    is_pair = len(numbers) == 2 and (num_heads == 2 or numbers[0] <= numbers[1])
    if not (is_pair or len(numbers) == num_heads) or not all(value > 0 and is_finite(value) for value in numbers):
        raise ValueError(expected)
    return tuple(float(value) for value in numbers)


def check_log_decays(name: str, values: Sequence[float] | Tensor, learned: bool) -> tuple[float, ...]:
    """Return one number per head, as floats."""
    numbers = _numbers(values)
    if numbers is None:
        raise TypeError(f"{name}: expected one number per head, a sequence or a tensor (H,), got {values!r}")
    if len(numbers) == 0:
        raise ValueError(f"{name}: expected at least one head, got none")
    if not all(is_finite(value) for value in numbers):
        raise ValueError(f"{name}: expected finite log-decays, got {values!r}")
    if learned and 0 in numbers:
        raise ValueError(f"{name}: expected no 0 with learned=True, which keeps signs, got {values!r}")
    return tuple(float(value) for value in numbers)


def _numbers(values: object) -> Sequence[float] | None:
    """Elements of a sequence, or of a vector of torch or numpy; None for anything else."""
    numbers = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(numbers, str) or not isinstance(numbers, Sequence) or not all(map(is_real, numbers)):
        return None
    return numbers


# ----------------------------------------------------------------------------------------------------------------------
# Keywords of FlashAttention, PyTorch, fla and others: the error names our argument

# default of a required argument, so that the error for an unknown keyword comes before that for a missing one;
# inspect.signature shows no default
REQUIRED: Any = inspect.Parameter.empty


def _by_name(names: dict[str, str]) -> dict[str, str]:
    """{name: hint} from {hint: names}. {} in a hint becomes the name."""
    return {name: hint.replace("{}", name) for hint, together in names.items() for name in together.split()}


# of the functions and the layer
_SHARED_HINTS = _by_name({
    "use scale": "softmax_scale sm_scale scaling qk_scale",
    "use causal": "is_causal",
    "use window_size=(left, right)": "window sliding_window",
    "there is no dropout; leave it out":
        "dropout dropout_p attn_dropout attention_dropout resid_dropout attn_drop proj_drop",
    "there is no soft cap": "softcap logit_softcapping",
    "use skip_tolerance, the probability that a row may lose: math.exp(-10) for 'auto'": "adaptive_threshold",
})
_HINTS = _SHARED_HINTS | _by_name({  # of the functions
    "use log_decay, (H,), the negated slopes": "alibi_slopes slopes",
    "use log_decay, natural logarithms of the gates": "g log_fgate log_forget log_f decay",
    "use log_decay=F.logsigmoid(fgate_logit.float())": "fgate_logit",
    "use bias: boolean (True = visible) or added to the scores; padding is seqused_k and leftpad_k; a window is "
    "window_size": "attn_mask attention_mask attn_bias mask key_padding_mask padding_mask block_mask",
    "use log_decay, bias, window_size or scale": "score_mod",
    "use sink, one logit per head": "sinks s_aux sink_bias learnable_sink",
    "use return_lse": "return_attn_probs return_softmax_lse",
    "decay_attention_paged takes it": "block_table",
    "leave it out: k and v may always have fewer heads than q": "enable_gqa",
    "leave it out: torch.use_deterministic_algorithms asks for that": "deterministic",
    "the order is (batch, tokens, heads, head dimension): give x.transpose(1, 2)": "head_first",
    "use seqused_k": "cache_seqlens",
    "use leftpad_k": "seq_start",
    "decay_attention_varlen takes cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k":
        "cu_seqlens cu_seqlens_q cu_seqlens_k max_seqlen max_seqlen_q max_seqlen_k",
    "decay_attention takes it; packed sequences have none": "bias seqused_q seqused_k leftpad_q leftpad_k",
})
_LAYER_HINTS = {
    "DecayFlashAttention": _SHARED_HINTS | _by_name({
        "leave it out: x is (batch, tokens, embed_dim)": "batch_first",
        "use sink=True, a learned logit per head with a zero value vector": "add_bias_kv add_zero_attn sinks",
        "leave it out: x and memory have embed_dim channels; value_dim is D_v of a head": "kdim vdim",
        "use embed_dim": "hidden_size d_model dim width n_embd",
        "use num_heads": "heads n_heads n_head nhead num_attention_heads",
        "use num_kv_heads": "num_key_value_heads n_kv_heads kv_heads num_heads_kv",
        "use head_dim": "dim_head head_size d_head",
        "use position=module, which rotates q and k": "rope use_rope rope_theta rope_base rope_scaling rotary "
        "use_rotary rotary_emb rotary_emb_dim rotary_dim rotary_embedding position_embedding",
        "use bias, for both projections": "qkv_bias use_bias add_bias attention_bias qkv_proj_bias out_proj_bias",
        "use output_gate": "use_output_gate gate use_gate",
        "use qk_norm": "use_qk_norm qk_layernorm qk_rms_norm",
        "use decay: a name as 'alibi', or a module as ConstantDecay.from_values(-slopes)":
            "alibi use_alibi alibi_slopes alibi_pos_bias slopes log_decay g fgate fgate_type forget_gate",
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
        "causal, window_size and scale are options of the layer, DecayFlashAttention(..., window_size=(left, right))":
            "is_causal sliding_window softmax_scale sm_scale",
        "decay_attention returns it": "return_lse",
        "there is no dropout; leave it out": "dropout dropout_p",
    }),
}


def hide_unknown(function: _F) -> _F:
    """Hide the function's catch-alls from help() and inspect.signature."""
    signature = inspect.signature(function)
    known = [x for x in signature.parameters.values() if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)]
    function.__signature__ = signature.replace(parameters=known)  # type: ignore[attr-defined]
    return function


def refuse_unknown(function: Callable, unknown: dict[str, object], others: tuple[object, ...] = ()) -> None:
    """Raise a TypeError for surplus arguments, or for the first unknown keyword with a hint to ours."""
    owner, parameters = function.__qualname__, inspect.signature(function).parameters
    known = [name for name in parameters if name != "self"]
    if others:
        first = [name for name in known if parameters[name].kind != parameters[name].KEYWORD_ONLY]
        hint = "; cross-attention is layer(x, memory=memory)" if owner.endswith("forward") else ""
        raise TypeError(f"{owner}: expected {' and '.join(first)}, the rest by keyword, got {len(others)} more{hint}")
    name = next(iter(unknown))
    similar = difflib.get_close_matches(name, known, n=1)
    guess = f"did you mean {similar[0]}?" if similar else f"it takes {', '.join(known)}"
    hint = _LAYER_HINTS.get(owner, _HINTS).get(name, guess)
    raise TypeError(f"{name}: unexpected keyword argument of {owner}; {hint}")
