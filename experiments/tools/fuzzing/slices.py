"""Random calls in slices of tokens, one for each rank: drawn, run and joined."""

import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from shared.poison import poisoned_allocations
from torch import Tensor

from decayattn.distributed import context_parallel_attention
from tools.fuzzing.draws import MOST_SCORES, Draw, draw
from tools.fuzzing.judge import differentiable, gradients, outputs
from tools.fuzzing.tensors import Case, build

# the axis of tokens, of what has one, in a dense call; one less in a packed one
_TOKENS = {"out": 1, "lse": 2, "q": 1, "k": 1, "v": 1, "log_decay": 1}


@dataclass(frozen=True)
class Division:
    """Slices of a call."""

    mode: str
    lengths: tuple[int, ...]
    reach: int | None


def draw_slices(
    seed: int, number: int, ranks: int, longest: int, bfloat16: bool, family: int
) -> tuple[Draw, Division]:
    """Call `number` of a run: draws.draw's, but for what context_parallel_attention does not take."""
    rng = random.Random(f"{seed}/slices/{number}/{ranks}")
    call = draw(seed, number, longest, bfloat16, family)
    own = call.family
    mode = rng.choice(("halo", "halo", "heads"))
    heads, kv_heads = own.heads or own.kv_heads, own.kv_heads
    if mode == "heads" and heads % ranks:
        heads, kv_heads = heads * ranks, kv_heads * rng.choice((1, ranks))
    own = replace(own, heads=heads, kv_heads=kv_heads)
    if own.layout == "padded" and (mode == "halo" or not call.batch):
        own, call = replace(own, layout="dense"), replace(call, padding={})
    if mode == "halo":
        own = replace(own, causal=True, bias="none")
    call = replace(call, family=own, before=call.before[:1] * 2, after=call.after[:1] * 2, batch=max(call.batch, 1))
    if own.layout == "packed":
        sequences = tuple((rows, rows) for rows, _ in call.sequences)
        call = replace(call, sequences=sequences, longest=(max(0, call.longest[0]),) * 2)
        tokens = max(0, call.before[0] + sum(rows for rows, _ in sequences) + call.after[0])
    else:
        # a halo has whole granules of 64 tokens: in short slices everything
        tokens = call.rows
        if rng.random() < 0.5:
            most = math.isqrt(MOST_SCORES // (call.batch * own.heads))
            tokens = min(rng.randrange(longest // 2, longest + 1), most)
        call = replace(call, resets=call.resets if rng.random() < 0.5 else 0.0)
    if own.dtype == "float16":
        # gradients below its normal numbers: the roundings of several ranks' shares are more than the budget of a whole
        scale = 1e-2 if 0 < abs(call.scale) < 1e-2 else call.scale
        sizes = {name: max(1.0, getattr(call, name)) for name in ("query_size", "value_size", "gradient_size")}
        call = replace(call, scale=scale, **sizes)
    if own.bias == "none":
        call = replace(call, bias_shape="", bias_size=0.0, bias_hidden=0.0)
    call = replace(call, rows=tokens, keys=tokens)
    left = -1 if call.window is None else call.window[0]
    reach = left + rng.choice((0, 1, 50)) if mode == "halo" and 0 <= left <= longest and rng.random() < 0.5 else None
    return call, Division(mode, _cut(rng, tokens, ranks), reach)


def _cut(rng: random.Random, tokens: int, ranks: int) -> tuple[int, ...]:
    """Lengths of slices: equal where that is possible, or any; some are empty."""
    if tokens % ranks == 0 and rng.random() < 0.4:
        return (tokens // ranks,) * ranks
    cuts = sorted(rng.choice((0, tokens, *[rng.randrange(tokens + 1)] * 6)) for _ in range(ranks - 1))
    return tuple(end - begin for begin, end in pairwise((0, *cuts, tokens)))


def run_slices(
    call: Draw, division: Division, group: dist.ProcessGroup, device: torch.device, backend: str
) -> tuple[Case, dict[str, Tensor]]:
    """The whole call, and what the ranks' slices give of it, put together; on every rank of the group."""
    case = _in_full(build(call, device))
    results = _run(case, division, group, backend)
    return case, {name: x if whole is None else _joined(x, whole, group) for name, (x, whole) in results.items()}


def _in_full(case: Case) -> Case:
    """Tensors that the ranks share in float32 or float64: each rounds its share of the gradient to that."""
    tensors, own = dict(case.tensors), torch.float64 if case.grad_out.dtype == torch.float64 else torch.float32
    for name in ("sink", "bias", *["scale"] * ("t" not in case.draw.scale_shape)):
        x = tensors[name]
        tensors[name] = x.to(own) if isinstance(x, Tensor) and x.is_floating_point() else x
    return replace(case, tensors=tensors)


def _run(
    case: Case, division: Division, group: dist.ProcessGroup, backend: str
) -> dict[str, tuple[Tensor, int | None]]:
    """This rank's results and gradients, each with the axis along which the ranks' are parts of the whole; None for a
    sum over the ranks."""
    rank, lengths = dist.get_rank(group), division.lengths
    mine = sum(lengths[:rank]), lengths[rank]
    axes = {name: axis - case.packed for name, axis in _TOKENS.items()}
    if case.draw.family.decay != "token":
        del axes["log_decay"]
    if "t" in case.draw.scale_shape:
        axes["scale"] = case.draw.scale_shape.index("t")

    def own(name: str, x: Any) -> Any:
        return x.narrow(axes[name], *mine) if isinstance(x, Tensor) and name in axes else x

    mine_of_each = {name: own(name, x) for name, x in case.tensors.items()}
    inputs, leaves = differentiable(mine_of_each, case.draw.family.needs_grad)
    options, given = dict(case.options), dict(inputs)
    if case.packed:
        given |= {name: x[None] for name, x in inputs.items() if name in axes and name != "scale"}
        if isinstance(inputs["scale"], Tensor) and inputs["scale"].ndim == 2:
            given["scale"] = inputs["scale"][None]
        options["cu_seqlens"], options["max_seqlen"] = options.pop("cu_seqlens_q"), options.pop("max_seqlen_q")
        del options["cu_seqlens_k"], options["max_seqlen_k"]
    with poisoned_allocations():
        returned = context_parallel_attention(
            **given, **options, group=group, mode=division.mode, lengths=lengths, reach=division.reach, backend=backend
        )
        found = outputs(returned, options["return_lse"])
        if case.packed:
            found = {name: x[0] for name, x in found.items()}
        grad_lse = None if case.grad_lse is None else own("lse", case.grad_lse)
        found |= gradients(found, leaves, own("out", case.grad_out), grad_lse)
    results: dict[str, tuple[Tensor, int | None]] = {}
    for name, x in found.items():
        axis = axes.get(name.removeprefix("d") if name.startswith("d") else name)
        x = x.detach().contiguous()
        if axis is None:
            dist.all_reduce(x, group=group)
        results[name] = x, axis
    return results


def _joined(part: Tensor, axis: int, group: dist.ProcessGroup) -> Tensor:
    """The ranks' parts, in the order of the ranks."""
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, part.cpu(), group=group)
    return torch.cat(parts, axis).to(part.device)
