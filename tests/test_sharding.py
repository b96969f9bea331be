"""decay_attention of DTensors: equal to one process, every gradient included, or refused by name. Two ranks."""

import itertools

import pytest
import torch
from distributed_pool import two_ranks
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
    "one for all heads": lambda: -torch.rand(B, T, 1, dtype=torch.float64),
    "one for the batch": lambda: -torch.rand(1, T, H, dtype=torch.float64),
}


@pytest.fixture(scope="module", params=[
    pytest.param("cpu", marks=pytest.mark.xdist_group("distributed")),  # these start processes of their own, once
    pytest.param("cuda", marks=pytest.mark.xdist_group("gpu")),
])
def ranks(request):
    pool = two_ranks(request.param)
    yield pool
    pool.close()


def tensors(decay: str) -> dict:
    generate = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    return {
        "q": generate(B, T, H, D), "k": generate(B, T, H_KV, D), "v": generate(B, T, H_KV, D),
        "log_decay": DECAYS[decay](), "sink": generate(H), "scale": generate(T, H), "bias": generate(1, H, T, T),
    }


def placements_of(name: str, value: torch.Tensor, split: str) -> list:
    """As q is split: sharded where the tensor has that axis, or replicated where it must be cut up."""
    if split == "batch":
        axis = 0 if name in ("q", "k", "v") or (name == "log_decay" and value.ndim == 3) else None
    else:
        axis = {"bias": 1, "q": 2, "k": 2, "v": 2}.get(name, value.ndim - 1)
    if axis is None or value.ndim == 0 or value.shape[axis] == 1 or name == "scale":  # scale is cut up
        return [Replicate()]
    return [Shard(axis)]


def compare(device: str, split: str, decay: str, lse: bool) -> dict[str, float]:
    """Errors of results and gradients against one process, and of gradients that are not whole."""
    mesh = init_device_mesh(device, (2,))
    plain = {
        name: x.to(device).requires_grad_() if isinstance(x, torch.Tensor) else x for name, x in tensors(decay).items()
    }
    given = {
        name: distribute_tensor(x.detach(), mesh, placements_of(name, x, split)).requires_grad_()
        if isinstance(x, torch.Tensor) else x
        for name, x in plain.items()
    }
    errors = {}
    weights = [torch.randn(*shape, dtype=torch.float64).to(device) for shape in ((B, T, H, D), (B, H, T))]
    sharded = [(Shard(SPLITS[split]),), (Shard(0 if split == "batch" else 1),)]
    results = []
    for inputs in (plain, given):
        found = decay_attention(**inputs, return_lse=lse, backend="reference")
        found = found if lse else (found,)
        results.append([x.full_tensor() if isinstance(x, DTensor) else x for x in found])
        if inputs is given:
            assert [x.placements for x in found] == sharded[: len(found)]
        sum((x * w).sum() for x, w in zip(results[-1], weights, strict=False)).backward()
    for name, ours, theirs in zip(("out", "lse"), results[1], results[0], strict=False):
        errors[name] = float((ours - theirs).detach().abs().max())
    for name, x in plain.items():
        if isinstance(x, torch.Tensor):
            gradient = given[name].grad
            assert not any(placement.is_partial() for placement in gradient.placements), name
            errors[f"d{name}"] = float((gradient.full_tensor() - x.grad).abs().max())
    return errors


@pytest.mark.parametrize(("split", "decay"), [*itertools.product(SPLITS, DECAYS)])
def test_results_and_gradients_are_those_of_one_process(ranks, split, decay):
    for errors in ranks(compare, ranks.device, split, decay, decay != "none"):
        assert len(errors) >= 6
        assert max(errors.values()) < 1e-12, errors


def packed(device: str) -> float:
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
    pairs = [(out, expected), (dq.grad, q.grad), (dk.grad, k.grad), (dv.grad, v.grad)]
    return max(float((a.full_tensor() - b).detach().abs().max()) for a, b in pairs)


def test_packed_sequences_are_divided_by_heads(ranks):
    assert max(ranks(packed, ranks.device)) < 1e-5


def refusals(device: str) -> dict[str, str]:
    mesh = init_device_mesh(device, (2,))
    names = ("q", "k", "v", "log_decay", "sink")
    whole = {name: x.to(device) for name, x in tensors("scalar").items() if name in names}
    heads = {name: distribute_tensor(x, mesh, placements_of(name, x, "heads")) for name, x in whole.items()}

    def sharded(name: str, axis: int) -> DTensor:
        return distribute_tensor(whole[name], mesh, [Shard(axis)])

    other_mesh = init_device_mesh(device, (2, 1))
    one_key_head = distribute_tensor(whole["k"][:, :, :1], mesh, [Replicate()])
    odd_batch = {name: distribute_tensor(whole[name][:1], mesh, [Shard(0)]) for name in ("q", "k", "v")}
    cases = {
        "sequence": {**heads, "q": sharded("q", 1)},
        "channels": {**heads, "q": sharded("q", 3)},
        "partial": {**heads, "q": DTensor.from_local(whole["q"], mesh, [Partial()])},
        "key heads": {**heads, "k": one_key_head, "v": one_key_head},
        "batch": odd_batch,
        "key sequence": {**heads, "k": sharded("k", 1)},
        "plain sink": {**heads, "sink": whole["sink"]},
        "plain q": {**heads, "q": whole["q"]},
        "mesh": {**heads, "v": distribute_tensor(whole["v"], other_mesh, [Shard(2), Replicate()])},
    }
    said = {}
    for name, arguments in cases.items():
        try:
            decay_attention(**arguments, backend="reference")
            said[name] = "nothing"
        except (TypeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def test_what_no_rank_can_do_alone_is_refused_by_name(ranks):
    for said in ranks(refusals, ranks.device):
        expected = {
            "sequence": "ValueError: q: is sharded along the sequence (S(1)), which context parallelism is for",
            "channels": "ValueError: q: expected a DTensor replicated or sharded by batch or heads, got S(3)",
            "partial": "ValueError: q: expected a DTensor replicated or sharded by batch or heads, got P(sum)",
            "key heads": "ValueError: k: expected heads (H_kv) in a multiple of the 2 ranks that share them, got 1",
            "batch": "ValueError: q: expected a batch in a multiple of the 2 ranks that share them, got 1",
            "key sequence": "ValueError: k: expected S(2) or Replicate() beside q, got S(1)",
            "plain sink": "TypeError: sink: expected a DTensor, as another argument is, got a Tensor",
            "plain q": "TypeError: q: expected a DTensor, as another argument is, got a Tensor",
            "mesh": "ValueError: v: expected a DTensor on the mesh",
        }
        assert said.keys() == expected.keys()
        for name, message in expected.items():
            assert said[name].startswith(message), (name, said[name])
