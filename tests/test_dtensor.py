"""decay_attention of DTensors: equal to one process, every gradient included, or refused by name. Two ranks."""

import itertools
import re

import pytest
import torch
from distributed_pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from decayattn import decay_attention, decay_attention_varlen

B, T, H, H_KV, D = 2, 24, 4, 2, 8
SPLITS = {"batch": 0, "heads": 2}  # axes of q, k, v and out
DECAYS = {
    "none": lambda: None,
    "number": lambda: -0.1,
    "0-d": lambda: torch.tensor(-0.1, dtype=torch.float64),
    "constant": lambda: -torch.rand(H, dtype=torch.float64),
    "scalar": lambda: -torch.rand(B, T, H, dtype=torch.float64),
    "directions": lambda: -torch.rand(B, T, H, 2, dtype=torch.float64),
    "one for all heads": lambda: -torch.rand(B, T, 1, dtype=torch.float64),
    "one for the batch": lambda: -torch.rand(1, T, H, dtype=torch.float64),
}


def tensors(decay: str) -> dict:
    generate = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    return {
        "q": generate(B, T, H, D), "k": generate(B, T, H_KV, D), "v": generate(B, T, H_KV, D),
        "log_decay": DECAYS[decay](), "sink": generate(H), "scale": generate(T, H), "bias": generate(1, H, T, T),
    }


def placements_of(name: str, value: torch.Tensor, split: str) -> list:
    """Placements by the split of q: sharded if the tensor has that axis, or replicated if it must be split."""
    if split == "batch":
        axis = 0 if name in ("q", "k", "v") or (name == "log_decay" and value.ndim > 1) else None
    else:
        axis = {"bias": 1, "q": 2, "k": 2, "v": 2}.get(name, min(value.ndim - 1, 2))
    if axis is None or value.ndim == 0 or value.shape[axis] == 1 or name == "scale":  # scale is cut up
        return [Replicate()]
    return [Shard(axis)]


def assert_close(pairs: list[tuple[torch.Tensor, torch.Tensor]], bound: float = 1e-12) -> None:
    """DTensors against tensors of one process."""
    for ours, theirs in pairs:
        assert not any(placement.is_partial() for placement in ours.placements)
        assert (ours.full_tensor() - theirs).detach().abs().max() < bound


@on_ranks
@pytest.mark.parametrize(("split", "decay"), [*itertools.product(SPLITS, DECAYS)])
def test_results_and_gradients_equal_one_process(device, split, decay):
    mesh = init_device_mesh(device, (2,))
    plain = {
        name: x.to(device).requires_grad_() if isinstance(x, torch.Tensor) else x for name, x in tensors(decay).items()
    }
    given = {
        name: distribute_tensor(x.detach(), mesh, placements_of(name, x, split)).requires_grad_()
        if isinstance(x, torch.Tensor) else x
        for name, x in plain.items()
    }
    weights = [torch.randn(*shape, dtype=torch.float64).to(device) for shape in ((B, T, H, D), (B, H, T))]
    sharded = [(Shard(SPLITS[split]),), (Shard(0 if split == "batch" else 1),)]
    results = []
    for inputs in (plain, given):
        options = dict(causal=decay != "directions", backend="reference")
        found = decay_attention(**inputs, return_lse=decay != "none", **options)
        results.append(found if isinstance(found, tuple) else (found,))
        whole = [x.full_tensor() if inputs is given else x for x in results[-1]]
        sum((x * w).sum() for x, w in zip(whole, weights, strict=False)).backward()
    assert [x.placements for x in results[1]] == sharded[: len(results[1])]
    leaves = [name for name, x in plain.items() if isinstance(x, torch.Tensor)]
    gradients = [(given[name].grad, plain[name].grad) for name in leaves]
    assert_close([*zip(*reversed(results), strict=True), *gradients])


@on_ranks
def test_packed_sequences_are_divided_by_heads(device):
    mesh = init_device_mesh(device, (2,))
    q, k, v = (torch.randn(T, heads, D, device=device, requires_grad=True) for heads in (H, H_KV, H_KV))
    offsets = torch.tensor([0, 7, T], device=device)
    options = dict(max_seqlen_q=T, max_seqlen_k=T, backend="reference")
    expected = decay_attention_varlen(q, k, v, -0.1, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **options)
    expected.sum().backward()
    dq, dk, dv = (distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_() for x in (q, k, v))
    offsets = distribute_tensor(offsets, mesh, [Replicate()])
    out = decay_attention_varlen(dq, dk, dv, -0.1, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **options)
    out.full_tensor().sum().backward()
    assert_close([(out, expected), (dq.grad, q.grad), (dk.grad, k.grad), (dv.grad, v.grad)], 1e-5)


@on_ranks
@pytest.mark.parametrize(("shape", "sizes"), [
    pytest.param((1, 2), (1, 4, 2), id="a batch of 1 beside heads on two ranks"),
    pytest.param((1, 2), (2, 4, 2), id="a batch that a decay is broadcast to"),
    pytest.param((2, 1), (2, 1, 1), id="one head beside a batch on two ranks"),
])
def test_axis_of_1_may_be_sharded_over_one_rank(device, shape, sizes):
    batch, heads, kv_heads = sizes
    mesh = init_device_mesh(device, shape)
    generate = lambda *shape: torch.randn(*shape, dtype=torch.float64, device=device)  # noqa: E731
    shapes = {
        "q": (batch, T, heads, D), "k": (batch, T, kv_heads, D), "v": (batch, T, kv_heads, D),
        "log_decay": (1, T, heads), "scale": (1, T, 1), "sink": (heads,), "bias": (batch, 1, T, T),
    }
    plain = {name: (-generate(*shape).abs()).requires_grad_() for name, shape in shapes.items()}
    cut = {"log_decay": [Replicate(), Shard(2)], "sink": [Replicate(), Shard(0)]}
    cut |= {name: [Shard(0), Shard(2)] for name in ("q", "k", "v")}
    given = {
        name: distribute_tensor(x.detach(), mesh, cut.get(name, [Replicate()] * 2)).requires_grad_()
        for name, x in plain.items()
    }
    expected, out = (decay_attention(**inputs, backend="reference") for inputs in (plain, given))
    assert out.placements == (Shard(0), Shard(2))
    weight = generate(*expected.shape)
    (expected * weight).sum().backward()
    (out.full_tensor() * weight).sum().backward()
    assert_close([(out, expected), *((given[name].grad, x.grad) for name, x in plain.items())])


@on_ranks
def test_autocast_casts_before_dtypes_are_compared(device):
    mesh = init_device_mesh(device, (2,))
    q, k, v = (torch.randn(B, T, heads, D, device=device) for heads in (H, H_KV, H_KV))
    k = k.bfloat16()
    with torch.autocast(device, torch.bfloat16):
        expected = decay_attention(q, k, v, -0.1, backend="reference")
        sharded = (distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v))
        out = decay_attention(*sharded, -0.1, backend="reference")
    assert out.dtype == torch.bfloat16
    assert_close([(out, expected)], 1e-2)


@on_ranks
def test_errors_name_placements_that_ranks_cannot_take(device):
    mesh = init_device_mesh(device, (2,))
    names = ("q", "k", "v", "log_decay", "sink")
    whole = {name: x.to(device) for name, x in tensors("scalar").items() if name in names}
    heads = {name: distribute_tensor(x, mesh, placements_of(name, x, "heads")) for name, x in whole.items()}

    def sharded(name: str, axis: int) -> DTensor:
        return distribute_tensor(whole[name], mesh, [Shard(axis)])

    on_other_mesh = distribute_tensor(whole["v"], init_device_mesh(device, (2, 1)), [Shard(2), Replicate()])
    one_key_head = distribute_tensor(whole["k"][:, :, :1], mesh, [Replicate()])
    odd_batch = {name: distribute_tensor(whole[name][:1], mesh, [Shard(0)]) for name in ("q", "k", "v")}
    expects = "expected a DTensor replicated or sharded by batch or heads, got"
    for changes, message in (
        ({"q": sharded("q", 1)}, "q: expected shards of the batch or the heads, got shards of the sequence (S(1))"),
        ({"q": sharded("q", 3)}, f"q: {expects} S(3)"),
        ({"q": DTensor.from_local(whole["q"], mesh, [Partial()])}, f"q: {expects} P(sum)"),
        ({"k": one_key_head, "v": one_key_head}, "k: expected a number of heads (H_kv) that is a multiple of its 2"),
        (odd_batch, "q: expected a batch size that is a multiple of its 2 ranks, got 1"),
        ({"k": sharded("k", 1)}, "k: expected S(2) or Replicate(), to match q, got S(1)"),
        ({"sink": whole["sink"]}, "sink: expected a DTensor like the other arguments, got a Tensor"),
        ({"q": whole["q"]}, "q: expected a DTensor like the other arguments, got a Tensor"),
        ({"v": on_other_mesh}, "v: expected a DTensor on the mesh"),
    ):
        given = {**heads, **changes} if changes is not odd_batch else odd_batch
        with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}"):
            decay_attention(**given, backend="reference")


def error_of(arguments: dict) -> str:
    function = decay_attention_varlen if "max_seqlen_q" in arguments else decay_attention
    with pytest.raises(ValueError, match="expected") as raised:
        function(**arguments, backend="reference")
    return str(raised.value)


@on_ranks
def test_shapes_raise_as_in_one_process(device):
    """With the shapes of the whole tensors, though parts of them would fit one another, or broadcast."""
    mesh, batch = init_device_mesh(device, (2,)), 4
    zeros = lambda *shape: torch.zeros(*shape, dtype=torch.float64, device=device)  # noqa: E731
    qkv = {name: zeros(batch, T, heads, D) for name, heads in (("q", H), ("k", H_KV), ("v", H_KV))}
    offsets = torch.tensor([0, T], device=device)
    packing = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=T, max_seqlen_k=T)
    for name, axis, others in (
        ("log_decay", 2, {"log_decay": zeros(batch, T, H // 2)}),
        ("log_decay", 1, packing | dict.fromkeys("qkv", zeros(T, H, D)) | {"log_decay": zeros(T, 2)}),
        ("bias", 2, {"bias": zeros(H // 2, 1, T)}),
        ("scale", 2, {"scale": zeros(H // 2)}),
        ("sink", 0, {"sink": zeros(H // 2)}),
        ("seqused_k", 0, {"seqused_k": zeros(batch // 2).int()}),
        ("q", 4, {of: x[..., None] for of, x in qkv.items()}),
    ):
        whole = qkv | others
        sharded = {
            of: distribute_tensor(x, mesh, [Shard(axis) if of in qkv and x.shape[axis] > 1 else Replicate()])
            if isinstance(x, torch.Tensor) else x
            for of, x in whole.items()
        }
        assert error_of(sharded) == error_of(whole)
        assert error_of(whole).startswith(f"{name}: expected")
