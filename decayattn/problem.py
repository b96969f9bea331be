"""What one call of decay_attention asks for: its arguments checked once, its shapes and modes frozen."""

import contextlib
import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Literal, NamedTuple

import torch
from torch import Tensor

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256
# a log-decay below this is a reset: e^λ is 0 in float64 there, and −1e9 or finfo.min is how people write one
RESET_BELOW = -746.0
# tokens of a block of DecayPrefix; tiles of every size lie inside one
DECAY_BLOCK = 128
# query rows for which a plan says what they skip (Saved.first_block)
GRANULE = 64
_LARGEST_FLOAT32, _LARGEST_FLOAT64 = torch.finfo(torch.float32).max, torch.finfo(torch.float64).max


# the names that arguments may have, for annotations
BackendName = Literal["auto", "reference", "triton", "hopper"]
DecayName = Literal["none", "constant", "scalar"]
LayoutName = Literal["dense", "padded", "packed"]
SkipTolerance = float | Literal["auto"] | None


class AttentionProblem(NamedTuple):
    """Shapes and modes of one call; it carries no tensor, so it can be compared, printed and cached.

    decay is "none", "constant" (one log-decay per head) or "scalar" (one per token and head);
    row_scale says that every query row has a scale of its own, with a gradient, instead of one number for all;
    bias says that scores have one added to them, or are masked;
    window is (left, right), how far a query sees to either side, −1 without a limit that any pair could exceed;
    skip_tolerance is the probability that a row may lose to keys that are not visited.

    layout says where the sequences lie. "dense": each fills its batch entry. "padded": each lies somewhere in its batch
    entry. "packed": all lie behind one another on the token axes of a single batch entry, which query_length and
    key_length measure, and the longest of them has longest_query rows and longest_key tokens. Unless it is dense, a
    tensor `bounds` (sequences, 4), int32, holds first row, number of rows, first token and number of tokens of each.
    """

    batch: int
    query_length: int
    key_length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    decay: DecayName
    causal: bool
    row_scale: bool
    bias: bool = False
    window: tuple[int, int] = (-1, -1)
    layout: LayoutName = "dense"
    sequences: int = 0
    longest_query: int = 0
    longest_key: int = 0
    skip_tolerance: float = 0.0

    @property
    def first_position(self) -> int:
        return first_position(self)

    @property
    def is_empty(self) -> bool:
        """Whether no query can see a key, so that no kernel has anything to do."""
        lengths = (self.query_length, self.key_length, self.longest_query, self.longest_key)
        return 0 in (self.sequences, self.num_heads, *lengths)

    @property
    def accumulator_dtype(self) -> torch.dtype:
        return accumulator_dtype(self)

    @classmethod
    def of(
        cls,
        q: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        row_scale: Tensor | None,
        causal: bool,
        window: Sequence[int] = (-1, -1),
        bounds: Tensor | None = None,
        longest: Sequence[int] | None = None,
        bias: Tensor | None = None,
        skip_tolerance: float = 0.0,
    ) -> "AttentionProblem":
        """The problem of arguments that were checked and brought to their full shapes already.

        longest, (longest_query, longest_key), says that the sequences of `bounds` are packed.
        """
        batch, query_length, num_heads, head_dim = q.shape
        _, key_length, num_kv_heads, value_dim = v.shape
        decay: DecayName = "none" if log_decay is None else "constant" if log_decay.ndim == 1 else "scalar"
        layout: LayoutName = "dense" if bounds is None else "padded" if longest is None else "packed"
        sequences = batch if bounds is None else bounds.shape[0]
        longest_query, longest_key = (query_length, key_length) if longest is None else longest
        return cls(
            batch, query_length, key_length, num_heads, num_kv_heads, head_dim, value_dim,
            q.dtype, q.device, decay, causal, row_scale is not None, bias is not None,
            _clamped(window, longest_query, longest_key), layout, sequences, longest_query, longest_key, skip_tolerance,
        )


class Inputs(NamedTuple):
    """The tensors of one call, checked and brought to their full shapes, and its scale."""

    q: Tensor  # (B, T_q, H, D)
    k: Tensor  # (B, T_k, H_kv, D)
    v: Tensor  # (B, T_k, H_kv, D_v)
    log_decay: Tensor | None = None  # (H,) constant, or (B, T_k, H) scalar
    row_scale: Tensor | None = None  # (B, T_q, H) in the accumulator dtype
    bounds: Tensor | None = None  # AttentionProblem's, (sequences, 4) int32
    bias: Tensor | None = None  # broadcastable to (B, H, T_q, T_k), floating or boolean
    sink: Tensor | None = None  # (H,)
    scale: float = 1.0  # of all rows; 1 where every row has one of its own

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All but the number, which comes last."""
        return self[:-1]

    @property
    def any_scale(self) -> Tensor | float:
        return any_scale(self)


# what the reference asks for by a function: torch.compile of PyTorch 2.10 cannot trace a property of a NamedTuple


def first_position(problem: AttentionProblem) -> int:
    """Position of query row 0 on the keys' axis: the queries are the last rows (bottom-right alignment)."""
    return problem.key_length - problem.query_length


def accumulator_dtype(problem: AttentionProblem) -> torch.dtype:
    """The dtype of scores, softmax state, lse and accumulated gradients."""
    return torch.float64 if problem.dtype == torch.float64 else torch.float32


def any_scale(inputs: Inputs) -> Tensor | float:
    """One number for all rows, or one per row."""
    return inputs.scale if inputs.row_scale is None else inputs.row_scale


class Held(NamedTuple):
    """What a cache of keys and values is written to (DecayCache says what each means).

    With a block table, the tokens of an entry are in pages: keys, values and alpha are (pages, page, ·, ·).
    """

    keys: Tensor  # (B, max_length, H_kv, D)
    values: Tensor  # (B, max_length, H_kv, D_v)
    lengths: Tensor  # (B,) int32
    first: Tensor | None  # (B, H) int32; None: 0, where no decay is per token
    log_evicted: Tensor | None  # (B, H) float64; None: nothing is evicted
    alpha: Tensor | None  # (B, max_length, H) float64
    block_table: Tensor | None = None  # (B, blocks) int32: the pages of an entry, in the order of its tokens


class DecayPrefix(NamedTuple):
    """What the kernels read of a per-token decay, in (B, H, ·) and base 2; empty tensors for other decays.

    Every sequence has a prefix of its own: its blocks start at its first token, and its resets are counted from there.
    """

    # β (B, H, T_k): float32 for 16-bit inputs, else float64, since a strong decay costs float32's low bits
    beta: Tensor
    base: Tensor  # α at each block's start (B, H, blocks), float64
    last_reset: Tensor  # (B, H, T_k) int32
    next_reset: Tensor  # (B, H, T_k) int32


class Saved(NamedTuple):
    """What a forward saves for the backward, besides its inputs and out; any backend reads what another one saved."""

    row_lse2: Tensor  # (B, H, T_q): the log-sum-exp as tiles count it, in base 2
    beta: Tensor  # from here on DecayPrefix's
    base: Tensor
    last_reset: Tensor
    next_reset: Tensor
    first_block: Tensor  # the first blocks of keys that were visited (skipping.plan)
    sink_probability: Tensor | None = None  # (B, H, T_q): P of the sink, the library's own

    @property
    def prefix(self) -> DecayPrefix:
        return DecayPrefix(self.beta, self.base, self.last_reset, self.next_reset)


class KeyDecay(NamedTuple):
    """What a forward of dense sequences makes of log_decay, whatever the queries are; of one backend, and for one
    forward. Another backend has use for the prefix alone."""

    prefix: DecayPrefix
    # what the Hopper kernels read besides: log_decay split for products, and the counter of their scheduler
    splits: Tensor | None = None
    bases: Tensor | None = None
    counter: Tensor | None = None


class Prepared(NamedTuple):
    """What a caller that makes one result of several calls has made of a forward already."""

    out: Tensor  # (B, T_q, H, D_v), with any strides but in the last dimension: where the result goes
    terms: tuple[Tensor, Tensor] | None = None  # skipping.summaries, of no more granules than it has
    key_decay: KeyDecay | None = None


class Gradients(NamedTuple):
    """Of the inputs, in their shapes; None for what is not asked for."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_log_decay: Tensor | None
    d_row_scale: Tensor | None
    d_bias: Tensor | None
    d_sink: Tensor | None = None  # no backend's


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
            "causal: False with a per-token log_decay needs T_q <= T_k, because the first "
            f"{q.shape[1] - k.shape[1]} query rows lie before the first log-decay; "
            f"got T_q = {q.shape[1]}, T_k = {k.shape[1]}"
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
    """Refuse what a cache of keys and values has no gradient for."""
    if not torch.is_grad_enabled():
        return
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise RuntimeError(f"{name}: requires a gradient, and a cache has none; call it under torch.no_grad()")


def check_offsets(name: str, offsets: Tensor, q: Tensor) -> None:
    """Refuse what are no offsets of packed sequences on the device of q."""
    if isinstance(offsets, Tensor) and (offsets.ndim != 1 or offsets.shape[0] == 0):
        raise ValueError(f"{name}: expected shape (sequences + 1,), got {tuple(offsets.shape)}")
    check_counts(name, offsets, q.device, "(sequences + 1,)", None)


def check_count(name: str, number: int) -> None:
    """Refuse what is no number of tokens."""
    if not _is_integer(number):
        raise TypeError(f"{name}: expected an int, got {_describe(number)}")
    if number < 0:
        raise ValueError(f"{name}: expected at least 0, got {number}")


def is_finite(number: float, dtype: torch.dtype = torch.float64) -> bool:
    """Whether a number is finite, also as calls with inputs of this dtype count: in float32, or float64 for float64."""
    if -1e4 < number < 1e4:
        return True  # at once, as nearly all
    # an int may be too large for a float, and numpy's numbers cast what they are compared with
    number = number if isinstance(number, int) else float(number)
    return abs(number) <= (_LARGEST_FLOAT64 if dtype == torch.float64 else _LARGEST_FLOAT32)


def is_reset(log_decay: Tensor) -> Tensor:
    """True where a log-decay is a reset; NaN is none."""
    return log_decay < RESET_BELOW


def window_of(window_size: tuple[int, int] | None, causal: bool) -> tuple[int, int]:
    """(left, right) with −1 for no limit; a causal query sees nothing to its right anyway."""
    left, right = (-1, -1) if window_size is None else map(integer, window_size)
    return (left, -1) if causal else (left, right)


def within(longest: int, axis: int) -> int:
    """No sequence is longer than the axis. Symbolic ones are not compared: that would fix them in an exported graph."""
    return longest if isinstance(axis, torch.SymInt) or isinstance(longest, torch.SymInt) else min(longest, axis)


def _clamped(window: Sequence[int], longest_query: int, longest_key: int) -> tuple[int, int]:
    """The window, without limits that no pair of a query and a key exceeds: kernels add 32-bit numbers to them.

    The first key is up to longest_key − 1 to the left of a query, the last one up to longest_query − 1 to the right.
    """
    left, right = window
    if torch.compiler.is_compiling() or not isinstance(longest_query, int) or not isinstance(longest_key, int):
        # a comparison would tie a graph to these lengths; the operator, which launches, has numbers for them
        return left, right
    return -1 if left >= longest_key - 1 else left, -1 if right >= longest_query - 1 else right


def integer(number: int) -> int:
    """A checked integer that may be one of numpy's as Python's own, which operators and launches take."""
    return number if isinstance(number, (int, torch.SymInt)) else int(number)


def tolerance_of(skip_tolerance: SkipTolerance, dtype: torch.dtype) -> float:
    """skip_tolerance as a number: "auto" is below the resolution of the accumulators, None is 0."""
    if skip_tolerance == "auto":
        return 2.0**-53 if dtype == torch.float64 else 2.0**-24
    return 0.0 if skip_tolerance is None else float(skip_tolerance)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts to; None where it is off. On the meta device there is none."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Autocast switched off, where there is one."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"one of layout {tensor.layout}"
        raise TypeError(f"{name}: expected a dense tensor, got {kind}")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, axes: tuple[str, ...]) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {_describe(tensor)}")
        _check_dense(name, tensor)
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
        # more key heads than query heads are no mistake in counting heads
        fits = k.shape[-2] > q.shape[-2] and k.shape[-3] > 0 and q.shape[-3] % k.shape[-3] == 0
        raise ValueError(
            f"k: its {k.shape[-2]} heads must divide the {q.shape[-2]} heads of q (grouped queries)"
            f"{_order_hint(q, fits)}"
        )
    for name, dim in (("q", q.shape[-1]), ("v", v.shape[-1])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: expected a head dimension from 1 to {MAX_HEAD_DIM}, got {dim}")


def _check_log_decay(log_decay: Tensor | float | None, q: Tensor, k: Tensor, axes: str) -> bool:
    """Whether there is one per token."""
    if log_decay is None:
        return False
    if isinstance(log_decay, Real) and not isinstance(log_decay, bool):
        # one too low for the dtype is a reset, as any below −746
        if not is_finite(log_decay, q.dtype) and not -math.inf < log_decay < 0:
            raise ValueError(f"log_decay: expected a finite number, got {log_decay} (q: {q.dtype})")
        return False
    if not isinstance(log_decay, Tensor):
        raise TypeError(f"log_decay: expected None, a number or a tensor, got {_describe(log_decay)}")
    _check_dense("log_decay", log_decay)
    if log_decay.dtype in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"log_decay: expected float32, got {log_decay.dtype}; a 16-bit gate loses the model, "
            "compute it in float32 or pass log_decay.float()"
        )
    if log_decay.dtype != torch.float32 and not (log_decay.dtype == q.dtype == torch.float64):
        raise TypeError(f"log_decay: expected float32 (or float64 with float64 q, k, v), got {log_decay.dtype}")
    if log_decay.device != q.device:
        raise ValueError(f"log_decay: expected the device of q, {q.device}, got {log_decay.device}")
    per_token = (*k.shape[:-2], q.shape[-2])
    # tuples are compared from their first entries on, whatever their lengths: with a symbolic batch that is a guard
    if log_decay.ndim > 1 and log_decay.shape == per_token:
        return True
    if _is_decay(log_decay.shape, per_token):
        return log_decay.ndim > 1
    raise ValueError(
        f"log_decay: expected shape () or (H,) = ({per_token[-1]},) for a constant decay, or {axes} = {per_token} for "
        f"one per token, where batch and heads may be 1; got {tuple(log_decay.shape)}"
        f"{_decay_hint(log_decay.shape, q, k, per_token)}"
    )


def _is_decay(shape: Sequence[int], per_token: Sequence[int]) -> bool:
    """Whether a log-decay may have this shape. The number of tokens is never broadcast: a constant decay is (H,), and
    one token's λ beside many keys is a mistake."""
    if len(shape) < 2:
        return len(shape) == 0 or shape[0] == per_token[-1]
    return len(shape) == len(per_token) and _broadcasts(shape, per_token) and shape[-2] == per_token[-2]


def _decay_hint(shape: Sequence[int], q: Tensor, k: Tensor, per_token: tuple[int, ...]) -> str:
    """What a message adds for a log-decay that fits in another order, or with a dimension more or less."""
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


def check_bool(name: str, value: bool) -> None:
    """Refuse what is no bool."""
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


def check_bias(bias: Tensor | None, q: Tensor, k: Tensor, tokens: int | None = None) -> None:
    """Refuse what is no bias of the scores of q and k, or of so many tokens of which these are a slice."""
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
    """Refuse what is no tensor on the device of its owner; None: on any."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {_describe(x)}")
    if device is not None and x.device != device:
        raise ValueError(f"{name}: expected the device of {owner}, {device}, got {x.device}")


def check_counts(
    name: str, numbers: Tensor, device: torch.device, axes: str, shape: tuple[int, ...] | None, owner: str = "q"
) -> None:
    """Refuse what are no integers of this shape (None: any) on the device of their owner."""
    check_tensor(name, numbers, device, owner)
    if numbers.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {numbers.dtype}")
    if shape is not None and numbers.shape != shape:
        raise ValueError(f"{name}: expected shape {axes} = {shape}, got {tuple(numbers.shape)}")


def _is_integer(value: object) -> bool:
    """Python's, numpy's or a symbolic one."""
    return type(value) is int or (isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool))


def _broadcasts(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Whether a tensor of this shape broadcasts to the full one."""
    missing = len(full) - len(shape)
    # the wanted size first: of two symbols for one length, only that comparison needs no guard
    return missing >= 0 and all(have == want or have == 1 for have, want in zip(shape, full[missing:], strict=True))


def _order_hint(q: Tensor, fits: bool) -> str:
    """What a message adds where the shapes would fit if heads came before tokens in q, k and v."""
    if not fits:
        return ""
    batch = "B, " if q.ndim == 4 else ""
    return f"; q, k, v: expected ({batch}T, H, D); these look like ({batch}H, T, D), then give q.transpose(-3, -2) etc."


def _describe(value: object) -> str:
    kind = type(value)
    # numpy.bool is another type than bool
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{value!r} of type {name}"
