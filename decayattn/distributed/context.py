"""The public function and the layer's settings: contract, checks, and the dispatch to a mode."""

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from decayattn import compatibility, dtensor, validation
from decayattn.backends import registry
from decayattn.distributed import fetching, halo, heads
from decayattn.distributed.agreement import Handshake, Option
from decayattn.distributed.exchange import Slices
from decayattn.distributed.local import Packed
from decayattn.normalize import autocast, inputs_of, integer, problem_of, window_of
from decayattn.problem import AttentionProblem, BackendName, SkipTolerance
from decayattn.validation import check_arguments, check_bias, check_bool, check_count, check_offsets

ModeName = Literal["halo", "heads"]
MODES = get_args(ModeName)
_REASON = "context_parallel_attention: torch.compile cannot trace it, because the sizes of exchanges depend on values"


@validation.hide_unknown
@compatibility.left_to_eager_code(_REASON)
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | float | None = None,
    *,
    group: dist.ProcessGroup | None,
    mode: ModeName = "halo",
    lengths: Sequence[int] | None = None,
    reach: int | None = None,
    scale: Tensor | float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    return_lse: bool = False,
    skip_tolerance: SkipTolerance = "auto",
    backend: BackendName = "auto",
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""decay_attention of sequences that are cut into consecutive slices of tokens, one for each rank of a group.

    Rank r has T_r tokens. Every rank gets its own rows of decay_attention over all T = ΣT_r tokens. There are two
    modes:

    "halo": every rank keeps its queries and fetches the keys before its slice that matter to any of its rows. The bound
    of skip_tolerance selects them before any key is sent: a strong decay sends a few hundred tokens of a head, no decay
    sends everything. Rows that see only their slice do not wait for them. Causal attention only.
    "heads": one all-to-all gives every rank the whole sequences of H / ranks heads, and another one returns its rows
    (DeepSpeed-Ulysses, arXiv 2309.14509). H must be a multiple of the number of ranks. All options work, and the number
    of bytes does not depend on the decay: the choice without a decay or a window.

    Args:
        q, k, v: this rank's (B, T_r, H, D), (B, T_r, H_kv, D) and (B, T_r, H_kv, D_v).
        log_decay: as in decay_attention; one per token is (B, T_r, H). A slice's first λ acts between the slices.
        group: the process group; None is torch.distributed's default group. All its ranks call with the same options.
        lengths: T_r of every rank, 0 included; None: all the same.
        mode: "halo" or "heads".
        reach: halo only: every rank fetches the last `reach` tokens before its slice, and rows see no further. The
            caller guarantees that no key beyond `reach` matters; this is exact for a window of that size. Skips
            planning, so the host does not synchronise.
        scale, window_size, skip_tolerance, backend: as in decay_attention; a tensor scale broadcasts to (B, T_r, H). In
            halo mode, keys that are not fetched and keys that the call skips share skip_tolerance: half each, or a
            third each for a constant decay. With None, or with the "reference" backend, a rank fetches every key that a
            row sees.
        causal, bias, seqused_q, seqused_k, leftpad_q, leftpad_k: as in decay_attention, heads mode only. bias and
            padding cover all T tokens and are the same on every rank.
        sink: (H,), as in decay_attention.
        cu_seqlens, max_seqlen: packed sequences, with B = 1. (sequences + 1,) int32 or int64: offsets on the axis of
            all T tokens, the same on every rank; a sequence may span several ranks. max_seqlen is an upper bound on the
            sequence lengths, default T.
        return_lse: also return lse.

    Returns:
        out (B, T_r, H, D_v), or (out, lse) with lse (B, H, T_r). Differentiable once, in both modes. The gradients of
        q, k, v, log_decay per token and scale per row are those of the sum of all ranks' losses. Arguments that all
        ranks share (a constant log_decay, sink, bias, a broadcast scale) have a share of their gradient on each rank.
        The sum over the ranks is the gradient; data-parallel wrappers average it like that of any other weight.

    The first collective of every call compares the options of the ranks. On a GPU the host waits for it only with new
    options; an assertion on the device checks later ones. A planned halo waits once per call, to size the exchange.
    Activation checkpointing repeats the exchanges. A CUDA graph can hold heads mode, and a halo with a fixed
    reach, after a call outside of it. torch.compile leaves the call to eager code.

    Raises:
        TypeError, ValueError: for every bad argument, by name, and if the ranks' options differ.
        RuntimeError: under a transform of torch.func (vmap, grad). On every other rank if a rank raises in its checks
            or in the plan; it names the rank. On a GPU, if an earlier call had these options, an assertion on the
            device fails instead. An error in a rank's own kernels or in its backward is not reported: the other ranks
            wait until the group's timeout. In a CUDA graph, for a planned halo and for options without an earlier call.
            Under torch.compile with fullgraph=True.
    """
    group = _checked_group(group)
    only_heads = {
        "causal": causal, "bias": bias, "seqused_q": seqused_q, "seqused_k": seqused_k, "leftpad_q": leftpad_q,
        "leftpad_k": leftpad_k,
    }
    with Handshake(group, q) as handshake:
        if unknown:
            validation.refuse_unknown(context_parallel_attention, unknown)
        if compatibility.is_transformed():
            raise RuntimeError(
                "context_parallel_attention: expected no transform of torch.func (vmap, grad), which cannot map its "
                "exchanges; call it outside, with the samples as its batch"
            )
        dtensor.refuse(q=q, k=k, v=v, log_decay=log_decay, scale=scale, sink=sink, cu_seqlens=cu_seqlens, **only_heads)
        q, k, v = autocast(q, k, v)
        check_arguments(
            q, k, v, log_decay, scale, causal, window_size, sink, seqused_q, seqused_k, leftpad_q, leftpad_k,
            skip_tolerance=skip_tolerance,
        )
        check_bool("return_lse", return_lse)
        registry.check_name(backend)
        _check_device(q, handshake.device_types)
        slices = _checked_slices(q, k, lengths, group)
        packed = _checked_packed(q, slices, cu_seqlens, max_seqlen)
        _check_mode(mode, reach, q, slices, only_heads, packed)
        check_bias(bias, q, k, sum(slices.lengths))
        inputs = inputs_of(q, k, v, log_decay, scale)
        log_decay, row_scale, number = inputs.log_decay, inputs.row_scale, inputs.scale
        window, reach = window_of(window_size, causal), None if reach is None else integer(reach)
        problem = problem_of(inputs, causal, window_size, skip_tolerance)
        kernels: str | None = registry.select(problem, backend)
        if kernels == "reference":
            kernels = None
        elif mode == "halo" and packed is None:
            # the backend for the slice alone; it may refuse these very tensors
            kernels = registry.resolve(problem, backend, inputs)
        differentiable = q, k, v, log_decay, row_scale, sink, bias
        handshake.options = (
            Option("mode", mode), Option("reach", reach),
            *_compared(slices, problem, log_decay, row_scale, number, window, packed),
            Option("causal", causal), Option("sink", sink is not None), Option("return_lse", return_lse),
            Option("backend", (backend, kernels is not None)),
            Option("bias", None if bias is None else (tuple(bias.shape), bias.dtype)),
            Option("requires_grad", (torch.is_grad_enabled(), *map(_requires_grad, differentiable))),
            *(Option(name, x is not None) for name, x in only_heads.items() if name not in ("causal", "bias")),
        )
        scale = inputs.any_scale
        call: dict[str, Any] = {"sink": sink, "window_size": window_size, "backend": backend}
        if mode == "heads":
            call |= only_heads if packed is None else {"causal": causal}
            call["skip_tolerance"] = skip_tolerance
            return heads.attention(slices, q, k, v, log_decay, scale, packed, return_lse, call, handshake)
        sight = fetching.Sight(window[0], reach, cu_seqlens)
        return halo.attention(
            slices, problem, q, k, v, log_decay, scale, sight, packed, kernels, return_lse, call, handshake,
        )


class ContextParallel(NamedTuple):
    """Settings for attention over sequences that are sharded across ranks: `layer.context = ContextParallel(group)`.

    x is then this rank's slice (B, T_r, embed_dim); so are resets. cu_seqlens counts on the axis of all slices. A
    position module is called with start, the position (B,) int32 of the slice's first token. Padding masks, caches and
    memories raise.
    """

    group: dist.ProcessGroup | None
    mode: ModeName = "halo"
    lengths: Sequence[int] | None = None
    reach: int | None = None

    def __deepcopy__(self, memo: dict) -> "ContextParallel":
        return self  # groups cannot be copied

    def first_token(self, length: int) -> int:
        """Position of the first token of this rank's slice of that length."""
        rank = dist.get_rank(self.group)
        return rank * length if self.lengths is None else sum(_checked_lengths(self.lengths)[:rank])

    def reporting(self, x: Tensor) -> AbstractContextManager[object]:
        """Context manager before `attend`: if this rank raises, the ranks waiting in `attend` raise too."""
        if not (dist.is_available() and dist.is_initialized()):
            return nullcontext()
        return Handshake(_checked_group(self.group), x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | float | None, **options: Any) -> Tensor:
        """context_parallel_attention with these settings."""
        return context_parallel_attention(
            q, k, v, log_decay, group=self.group, mode=self.mode, lengths=self.lengths, reach=self.reach, **options
        )


@torch.no_grad()
def fetched_tokens(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | float | None,
    *,
    group: dist.ProcessGroup | None,
    lengths: Sequence[int] | None = None,
    scale: Tensor | float | None = None,
    window_size: tuple[int, int] | None = None,
    cu_seqlens: Tensor | None = None,
    skip_tolerance: SkipTolerance = "auto",
) -> Tensor:
    """Number of tokens before its slice that every rank fetches in "halo" mode for these arguments.

    For each batch entry and key head, a rank receives this number of rows with D and D_v values and H / H_kv
    log-decays. The plan of "triton" gives the answer, so this needs a GPU or Triton's interpreter. Every rank of the
    group calls it.

    Args:
        q, k, log_decay, group, lengths, scale, window_size, cu_seqlens, skip_tolerance: as in
            context_parallel_attention.

    Returns:
        (ranks, B, H_kv) int64, the same on every rank.

    Raises:
        TypeError, ValueError: for every bad argument, by name, and if the Triton kernels cannot run.
    """
    group = _checked_group(group)
    with Handshake(group, q) as handshake:
        dtensor.refuse(q=q, k=k, log_decay=log_decay, scale=scale, cu_seqlens=cu_seqlens)
        q, k = autocast(q, k)
        check_arguments(q, k, k, log_decay, scale, True, window_size, skip_tolerance=skip_tolerance)
        _check_device(q, handshake.device_types)
        slices = _checked_slices(q, k, lengths, group)
        packed = _checked_packed(q, slices, cu_seqlens, None)
        inputs = inputs_of(q, k, k, log_decay, scale)
        log_decay, row_scale, number = inputs.log_decay, inputs.row_scale, inputs.scale
        problem = problem_of(inputs, True, None, skip_tolerance)
        registry.select(problem, "triton")
        window = window_of(window_size, True)
        handshake.options = _compared(slices, problem, log_decay, row_scale, number, window, packed)
        sight = fetching.Sight(window[0], None, cu_seqlens)
        tolerance = problem.skip_tolerance / fetching.shares(problem)
        scale = inputs.any_scale
        fetch, _ = fetching.fetch(slices, problem, q, k, log_decay, scale, sight, tolerance, handshake)
        handshake.meet()  # fetch meets only if it makes a plan
    offsets = torch.tensor(slices.offsets[:-1], device=q.device)
    return offsets[:, None, None] - fetch.first


def _compared(
    slices: Slices, problem: AttentionProblem, log_decay: Tensor | None, row_scale: Tensor | None, number: float,
    window: tuple[int, int], packed: Packed | None,
) -> tuple[Option, ...]:
    """Options that every call of a group compares."""
    return (
        Option("lengths", slices.lengths),
        Option("q", (problem.device.type, problem.dtype, problem.batch, problem.num_heads, problem.head_dim)),
        Option("k", (problem.num_kv_heads, problem.head_dim)), Option("v", problem.value_dim),
        Option("log_decay", None if log_decay is None else (problem.decay, log_decay.dtype)),
        Option("scale", "one per row" if row_scale is not None else number), Option("window_size", window),
        Option("cu_seqlens", None if packed is None else packed.cu_seqlens_k.shape[0]),
        Option("max_seqlen", None if packed is None else packed.longest_key),
        Option("skip_tolerance", problem.skip_tolerance),
    )


def _requires_grad(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad


def _checked_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("group: expected torch.distributed.init_process_group to have been called")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup or None, got {group!r}")
    return group


def _check_device(q: Tensor, types: Sequence[str]) -> None:
    if q.device.type not in types:
        raise ValueError(
            f"q: expected a device of the group's backend, {' or '.join(types)}, got {q.device}; move the tensors, or "
            "make a group with a backend for them: torch.distributed.new_group(backend=…)"
        )


def _checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(lengths, Iterable) or isinstance(lengths, str):
        raise TypeError(f"lengths: expected a number of tokens for each rank, got {lengths!r}")
    numbers = tuple(lengths)
    for number in numbers:
        check_count("lengths", number)
    return tuple(map(integer, numbers))


def _checked_slices(q: Tensor, k: Tensor, lengths: Sequence[int] | None, group: dist.ProcessGroup) -> Slices:
    rank, ranks, own = dist.get_rank(group), dist.get_world_size(group), q.shape[1]
    if k.shape[1] != own:
        raise ValueError(f"k: expected the sequence length of q, {own}, got {k.shape[1]}")
    found = (own,) * ranks if lengths is None else _checked_lengths(lengths)
    if len(found) != ranks or found[rank] != own or min(found) < 0:
        raise ValueError(
            f"lengths: expected the number of tokens of each of {ranks} ranks, with {own} for rank {rank}, got {found}"
        )
    return Slices(found, rank, weakref.ref(group))


def _checked_packed(
    q: Tensor, slices: Slices, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Packed | None:
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError("max_seqlen: expected only with cu_seqlens")
        return None
    check_offsets("cu_seqlens", cu_seqlens, q)
    if q.shape[0] != 1:
        raise ValueError(f"q: expected shape (1, T, H, D) with cu_seqlens, got {tuple(q.shape)}")
    if max_seqlen is not None:
        check_count("max_seqlen", max_seqlen)
    longest = sum(slices.lengths) if max_seqlen is None else integer(max_seqlen)
    return Packed(cu_seqlens, cu_seqlens, longest, longest)


def _check_mode(
    mode: ModeName, reach: int | None, q: Tensor, slices: Slices, only_heads: dict[str, Any], packed: Packed | None
) -> None:
    if mode not in MODES:
        raise ValueError(f"mode: expected 'halo' or 'heads', got {mode!r}")
    if reach is not None:
        check_count("reach", reach)
        if mode == "heads":
            raise ValueError("reach: expected only with mode='halo'")
    given = [name for name, x in only_heads.items() if name != "causal" and x is not None]
    if mode == "halo":
        if not only_heads["causal"]:
            raise ValueError("causal: expected True with mode='halo', which fetches earlier keys; 'heads' takes False")
        if given:
            raise ValueError(f"{given[0]}: expected None with mode='halo'; 'heads' takes it")
    elif q.shape[2] % slices.ranks:
        raise ValueError(
            f"mode: expected query heads in a multiple of the {slices.ranks} ranks with 'heads', got "
            f"{q.shape[2]}; 'halo' takes any number"
        )
    if packed is not None and given:
        raise ValueError(f"{given[0]}: expected None with cu_seqlens")
