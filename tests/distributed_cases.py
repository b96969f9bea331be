"""Context parallelism against one process: what every rank of a group computes and compares."""

import itertools
import math
import os

import torch
import torch.distributed as dist

from decayattn import decay_attention, decay_attention_varlen
from decayattn.distributed import context_parallel_attention

if os.environ.get("TRITON_INTERPRET") == "1":
    import quick_interpreter

    quick_interpreter.hurry()

PER_TOKEN = ("q", "k", "v", "scale")


def make(
    seed=0, *, batch=2, length=300, heads=4, kv_heads=2, dim=16, value_dim=8, decay="gate", mean=-0.1, spread=1.0,
    resets=0.0, row_scale=False, sink=False, dtype=torch.float64, device="cpu",
):
    """decay_attention's tensors by name, and the gradients of out and lse; the same on every rank.

    spread: the last head's rates over those of the first.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    found = {
        "q": normal(batch, length, heads, dim),
        "k": normal(batch, length, kv_heads, dim),
        "v": normal(batch, length, kv_heads, value_dim),
    }
    rates = mean * torch.logspace(0, math.log10(spread), heads, dtype=torch.float64)
    uniform = torch.rand(batch, length, heads, generator=generator, dtype=torch.float64)
    if decay == "constant":
        found["log_decay"] = rates
    elif decay != "none":
        found["log_decay"] = rates * (2 * uniform if decay == "gate" else normal(batch, length, heads))
        resetting = torch.rand(batch, length, heads, generator=generator) < resets
        found["log_decay"] = found["log_decay"].masked_fill(resetting, -math.inf)
    if row_scale:
        found["scale"] = normal(batch, length, heads) * dim**-0.5
    if sink:
        found["sink"] = normal(heads)
    d_out, d_lse = normal(batch, length, heads, value_dim), normal(batch, heads, length)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dtypes = {"q": dtype, "k": dtype, "v": dtype}
    found = {name: x.to(device, dtypes.get(name, wide)) for name, x in found.items()}
    return found, d_out.to(device, dtype), d_lse.to(device, wide)


def lengths_of(how, length, ranks):
    """T_r of every rank: equal, random cuts, or torch.chunk's, whose last ones are shorter or empty."""
    if how == "equal":
        return [length // ranks] * ranks
    if how == "uneven":
        generator = torch.Generator().manual_seed(length)
        cuts = sorted(torch.randint(0, length + 1, (ranks - 1,), generator=generator).tolist())
        return [end - begin for begin, end in itertools.pairwise([0, *cuts, length])]
    each = -(-length // ranks)
    return [max(0, min(each, length - rank * each)) for rank in range(ranks)]


def whole(inputs, d_out, d_lse, cu_seqlens=None, **options):
    """out, lse and every gradient in one process."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    if cu_seqlens is None:
        out, lse = decay_attention(**leaves, return_lse=True, **options)
    else:
        flat = {name: x.squeeze(0) if x.ndim > 2 else x for name, x in leaves.items()}
        longest = d_out.shape[1]
        out, lse = decay_attention_varlen(
            **flat, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest,
            return_lse=True, **options,
        )
        out, lse = out[None], lse[None]
    return results(leaves, out, lse, d_out, d_lse)


def results(leaves, out, lse, d_out, d_lse):
    """out, lse and the gradients of the leaves by name. A row that sees nothing has lse −inf, which no loss takes."""
    seen = torch.isfinite(lse)
    loss = (out * d_out).sum() + torch.where(seen, lse * d_lse, 0.0).sum()
    loss.backward()
    found = {"out": out.detach(), "lse": torch.where(seen, lse.detach(), -1e3)}
    return found | {f"d_{name}": x.grad for name, x in leaves.items()}


def part_of(name, x, mine):
    """This rank's part of one of decay_attention's tensors, or of a result or a gradient of one."""
    bare = name.removeprefix("d_")
    if bare == "lse":
        return x[:, :, mine]
    return x[:, mine] if bare in (*PER_TOKEN, "out") or (bare == "log_decay" and x.ndim == 3) else x


def parallel(group, inputs, d_out, d_lse, lengths, **options):
    """The same of this rank's slice; the gradients of what the ranks share are added up."""
    rank = dist.get_rank(group)
    mine = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    leaves = {name: part_of(name, x, mine).detach().clone().requires_grad_() for name, x in inputs.items()}
    out, lse = context_parallel_attention(**leaves, group=group, lengths=lengths, return_lse=True, **options)
    found = results(leaves, out, lse, d_out[:, mine], d_lse[:, :, mine])
    for name, x in found.items():
        if part_of(name, x, slice(0, 0)) is x:
            dist.all_reduce(x, group=group)
    return found, mine


def errors(found, expected, mine):
    """name → the largest difference, over the largest number of what is expected."""
    worst = {}
    for name, x in found.items():
        theirs = part_of(name, expected[name], mine)
        assert x.shape == theirs.shape, f"{name}: {tuple(x.shape)} for {tuple(theirs.shape)}"
        difference = (x.double() - theirs.double()).abs()
        size = max(1.0, float(expected[name].double().abs().max())) if expected[name].numel() else 1.0
        worst[name] = float(difference.max()) / size if difference.numel() else 0.0
        if bool(difference.isnan().any()):
            worst[name] = math.inf
    return worst


def compare(group, mode, *, lengths="equal", cu_seqlens=None, options=None, backend="reference", **inputs):
    """The errors of both modes' results on this rank against the whole in one process."""
    inputs, d_out, d_lse = make(**inputs)
    lengths = lengths_of(lengths, d_out.shape[1], dist.get_world_size(group))
    options = dict(options or {})
    if cu_seqlens is not None:
        cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32)
    ours = ("reach", "skip_tolerance")
    expected = whole(
        inputs, d_out, d_lse, cu_seqlens, backend="reference",
        **{name: x for name, x in options.items() if name not in ours},
    )
    found, mine = parallel(
        group, inputs, d_out, d_lse, lengths, mode=mode, cu_seqlens=cu_seqlens, backend=backend, **options
    )
    return errors(found, expected, mine)
