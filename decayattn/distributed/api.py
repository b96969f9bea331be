"""Public functions of several ranks: checks of their arguments, and the choice of a mode."""

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from decayattn import compatibility, dtensor, validation
from decayattn.backends import registry
from decayattn.distributed import halo, ulysses
from decayattn.distributed.collectives import Slices, TokenBefore
from decayattn.distributed.halo_plan import ViewLimits, make_plan, tolerance_share
from decayattn.distributed.option_check import OptionCheck
from decayattn.normalize import autocast, inputs_of, problem_of, window_of
from decayattn.problem import AttentionProblem, BackendName, Inputs, SkipTolerance
from decayattn.validation import check_arguments, check_bias, check_bool, check_count, check_offsets, check_same

ModeName = Literal["halo", "heads"]


@validation.hide_unknown
@torch.compiler.disable(
    reason="context_parallel_attention: torch.compile cannot trace it, because the sizes of exchanges depend on values"
)
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

    Rank r has T_r tokens and gets its own rows of decay_attention over all T = ΣT_r tokens, in one of two modes:

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
        reach: halo only: every rank fetches the last `reach` tokens before its slice, and rows see no further. The
            caller guarantees that no key beyond `reach` matters; this is exact for a window of that size. Skips
            planning, so the host does not synchronise.
        scale, window_size, skip_tolerance, backend: as in decay_attention; a tensor scale broadcasts to (B, T_r, H). In
            halo mode, keys that are not fetched and keys that the call skips get half of skip_tolerance each (a third
            for a constant decay). Without it, or with "reference", a rank fetches every key that a row sees.
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
    A CUDA graph can hold heads mode, and a halo with a fixed reach, after a call outside of it with the same options.
    torch.compile leaves the call to eager code.

    Raises:
        TypeError, ValueError: for every bad argument, by name, and if the ranks' options differ.
        RuntimeError: on every other rank if a rank raises in its checks or in the plan; it names the rank. (An error in
            a rank's own kernels or in its backward is not reported: the others wait until the group's timeout.) Under a
            transform of torch.func, under torch.compile with fullgraph=True, and in a CUDA graph that cannot hold the
            call.
    """
    only_heads = {
        "causal": causal, "bias": bias, "seqused_q": seqused_q, "seqused_k": seqused_k, "leftpad_q": leftpad_q,
        "leftpad_k": leftpad_k,
    }
    with OptionCheck(_checked_group(group), q) as check:
        if unknown:
            validation.refuse_unknown(context_parallel_attention, unknown)
        if compatibility.is_transformed():
            raise RuntimeError(
                "context_parallel_attention: expected no transform of torch.func (vmap, grad), which cannot map its "
                "exchanges; call it outside, with the samples as its batch"
            )
        check_bool("return_lse", return_lse)
        slices, problem, inputs, limits, options = _sliced(
            check, q, k, v, log_decay, scale, window_size, sink, lengths, cu_seqlens, max_seqlen, skip_tolerance,
            only_heads,
        )
        q, k, v = inputs[:3]
        _check_mode(mode, reach, q, slices, only_heads, cu_seqlens is not None)
        check_bias(bias, q, k, sum(slices.lengths))
        limits = limits._replace(reach=None if reach is None else check_count("reach", reach))
        runs_kernels = registry.select(problem, backend) != "reference"
        if runs_kernels and mode == "halo" and cu_seqlens is None:
            registry.resolve(problem, backend, inputs)  # refuses tensors that the backend cannot take
        requires_grad = (x is not None and x.requires_grad for x in (*inputs[:-1], bias))
        check.options = {
            "mode": mode, "reach": limits.reach, **options, "sink": sink is not None, "return_lse": return_lse,
            "backend": (backend, runs_kernels), **{name: x is not None for name, x in only_heads.items()},
            "causal": causal, "bias": None if bias is None else (tuple(bias.shape), bias.dtype),
            "requires_grad": (torch.is_grad_enabled(), *requires_grad),
        }
        if mode == "halo":
            return halo.attention(slices, problem, inputs, limits, runs_kernels, backend, return_lse, check)
        heads_options = only_heads if cu_seqlens is None else {"causal": causal}
        return ulysses.attention(
            slices, q, k, v, cu_seqlens, limits.max_seqlen, check, log_decay=inputs.log_decay, scale=inputs.any_scale,
            sink=sink, window_size=window_size, return_lse=return_lse, skip_tolerance=skip_tolerance, backend=backend,
            **heads_options,
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

    def reporting(self, x: Tensor) -> AbstractContextManager[OptionCheck | None]:
        """Context manager before `attend`: if this rank raises, the ranks waiting in `attend` raise too."""
        if not (dist.is_available() and dist.is_initialized()):
            return nullcontext()
        return OptionCheck(_checked_group(self.group), x)

    @torch.compiler.disable(reason="ContextParallel.token_before: torch.compile cannot trace its exchange")
    def token_before(self, k: Tensor, v: Tensor, check: OptionCheck) -> tuple[Tensor, Tensor]:
        """k and v of the token before this rank's slice, (B, 1, H_kv, ·); `check` comes from `reporting`."""
        slices = _checked_slices(k, v, self.lengths, check.group)
        kinds = tuple((len(x), *x.shape[2:], x.dtype, x.device.type) for x in (k, v))
        check.options = {
            "kv_shift": kinds, "lengths": slices.lengths, "requires_grad": torch.is_grad_enabled() and k.requires_grad,
        }
        check.compare()
        # a sum over no token is 0 with a graph: no rank is missing in the backward's exchange
        last = [x[:, -1:] if slices.length else x.sum(1, keepdim=True) for x in (k, v)]
        before = TokenBefore.apply(torch.cat([x.flatten(2) for x in last], 2), slices)
        check.restart()
        of_k, of_v = before.split([x[0, 0].numel() for x in last], 2)
        return of_k.view_as(last[0]), of_v.view_as(last[1])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | float | None, **options: Any) -> Tensor:
        """context_parallel_attention with these settings."""
        return context_parallel_attention(q, k, v, log_decay, **self._asdict(), **options)


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

    The arguments are those of context_parallel_attention. For each batch entry and key head, a rank receives this
    number of rows with D and D_v values and H / H_kv log-decays. The plan of "triton" gives the answer, so this needs a
    GPU or Triton's interpreter. Every rank of the group calls it.

    Returns:
        (ranks, B, H_kv) int64, the same on every rank.

    Raises:
        TypeError, ValueError: for every bad argument, by name, and if the Triton kernels cannot run.
    """
    with OptionCheck(_checked_group(group), q) as check:
        slices, problem, inputs, limits, check.options = _sliced(
            check, q, k, k, log_decay, scale, window_size, None, lengths, cu_seqlens, None, skip_tolerance,
            {"causal": True},
        )
        registry.select(problem, "triton")
        plan, _ = make_plan(slices, problem, inputs, limits, tolerance_share(problem), check)
        check.compare()  # a call without a plan has not compared them yet
    offsets = torch.tensor(slices.offsets[:-1], device=q.device)
    return offsets[:, None, None] - plan.begins.unflatten(1, (-1, plan.kv_heads))


def _sliced(
    check: OptionCheck, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | float | None,
    scale: Tensor | float | None, window_size: tuple[int, int] | None, sink: Tensor | None,
    lengths: Sequence[int] | None, cu_seqlens: Tensor | None, max_seqlen: int | None, skip_tolerance: SkipTolerance,
    only_heads: dict[str, Any],
) -> tuple[Slices, AttentionProblem, Inputs, ViewLimits, dict[str, Any]]:
    """Checked slices, this rank's part of the call, and the options that every call of a group compares."""
    dtensor.refuse(q=q, k=k, v=v, log_decay=log_decay, scale=scale, sink=sink, cu_seqlens=cu_seqlens, **only_heads)
    q, k, v = autocast(q, k, v)
    of_slices = {name: x for name, x in only_heads.items() if name != "bias"}  # a bias has all tokens
    check_arguments(
        q, k, v, log_decay, scale, window_size=window_size, sink=sink, skip_tolerance=skip_tolerance, **of_slices
    )
    causal = only_heads["causal"]
    if q.device.type not in check.device_types:
        raise ValueError(
            f"q: expected a device of the group's backend, {' or '.join(check.device_types)}, got {q.device}; move the "
            "tensors, or make a group with a backend for them: torch.distributed.new_group(backend=…)"
        )
    slices = _checked_slices(q, k, lengths, check.group)
    longest = _checked_longest(q, slices, cu_seqlens, max_seqlen)
    inputs, window = inputs_of(q, k, v, log_decay, scale, sink=sink), window_of(window_size, causal)
    problem, rates = problem_of(inputs, causal, window_size, skip_tolerance), inputs.log_decay
    options = {
        "lengths": slices.lengths,
        "q": (problem.device.type, problem.dtype, problem.batch, problem.num_heads, problem.head_dim),
        "k": (problem.num_kv_heads, problem.head_dim), "v": problem.value_dim,
        "log_decay": None if rates is None else (problem.decay, rates.shape[3:], rates.dtype),
        "scale": inputs.scale if inputs.row_scale is None else "one per row", "window_size": window,
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.shape[0], "max_seqlen": longest,
        "skip_tolerance": problem.skip_tolerance,
    }
    return slices, problem, inputs, ViewLimits(window[0], None, cu_seqlens, longest), options


def _checked_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("group: expected torch.distributed.init_process_group to have been called")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup or None, got {group!r}")
    return group


def _checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(lengths, Iterable) or isinstance(lengths, str):
        raise TypeError(f"lengths: expected a number of tokens for each rank, got {lengths!r}")
    return tuple(check_count("lengths", number) for number in lengths)


def _checked_slices(q: Tensor, k: Tensor, lengths: Sequence[int] | None, group: dist.ProcessGroup) -> Slices:
    rank, ranks, own = dist.get_rank(group), dist.get_world_size(group), q.shape[1]
    check_same("k", "sequence length of q", own, k.shape[1])
    found = (own,) * ranks if lengths is None else _checked_lengths(lengths)
    if len(found) != ranks or found[rank] != own:
        raise ValueError(
            f"lengths: expected the number of tokens of each of {ranks} ranks, with {own} for rank {rank}, got {found}"
        )
    return Slices(found, rank, weakref.ref(group))


def _checked_longest(q: Tensor, slices: Slices, cu_seqlens: Tensor | None, max_seqlen: int | None) -> int:
    """Upper bound on the lengths of packed sequences; the number of all tokens by default."""
    if cu_seqlens is not None:
        check_offsets("cu_seqlens", cu_seqlens, q)
        if q.shape[0] != 1:
            raise ValueError(f"q: expected shape (1, T, H, D) with cu_seqlens, got {tuple(q.shape)}")
    elif max_seqlen is not None:
        raise ValueError("max_seqlen: expected only with cu_seqlens")
    return sum(slices.lengths) if max_seqlen is None else check_count("max_seqlen", max_seqlen)


def _check_mode(mode: ModeName, reach: int | None, q: Tensor, slices: Slices, only_heads: dict, packed: bool) -> None:
    if mode not in ("halo", "heads"):
        raise ValueError(f"mode: expected 'halo' or 'heads', got {mode!r}")
    given = [name for name, x in only_heads.items() if name != "causal" and x is not None]
    if mode == "halo":
        if not only_heads["causal"]:
            raise ValueError("causal: expected True with mode='halo', which fetches earlier keys; 'heads' takes False")
        if given:
            raise ValueError(f"{given[0]}: expected None with mode='halo'; 'heads' takes it")
        return
    if reach is not None:
        raise ValueError("reach: expected only with mode='halo'")
    if q.shape[2] % slices.ranks:
        raise ValueError(
            f"mode: expected query heads in a multiple of the {slices.ranks} ranks with 'heads', got "
            f"{q.shape[2]}; 'halo' takes any number"
        )
    if packed and given:
        raise ValueError(f"{given[0]}: expected None with cu_seqlens")
