"""Tests that need a GPU: launches, addresses past 2^31, grids past 65,535, a million tokens, graphs, two devices."""

import pytest
import torch
from judged_calls import captured
from tools import stress_kernels
from torch import Tensor

from decayattn import decay_attention
from decayattn.backends.registry import unavailable
from decayattn.testing import assert_within_budget, verify_attention

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.xdist_group("gpu"),  # one after another: some of these fill half of an 80 GB GPU, one counts launches
]

BF16 = torch.bfloat16
NAMES = ("q", "k", "v", "log_decay")


def make(batch=2, length=1024, heads=4, dim=64, mean=-0.1, device="cuda", dtype=BF16) -> dict[str, Tensor]:
    tensors = {name: torch.randn(batch, length, heads, dim, device=device, dtype=dtype) for name in "qkv"}
    tensors["log_decay"] = 2 * mean * torch.rand(batch, length, heads, device=device)
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def outputs_and_gradients(leaves: dict, grad_out: Tensor, **options) -> list[Tensor]:
    out, lse = decay_attention(**leaves, return_lse=True, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, list(leaves.values()), grad_out)]


def relative_error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def test_kernels_repeat_where_processes_share_the_gpu():
    """A GPU that shares its time stops a kernel anywhere; the one-process suite never sees that."""
    arguments = ["--minutes", "0.25", "--shapes", "16,2048,8,64", "--far", "0", "--load", "3"]
    assert stress_kernels.main(arguments) == 0


# Launches


def device_events(function) -> list[str]:
    """Kernels, memsets and copies that a call puts on the GPU."""
    function()  # compiles
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        function()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize(("skip_tolerance", "most"), [(None, (2, 3)), ("auto", (4, 4))])
@pytest.mark.parametrize("poison_uninitialised_memory", [None], ids=[""])  # the fixture's fills are launches
def test_launches_of_dense_scalar_decay(skip_tolerance, most, poison_uninitialised_memory):
    """The decay prefix of 1024 tokens takes one, and so does its reverse; a plan of what to skip two more, and its
    mirror one."""
    leaves = make()
    values = list(leaves.values())
    options = dict(skip_tolerance=skip_tolerance, backend="triton")
    forward = device_events(lambda: decay_attention(**leaves, **options))
    assert 1 <= len(forward) <= most[0], forward
    out = decay_attention(**leaves, **options)
    grad_out = torch.randn_like(out)
    backward = device_events(lambda: torch.autograd.grad(out, values, grad_out, retain_graph=True))
    assert 1 <= len(backward) <= most[1], backward


# Sizes


@pytest.mark.parametrize("far", ["batch", "tokens", "heads"])
def test_views_past_2_to_the_31_elements(far):
    """q, k, v and dO as columns of one storage of about 5 GB, far apart along one axis."""
    shape = {"batch": (2, 70, 2, 64), "tokens": (1, 600, 2, 64), "heads": (1, 70, 3, 64)}[far]
    token = 2**22 if far == "tokens" else 8 * 64
    strides = {
        "batch": (2**31 + 2**16, token, 4 * 64, 1),
        "tokens": (600 * token, token, 4 * 64, 1),
        "heads": (0, token, 2**30 + 2**16, 1),
    }[far]
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    assert last > 2**31
    storage = torch.empty(last + 4 * 64, device="cuda", dtype=BF16)
    q, k, v, grad_out = (storage.as_strided(shape, strides, 64 * part) for part in range(4))
    for tensor in (q, k, v, grad_out):
        tensor.copy_(torch.randn(shape, device="cuda"))
    log_decay = -torch.rand(shape[:3], device="cuda")
    assert_within_budget(verify_attention(q, k, v, log_decay, grad_out=grad_out, backend="triton"))
    assert_within_budget(verify_attention(q, k, v, None, causal=False, grad_out=grad_out, backend="triton"))


def test_tensors_past_2_to_the_31_elements():
    """Every batch entry is computed alone, so the last of many equals, bit by bit, a call on nothing else."""
    batch, length, heads, dim = 33_000, 16, 64, 64
    shape = (batch, length, heads, dim)
    assert batch * length * heads * dim > 2**31
    # 16 processes with other tests, which keep at most 256 MB each, leave more of 80 GB
    if torch.cuda.mem_get_info()[0] < 45 * 2**30:
        pytest.skip("needs 45 GB of free GPU memory: eight tensors of 4.3 GB, and working space")
    leaves = make(*shape)
    grad_out = torch.randn_like(leaves["q"])
    whole = outputs_and_gradients(leaves, grad_out, backend="triton")
    for entry in (0, batch // 2, batch - 1):
        here = slice(entry, entry + 1)
        alone = {name: tensor.detach()[here].clone().requires_grad_() for name, tensor in leaves.items()}
        for a, b in zip(whole, outputs_and_gradients(alone, grad_out[here], backend="triton"), strict=True):
            assert torch.equal(a[here], b)


@pytest.mark.parametrize("shape", [(70_000, 5, 1, 16), (1, 5, 70_000, 16)])
@pytest.mark.parametrize("decay", ["constant", "scalar"])
def test_more_heads_than_a_grid_dimension_holds(shape, decay):
    heads = shape[2]
    q, k, v = torch.randn(3, *shape, device="cuda", dtype=BF16)
    log_decay = -torch.rand(shape[:3] if decay == "scalar" else heads, device="cuda")
    judged = [(n, 0) if heads == 1 else (0, n) for n in (0, 65_535, 65_536, 69_999)]
    assert_within_budget(verify_attention(q, k, v, log_decay, heads=judged, backend="triton"))


# Numerics at length


def test_a_million_tokens_are_as_exact_as_eight_thousand():
    """The last 64 rows, and the gradients that they send to the last 8192 tokens, with a mean λ of −0.7. The short
    sequence is the end of the long one, so both answer nearly the same question."""
    short, rows = 8192, 64

    def evaluate(leaves: dict, grad_out: Tensor, backend: str) -> dict[str, Tensor]:
        return dict(zip(("out", "lse", *NAMES), outputs_and_gradients(leaves, grad_out, backend=backend), strict=True))

    def errors(leaves: dict) -> dict[str, float]:
        grad_out = torch.zeros_like(leaves["q"])
        grad_out[:, -rows:] = last_grad
        found = evaluate(leaves, grad_out, "triton")
        exact = {name: x.detach().double() for name, x in leaves.items()}
        exact["q"] = exact["q"][:, -rows:]
        oracle = evaluate({name: x.requires_grad_() for name, x in exact.items()}, last_grad.double(), "reference")
        assert torch.isfinite(found["log_decay"]).all()
        result = {name: relative_error(found[name][:, -rows:], oracle[name]) for name in ("out", "q")}
        result |= {name: relative_error(found[name][:, -short:], oracle[name][:, -short:]) for name in ("k", "v")}
        result["log_decay"] = relative_error(found["log_decay"][:, -short:], oracle["log_decay"][:, -short:])
        result["lse"] = relative_error(found["lse"][..., -rows:], oracle["lse"])
        return result

    million = make(batch=1, length=2**20, heads=1, mean=-0.7)
    last_grad = torch.randn(1, rows, 1, 64, device="cuda", dtype=BF16)
    end = {name: x.detach()[:, -short:].clone().requires_grad_() for name, x in million.items()}
    at_a_million, at_eight_thousand = errors(million), errors(end)
    for name, error in at_a_million.items():
        assert error <= 1.2 * at_eight_thousand[name], (name, error, at_eight_thousand[name])


@pytest.mark.parametrize("mean", [-0.001, -0.01, -0.1, -1.0])
def test_the_decay_gradient_survives_a_16_bit_output(mean):
    """Δ comes from a bfloat16 O, and only the row sums of dS cancel its rounding: without them −0.1 errs by 0.14."""
    leaves = make(batch=1, length=8192, heads=1, mean=mean)
    grad_out = torch.randn_like(leaves["q"])
    found = outputs_and_gradients(leaves, grad_out, backend="triton")[-1]
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    expected = outputs_and_gradients(exact, grad_out.double(), backend="reference")[-1]
    assert relative_error(found, expected) < 5e-3


# Repetition, graphs, devices


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
def test_captured_graph_replays_on_changed_inputs(decay, backend):
    leaves = make(length=300)
    if reason := unavailable(backend, leaves["q"].dtype, leaves["q"].device):
        pytest.skip(reason)
    leaves.pop("log_decay")
    if decay != "none":
        shape = (4,) if decay == "constant" else (2, 300, 4)
        leaves["log_decay"] = (-torch.rand(shape, device="cuda")).requires_grad_()
    grad_out = torch.randn_like(leaves["q"])
    graph, results = captured(lambda: outputs_and_gradients(leaves, grad_out, backend=backend))
    for seed in range(3):
        torch.manual_seed(seed)
        for name, leaf in leaves.items():
            leaf.data.copy_(-torch.rand_like(leaf) if name == "log_decay" else torch.randn_like(leaf))
        if decay == "scalar":
            leaves["log_decay"].data[:, 10 * seed + 5] = -torch.inf  # the visited tiles depend on it
        graph.replay()
        expected = outputs_and_gradients(leaves, grad_out, backend=backend)
        for n, (a, b) in enumerate(zip(results, expected, strict=True)):
            if backend == "triton" or n < 2:
                assert torch.equal(a, b)
            else:  # gradients are added up in no fixed order
                torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_two_devices_in_one_process(backend):
    """Calls on cuda:1 while cuda:0 is current and the other way round, alternating: each device keeps its own launches.
    The first round compiles, later ones launch remembered kernels. Every answer is judged by itself, because the GPUs
    may be of two kinds, and is on the device of its inputs."""
    inputs = []
    for length in (300, 1024):  # without and with a plan of what to skip
        leaves = make(length=length, device="cpu")
        inputs.append(([x.detach() for x in leaves.values()], torch.randn_like(leaves["q"])))
    before = torch.cuda.current_device()
    try:
        for current, device in [(0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 1)]:
            torch.cuda.set_device(current)
            for tensors, grad_out in inputs:
                here = [x.to(f"cuda:{device}") for x in tensors]
                if reason := unavailable(backend, here[0].dtype, here[0].device):
                    pytest.skip(reason)
                assert_within_budget(verify_attention(*here, grad_out=grad_out.to(here[0].device), backend=backend))
                leaves = dict(zip(NAMES, (x.requires_grad_() for x in here), strict=True))
                found = outputs_and_gradients(leaves, grad_out.to(here[0].device), backend=backend)
                assert {x.device for x in found} == {torch.device("cuda", device)}
                assert torch.cuda.current_device() == current
    finally:
        torch.cuda.set_device(before)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_float32_follows_the_matmul_precision(precision, torch_settings):
    """ "highest" is IEEE float32, never a hidden tf32; "high" may use it, and is then a thousand times less exact."""
    leaves = make(length=300, dtype=torch.float32)
    torch.set_float32_matmul_precision(precision)
    out = decay_attention(**leaves, backend="triton").detach()
    exact = decay_attention(**{name: x.detach().double() for name, x in leaves.items()}, backend="reference")
    assert (relative_error(out, exact) < 1e-5) == (precision == "highest")
