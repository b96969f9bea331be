"""Context parallelism against one process: what every rank of a group computes and compares."""

import contextlib
import copy
import functools
import itertools
import math
import os

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from benchmarks import context
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from decayattn import DecayFlashAttention, compatibility, decay_attention, decay_attention_varlen
from decayattn.distributed import (
    ContextParallel,
    context_parallel_attention,
    exchange,
    fetched_tokens,
    fetching,
    local,
)

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


def random_halo(group, *, hides=True, seen=1.0, lengths="equal", **inputs):
    """`compare` with a halo of a random length for every rank, batch entry and key head, which nobody has planned.

    In one process a mask leaves out what is not fetched. hides=False: nothing hides the zeros of shorter heads. seen:
    the share of every slice's rows that see the halo.
    """
    inputs, d_out, d_lse = make(**inputs)
    rank, ranks, length = dist.get_rank(group), dist.get_world_size(group), d_out.shape[1]
    lengths = lengths_of(lengths, length, ranks)
    shape = ranks, d_out.shape[0], inputs["k"].shape[2]
    share = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    share[:, 0, 0] = torch.tensor([0.0, 1.0] * ranks)[:ranks]  # one fetches everything, and one nothing
    begins = torch.tensor([sum(lengths[:r]) for r in range(ranks)])
    first = (share * begins[:, None, None]).round().long()
    row = torch.arange(length)
    slice_of_row = torch.repeat_interleave(torch.arange(ranks), torch.tensor(lengths))
    first_of_row = first[slice_of_row].repeat_interleave(d_out.shape[2] // shape[2], 2)  # (T, B, H)
    rows = [int(seen * own) for own in lengths]
    is_far = row - begins[slice_of_row] >= torch.tensor(rows)[slice_of_row]
    first_of_row = torch.where(is_far[:, None, None], begins[slice_of_row][:, None, None], first_of_row)
    expected = whole(
        inputs, d_out, d_lse, backend="reference", bias=row >= first_of_row.permute(1, 2, 0)[..., None],
    )
    with pytest.MonkeyPatch.context() as patch:
        found = torch.cat([first[rank].flatten(), torch.tensor([rows[rank]])])
        patch.setattr(fetching, "first_keys", lambda *_: (found, None))
        if not hides:
            patch.setattr(fetching.Fetch, "cut", property(lambda self: torch.zeros_like(self.first[0])))
        computed, mine = parallel(group, inputs, d_out, d_lse, lengths, backend="reference")
    return errors(computed, expected, mine)


def planned(group, *, lengths="equal", options=None, backend="triton", **inputs):
    """`compare` through the kernels, and how many tokens every rank fetches: (ranks, B, H_kv), and all that there are.
    """
    worst = compare(group, "halo", lengths=lengths, options=options, backend=backend, **inputs)
    inputs, d_out, _ = make(**inputs)
    rank = dist.get_rank(group)
    lengths = lengths_of(lengths, d_out.shape[1], dist.get_world_size(group))
    mine = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    names = ("q", "k", "log_decay", "scale")
    own = {name: part_of(name, x, mine) for name, x in inputs.items() if name in names}
    return worst, fetched_tokens(**own, group=group, lengths=lengths, **options or {}).tolist()


@contextlib.contextmanager
def counted_calls():
    """Count the rows of each call of attention in the forwards of slices."""
    counted, forward = [], local.Call.forward

    def counting(call, *args):
        counted.append(call.problem.query_length)
        return forward(call, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.Call, "forward", counting)
        yield counted


def calls(group, **case):
    """`compare`, and how many calls of attention a slice is in its forward."""
    with counted_calls() as counted:
        return compare(group, "halo", **case), counted


def changed_in_place(group, length, **options):
    """Error of a backward after a change of the forward's result in place."""
    inputs, _, _ = make(length=length)
    part, rank = length // dist.get_world_size(group), dist.get_rank(group)
    leaves = {name: part_of(name, x, slice(rank * part, (rank + 1) * part)) for name, x in inputs.items()}
    leaves = {name: x.clone().requires_grad_() if torch.is_tensor(x) else x for name, x in leaves.items()}
    out = context_parallel_attention(**leaves, group=group, backend="reference", **options)
    out.mul_(2)
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def sent_bytes(group, mode, **options):
    """Bytes that a rank passes to all_to_all_single in a forward and a backward, in the order of the calls."""
    inputs, d_out, d_lse = make(**options)
    counted, exchange = [], dist.all_to_all_single

    def counting(received, rows, receive, send, group, **options):
        rank = dist.get_rank(group)
        counted.append((sum(send) - send[rank]) * rows[:1].nbytes if len(rows) else 0)
        return exchange(received, rows, receive, send, group=group, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        lengths = lengths_of("equal", d_out.shape[1], dist.get_world_size(group))
        parallel(group, inputs, d_out, d_lse, lengths, mode=mode, backend="reference")
    return counted


def call(group, options=None, of_last_rank=None, *, length=24, **inputs):
    """A call with options, of which the last rank has others, or other tensors: shapes and dtypes by name."""
    options = dict(options or {})
    inputs, _, _ = make(length=length, device=options.pop("device", "cpu"), **inputs)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    part = length // ranks
    arguments = {name: part_of(name, x, slice(rank * part, (rank + 1) * part)) for name, x in inputs.items()}
    arguments |= options
    if rank == ranks - 1:
        arguments |= of_last_rank or {}
    # functions have no way to other processes
    if isinstance(arguments.get("lengths"), str) and arguments["lengths"] == "halved":
        arguments |= {name: arguments[name][:, ::2] for name in ("q", "k", "v", "log_decay")} | {"lengths": None}
    if arguments["log_decay"] is not None and isinstance(arguments["log_decay"], str):
        arguments["log_decay"] = inputs["log_decay"][:, :part].half()
    if isinstance(arguments["k"], str):
        arguments |= {name: inputs[name][:, : part // 2] for name in ("k", "v")} | {"log_decay": -0.1}
    call = functools.partial(context_parallel_attention, group=group)
    if arguments.pop("mapped", False):
        torch.vmap(lambda q: call(**arguments | {"q": q}))(arguments["q"][None])
    call(**arguments)


class Unreadable:
    """No number, and no other argument."""

    def __repr__(self):
        return str(1 // 0)


def layer_call(group, of_last_rank, **options):
    """A layer's call, which on the last rank has another x, other options, or a module that raises."""
    changed = of_last_rank if dist.get_rank(group) == dist.get_world_size(group) - 1 else {}
    layer = DecayFlashAttention(16, 4, **options)
    layer.context, x = ContextParallel(group), torch.zeros(1, 4, 16)
    bad = copy.deepcopy(layer)
    bad.context = ContextParallel(group, lengths=changed.get("lengths"))
    if "raises" in changed:
        getattr(bad, changed["raises"]).register_forward_pre_hook(run_out_of_memory)
    if "log_scale" in changed:
        bad.log_scale = torch.nn.Parameter(changed["log_scale"])
    try:
        bad(changed.get("x", x), **{name: changed[name] for name in ("resets", "attn_mask") if name in changed})
    except Exception:
        layer(x)  # the ranks have met once
        raise


def run_out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("on one rank")


class Misplacing(torch.nn.Module):
    """A position module that gives one rank's keys another shape."""

    def forward(self, q, k, start):
        return q, k if int(start[0]) == 0 else k[:, :1]


class WithoutStart(torch.nn.Module):
    """A position module for layers without a context, on the last rank."""

    def forward(self, q, k, **start):
        return (q, k) if dist.get_rank() == 0 else self.turn(q, k, **start)

    def turn(self, q, k):
        return q, k


def failing_call(group, where, options, **inputs):
    """A call in which a function of a module runs out of memory on the last rank."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == dist.get_world_size(group) - 1:
            patch.setattr(where, run_out_of_memory)
        try:
            call(group, options, **inputs)
        except Exception as error:
            found = error
    call(group, options, **inputs)  # the ranks have met once
    raise found


def would_fetch(group, of_last_rank):
    """fetched_tokens, of which the last rank has other options."""
    inputs, _, _ = make(length=12, dtype=torch.float32)
    arguments = {name: inputs[name] for name in ("q", "k", "log_decay")}
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        arguments |= of_last_rank
    fetched_tokens(**arguments, group=group)


def distributed(group, name, **inputs):
    """A call in which one argument is a DTensor, on the last rank."""
    inputs, _, _ = make(length=24, batch=1, **inputs)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    part = 24 // ranks
    arguments = {of: part_of(of, x, slice(rank * part, (rank + 1) * part)) for of, x in inputs.items()}
    others = {"bias": torch.zeros(24, 24), "cu_seqlens": torch.tensor([0, 24])}
    mesh = DeviceMesh.from_group(group, "cpu")
    if rank == ranks - 1:
        x = arguments.get(name, others.get(name, torch.tensor([24])))
        arguments[name] = DTensor.from_local(x, mesh, [Shard(1) if name in PER_TOKEN else Replicate()])
    context_parallel_attention(**arguments, group=group, mode="heads", backend="reference")


def collectives(group, options, **inputs):
    """Collectives of a call in their order: the length of every rank's part; 0 for an exchange."""
    found, gather, exchange = [], compatibility.all_gather, dist.all_to_all_single
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compatibility, "all_gather", lambda *args: found.append(args[1].numel()) or gather(*args))
        patch.setattr(dist, "all_to_all_single", lambda *args, **kw: found.append(0) or exchange(*args, **kw))
        call(group, options, **inputs)
    return found


def twice(group, mode):
    """Calls with the same options, and with others, which ranks that know both do not agree on in the end."""
    call(group, {"mode": mode})
    call(group, {"mode": mode, "scale": 0.5})
    with pytest.raises(ValueError, match="scale: expected the same"):
        call(group, {"mode": mode}, {"scale": 0.5})
    call(group, {"mode": mode})


def checkpointed(group, mode, reentrant):
    """Gradients with and without activation checkpointing, bit by bit."""
    found = []
    for checkpoint in (False, True):
        inputs, d_out, _ = make(length=64, resets=0.02)
        rank, part = dist.get_rank(group), 64 // dist.get_world_size(group)
        mine = slice(rank * part, (rank + 1) * part)
        leaves = [x[:, mine].clone().requires_grad_() for x in inputs.values()]

        def attend(*leaves):
            return context_parallel_attention(*leaves, group=group, mode=mode).sin()

        if checkpoint:
            out = torch.utils.checkpoint.checkpoint(attend, *leaves, use_reentrant=reentrant)
        else:
            out = attend(*leaves)
        found.append(torch.autograd.grad((out * d_out[:, mine]).sum(), leaves) if not reentrant else None)
        if reentrant:
            (out * d_out[:, mine]).sum().backward()
            found[-1] = [x.grad for x in leaves]
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def differentiate_twice(group, mode):
    inputs, _, _ = make(length=8)
    rank, part = dist.get_rank(group), 8 // dist.get_world_size(group)
    leaves = [x[:, rank * part : (rank + 1) * part].clone().requires_grad_() for x in inputs.values()]
    out = context_parallel_attention(*leaves, group=group, mode=mode, backend="reference")
    grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    sum(x.sum() for x in grads).backward()


def compiled(group, fullgraph):
    """The result of compiled code around a call, less that of eager code."""
    inputs, _, _ = make(length=8)
    rank, part = dist.get_rank(group), 8 // dist.get_world_size(group)
    q, k, v, log_decay = (x[:, rank * part : (rank + 1) * part].clone() for x in inputs.values())

    def model(q):
        return context_parallel_attention(q * 2, k, v, log_decay, group=group).cos()

    return float((torch.compile(model, backend="eager", fullgraph=fullgraph)(q) - model(q)).abs().max())


def of_the_first_layer(group, mode, *, lengths="equal", packed=False, length=60, given=None, **options):
    """A layer with and without a context: the errors of y, of dx and of every parameter's gradient.

    given: shape of a log_decay, of "B", "T" and "H".
    """
    torch.manual_seed(0)
    layer = DecayFlashAttention(
        32, 4, num_kv_heads=2, position=Turn(), dtype=torch.float64, qk_norm=True, output_gate=True, **options
    )
    x, d_y = torch.randn(2, 1 if packed else 2, length, 32, dtype=torch.float64)
    rank = dist.get_rank(group)
    lengths = lengths_of(lengths, length, dist.get_world_size(group))
    mine = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    per_token = options.get("decay", "scalar") == "scalar" if given is None else len(given) == 3
    sizes = {"B": len(x), "T": length, "H": 4}
    log_decay = None if given is None else -torch.rand([sizes[axis] for axis in given], dtype=torch.float64)
    resets = torch.rand(x.shape[:2]) < 0.05 if per_token else None
    cu_seqlens = torch.tensor([0, 20, 47]) if packed else None

    def run(x, d_y, resets, log_decay):
        x = x.clone().requires_grad_()
        rates = None if log_decay is None else log_decay.clone().requires_grad_()
        layer.zero_grad()
        y = layer(x, resets=resets, cu_seqlens=cu_seqlens, log_decay=rates)
        (y * d_y).sum().backward()
        found = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
        found |= {} if rates is None else {"rates" if rates.ndim == 1 else "log_decay": rates.grad}
        return {"y": y.detach(), "dx": x.grad} | found

    of_tokens = {"y", "dx", "log_decay"}
    expected = run(x, d_y, resets, log_decay)
    expected = {name: x[:, mine] if name in of_tokens else x for name, x in expected.items()}
    layer.context = ContextParallel(group, mode, lengths)
    layer = copy.deepcopy(layer)
    log_decay = log_decay[:, mine] if given is not None and per_token else log_decay
    found = run(x[:, mine], d_y[:, mine], None if resets is None else resets[:, mine], log_decay)
    for name, grad in found.items():
        if name not in of_tokens:
            dist.all_reduce(grad, group=group)
    return {name: float((x - expected[name]).abs().max()) if x.numel() else 0.0 for name, x in found.items()}


class Turn(torch.nn.Module):
    """Rotary positions of two columns, which only a slice that knows where it begins gets right."""

    def forward(self, q, k, start=0):
        start = torch.as_tensor(start)
        angle = (start.expand(len(q))[:, None] + torch.arange(q.shape[1]))[..., None] * 0.3
        sine, cosine = angle.sin(), angle.cos()

        def turned(x):
            a, b = x[..., 0].double(), x[..., 1].double()
            return torch.cat([torch.stack([a * cosine - b * sine, a * sine + b * cosine], -1), x[..., 2:]], -1)

        return turned(q), turned(k)


def die(group):
    """The last rank ends without a word, while the others call."""
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        os._exit(0)
    call(group)


def lost(group, tolerance, *, options, **inputs):
    """The largest probability that a row of this rank loses, and how many tokens it fetches.

    lse is that of the keys that are left.
    """
    inputs, _, _ = make(**inputs)
    rank, part = dist.get_rank(group), inputs["q"].shape[1] // dist.get_world_size(group)
    own = {name: x[:, rank * part : (rank + 1) * part] for name, x in inputs.items()}
    full = whole_lse(inputs, options)[:, :, rank * part : (rank + 1) * part]
    _, lse = context_parallel_attention(
        **own, group=group, skip_tolerance=tolerance, backend="triton", return_lse=True, **options
    )
    tokens = fetched_tokens(
        **{name: own[name] for name in ("q", "k", "log_decay")}, group=group, skip_tolerance=tolerance, **options
    )
    return float((1 - (lse - full).exp()).max()), int(tokens[rank].max())


def lost_twice(group):
    """The largest probability that a row of the second of two ranks loses, over the tolerance.

    Its last rows see the keys of the first slice, and the first block of their own, with 0.6 of the tolerance each.
    """
    from decayattn.backends.planning import skipping  # imports Triton

    length, far, tolerance = 320, 128, 1e-6
    inputs, _, _ = make(batch=1, length=2 * length, heads=1, kv_heads=1)
    inputs["q"].zero_(), inputs["log_decay"].zero_()
    inputs["log_decay"][:, length] = math.log(far / length)
    inputs["log_decay"][:, length + far] = math.log(0.6 * tolerance / far)
    rank = dist.get_rank(group)
    own = {name: x[:, rank * length : (rank + 1) * length] for name, x in inputs.items()}
    full = whole_lse(inputs, {})[:, :, rank * length : (rank + 1) * length]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skipping, "SHORTEST", 64)
        options = dict(skip_tolerance=tolerance, backend="triton", return_lse=True)
        _, lse = context_parallel_attention(**own, group=group, **options)
    return float((1 - (lse - full).exp()).max()) / tolerance


def whole_lse(inputs, options):
    """lse in one process, nothing skipped."""
    d_out, d_lse = torch.zeros_like(inputs["q"][..., : inputs["v"].shape[3]]), torch.zeros(())
    return whole(inputs, d_out, d_lse, backend="reference", **options)["lse"]


def equality(group, length, dtype):
    """Comparisons outside the error budget on this rank's device, in both modes."""
    wrong = []
    for mode, case, comparisons in context.equality(group, length, 4, 2, 64, dtype, "auto", 0):
        wrong += [f"{mode}, {case}: {c}" for c in comparisons if not c.passed]
    return wrong


def fetched_on_gpus(group, mean):
    inputs, _, _ = make(length=4096, batch=1, dim=64, mean=mean, dtype=torch.bfloat16, device="cuda")
    rank, part = dist.get_rank(group), 4096 // dist.get_world_size(group)
    own = {name: inputs[name][:, rank * part : (rank + 1) * part] for name in ("q", "k", "log_decay")}
    return fetched_tokens(**own, group=group).tolist()


def captured(group, mode, options, before=3):
    """The largest difference between a CUDA graph's results and a call's, on inputs that came after the capture; so
    many calls were before it. Constants that were made on the GPU for calls are not kept beside those of the graph."""
    torch.manual_seed(dist.get_rank(group))
    q, k, v = torch.randn(3, 1, 256, 4, 64, dtype=torch.bfloat16, device="cuda")
    log_decay = -torch.rand(1, 256, 4, device="cuda")

    def attend():
        return context_parallel_attention(q, k, v, log_decay, group=group, mode=mode, **options)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(before):
            attend()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    exchange._kept.cache_clear()
    others = [torch.full((64,), -1, dtype=torch.int64, device="cuda") for _ in range(64)]  # where they were
    q.normal_()
    k.normal_()
    graph.replay()
    del others
    return float((out - attend()).abs().max())
