"""The Hopper kernels against the float64 oracle by the error budget, and against themselves over many runs."""

import pytest
import torch

from decayattn import backends, decay_attention
from decayattn.testing import assert_within_budget, verify_attention

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")]

BF16 = torch.bfloat16


def make(rows=333, keys=None, *, batch=2, heads=4, kv_heads=None, dim=64, decay="scalar", dtype=BF16, strength=0.1):
    keys, kv_heads = keys or rows, kv_heads or heads
    q = torch.randn(batch, rows, heads, dim, device="cuda", dtype=dtype)
    k, v = torch.randn(2, batch, keys, kv_heads, dim, device="cuda", dtype=dtype)
    log_decay = {
        "none": None,
        "constant": -strength * torch.rand(heads, device="cuda"),
        "scalar": -2 * strength * torch.rand(batch, keys, heads, device="cuda"),
    }[decay]
    return dict(q=q, k=k, v=v, log_decay=log_decay)


def verify(inputs: dict, **options) -> None:
    assert_within_budget(verify_attention(**inputs, backend="hopper", **options))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
def test_every_decay_and_dtype(decay, dtype, dim):
    verify(make(decay=decay, dtype=dtype, dim=dim))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("length", [1, 15, 63, 65, 127, 129, 257, 1000])
def test_lengths_that_divide_nothing(length, dim):
    verify(make(length, dim=dim))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lengths", [(1, 1000), (37, 150), (130, 140), (150, 37), (300, 130), (200, 1), (200, 1000)])
def test_queries_are_the_last_rows(lengths, dim):
    for decay in ("none", "constant", "scalar"):
        verify(make(*lengths, decay=decay, dim=dim))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [(2, 1), (6, 2), (8, 1)])
def test_grouped_queries(heads, dim):
    verify(make(500, heads=heads[0], kv_heads=heads[1], dim=dim))
    verify(make(77, 500, heads=heads[0], kv_heads=heads[1], dim=dim, decay="constant"))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("share", [0.003, 0.03, 0.5, 1.0])
def test_resets(share, dim):
    inputs = make(1025, dim=dim)
    inputs["log_decay"][torch.rand_like(inputs["log_decay"]) < share] = -torch.inf
    verify(inputs)
    verify(inputs | dict(q=inputs["q"][:, -700:]))


@pytest.mark.parametrize("dim", [64, 128])
def test_strong_decay_and_growth(dim):
    for strength in (2.5, 100.0):
        verify(make(600, dim=dim, strength=strength))
    inputs = make(600, dim=dim)
    verify(inputs | dict(log_decay=-inputs["log_decay"]))
    verify(inputs | dict(log_decay=torch.randn_like(inputs["log_decay"])))


@pytest.mark.parametrize("dim", [64, 128])
def test_strides(dim):
    q, k, v = torch.randn(2, 300, 3, 4, dim, device="cuda", dtype=BF16).unbind(2)
    verify(dict(q=q, k=k, v=v, log_decay=torch.tensor(-0.1, device="cuda")))
    expanded = torch.randn((), device="cuda", dtype=BF16).expand(2, 300, 4, dim)
    verify(dict(q=q, k=k, v=v, log_decay=None), grad_out=expanded)


@pytest.mark.parametrize("decay", ["none", "scalar"])
@pytest.mark.parametrize("dim", [64, 128])
def test_runs_repeat(dim, decay):
    """200 runs: a race moves results by more than rounding. Only what is added up by atomics may move at all."""
    inputs = make(2048, heads=8, kv_heads=4, dim=dim, decay=decay)
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if x is not None}
    grad_out = torch.randn_like(inputs["q"])

    def run() -> dict[str, torch.Tensor]:
        out, lse = decay_attention(**inputs, return_lse=True, backend="hopper")
        grads = torch.autograd.grad(out, list(leaves.values()), grad_out)
        return {"out": out, "lse": lse, **dict(zip(leaves, grads, strict=True))}

    first = run()
    for _ in range(199):
        for name, x in run().items():
            if name in ("out", "lse", "k", "v"):
                assert torch.equal(x, first[name]), name
            else:
                # dλ is float32, and a small difference of sums: its rounding is many times that of a number
                error = (x.double() - first[name].double()).norm() / first[name].double().norm()
                assert error < (2**-14 if name == "log_decay" else torch.finfo(x.dtype).eps), name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(causal=False), "causal"),
        (dict(scale=0.0), "scale of at least"),
        (dict(scale=torch.ones(4)), "one scale for all rows"),
        (dict(v=torch.zeros(2, 333, 4, 32, dtype=BF16)), "D = D_v"),
    ],
)
def test_refusals_name_the_reason(change, reason):
    change = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    with pytest.raises(ValueError, match=reason):
        decay_attention(**make() | change, backend="hopper")


def test_tensors_that_tma_cannot_address_are_refused():
    q = torch.zeros(2, 333, 4, 65, device="cuda", dtype=BF16)[..., 1:]
    with pytest.raises(ValueError, match="TMA cannot address q"):
        decay_attention(**make() | dict(q=q), backend="hopper")


def test_deterministic_gradients():
    """By name there are none; "auto" takes these kernels forward, and a backward that repeats bit by bit."""
    leaves = {name: x.requires_grad_() for name, x in make(1000, dim=128).items()}
    grad_out = torch.randn_like(leaves["q"])

    def gradients(backend: str) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(decay_attention(**leaves, backend=backend), list(leaves.values()), grad_out)

    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="no deterministic backward"):
            gradients("hopper")
        first = gradients("auto")
        for _ in range(49):
            assert all(map(torch.equal, first, gradients("auto")))
        inputs = {name: x.detach() for name, x in leaves.items()}
        assert_within_budget(verify_attention(**inputs, backend="auto", grad_out=grad_out))
    finally:
        torch.use_deterministic_algorithms(False)


def test_auto_takes_them_where_they_take_the_problem(monkeypatch):
    ran = []
    for name in backends.KERNELS:
        module = backends.load(name)
        monkeypatch.setattr(module, "forward", lambda *a, n=name, f=module.forward: (ran.append(n), f(*a))[1])
    inputs = make(77, 200)
    decay_attention(**inputs)
    decay_attention(**inputs, causal=False)
    decay_attention(**inputs | dict(q=torch.zeros(2, 77, 4, 65, device="cuda", dtype=BF16)[..., 1:]))
    decay_attention(**inputs, scale=-1.0)
    assert ran == ["hopper", "triton", "triton", "triton"]
