"""What one call of decay_attention asks for: its arguments checked once, its shapes and modes frozen."""

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class AttentionProblem:
    """Shapes and modes of one call; it carries no tensor, so it can be compared, printed and cached.

    decay is "none", "constant" (one log-decay per head) or "scalar" (one per token and head);
    row_scale says that every query row has a scale of its own, with a gradient, instead of one number for all.
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
    decay: str
    causal: bool
    row_scale: bool

    @property
    def first_position(self) -> int:
        """Position of query row 0 on the keys' axis: the queries are the last rows (bottom-right alignment)."""
        return self.key_length - self.query_length

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """The dtype of scores, softmax state, lse and accumulated gradients."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @classmethod
    def of(
        cls, q: Tensor, v: Tensor, log_decay: Tensor | None, row_scale: Tensor | None, causal: bool
    ) -> "AttentionProblem":
        """The problem of arguments that were checked and brought to their full shapes already."""
        batch, query_length, num_heads, head_dim = q.shape
        _, key_length, num_kv_heads, value_dim = v.shape
        decay = "none" if log_decay is None else "constant" if log_decay.ndim == 1 else "scalar"
        return cls(
            batch, query_length, key_length, num_heads, num_kv_heads, head_dim, value_dim,
            q.dtype, q.device, decay, causal, row_scale is not None,
        )  # fmt: skip

    @classmethod
    def check(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | float | None,
        scale: Tensor | float | None,
        causal: bool,
    ) -> "AttentionProblem":
        """Refuse every bad argument of decay_attention by name; return the problem that the good ones state."""
        _check_tensors(q, k, v)
        batch, query_length, num_heads, head_dim = q.shape
        _, key_length, num_kv_heads, value_dim = v.shape
        if not isinstance(causal, bool):
            raise TypeError(f"causal: expected a bool, got {_describe(causal)}")
        decay = _check_log_decay(log_decay, q, k)
        row_scale = _check_scale(scale, q)
        if decay == "scalar" and not causal and query_length > key_length:
            raise ValueError(
                "causal: False with a per-token log_decay needs T_q <= T_k, because the first "
                f"{query_length - key_length} query rows lie before the first log-decay; "
                f"got T_q = {query_length}, T_k = {key_length}"
            )
        return cls(
            batch, query_length, key_length, num_heads, num_kv_heads, head_dim, value_dim,
            q.dtype, q.device, decay, causal, row_scale,
        )  # fmt: skip


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {_describe(tensor)}")
        if tensor.ndim != 4:
            raise ValueError(
                f"{name}: expected 4 dimensions (batch, sequence, heads, head_dim), got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype not in SUPPORTED_DTYPES:
            raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {tensor.dtype}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name}: expected the dtype of q, {q.dtype}, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected the device of q, {q.device}, got {tensor.device}")
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected the batch size of q, {q.shape[0]}, got {tensor.shape[0]}")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"v: expected the sequence length of k, {k.shape[1]}, got {v.shape[1]}")
    if v.shape[2] != k.shape[2]:
        raise ValueError(f"v: expected the number of heads of k, {k.shape[2]}, got {v.shape[2]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k: expected the head dimension of q, {q.shape[3]}, got {k.shape[3]}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] != 0:
        raise ValueError(f"k: its {k.shape[2]} heads must divide the {q.shape[2]} heads of q (grouped queries)")
    for name, dim in (("q", q.shape[3]), ("v", v.shape[3])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: expected a head dimension from 1 to {MAX_HEAD_DIM}, got {dim}")


def _check_log_decay(log_decay: Tensor | float | None, q: Tensor, k: Tensor) -> str:
    if log_decay is None:
        return "none"
    num_heads = q.shape[2]
    per_token = (k.shape[0], k.shape[1], num_heads)
    if isinstance(log_decay, Real) and not isinstance(log_decay, bool):
        if not math.isfinite(log_decay):
            raise ValueError(f"log_decay: expected a finite number, got {log_decay}")
        return "constant"
    if not isinstance(log_decay, Tensor):
        raise TypeError(f"log_decay: expected None, a number or a tensor, got {_describe(log_decay)}")
    if log_decay.dtype in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"log_decay: expected float32, got {log_decay.dtype}; a 16-bit gate loses the model, "
            "compute it in float32 or pass log_decay.float()"
        )
    if log_decay.dtype != torch.float32 and not (log_decay.dtype == q.dtype == torch.float64):
        raise TypeError(f"log_decay: expected float32 (or float64 with float64 q, k, v), got {log_decay.dtype}")
    if log_decay.device != q.device:
        raise ValueError(f"log_decay: expected the device of q, {q.device}, got {log_decay.device}")
    shape = tuple(log_decay.shape)
    if shape in ((), (num_heads,)):
        return "constant"
    if shape == per_token:
        return "scalar"
    raise ValueError(
        f"log_decay: expected shape () or (H,) = ({num_heads},) for a constant decay, "
        f"or (B, T_k, H) = {per_token} for one per token; got {shape}"
    )


def _check_scale(scale: Tensor | float | None, q: Tensor) -> bool:
    if scale is None:
        return False
    if isinstance(scale, Real) and not isinstance(scale, bool):
        if not math.isfinite(scale):
            raise ValueError(f"scale: expected a finite number, got {scale}")
        return False
    if not isinstance(scale, Tensor):
        raise TypeError(f"scale: expected None, a number or a tensor, got {_describe(scale)}")
    if scale.dtype not in SUPPORTED_DTYPES or (scale.dtype == torch.float64 and q.dtype != torch.float64):
        raise TypeError(
            f"scale: expected float32, bfloat16 or float16 (float64 with float64 q, k, v), got {scale.dtype}"
        )
    if scale.device != q.device:
        raise ValueError(f"scale: expected the device of q, {q.device}, got {scale.device}")
    rows = q.shape[:3]
    padded = (1,) * (3 - scale.ndim) + tuple(scale.shape)
    if len(padded) != 3 or any(have not in (1, want) for have, want in zip(padded, rows, strict=True)):
        raise ValueError(
            f"scale: expected a tensor broadcastable to (B, T_q, H) = {tuple(rows)}, got shape {tuple(scale.shape)}"
        )
    return True


def _describe(value: object) -> str:
    return f"{value!r} of type {type(value).__name__}"
