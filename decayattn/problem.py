"""One call of decay_attention as frozen values: its shapes, modes and tensors."""

import contextlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256
# a log-decay below this is a reset: e^λ is 0 in float64 there, and callers write a reset as −1e9 or finfo.min
RESET_BELOW = -746.0
# tokens of a block of DecayPrefix; a tile of any size is inside one block
DECAY_BLOCK = 128
# query rows that share one entry of a skipping plan (Saved.first_block)
GRANULE = 64


# values of `backend`, for annotations
BackendName = Literal["auto", "reference", "triton", "hopper"]
DecayName = Literal["none", "constant", "scalar"]
LayoutName = Literal["dense", "padded", "packed"]
SkipTolerance = float | Literal["auto"] | None


class AttentionProblem(NamedTuple):
    """Shapes and modes of one call, without tensors: it can be compared, printed and cached.

    layout is the place of the sequences. "dense": each fills its batch entry. "padded": each is an interval of its
    batch entry. "packed": all are consecutive on the token axes of a single batch entry. query_length and key_length
    then measure those axes, and the longest sequences have longest_query rows and longest_key tokens. Unless the layout
    is dense, a tensor `bounds` (sequences, 4), int32, holds first row, number of rows, first token and number of tokens
    of each sequence.
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
    decay: DecayName  # "constant": one log-decay per head; "scalar": one per token and head
    causal: bool
    row_scale: bool  # True if every query row has its own scale, with a gradient, instead of one number for all
    bias: bool = False  # True if a tensor is added to the scores, or masks them
    window: tuple[int, int] = (-1, -1)  # (left, right) as in decay_attention; −1 if no pair could exceed the limit
    layout: LayoutName = "dense"
    sequences: int = 0
    longest_query: int = 0
    longest_key: int = 0
    skip_tolerance: float = 0.0  # upper bound on the probability that a row may lose to skipped keys

    @property
    def is_empty(self) -> bool:
        """True if no query can see a key, so that no kernel has anything to do."""
        lengths = (self.query_length, self.key_length, self.longest_query, self.longest_key)
        return 0 in (self.sequences, self.num_heads, *lengths)

    @classmethod
    def of(
        cls, inputs: "Inputs", causal: bool, window: Sequence[int] = (-1, -1), longest: Sequence[int] | None = None,
        skip_tolerance: float = 0.0,
    ) -> "AttentionProblem":
        """Problem of these inputs. longest: (longest_query, longest_key) of packed `bounds`."""
        q, _, v, log_decay, row_scale, bounds, bias, _, _ = inputs
        batch, query_length, num_heads, head_dim = q.shape
        _, key_length, num_kv_heads, value_dim = v.shape
        decay: DecayName = "none" if log_decay is None else "constant" if log_decay.ndim == 1 else "scalar"
        layout: LayoutName = "dense" if bounds is None else "padded" if longest is None else "packed"
        sequences = batch if bounds is None else bounds.shape[0]
        longest_query, longest_key = (query_length, key_length) if longest is None else longest
        left, right = window
        # symbolic: a comparison would specialise a graph to these lengths; the operator compares them as numbers
        if not torch.compiler.is_compiling() and isinstance(longest_query, int) and isinstance(longest_key, int):
            # −1 for a limit that no pair exceeds, because kernels add limits to 32-bit numbers: the first key is up to
            # longest_key − 1 to the left of a query, the last one longest_query − 1 to its right
            left, right = -1 if left >= longest_key - 1 else left, -1 if right >= longest_query - 1 else right
        return cls(
            batch, query_length, key_length, num_heads, num_kv_heads, head_dim, value_dim,
            q.dtype, q.device, decay, causal, row_scale is not None, bias is not None,
            (left, right), layout, sequences, longest_query, longest_key, skip_tolerance,
        )


class Inputs(NamedTuple):
    """Tensors of one call, checked and brought to their full shapes, and its scale."""

    q: Tensor  # (B, T_q, H, D)
    k: Tensor  # (B, T_k, H_kv, D)
    v: Tensor  # (B, T_k, H_kv, D_v)
    log_decay: Tensor | None = None  # (H,) constant, or (B, T_k, H) scalar
    row_scale: Tensor | None = None  # (B, T_q, H) in the accumulator dtype
    bounds: Tensor | None = None  # AttentionProblem's, (sequences, 4) int32
    bias: Tensor | None = None  # broadcastable to (B, H, T_q, T_k), floating or boolean
    sink: Tensor | None = None  # (H,)
    scale: float = 1.0  # of all rows; 1 if row_scale is given. The last field, after all tensors

    @property
    def any_scale(self) -> Tensor | float:
        """One number for all rows, or one per row."""
        return self.scale if self.row_scale is None else self.row_scale


# functions: torch.compile of PyTorch 2.10 cannot trace properties of a NamedTuple


def first_position(problem: AttentionProblem) -> int:
    """Position of query row 0 on the keys' axis. The queries are its last rows (bottom-right alignment)."""
    return problem.key_length - problem.query_length


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, softmax state, lse and accumulated gradients for inputs of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class DecayPrefix(NamedTuple):
    """Prefix of a per-token decay for the kernels, in (B, H, ·) and base 2; empty tensors for other decays.

    Every sequence has its own prefix: its blocks start at its first token, and its resets are counted from there.
    """

    # β (B, H, T_k): float32 for 16-bit inputs, else float64, because a strong decay loses float32's low bits
    beta: Tensor
    base: Tensor  # α at each block's start (B, H, blocks), float64
    last_reset: Tensor  # (B, H, T_k) int32
    next_reset: Tensor  # (B, H, T_k) int32


class Saved(NamedTuple):
    """State that a forward saves for the backward, besides its inputs and out. Every backend reads every other's."""

    row_lse2: Tensor  # (B, H, T_q): the log-sum-exp as the tiles define it, in base 2
    beta: Tensor  # this and the next three are DecayPrefix's
    base: Tensor
    last_reset: Tensor
    next_reset: Tensor
    first_block: Tensor  # first visited block of keys per granule (skipping.plan)
    sink_probability: Tensor | None = None  # (B, H, T_q): P of the sink; backends leave it to autograd.py

    @property
    def prefix(self) -> DecayPrefix:
        return DecayPrefix(self.beta, self.base, self.last_reset, self.next_reset)


class Precomputed(NamedTuple):
    """Parts of a forward that the caller has precomputed."""

    out: Tensor  # (B, T_q, H, D_v), the output buffer; its last dimension is contiguous
    terms: tuple[Tensor, Tensor] | None = None  # skipping.summaries, of at most the call's granules


class GradientRequest(NamedTuple):
    """Flags of the requested gradients, for those that take extra work."""

    decay_gradient: bool
    bias_gradient: bool
    sink_gradient: bool


class Gradients(NamedTuple):
    """Gradients of the inputs, in their shapes; None for those not requested."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_log_decay: Tensor | None
    d_row_scale: Tensor | None
    d_bias: Tensor | None
    d_sink: Tensor | None = None  # never from a backend


def is_reset(log_decay: Tensor) -> Tensor:
    """True where a log-decay is a reset; NaN is not."""
    return log_decay < RESET_BELOW


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Context manager that switches autocast off on devices that have it."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
