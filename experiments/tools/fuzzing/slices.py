"""Random calls in slices of tokens, one for each rank: drawn, run and joined."""

import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from shared.ranks import whole_attention
from torch import Tensor

from tools.fuzzing.draws import MOST_SCORES, Draw, draw
from tools.fuzzing.judge import run
from tools.fuzzing.tensors import Case, build


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
        own = replace(own, causal=True, bias="none", directions=1)
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
    attend = whole_attention(group, division.mode, division.lengths, division.reach)
    return case, run(case, backend, attend)


def _in_full(case: Case) -> Case:
    """Tensors that the ranks share in float32 or float64: each rounds its share of the gradient to that."""
    tensors, own = dict(case.tensors), torch.float64 if case.grad_out.dtype == torch.float64 else torch.float32
    for name in ("sink", "bias", *["scale"] * ("t" not in case.draw.scale_shape)):
        x = tensors[name]
        tensors[name] = x.to(own) if isinstance(x, Tensor) and x.is_floating_point() else x
    return replace(case, tensors=tensors)
