"""Context parallelism against one process: computations and comparisons of every rank of a group."""

import contextlib
import copy
import itertools
import math
import os
import weakref

import judged_calls
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from benchmarks.context import MODES
from benchmarks.harness import Case
from cached_layers import Rotary
from shared.ranks import whole_attention
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from decayattn import DecayFlashAttention, decay_attention, decay_attention_varlen
from decayattn.distributed import ContextParallel, collectives, context_parallel_attention, fetched_tokens, halo_plan
from decayattn.distributed.halo import Call
from decayattn.testing import verify_attention, verify_attention_varlen

if os.environ.get("TRITON_INTERPRET") == "1":
    import quick_interpreter

    quick_interpreter.hurry()

PER_TOKEN = ("q", "k", "v", "scale")


def make(
    seed=0, *, batch=2, length=300, heads=4, kv_heads=2, dim=16, value_dim=8, decay="gate", mean=-0.1, spread=1.0,
    resets=0.0, row_scale=False, sink=False, dtype=torch.float64, device="cpu",
):
    """decay_attention's tensors by name, and the gradients of out and lse; the same on every rank. spread: the last
    head's rates over those of the first."""
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
        is_gate = decay in ("gate", "directions")
        found["log_decay"] = rates * (2 * uniform if is_gate else normal(batch, length, heads))
        resetting = torch.rand(batch, length, heads, generator=generator) < resets
        found["log_decay"] = found["log_decay"].masked_fill(resetting, -math.inf)
        if decay == "directions":
            found["log_decay"] = torch.stack([found["log_decay"], found["log_decay"].flip(2) / 3], 3)
    if row_scale:
        found["scale"] = normal(batch, length, heads) * dim**-0.5
    if sink:
        found["sink"] = normal(heads)
    d_out, d_lse = normal(batch, length, heads, value_dim), normal(batch, heads, length)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = {name: x.to(device, dtype if name in ("q", "k", "v") else wide) for name, x in found.items()}
    return found, d_out.to(device, dtype), d_lse.to(device, wide)


def lengths_of(how, length, ranks):
    """T_r of every rank: equal, random cuts, or torch.chunk's, of which the last ones are shorter or empty."""
    if how == "equal":
        return [length // ranks] * ranks
    if how == "uneven":
        generator = torch.Generator().manual_seed(length)
        cuts = sorted(torch.randint(0, length + 1, (ranks - 1,), generator=generator).tolist())
        return [end - begin for begin, end in itertools.pairwise([0, *cuts, length])]
    each = -(-length // ranks)
    return [max(0, min(each, length - rank * each)) for rank in range(ranks)]


def part_of(name, x, mine):
    """This rank's part of one of decay_attention's tensors, or of a result or a gradient of one."""
    bare = name.removeprefix("d_")
    if bare == "lse":
        return x[:, :, mine]
    return x[:, mine] if bare in (*PER_TOKEN, "out") or (bare == "log_decay" and x.ndim > 1) else x


def own(group, inputs, lengths=None, needs_grad=False):
    """This rank's tensors of decay_attention, and its slice; all slices have the same length by default."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    lengths = lengths or [inputs["q"].shape[1] // ranks] * ranks
    mine = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    return {name: part_of(name, x, mine).clone().requires_grad_(needs_grad) for name, x in inputs.items()}, mine


def whole(inputs, d_out, d_lse, cu_seqlens=None, **options):
    """out, lse and every gradient in one process."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    options |= dict(return_lse=True, backend="reference")
    if cu_seqlens is None:
        out, lse = decay_attention(**leaves, **options)
    else:
        flat = {name: x.squeeze(0) if x.ndim > 2 else x for name, x in leaves.items()}
        longest = options.pop("max_seqlen", d_out.shape[1])
        out, lse = decay_attention_varlen(
            **flat, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest,
            **options,
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


def parallel(group, inputs, d_out, d_lse, lengths, **options):
    """The same of this rank's slice; the gradients of tensors that the ranks share are added up."""
    leaves, mine = own(group, inputs, lengths, needs_grad=True)
    out, lse = context_parallel_attention(**leaves, group=group, lengths=lengths, return_lse=True, **options)
    found = results(leaves, out, lse, d_out[:, mine], d_lse[:, :, mine])
    for name, x in found.items():
        if part_of(name, x, slice(0, 0)) is x:
            dist.all_reduce(x, group=group)
    return found, mine


def errors(found, expected, mine):
    """name → the largest difference, over the largest expected value."""
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
    """The errors of a mode's results on this rank against the whole in one process."""
    inputs, d_out, d_lse = make(**inputs)
    lengths = lengths_of(lengths, d_out.shape[1], dist.get_world_size(group))
    options = dict(options or {})
    if cu_seqlens is not None:
        cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32)
    shared = {name: x for name, x in options.items() if name not in ("reach", "skip_tolerance")}
    expected = whole(inputs, d_out, d_lse, cu_seqlens, **shared)
    found, mine = parallel(
        group, inputs, d_out, d_lse, lengths, mode=mode, cu_seqlens=cu_seqlens, backend=backend, **options
    )
    return errors(found, expected, mine)


def random_halo(group, *, seen=1.0, lengths="equal", **inputs):
    """`compare` with an unplanned halo: a random length for every rank, batch entry and key head. In one process a mask
    leaves out the keys that are not fetched. seen: the share of every slice's rows that see the halo."""
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
    rows = [int(seen * number) for number in lengths]
    is_far = row - begins[slice_of_row] >= torch.tensor(rows)[slice_of_row]
    first_of_row = torch.where(is_far[:, None, None], begins[slice_of_row][:, None, None], first_of_row)
    expected = whole(inputs, d_out, d_lse, bias=row >= first_of_row.permute(1, 2, 0)[..., None])
    with pytest.MonkeyPatch.context() as patch:
        found = torch.cat([first[rank].flatten(), torch.tensor([rows[rank]])])
        patch.setattr(halo_plan, "first_keys", lambda *_: (found, None))
        computed, mine = parallel(group, inputs, d_out, d_lse, lengths, backend="reference")
    return errors(computed, expected, mine)


def planned(group, *, lengths="equal", **inputs):
    """`compare` through the kernels, and the number of tokens that every rank fetches, (ranks, B, H_kv)."""
    worst = compare(group, "halo", lengths=lengths, backend="triton", **inputs)
    inputs, d_out, _ = make(**inputs)
    lengths = lengths_of(lengths, d_out.shape[1], dist.get_world_size(group))
    return worst, fetched(group, inputs, lengths=lengths).tolist()


def fetched(group, inputs, lengths=None, **options):
    """fetched_tokens of these tensors."""
    arguments, _ = own(group, {name: x for name, x in inputs.items() if name not in ("v", "sink")}, lengths)
    return fetched_tokens(**arguments, group=group, lengths=lengths, **options)


def calls(group, **case):
    """`compare`, and the rows of each call of attention in the slice's forward."""
    counted, forward = [], Call.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Call, "forward", lambda call, *x: counted.append(call.problem.query_length) or forward(call, *x))
        return compare(group, "halo", **case), counted


@contextlib.contextmanager
def recorded(group):
    """Collectives in their order: the number of values that a rank gathers, or the bytes that it sends to others."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    found, gather, exchange = [], getattr(dist, name), dist.all_to_all_single

    def exchanging(received, rows, receive, send, **options):
        bytes_of_row = rows[:1].nbytes if len(rows) else 0
        found.append(("bytes", (sum(send) - send[dist.get_rank(group)]) * bytes_of_row))
        return exchange(received, rows, receive, send, **options)

    def gathering(everyone, own, group):
        found.append(("values", own.numel()))
        return gather(everyone, own, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, name, gathering)
        patch.setattr(dist, "all_to_all_single", exchanging)
        yield found


def sent_bytes(group, mode, **options):
    """Bytes that a rank sends to others in each exchange of a forward and a backward."""
    inputs, d_out, d_lse = make(**options)
    with recorded(group) as found:
        lengths = lengths_of("equal", d_out.shape[1], dist.get_world_size(group))
        parallel(group, inputs, d_out, d_lse, lengths, mode=mode, backend="reference")
    return [number for kind, number in found if kind == "bytes"]


def collective_sizes(group, options, **inputs):
    """Collectives of a call in their order: the number of values that every rank gathers; 0 for an exchange."""
    with recorded(group) as found:
        call(group, options, **inputs)
    return [number if kind == "values" else 0 for kind, number in found]


def call(group, options=None, of_last_rank=None, *, length=24, **inputs):
    """A call with options. The last rank has other ones, or other tensors: shapes and dtypes by name."""
    options = dict(options or {})
    inputs, _, _ = make(length=length, device=options.pop("device", "cpu"), **inputs)
    arguments, _ = own(group, inputs)
    arguments |= options
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        arguments |= of_last_rank or {}
    # functions cannot be sent to other processes
    if isinstance(arguments.get("lengths"), str) and arguments["lengths"] == "halved":
        arguments |= {name: arguments[name][:, ::2] for name in ("q", "k", "v", "log_decay")} | {"lengths": None}
    arguments = {"group": group} | arguments
    if arguments.pop("mapped", False):
        torch.vmap(lambda q: context_parallel_attention(**arguments | {"q": q}))(arguments["q"][None])
    context_parallel_attention(**arguments)


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
        layer(x)  # the ranks are in step again
        raise


def run_out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("on one rank")


class Misplacing(torch.nn.Module):
    """A position module that gives one rank's keys another shape."""

    def forward(self, q, k, start):
        return q, k if int(start[0]) == 0 else k[:, :1]


def failing_call(group, where, options, **inputs):
    """A call in which a function of a module runs out of memory on the last rank."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == dist.get_world_size(group) - 1:
            patch.setattr(where, run_out_of_memory)
        try:
            call(group, options, **inputs)
        except Exception as error:
            found = error
    call(group, options, **inputs)  # the ranks are in step again
    raise found


def would_fetch(group, of_last_rank):
    """fetched_tokens; the last rank has other options."""
    inputs, _, _ = make(length=12, dtype=torch.float32)
    fetched(group, inputs, **of_last_rank if dist.get_rank(group) == dist.get_world_size(group) - 1 else {})


def pass_dtensor(group, name, **inputs):
    """A call in which one argument is a DTensor, on the last rank."""
    arguments, _ = own(group, make(length=24, batch=1, **inputs)[0])
    others = {"bias": torch.zeros(24, 24), "cu_seqlens": torch.tensor([0, 24])}
    mesh = DeviceMesh.from_group(group, "cpu")
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        x = arguments.get(name, others.get(name, torch.tensor([24])))
        arguments[name] = DTensor.from_local(x, mesh, [Shard(1) if name in PER_TOKEN else Replicate()])
    context_parallel_attention(**arguments, group=group, mode="heads", backend="reference")


def disagree_later(group, mode):
    """Calls with the same options and with others, which all ranks know; then one rank mixes them up."""
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
        leaves, mine = own(group, inputs, needs_grad=True)
        leaves = list(leaves.values())

        def attend(*leaves):
            return context_parallel_attention(*leaves, group=group, mode=mode).sin()

        if checkpoint:
            out = torch.utils.checkpoint.checkpoint(attend, *leaves, use_reentrant=reentrant)
        else:
            out = attend(*leaves)
        (out * d_out[:, mine]).sum().backward()
        found.append([x.grad for x in leaves])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def change_in_place(group):
    """A backward of two calls after a change of the forward's result in place."""
    leaves, _ = own(group, make(length=100)[0], needs_grad=True)
    out = context_parallel_attention(**leaves, group=group, backend="reference", window_size=(20, 0))
    out.mul_(2)
    out.sum().backward()


def differentiate_twice(group, mode):
    leaves, _ = own(group, make(length=8)[0], needs_grad=True)
    out = context_parallel_attention(**leaves, group=group, mode=mode, backend="reference")
    grads = torch.autograd.grad(out.square().sum(), leaves.values(), create_graph=True)
    sum(x.sum() for x in grads).backward()


def compiled(group, fullgraph):
    """The result of compiled code around a call, less that of eager code."""
    arguments, _ = own(group, make(length=8)[0])

    def model(q):
        return context_parallel_attention(**arguments | {"q": q * 2}, group=group).cos()

    q = arguments["q"]
    return float((torch.compile(model, backend="eager", fullgraph=fullgraph)(q) - model(q)).abs().max())


def layer_errors(group, mode, *, lengths="equal", packed=False, length=60, given=None, **options):
    """A layer with and without a context: the errors of y, of dx and of every parameter's gradient. given: shape of a
    log_decay, of "B", "T" and "H"."""
    torch.manual_seed(0)
    layer = DecayFlashAttention(
        32, 4, num_kv_heads=2, position=Rotary(), dtype=torch.float64, qk_norm=True, output_gate=True, **options
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


def is_group_freed(group, mode):
    """True if nothing holds a destroyed group after a backward, while its output lives."""
    own = dist.new_group()
    layer = DecayFlashAttention(64, 4)
    layer.context = ContextParallel(own, mode)
    y = layer(torch.randn(1, 40, 64))
    y.sum().backward()
    found = weakref.ref(own)
    dist.destroy_process_group(own)
    del own, layer
    return found() is None


def die(group):
    """The last rank ends without a word, while the others call."""
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        os._exit(0)
    call(group)


def lost(group, tolerance, *, options, **inputs):
    """The largest probability that a row of this rank loses, and the number of tokens that it fetches."""
    inputs, _, _ = make(**inputs)
    worst = _lost(group, inputs, options, tolerance)
    tokens = fetched(group, inputs, skip_tolerance=tolerance, **options)
    return worst, int(tokens[dist.get_rank(group)].max())


def lost_twice(group):
    """The largest probability that a row of the second of two ranks loses, over the tolerance. Its last rows see the
    keys of the first slice, and the first block of their own, with 0.6 of the tolerance each."""
    from decayattn.backends.planning import skipping  # imports Triton

    length, far, tolerance = 320, 128, 1e-6
    inputs, _, _ = make(batch=1, length=2 * length, heads=1, kv_heads=1)
    inputs["q"].zero_(), inputs["log_decay"].zero_()
    inputs["log_decay"][:, length] = math.log(far / length)
    inputs["log_decay"][:, length + far] = math.log(0.6 * tolerance / far)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skipping, "SHORTEST", 64)
        return _lost(group, inputs, {}, tolerance) / tolerance


def _lost(group, inputs, options, tolerance):
    """The largest probability that a row of this rank loses: its lse is that of the keys that are left."""
    d_out, (arguments, mine) = torch.zeros_like(inputs["q"][..., : inputs["v"].shape[3]]), own(group, inputs)
    options = dict(options)
    full = whole(inputs, d_out, torch.zeros(()), **options)["lse"][:, :, mine]
    options |= dict(skip_tolerance=tolerance, backend="triton", return_lse=True)
    _, lse = context_parallel_attention(**arguments, group=group, **options)
    return float((1 - (lse - full).exp()).max())


def equality(group, length, dtype):
    """Comparisons outside the error budget of one process, on this rank's device: out, lse and every gradient of a
    sequence over all ranks, by every kind of call, in both modes."""
    device, ranks, wrong = "cuda" if torch.cuda.is_available() else "cpu", dist.get_world_size(group), []
    lengths = [length // ranks] * (ranks - 1) + [length - length // ranks * (ranks - 1)]
    kinds = ("none", "scalar", "scalar, strong", "constant", "resets", "window", "packed")
    for kind, mode in itertools.product(kinds, MODES):
        decay, mean = "none" if kind == "none" else "scalar", -1.0 if kind == "scalar, strong" else -0.02
        inputs = Case(1, 4, length, 64, dtype, decay, mean, kv_heads=2).inputs(device, 0)
        options, verify = {"heads": [(0, 0), (0, 3)]}, verify_attention
        if kind == "constant":
            inputs["log_decay"] = torch.linspace(-0.5, 0.0, 4, device=device)
        elif kind == "resets":  # three per head, on average
            inputs["log_decay"].masked_fill_(inputs["log_decay"] > -0.04 * 3 / length, -math.inf)
        elif kind == "window":
            options["window_size"] = (length // 3, 0)
        elif kind == "packed":
            third, verify = length // 3, verify_attention_varlen
            offsets = torch.tensor([0, third, third, 2 * third + 5, length - 1], device=device, dtype=torch.int32)
            options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "heads": [(0, 0), (2, 3), (3, 1)]}
            inputs = {name: x[0] for name, x in inputs.items()}
        compared = verify(**inputs, attend=whole_attention(group, mode, lengths), backend="auto", **options)
        wrong += [f"{mode}, {kind}: {c}" for c in compared if not c.passed]
    return wrong


def fetched_on_gpus(group, mean):
    inputs, _, _ = make(length=4096, batch=1, dim=64, mean=mean, dtype=torch.bfloat16, device="cuda")
    return fetched(group, inputs).tolist()


def captured(group, mode, options, before=3):
    """The largest difference between a CUDA graph's results and a call's, on inputs that are newer than the graph.
    before: number of calls before the capture. Constants that calls made on the GPU are then freed, unlike the
    graph's."""
    torch.manual_seed(dist.get_rank(group))
    q, k, v = torch.randn(3, 1, 256, 4, 64, dtype=torch.bfloat16, device="cuda")
    log_decay = -torch.rand(1, 256, 4, device="cuda")

    def attend():
        return context_parallel_attention(q, k, v, log_decay, group=group, mode=mode, **options)

    graph, out = judged_calls.captured(attend, before)
    collectives._constant.cache_clear()
    others = [torch.full((64,), -1, dtype=torch.int64, device="cuda") for _ in range(64)]  # at their addresses
    q.normal_()
    k.normal_()
    graph.replay()
    del others
    return float((out - attend()).abs().max())
