"""The calls that a rank makes on its own, once the keys are there."""

from typing import Any, NamedTuple

from torch import Tensor

from decayattn.functional import attend, decay_attention, decay_attention_varlen
from decayattn.problem import AttentionProblem, Inputs, Prepared, tolerance_of, window_of


class Packed(NamedTuple):
    """Packed sequences of a batch of one."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest_query: int
    longest_key: int


def attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: Tensor | float, packed: Packed | None,
    return_lse: bool, options: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    """decay_attention, or decay_attention_varlen, with tensors (B, T, ·)."""
    if packed is None:
        return decay_attention(q, k, v, log_decay, scale=scale, return_lse=return_lse, **options)
    result = decay_attention_varlen(
        q.squeeze(0), k.squeeze(0), v.squeeze(0),
        log_decay.squeeze(0) if log_decay is not None and log_decay.ndim == 3 else log_decay,
        cu_seqlens_q=packed.cu_seqlens_q, cu_seqlens_k=packed.cu_seqlens_k, max_seqlen_q=packed.longest_query,
        max_seqlen_k=packed.longest_key, scale=scale.squeeze(0) if isinstance(scale, Tensor) else scale,
        return_lse=return_lse, **options,
    )
    return result[None] if isinstance(result, Tensor) else (result[0][None], result[1][None])


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: Tensor | float, return_lse: bool,
    options: dict[str, Any], prepared: Prepared,
) -> tuple[Tensor, Tensor | None]:
    """decay_attention of arguments that were checked; what is prepared need not be used."""
    row_scale, number = (scale, 1.0) if isinstance(scale, Tensor) else (None, scale)
    inputs = Inputs(q, k, v, log_decay, row_scale, sink=options["sink"], scale=number)
    problem = AttentionProblem.of(
        q, v, log_decay, row_scale, True, window_of(options["window_size"], True),
        skip_tolerance=tolerance_of(options["skip_tolerance"], q.dtype),
    )
    return attend(problem, inputs, options["backend"], return_lse, prepared)
