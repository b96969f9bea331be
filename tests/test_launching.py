"""Launches: what is remembered of them, and that it is what Triton would have chosen."""

from types import SimpleNamespace

import pytest
import torch
import triton
from conftest import ON_GPU

from decayattn import decay_attention, decay_attention_varlen
from decayattn.backends import launching, load

gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: the interpreter compiles nothing")


class Kernel:
    """What launching asks of a kernel of Triton's."""

    arg_names = ("x", "count", "WIDTH", "MODE", "rest")
    params = (SimpleNamespace(name="x", has_default=False, default=None), SimpleNamespace(
        name="rest", has_default=True, default=None))  # fmt: skip

    def __init__(self):
        self.fn, self.log = object(), []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.log.append(("asked", grid, args, constants))
            return SimpleNamespace(run=run, function="function", packed_metadata="metadata")

        def run(x, y, z, stream, function, metadata, *rest):
            assert (y, z, function, metadata) == (1, 1, "function", "metadata")
            assert stream == torch._C._cuda_getCurrentRawStream(0)
            hooks, all_args = rest[:3], rest[3:]
            assert hooks == (None, None, None)
            self.log.append(("launched", x, all_args))

        return launch


GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    if not ON_GPU:  # PyTorch without CUDA has no streams
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 17 + device, raising=False)


def test_second_launch_asks_nothing():
    kernel, x = Kernel(), torch.zeros(2, 8)
    for _ in range(2):
        launching.of_call(GPU, (x, None), "first test")(kernel, 3, x, 7, MODE="a", WIDTH=16, num_warps=4)
    constants = {"MODE": "a", "WIDTH": 16, "num_warps": 4}
    # all parameters in the order of the kernel's, the constants among them
    expected = [("asked", (3,), (x, 7), constants), ("launched", 3, (x, 7, 16, "a", None))]
    assert kernel.log == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda x, mode: ((x.transpose(0, 1),), mode),
        lambda x, mode: ((x.double(),), mode),
        lambda x, mode: ((None,), mode),
        lambda x, mode: ((x,), mode + 1),
    ],
    ids=["strides", "dtype", "none", "modes"],
)
def test_other_kinds_are_asked_anew(change):
    kernel, x = Kernel(), torch.zeros(2, 8)
    for tensors, mode in (((x,), 1), change(x, 1)):
        launching.of_call(GPU, tensors, kernel, mode)(kernel, 1, x, 7, WIDTH=16, MODE="a")
    assert [entry[0] for entry in kernel.log] == ["asked", "asked"]


def test_other_constants_are_asked_anew():
    kernel, x = Kernel(), torch.zeros(2, 8)
    launch = launching.of_call(GPU, (x,), kernel)
    for width in (16, 32, 16):
        launch(kernel, 1, x, 7, WIDTH=width, MODE="a")
    assert [entry[0] for entry in kernel.log] == ["asked", "asked", "launched"]


def test_misaligned_tensors_and_cpus_are_launched_anew():
    x, misaligned = torch.zeros(8), torch.zeros(17)[1:]
    assert launching.of_call(GPU, (x, misaligned)) is launching.anew
    assert launching.of_call(torch.device("cpu"), (x,)) is launching.anew
    assert launching.of_call(GPU, (x, misaligned[3:])) is not launching.anew
    assert launching.of_call(GPU, (x,), saved=(misaligned,)) is launching.anew
    assert launching.of_call(GPU, (x,), saved=(misaligned[3:],)) is not launching.anew


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_told(name):
    chain, hook = getattr(triton.knobs.runtime, name), print
    chain.add(hook)
    try:
        assert launching.of_call(GPU, (torch.zeros(8),)) is launching.anew
    finally:
        chain.remove(hook)
    assert launching.of_call(GPU, (torch.zeros(8),)) is not launching.anew


CALLS = {
    "dense": {},
    "one token more": {"length": 641},
    "one head": {"heads": 1, "kv_heads": 1},
    "groups": {"kv_heads": 1},
    "constant": {"decay": "constant"},
    "none": {"decay": None},
    "not planned": {"length": 200},
    "window": {"window_size": (130, 0)},
    "not causal": {"causal": False, "length": 300},
    "packed": {"packed": [0, 5, 5, 600, 640]},
    "float16 of 96": {"dtype": torch.float16, "dim": 96},
    "strided": {"strided": True},
    "row scale": {"row_scale": True},
    "bias": {"bias": True, "length": 130},
    "lse": {"lse": True},
}
NOT_HOPPERS = ("not causal", "float16 of 96", "row scale", "bias")


def run(backend, dtype=torch.bfloat16, dim=64, length=640, heads=2, kv_heads=2, decay="scalar", packed=None,
        strided=False, row_scale=False, bias=False, lse=False, **options):  # fmt: skip
    shape = (1, length, heads, dim)
    q, k, v = (torch.randn(*shape[:2], n, dim, device="cuda").to(dtype) for n in (heads, kv_heads, kv_heads))
    if strided:
        q, k, v = torch.randn(1, length, 3, heads, dim, device="cuda").to(dtype).unbind(2)
    sizes = {"scalar": shape[:3], "constant": (heads,)}
    inputs = [q, k, v]
    if decay is not None:
        inputs.append(-0.1 * torch.rand(sizes[decay], device="cuda"))
    inputs = [x.requires_grad_() for x in inputs]
    if row_scale:
        options["scale"] = torch.rand(shape[:3], device="cuda")
    if bias:
        options["bias"] = torch.randn(heads, length, length, device="cuda").requires_grad_()
    if packed is None:
        out, row_lse = decay_attention(*inputs, **options, return_lse=True, backend=backend)
    else:
        flat, ends = [x.squeeze(0) for x in inputs], torch.tensor(packed, dtype=torch.int32, device="cuda")
        out, row_lse = decay_attention_varlen(
            *flat, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=length, max_seqlen_k=length, **options,
            return_lse=True, backend=backend,
        )  # fmt: skip
    total = out.sum() + (row_lse.sum() if lse else 0)
    torch.autograd.grad(total, inputs)


@gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_remembered_kernels_are_those_that_triton_chooses(backend, monkeypatch):
    """All calls, twice, one after the other, in one memory of launches: none may find another's kernels."""
    if isinstance(load(backend), str):
        pytest.skip(load(backend))
    launches = []
    remembering = launching._remembering

    def watched(kinds):
        launch = remembering(kinds)

        def check(kernel, programs, *args, **constants):
            chosen = kernel.warmup(*args, grid=(programs,), **constants)
            launch(kernel, programs, *args, **constants)
            _, function, metadata, _ = launch.known[(kernel.fn, programs, *constants.values())]
            assert (function, metadata) == (chosen.function, chosen.packed_metadata), kernel.fn.__name__
            launches.append(kernel.fn.__name__)

        return check

    monkeypatch.setattr(launching, "_remembering", watched)
    for _ in range(2):
        for name, call in CALLS.items():
            if backend == "hopper" and name in NOT_HOPPERS:
                continue
            run(backend, **call)
    assert "forward_kernel" in launches
    assert "_scan_blocks" in launches
