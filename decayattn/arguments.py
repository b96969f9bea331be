"""Checks of the public functions' arguments: every bad one raises by name before anything is computed."""

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

from decayattn.compatibility import refuse_unless
from decayattn.problem import MAX_HEAD_DIM, SUPPORTED_DTYPES, SkipTolerance

_LARGEST_FLOAT32, _LARGEST_FLOAT64 = torch.finfo(torch.float32).max, torch.finfo(torch.float64).max


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | float | None,
    scale: Tensor | float | None,
    causal: bool,
    window_size: tuple[int, int] | None = None,
    sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    bias: Tensor | None = None,
    skip_tolerance: SkipTolerance = None,
) -> None:
    """Refuse every bad argument of decay_attention by name."""
    axes = ("batch", "sequence", "heads", "head_dim")
    _check_tensors(q, k, v, axes)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected the batch size of q, {q.shape[0]}, got {tensor.shape[0]}")
    check_bool("causal", causal)
    per_token = _check_log_decay(log_decay, q, k, "(B, T_k, H)")
    _check_scale(scale, q, "(B, T_q, H)")
    check_window(window_size)
    _check_sink(sink, q)
    check_bias(bias, q, k)
    check_skip_tolerance(skip_tolerance)
    given = {"seqused_q": seqused_q, "seqused_k": seqused_k, "leftpad_q": leftpad_q, "leftpad_k": leftpad_k}
    for name, lengths in given.items():
        if lengths is not None:
            check_counts(name, lengths, q.device, "(B,)", (q.shape[0],))
    if per_token and not causal and q.shape[1] > k.shape[1]:
        raise ValueError(
            "causal: expected T_q <= T_k with causal=False and a log_decay per token, because the first "
            f"{q.shape[1] - k.shape[1]} query rows precede the first log-decay, "
            f"got T_q = {q.shape[1]}, T_k = {k.shape[1]}; leave these rows out"
        )


def check_packed_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | float | None,
    scale: Tensor | float | None,
    causal: bool,
    window_size: tuple[int, int] | None,
    sink: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    skip_tolerance: SkipTolerance = None,
) -> None:
    """Refuse every bad argument of decay_attention_varlen by name."""
    _check_tensors(q, k, v, ("tokens", "heads", "head_dim"))
    check_bool("causal", causal)
    _check_log_decay(log_decay, q, k, "(total_k, H)")
    _check_scale(scale, q, "(total_q, H)")
    check_window(window_size)
    _check_sink(sink, q)
    check_skip_tolerance(skip_tolerance)
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_offsets(name, offsets, q)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k: expected the shape of cu_seqlens_q, {tuple(cu_seqlens_q.shape)}, "
            f"got {tuple(cu_seqlens_k.shape)}"
        )
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        check_count(name, longest)


def refuse_gradients(**inputs: Tensor | float | None) -> None:
    """Refuse inputs that require a gradient: a cache of keys and values has none."""
    if not torch.is_grad_enabled():
        return
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise RuntimeError(
                f"{name}: expected a tensor without a gradient, because a cache has none; call it under torch.no_grad()"
            )


def check_offsets(name: str, offsets: Tensor, q: Tensor) -> None:
    """Refuse anything but offsets of packed sequences on the device of q."""
    if isinstance(offsets, Tensor) and (offsets.ndim != 1 or offsets.shape[0] == 0):
        raise ValueError(f"{name}: expected shape (sequences + 1,), got {tuple(offsets.shape)}")
    check_counts(name, offsets, q.device, "(sequences + 1,)", None)
    if type(offsets) is Tensor and offsets.device.type == "cpu":  # on a GPU it would take longer than a small call
        refuse_unless(
            (offsets.diff() >= 0).all(),
            f"{name}: expected offsets that never fall, got others; from lengths, compute "
            "F.pad(lengths.cumsum(0), (1, 0))",
        )


def check_count(name: str, number: int) -> None:
    """Refuse anything but a number of tokens."""
    if not _is_integer(number):
        raise TypeError(f"{name}: expected an int, got {_describe(number)}")
    if number < 0:
        raise ValueError(f"{name}: expected at least 0, got {number}")


def is_finite(number: float, dtype: torch.dtype = torch.float64) -> bool:
    """True if a number is finite in the arithmetic of inputs of this dtype: float32, or float64 for float64."""
    if -1e4 < number < 1e4:
        return True  # fast path
    # an int may be too large for a float; a numpy number casts the other operand of a comparison
    number = number if isinstance(number, int) else float(number)
    return abs(number) <= (_LARGEST_FLOAT64 if dtype == torch.float64 else _LARGEST_FLOAT32)


def check_bool(name: str, value: bool) -> None:
    """Refuse anything but a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {_describe(value)}")


def check_window(window_size: tuple[int, int] | None) -> None:
    """Refuse a bad window_size."""
    if window_size is None:
        return
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size: expected None or a pair (left, right), got {_describe(window_size)}")
    for side in window_size:
        if not _is_integer(side):
            raise TypeError(f"window_size: expected two ints, got {_describe(window_size)}")
        if side < -1:
            raise ValueError(f"window_size: expected numbers of tokens, or -1 for no limit, got {window_size}")


def check_skip_tolerance(skip_tolerance: SkipTolerance) -> None:
    """Refuse a bad skip_tolerance."""
    if skip_tolerance is None or (isinstance(skip_tolerance, str) and skip_tolerance == "auto"):
        return
    expected = "skip_tolerance: expected 'auto', None or a number between 0 and 1"
    if isinstance(skip_tolerance, str):
        raise ValueError(f"{expected}, got {skip_tolerance!r}")
    if not isinstance(skip_tolerance, Real) or isinstance(skip_tolerance, bool):
        raise TypeError(f"{expected}, got {_describe(skip_tolerance)}")
    if not 0 < skip_tolerance < 1:
        raise ValueError(f"{expected}, got {skip_tolerance}")


def check_bias(bias: Tensor | None, q: Tensor, k: Tensor, tokens: int | None = None) -> None:
    """Refuse anything but a bias for the scores of q and k; tokens: T of the sequence if they are slices of it."""
    if bias is None:
        return
    if not isinstance(bias, Tensor):
        raise TypeError(f"bias: expected None or a tensor, got {_describe(bias)}")
    _check_dense("bias", bias)
    if bias.dtype != torch.bool and (
        bias.dtype not in SUPPORTED_DTYPES or (bias.dtype == torch.float64 and q.dtype != torch.float64)
    ):
        raise TypeError(
            f"bias: expected bool, float32, bfloat16 or float16 (float64 with float64 q, k, v), got {bias.dtype}"
        )
    if bias.device != q.device:
        raise ValueError(f"bias: expected the device of q, {q.device}, got {bias.device}")
    rows, keys = (q.shape[1], k.shape[1]) if tokens is None else (tokens, tokens)
    scores = (q.shape[0], q.shape[2], rows, keys)
    if not _broadcasts(bias.shape, scores):
        swapped = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        raise ValueError(
            f"bias: expected a tensor broadcastable to (B, H, T_q, T_k) = {scores}, got shape {tuple(bias.shape)}"
            f"{_order_hint(q, _broadcasts(bias.shape, swapped))}"
        )


def check_tensor(name: str, x: Tensor, device: torch.device | None = None, owner: str = "q") -> None:
    """Refuse anything but a dense tensor on this device, that of its owner; None: on any device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {_describe(x)}")
    _check_dense(name, x)
    if device is not None and x.device != device:
        raise ValueError(f"{name}: expected the device of {owner}, {device}, got {x.device}")


def check_counts(
    name: str, numbers: Tensor, device: torch.device | None, axes: str, shape: tuple[int, ...] | None, owner: str = "q"
) -> None:
    """Refuse anything but integers of this shape (None: any) on this device, that of their owner."""
    check_tensor(name, numbers, device, owner)
    if numbers.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {numbers.dtype}")
    if shape is not None and numbers.shape != shape:
        raise ValueError(f"{name}: expected shape {axes} = {shape}, got {tuple(numbers.shape)}")


def _check_dense(name: str, tensor: Tensor) -> None:
    """Refuse nested and sparse tensors."""
    if tensor.is_nested:
        raise TypeError(
            f"{name}: expected a dense tensor, got a nested tensor; pack the sequences, nested.values() of the jagged "
            "layout, and pass cu_seqlens, nested.offsets(), to decay_attention_varlen or to the layer"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got one of layout {tensor.layout}")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, axes: tuple[str, ...]) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        if tensor.ndim != len(axes):
            raise ValueError(
                f"{name}: expected {len(axes)} dimensions ({', '.join(axes)}), got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype not in SUPPORTED_DTYPES:
            raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {tensor.dtype}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name}: expected the dtype of q, {q.dtype}, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected the device of q, {q.device}, got {tensor.device}")
    if v.shape[-3] != k.shape[-3]:
        raise ValueError(f"v: expected the sequence length of k, {k.shape[-3]}, got {v.shape[-3]}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v: expected the number of heads of k, {k.shape[-2]}, got {v.shape[-2]}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: expected the head dimension of q, {q.shape[-1]}, got {k.shape[-1]}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] != 0:
        # more key heads than query heads: rather another order of dimensions than a wrong number of heads
        fits = k.shape[-2] > q.shape[-2] and k.shape[-3] > 0 and q.shape[-3] % k.shape[-3] == 0
        raise ValueError(
            f"k: expected heads that divide those of q (grouped queries), got {k.shape[-2]} for {q.shape[-2]}"
            f"{_order_hint(q, fits)}"
        )
    for name, dim in (("q", q.shape[-1]), ("v", v.shape[-1])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: expected a head dimension from 1 to {MAX_HEAD_DIM}, got {dim}")


def _check_log_decay(log_decay: Tensor | float | None, q: Tensor, k: Tensor, axes: str) -> bool:
    """Check log_decay. True if there is one per token."""
    if log_decay is None:
        return False
    if isinstance(log_decay, Real) and not isinstance(log_decay, bool):
        # a number too low for the dtype is a reset, like any below −746
        if not is_finite(log_decay, q.dtype) and not -math.inf < log_decay < 0:
            raise ValueError(f"log_decay: expected a finite number, got {log_decay} (q: {q.dtype})")
        return False
    if not isinstance(log_decay, Tensor):
        raise TypeError(f"log_decay: expected None, a number or a tensor, got {_describe(log_decay)}")
    _check_dense("log_decay", log_decay)
    if log_decay.dtype in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"log_decay: expected float32, got {log_decay.dtype}; its rounding errors add up over "
            "tokens: compute the gate in float32, or pass log_decay.float()"
        )
    if log_decay.dtype != torch.float32 and not (log_decay.dtype == q.dtype == torch.float64):
        raise TypeError(f"log_decay: expected float32 (or float64 with float64 q, k, v), got {log_decay.dtype}")
    if log_decay.device != q.device:
        raise ValueError(f"log_decay: expected the device of q, {q.device}, got {log_decay.device}")
    per_token = (*k.shape[:-2], q.shape[-2])
    # compare ndim first: tuples compare entry by entry whatever their lengths, which guards a symbolic batch
    if log_decay.ndim > 1 and log_decay.shape == per_token:
        return True
    if _is_decay(log_decay.shape, per_token):
        return log_decay.ndim > 1
    raise ValueError(
        f"log_decay: expected shape () or (H,) = ({per_token[-1]},) for a constant decay, or {axes} = {per_token} for "
        f"one per token, where batch and heads may be 1, got {tuple(log_decay.shape)}"
        f"{_decay_hint(log_decay.shape, q, k, per_token)}"
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
    if isinstance(scale, Real) and not isinstance(scale, bool):
        if not is_finite(scale, q.dtype):
            raise ValueError(f"scale: expected a finite number, got {scale} (q: {q.dtype})")
        return
    if not isinstance(scale, Tensor):
        raise TypeError(f"scale: expected None, a number or a tensor, got {_describe(scale)}")
    _check_dense("scale", scale)
    if scale.dtype not in SUPPORTED_DTYPES or (scale.dtype == torch.float64 and q.dtype != torch.float64):
        raise TypeError(
            f"scale: expected float32, bfloat16 or float16 (float64 with float64 q, k, v), got {scale.dtype}"
        )
    if scale.device != q.device:
        raise ValueError(f"scale: expected the device of q, {q.device}, got {scale.device}")
    rows = q.shape[:-1]
    if not _broadcasts(scale.shape, rows):
        swapped = (*q.shape[:-3], q.shape[-2], q.shape[-3])
        raise ValueError(
            f"scale: expected a tensor broadcastable to {axes} = {tuple(rows)}, got shape {tuple(scale.shape)}"
            f"{_order_hint(q, _broadcasts(scale.shape, swapped))}"
        )


def _check_sink(sink: Tensor | None, q: Tensor) -> None:
    if sink is None:
        return
    if not isinstance(sink, Tensor):
        raise TypeError(f"sink: expected None or a tensor, got {_describe(sink)}")
    _check_dense("sink", sink)
    if sink.dtype not in SUPPORTED_DTYPES or (sink.dtype == torch.float64 and q.dtype != torch.float64):
        raise TypeError(f"sink: expected float32, bfloat16 or float16 (float64 with float64 q, k, v), got {sink.dtype}")
    if sink.device != q.device:
        raise ValueError(f"sink: expected the device of q, {q.device}, got {sink.device}")
    if sink.shape != (q.shape[-2],):
        raise ValueError(
            f"sink: expected one logit per head, (H,) = ({q.shape[-2]},), got {tuple(sink.shape)}"
            f"{_order_hint(q, sink.shape == (q.shape[-3],))}"
        )


def _is_integer(value: object) -> bool:
    """True for an int of Python, numpy or torch (symbolic), not for a bool."""
    return type(value) is int or (isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool))


def _broadcasts(shape: Sequence[int], full: Sequence[int]) -> bool:
    """True if a tensor of this shape broadcasts to the full one."""
    missing = len(full) - len(shape)
    # the full size first: of two symbols for one length, only that comparison needs no guard
    return missing >= 0 and all(have == want or have == 1 for have, want in zip(shape, full[missing:], strict=True))


def _order_hint(q: Tensor, fits: bool) -> str:
    """Hint if the shapes would fit with heads before tokens in q, k and v."""
    if not fits:
        return ""
    batch = "B, " if q.ndim == 4 else ""
    return f"; q, k, v: expected ({batch}T, H, D); these look like ({batch}H, T, D): pass q.transpose(-3, -2) etc."


def _describe(value: object) -> str:
    kind = type(value)
    # numpy.bool and bool may have the same name
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{value!r} of type {name}"
