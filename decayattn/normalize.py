"""User arguments as (AttentionProblem, Inputs): for the functions, the cache, pages and several ranks."""

import torch
from torch import Tensor

from decayattn.compatibility import refuse_unless, within
from decayattn.problem import RESET_BELOW, AttentionProblem, Inputs, SkipTolerance, accumulator_dtype
from decayattn.validation import check_arguments, check_packed_arguments, integer

_AUTOCAST_FROM = (torch.float16, torch.bfloat16, torch.float32)


def dense(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | float | None, scale: Tensor | float | None = None,
    causal: bool = True, window_size: tuple[int, int] | None = None, sink: Tensor | None = None,
    bias: Tensor | None = None, skip_tolerance: SkipTolerance = None, **lengths: Tensor | None,
) -> tuple[AttentionProblem, Inputs]:
    """Check arguments of decay_attention, and bring them to their full shapes. lengths: those of check_arguments."""
    check_arguments(q, k, v, log_decay, scale, causal, window_size, sink, bias, skip_tolerance, **lengths)
    bounds = None
    if any(x is not None for x in lengths.values()):
        rows = _interval(lengths.get("leftpad_q"), lengths.get("seqused_q"), q)
        tokens = _interval(lengths.get("leftpad_k"), lengths.get("seqused_k"), k)
        bounds = torch.stack([*rows, *tokens], 1)
    inputs = inputs_of(q, k, v, log_decay, scale, bounds, bias, sink)
    return problem_of(inputs, causal, window_size, skip_tolerance), inputs


def packed(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | float | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, scale: Tensor | float | None = None, causal: bool = True,
    window_size: tuple[int, int] | None = None, sink: Tensor | None = None, skip_tolerance: SkipTolerance = None,
) -> tuple[AttentionProblem, Inputs]:
    """Check arguments of decay_attention_varlen, and make them a batch of one entry in full shapes."""
    check_packed_arguments(
        q, k, v, log_decay, scale, causal, window_size, sink, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        skip_tolerance,
    )
    q, k, v = q[None], k[None], v[None]
    max_seqlen_q, max_seqlen_k = integer(max_seqlen_q), integer(max_seqlen_k)
    if not torch.compiler.is_compiling():  # a comparison would specialise a graph to these lengths
        # any max_seqlen then fits into 32 bits
        max_seqlen_q, max_seqlen_k = within(max_seqlen_q, q.shape[1]), within(max_seqlen_k, k.shape[1])
    if isinstance(log_decay, Tensor) and log_decay.ndim > 1:
        log_decay = log_decay[None]
    rows = tokens = sequence_spans(cu_seqlens_q, q.shape[1], max_seqlen_q)
    if cu_seqlens_k is not cu_seqlens_q or k.shape[1] != q.shape[1] or max_seqlen_k != max_seqlen_q:
        tokens = sequence_spans(cu_seqlens_k, k.shape[1], max_seqlen_k)
    inputs = inputs_of(q, k, v, log_decay, scale, torch.stack([*rows, *tokens], 1), None, sink)
    return problem_of(inputs, causal, window_size, skip_tolerance, (max_seqlen_q, max_seqlen_k)), inputs


def decoding(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | float | None, scale: Tensor | float | None,
    window_size: tuple[int, int] | None, sink: Tensor | None, skip_tolerance: SkipTolerance = None,
) -> tuple[Inputs, Tensor | None, int | None]:
    """Check new tokens over a cache. Return inputs, a log_decay per token apart from them, and the window's left."""
    check_arguments(q, k, v, log_decay, scale, True, window_size, sink, skip_tolerance=skip_tolerance)
    inputs, (left, _) = inputs_of(q, k, v, log_decay, scale, None, None, sink), window_of(window_size, True)
    per_token = None
    if inputs.log_decay is not None and inputs.log_decay.ndim == 3:
        per_token, inputs = inputs.log_decay, Inputs(q, k, v, None, *inputs[4:])  # faster than _replace
    return inputs, per_token, None if left < 0 else left


def inputs_of(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | float | None, scale: Tensor | float | None,
    bounds: Tensor | None = None, bias: Tensor | None = None, sink: Tensor | None = None,
) -> Inputs:
    """Inputs of checked arguments: a log_decay per head or token, and a scale per row or one number."""
    row_scale: Tensor | None = None
    if scale is None:
        number = integer(q.shape[3]) ** -0.5  # under torch.jit.trace sizes are tensors
    elif isinstance(scale, Tensor):
        row_scale, number = scale.to(accumulator_dtype(q.dtype)).expand(q.shape[:3]), 1.0
    else:
        number = float(scale)
    return Inputs(q, k, v, _per_head(log_decay, q), row_scale, bounds, bias, sink, number)


def problem_of(
    inputs: Inputs, causal: bool, window_size: tuple[int, int] | None, skip_tolerance: SkipTolerance,
    longest: tuple[int, int] | None = None,
) -> AttentionProblem:
    """Problem of checked arguments and their inputs. longest: that of AttentionProblem.of."""
    bounds, log_decay = inputs.bounds, inputs.log_decay
    if bounds is not None and log_decay is not None and log_decay.ndim == 4:
        refuse_unless(
            (bounds[:, :2] == bounds[:, 2:]).all(),
            "log_decay: expected the same queries and keys in every sequence with a gate per direction, got others; "
            "pass equal cu_seqlens, leftpad and seqused for both",
        )
    window, tolerance = window_of(window_size, causal), tolerance_of(skip_tolerance, inputs.q.dtype)
    return AttentionProblem.of(inputs, causal, window, longest, tolerance)


def _per_head(log_decay: Tensor | float | None, q: Tensor) -> Tensor | None:
    """log_decay as None, (H,), (B, T_k, H) or (B, T_k, H, 2)."""
    if log_decay is None:
        return None
    if not isinstance(log_decay, Tensor):
        # a lower one may overflow the dtype; all of them are resets
        number = float(max(log_decay, 2 * RESET_BELOW))
        return torch.full((q.shape[2],), number, dtype=accumulator_dtype(q.dtype), device=q.device)
    batch, _, heads, _ = q.shape
    shape = log_decay.shape
    if len(shape) > 2 and (shape[0] != batch or shape[2] != heads):
        return log_decay.expand(batch, -1, heads, *shape[3:])
    return log_decay if shape else log_decay.expand(heads)


def _interval(begin: Tensor | None, end: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """Begin and length (B,), clamped to the tokens of x: the numbers on the device may be anything."""
    axis = x.shape[1]
    begin, end = (
        x.new_full((x.shape[0],), default, dtype=torch.int32) if given is None else given
        for given, default in ((begin, 0), (end, axis))
    )
    begin = begin.clamp(0, axis).int()
    # not in place: under vmap, one of the two may be mapped alone
    return begin, (end.clamp(0, axis).int() - begin).clamp(min=0)


def sequence_spans(offsets: Tensor, axis: int, longest: int) -> tuple[Tensor, Tensor]:
    """Begin and length (N,) of the sequences between N + 1 offsets.

    They lie inside the axis and are disjoint for any offsets, so the axis bounds their sum. An offset smaller than one
    before it counts as that one.
    """
    offsets = offsets.clamp(0, axis).int().cummax(0).values
    return offsets[:-1], offsets.diff().clamp(0, longest)


def roll_left(x: Tensor, tokens: Tensor) -> Tensor:
    """x (B, T, …), with every entry rolled to the left by a number of tokens (B,)."""
    index = torch.arange(x.shape[1], device=x.device) + tokens[:, None]
    return x.take_along_dim((index % max(x.shape[1], 1)).view(*x.shape[:2], *[1] * (x.ndim - 2)), 1)


def window_of(window_size: tuple[int, int] | None, causal: bool) -> tuple[int, int]:
    """(left, right) with −1 for no limit; a causal query sees nothing to its right."""
    left, right = (-1, -1) if window_size is None else map(integer, window_size)
    return (left, -1) if causal else (left, right)


def tolerance_of(skip_tolerance: SkipTolerance, dtype: torch.dtype) -> float:
    """skip_tolerance as a number. "auto" is below the resolution of the accumulators, None is 0."""
    if skip_tolerance == "auto":
        return 2.0**-53 if dtype == torch.float64 else 2.0**-24
    return 0.0 if skip_tolerance is None else float(skip_tolerance)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype if it is on, as in scaled_dot_product_attention; float64 keeps its dtype."""
    first = tensors[0]
    kind = first.device.type if isinstance(first, Tensor) else "meta"
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # the meta device has no autocast
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.dtype in _AUTOCAST_FROM else t for t in tensors)
