"""The public functions: the contract, then `normalize` and one call."""

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from decayattn import autograd, directions, dtensor, normalize, reference, validation
from decayattn.backends import registry
from decayattn.problem import AttentionProblem, BackendName, Inputs, SkipTolerance

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on


class _Options(TypedDict, total=False):
    """Keywords of both functions, except return_lse, on which the type of the result depends."""

    scale: Tensor | float | None
    causal: bool
    window_size: tuple[int, int] | None
    sink: Tensor | None
    skip_tolerance: SkipTolerance
    backend: BackendName


class _DenseOptions(_Options, total=False):
    bias: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    leftpad_q: Tensor | None
    leftpad_k: Tensor | None


class _PackedOptions(_Options):
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@overload
def decay_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | float | None = None, *, return_lse: Literal[False] = False,
    **options: "Unpack[_DenseOptions]",
) -> Tensor: ...
@overload
def decay_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | float | None = None, *, return_lse: Literal[True],
    **options: "Unpack[_DenseOptions]",
) -> tuple[Tensor, Tensor]: ...
@overload
def decay_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | float | None = None, *, return_lse: bool,
    **options: "Unpack[_DenseOptions]",
) -> Tensor | tuple[Tensor, Tensor]: ...
@validation.hide_unknown
def decay_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | float | None = None,
    *,
    scale: Tensor | float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    return_lse: bool = False,
    skip_tolerance: SkipTolerance = "auto",
    backend: BackendName = "auto",
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Softmax attention with scores that decay with the distance between query and key.

    λ_t are log-decays (natural logarithm), and α_t = λ_0 + … + λ_t. Per batch entry and head::

        S_ij  = s_i · q_i·k_j + sign(i − j) · (α_i − α_j)     for the keys j that i sees, −inf elsewhere
        out_i = Σ_j softmax_j(S_ij) v_j                       lse_i = log Σ_j exp(S_ij)

    The decay term is the sum of λ over the tokens after the earlier and up to the later of the two positions. i is the
    position of a query on the keys' axis. The queries are the last T_q of the T_k positions: i = row + T_k − T_q.

    With λ = log of a forget gate this is the Forgetting Transformer (Lin et al., arXiv 2503.02130). With one constant
    per head it is ALiBi (Press et al., arXiv 2108.12409), or a retention rate (Sun et al., arXiv 2307.08621) under a
    softmax. Example::

        log_decay = F.logsigmoid(gate_logits.float())               # (B, T, H)
        out = decay_attention(q, k, v, log_decay)                   # (B, T, H, D_v)

    Args:
        q: queries (B, T_q, H, D), D up to 256. float16, bfloat16, float32 or float64. q, k and v may have any
            strides. "triton" copies a tensor if the D numbers of a token and head are not consecutive in memory.
        k: keys (B, T_k, H_kv, D). H_kv divides H, and query head h reads key head h // (H / H_kv).
        v: values (B, T_k, H_kv, D_v), D_v up to 256.
        log_decay: λ in natural logarithm, float32 (or float64 with float64 q).
            None: no decay.
            A number or 0-d tensor: the same constant γ for every head. (H,): a constant γ_h per head; S gets
            |i − j|·γ_h.
            (B, T_k, H): one λ per token and query head. B and H may be 1, for the same λ in all batch entries or heads;
            T_k is never broadcast. A sequence's first λ is never used.
            (B, T, H, 2), with causal=False: a λ per direction. The keys j ≤ i have decays of λ[..., 0], the keys j > i
            of λ[..., 1], which reset their own side only. If both are equal, the result is that of one λ. It needs T_q
            = T_k, and the same sequences of queries and keys where these are padded or packed.
            −inf resets: nothing before that token is visible to it or to later tokens. Values above 0 let scores grow.
            A λ below −746, where e^λ is 0 in float64, is a reset, too, and has gradient 0. Such a constant leaves a row
            its own key.
        scale: s, a number, or a tensor broadcastable to (B, T_q, H): one finite scale of any sign per query row and
            head. Default 1/√D.
        causal: query i sees the keys j ≤ i. Otherwise it sees all keys, and the decay acts in both directions.
        window_size: (left, right): query i sees only the keys i − left ≤ j ≤ i + right; −1 is no limit. A causal query
            sees nothing to its right in any case. Sliding windows as in Beltagy et al., arXiv 2004.05150.
        bias: added to the scores; broadcastable to (B, H, T_q, T_k), with a gradient of its own shape. Or boolean: True
            where a query may see a key, within the limits of the other arguments.
        sink: (H,) learned logits, finite, or −inf for none. Every row has one more key, with score sink_h and value 0.
            lse includes it. It has a gradient (Xiao et al., arXiv 2309.17453).
        seqused_q, seqused_k, leftpad_q, leftpad_k: (B,) int32 or int64, the part of a batch entry that holds its
            sequence. The queries are the rows leftpad_q ≤ row < seqused_q, the keys the tokens leftpad_k ≤ j <
            seqused_k, and the last query is at the last key. Defaults: 0 and T_q, 0 and T_k. A batch padded on the
            right has seqused_q = seqused_k = its lengths, one padded on the left has leftpad_q = leftpad_k, a key cache
            has seqused_k. Padding may hold any values. Its rows have out 0, lse −inf (with a sink, the sink) and
            gradient 0. A bound outside a tensor counts as its end. Not causal, with a decay per token, rows before the
            first key of their sequence see nothing.
        return_lse: also return lse.
        skip_tolerance: upper bound on the probability that a row may lose. Causal calls with a decay and no bias skip
            far keys, and do not read their values, while every row's loss is provably within it. With a λ per direction
            this holds for the keys before a row. "auto" is 2⁻²⁴, which float32 accumulators cannot resolve (float64:
            2⁻⁵³). None visits every visible key. The bound holds for any inputs, growth and outliers included.
            visited_fraction returns the fraction that is left. "reference" never skips.
        backend: "auto" takes the fastest that accepts the problem. An explicit name is never replaced: if it cannot
            run, the error says why.
            "reference": eager PyTorch, differentiable to any order.
            "triton": Triton kernels. Gradients repeat bit by bit; that of a broadcast bias does only under
            torch.use_deterministic_algorithms.
            "hopper": Gluon kernels for sm_90. Gradients repeat bit by bit under torch.use_deterministic_algorithms
            only. A gradient of out is copied if it is expanded or not aligned to 16 bytes.

    Returns:
        out (B, T_q, H, D_v) in the dtype of q, or (out, lse) with lse (B, H, T_q) in float32 (float64 for float64
        inputs). Both are differentiable with respect to q, k, v, log_decay, scale, bias and sink. A row that sees no
        key has out 0 and lse −inf (with a sink, the sink). It contributes exactly 0 to every gradient but the sink's.

    Under autocast q, k and v are cast to its dtype; log_decay and scale are not. The kernels have no second derivative:
    a double backward raises. Tensors on the meta device give results there, for every backend.

    DTensors (torch.distributed.tensor) may be sharded by batch or by heads, as q is. The results are sharded in the
    same way, and nothing is sent. All tensor arguments are then DTensors. Replicated arguments are split as q is. An
    argument without that dimension (a sink with a sharded batch) stays whole, and its gradient is summed over the
    ranks. Batch and H_kv must be multiples of the ranks that share them. The sequence is not sharded.

    Raises:
        TypeError, ValueError: for every bad argument, by name, before any kernel starts.
    """
    if unknown:
        validation.refuse_unknown(decay_attention, unknown)
    q, k, v = normalize.autocast(q, k, v)
    tensors: dict[str, Any] = dict(
        q=q, k=k, v=v, log_decay=log_decay, scale=scale, bias=bias, sink=sink, seqused_q=seqused_q,
        seqused_k=seqused_k, leftpad_q=leftpad_q, leftpad_k=leftpad_k,
    )
    options: dict[str, Any] = dict(causal=causal, window_size=window_size, skip_tolerance=skip_tolerance)
    if dtensor.any_dtensor(*tensors.values()):
        others = dict(return_lse=return_lse, backend=backend)
        return dtensor.attention(decay_attention, validation.check_arguments, tensors, options, others)
    validation.check_bool("return_lse", return_lse)
    problem, inputs = normalize.dense(**tensors, **options)
    out, lse = _attend(problem, inputs, backend, return_lse)
    return (out, lse) if return_lse else out


@overload
def decay_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | float | None = None, *, return_lse: Literal[False] = False,
    **options: "Unpack[_PackedOptions]",
) -> Tensor: ...
@overload
def decay_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | float | None = None, *, return_lse: Literal[True],
    **options: "Unpack[_PackedOptions]",
) -> tuple[Tensor, Tensor]: ...
@overload
def decay_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | float | None = None, *, return_lse: bool,
    **options: "Unpack[_PackedOptions]",
) -> Tensor | tuple[Tensor, Tensor]: ...
@validation.hide_unknown
def decay_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | float | None = None,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: Tensor | float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    skip_tolerance: SkipTolerance = "auto",
    backend: BackendName = "auto",
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""decay_attention of packed sequences: sequences of different lengths, consecutive, without padding.

    Sequence n has the queries cu_seqlens_q[n] ≤ row < cu_seqlens_q[n + 1] and the keys cu_seqlens_k[n] ≤ token <
    cu_seqlens_k[n + 1]; either may be empty. Nothing crosses a boundary. The result is decay_attention of each sequence
    alone, and the first λ of every sequence has gradient 0. Example::

        cu_seqlens = torch.tensor([0, 7, 7, 60], dtype=torch.int32)      # 7 tokens, none, and 53
        tokens = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=53, max_seqlen_k=53)
        out = decay_attention_varlen(q, k, v, log_decay, **tokens)       # (60, H, D_v)

    Args:
        q, k, v: (total_q, H, D), (total_k, H_kv, D) and (total_k, H_kv, D_v).
        log_decay: as in decay_attention. One per token is (total_k, H), or (total_k, 1) for all heads; one per
            direction is (total_k, H, 2), with the same cu_seqlens and max_seqlen for queries and keys.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 or int64, non-decreasing. Falling offsets raise on a CPU. On
            a GPU an offset below an earlier one counts as that one. They are read when the kernels run, so a CUDA graph
            may be replayed after a change in place.
        max_seqlen_q, max_seqlen_k: upper bounds on the sequence lengths; they size the launch. Tokens beyond them are
            ignored: their outputs are 0, and no query sees them.
        scale, causal, window_size, sink, return_lse, skip_tolerance, backend: as in decay_attention. A tensor scale
            broadcasts to (total_q, H). Not causal, with a decay per token, rows before a sequence's first key (T_q >
            T_k) see nothing.

    Returns:
        out (total_q, H, D_v), or (out, lse) with lse (H, total_q). Tokens that belong to no sequence have out 0, lse
        −inf (with a sink, the sink) and gradient 0.

    Raises:
        TypeError, ValueError: for every bad argument, by name, before any kernel starts.
    """
    if unknown:
        validation.refuse_unknown(decay_attention_varlen, unknown)
    q, k, v = normalize.autocast(q, k, v)
    tensors: dict[str, Any] = dict(
        q=q, k=k, v=v, log_decay=log_decay, scale=scale, sink=sink, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    options: dict[str, Any] = dict(
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal, window_size=window_size,
        skip_tolerance=skip_tolerance,
    )
    if dtensor.any_dtensor(*tensors.values()):
        others = dict(return_lse=return_lse, backend=backend)
        return dtensor.attention(decay_attention_varlen, validation.check_packed_arguments, tensors, options, others)
    validation.check_bool("return_lse", return_lse)
    problem, inputs = normalize.packed(**tensors, **options)
    out, lse = _attend(problem, inputs, backend, return_lse)
    out = out.squeeze(0)  # not out[0]: its backward copies the gradient into zeros
    return (out, lse.squeeze(0)) if return_lse else out


@torch.no_grad()
def visited_fraction(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | float | None,
    *,
    scale: Tensor | float | None = None,
    window_size: tuple[int, int] | None = None,
    skip_tolerance: SkipTolerance = "auto",
) -> Tensor:
    r"""Fraction of tiles that causal decay_attention computes for these arguments.

    Per batch entry and head: visited tiles over tiles in which a row sees a key. Tiles have 64 query rows × 128 keys.
    The fraction is 1 where nothing is skipped. "triton" makes the plan, so it needs a GPU or Triton's interpreter.

    Args:
        q, k, log_decay, scale, window_size, skip_tolerance: as in decay_attention.

    Returns:
        (B, H) float32, on the device of q.

    Raises:
        TypeError, ValueError: for every bad argument, by name, and if the Triton kernels cannot run.
    """
    q, k = normalize.autocast(q, k)
    problem, inputs = normalize.dense(q, k, k, log_decay, scale, True, window_size, skip_tolerance=skip_tolerance)
    if q.is_meta:  # nothing runs
        return q.new_empty(problem.batch, problem.num_heads, dtype=torch.float32)
    if (reason := registry.unavailable("triton", problem.dtype, problem.device)) is not None:
        raise ValueError(f"visited_fraction: its kernels need a CUDA GPU, and cannot take q of {q.device}: {reason}")
    from decayattn.backends.planning import skipping  # imports Triton

    with torch.cuda.device_of(q):
        return skipping.visited_fraction(problem, inputs)


def _attend(problem: AttentionProblem, inputs: Inputs, backend: BackendName, return_lse: bool) -> tuple[Tensor, Tensor]:
    """out and lse of checked arguments. lse is None if it is not requested and a kernel backend runs."""
    chosen = registry.select(problem, backend)
    if chosen == "reference":
        return reference.attention(problem, inputs)
    if inputs.log_decay is not None and inputs.log_decay.ndim == 4:
        return directions.attention(problem, inputs, chosen, return_lse)  # type: ignore[return-value]
    return autograd.attention(problem, inputs, chosen, return_lse)  # type: ignore[return-value]
