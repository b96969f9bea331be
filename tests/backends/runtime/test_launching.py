"""Launches: remembered ones equal Triton's own choice and arguments. Buffers that kernels fill."""

import gc
import random
import subprocess
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend, max_shared_mem
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from decayattn import compatibility, decay_attention, decay_attention_varlen
from decayattn.backends.registry import load
from decayattn.backends.runtime import launching, tma
from decayattn.backends.runtime.strided import Strided, contiguous_like, uninitialised

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the interpreter compiles nothing")


def fill(x, count, WIDTH: tl.constexpr, MODE: tl.constexpr, rest=None):
    tl.store(x, count)


def zero(x, anything):
    tl.store(x, 0.0)


MODULE = object()


def recording_driver(log: list) -> SimpleNamespace:
    """Triton's driver, as far as compiling for an absent GPU needs it; records launches."""

    class Launcher:
        def __init__(self, source, metadata):
            pass

        def __call__(self, x, y, z, stream, function, metadata, told, enter, exit, *args):
            assert (y, z, stream) == (1, 1, 17)
            log.append(("launched", x, args))

    utils = SimpleNamespace(
        load_binary=lambda *_: (MODULE, 5, 32, 0, 1024), unload_module=lambda module: log.append(("unloaded",)),
        get_device_properties=lambda device: {"max_shared_mem": 1 << 17},
    )
    return SimpleNamespace(
        launcher_cls=Launcher, utils=utils, get_current_target=lambda: GPUTarget("cuda", 80, 32),
        get_current_device=lambda: 0, get_current_stream=lambda device=0: 17,
        get_active_torch_device=lambda: torch.device("cpu"), map_python_to_cpp_type=lambda name: name,
    )


GPU = torch.device("cuda", 0)


def forget_shared_memory() -> None:
    """Triton asks a device once how much it has, from 3.8 on: that of one that is not there is not everybody's."""
    getattr(max_shared_mem, "cache_clear", lambda: None)()


@pytest.fixture
def log(monkeypatch):
    """Record of launches on an absent GPU, of unloaded kernels, and of requests to Triton."""
    entries: list = []
    monkeypatch.setattr(driver, "_active", recording_driver(entries))
    monkeypatch.setattr(compatibility, "current_stream", lambda device: 17 + device)
    run = JITFunction.run

    def asked(self, *args, grid, warmup, **constants):
        if not warmup:
            entries.append(("asked", grid, args, constants))
        return run(self, *args, grid=grid, warmup=warmup, **constants)

    monkeypatch.setattr(JITFunction, "run", asked)
    forget_shared_memory()
    yield entries
    forget_shared_memory()
    for compiled in launching._held.values():
        if getattr(compiled, "module", None) is MODULE:
            compiled.module = None  # else Triton unloads it when Python ends, from a GPU that is not there


@pytest.fixture
def kernel(log):
    """One that Triton compiles, where the interpreter has taken the place of its decorator, too."""
    return anew(fill)


@pytest.fixture
def kernel_of_anything(log):
    return anew(zero)


def anew(function):
    launching._by_kinds.clear()
    launching._remembering.cache_clear()
    return JITFunction(function)


def test_triton_is_asked_once_per_constants(log, kernel):
    x = torch.zeros(2, 8)
    for width in (16, 16, 32, 16):
        launching.of_call(GPU, (x, None), "constants")(kernel, 3, x, 7, MODE="a", WIDTH=width, num_warps=4)
    constants = {"MODE": "a", "WIDTH": 16, "num_warps": 4, "enable_fp_fusion": True}
    # all parameters in the order of the kernel's, the constants among them
    launched = ("launched", 3, (x, 7, 16, "a", None))
    assert log[:3] == [("asked", (3,), (x, 7), constants), launched, launched]
    assert [entry[0] for entry in log[3:]] == ["asked", "launched", "launched"]


@pytest.mark.parametrize(("length", "other", "asked"), [
    *((*pair, 1) for pair in [
        (7, 9), (16, 48), (2**31 - 1, 3), (2**40 + 1, 2**41 + 1), ((5, 32), (11, 64)), ((0.5, None), (2.5, None)),
    ]),
    *((*pair, 2) for pair in [
        (7, 1), (7, 16), (7, 2**31), (2**31 + 1, 2**63 + 1), (7, 7.0), (7, None), ((5, 32), (5, 33)),
        ((5, None), (None, 5)), ((5,), (5, 5)), (Strided(None, (5,)), (None, (5,))), ((True,), (False,)),
        ((torch.zeros(1),), (torch.ones(1).int(),)),
    ]),
], ids=str)
def test_triton_is_asked_once_per_kind(length, other, asked, log, kernel_of_anything):
    x = torch.zeros(2, 8)
    for now in (length, other):
        launching.of_call(GPU, (x,), "a length", str(now))(kernel_of_anything, 3, x, now)
    assert [entry[0] for entry in log] == ["asked", "launched", "launched"] if asked == 1 else ["asked", "launched"] * 2
    assert asked == 2 or log[-1] == ("launched", 3, (x, other))


@pytest.mark.parametrize("changed", [{"block_shape": [1, 32, 1, 16]}, {"padding": "nan"}, {"dtype": torch.float16}])
def test_kinds_of_descriptors(changed):
    def descriptor(address, length, dtype=torch.bfloat16, block_shape=(1, 16, 1, 16), padding="zero"):
        memory, strides = tma.Memory(address, dtype), [length * 128, 128, 64, 1]
        return launching.kinds_of((TensorDescriptor(memory, [2, length, 2, 64], strides, list(block_shape), padding),))

    assert descriptor(64, 5) == descriptor(128, 7) is not None
    assert descriptor(64, 5) != descriptor(64, 5, **changed)


def test_triton_is_asked_for_unknown_kinds(log, kernel_of_anything, monkeypatch):
    assert launching.kinds_of((7, (None, "a"))) is None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert launching.kinds_of((7,)) is None
    x = torch.zeros(2, 8)
    for length in (7, 9):
        launching.of_call(GPU, (x,), "ROCm", length)(kernel_of_anything, 1, x, length)
    assert [entry[0] for entry in log] == ["asked", "launched"] * 2


def test_kinds_are_as_fine_as_in_triton():
    specialize = getattr(triton.runtime.jit, "native_specialize_impl", None)
    if specialize is None:
        pytest.skip("this Triton has no such function")
    chosen = random.Random(0)
    numbers = [0, 1, 15, 16, 17, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 16, -1, -16, -(2**31), -(2**31) - 1]
    some = [*numbers, *(chosen.randrange(2**chosen.randrange(1, 40)) for _ in range(60)), 1.0, 0.5, None, True, False]
    some += [tuple(chosen.choices(some, k=chosen.randrange(1, 3))) for _ in range(300)]
    some += [torch.zeros(3, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int32)]
    backend, seen = make_backend(GPUTarget("cuda", 90, 32)), {}
    for x in some:
        found = specialize(type(backend), x, False, True, True)
        assert seen.setdefault(launching.kinds_of((x,)), found) == found, x
    assert len(seen) > 30


def test_ptxas_for_hopper(log, kernel, kernel_of_anything, monkeypatch, tmp_path, request):
    """Triton 3.9 takes CUDA 13.4's. Ours are assembled by another; kernels of others, and of other threads, are not."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    monkeypatch.setattr(driver.active, "get_current_target", lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(compiler, "get_ptxas", compiler.get_ptxas)  # and back
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    request.addfinalizer(launching.faster_ptxas.cache_clear)
    for cached in (launching.faster_ptxas, compiler.get_ptxas_version):
        cached.cache_clear()
    choice, run, used = compiler.get_ptxas(90), subprocess.run, []

    def recorded(command, **options):
        if "--version" not in command:
            with ThreadPoolExecutor() as pool:
                used.append((command[0], pool.submit(compiler.get_ptxas, 90).result()))
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", recorded)
    x = torch.zeros(8)
    launching.uncached(kernel, 1, x, 7, WIDTH=16, MODE="a")
    kernel_of_anything[(1,)](x, 7, enable_fp_fusion=True)
    other = triton.knobs.nvidia.ptxas.path if choice.version == "13.4" else choice.path
    assert used == [(other, choice), (choice.path, choice)]
    assert choice.version in compiler.get_ptxas_version(90)
    monkeypatch.setattr(compatibility, "unused", {})
    monkeypatch.setenv("TRITON_PTXAS_PATH", triton.knobs.nvidia.ptxas_blackwell.path)
    for variable, entries in ((None, choice.version == "13.4"), ("TRITON_PTXAS_BLACKWELL_PATH", 0)):
        if variable:
            compatibility.unused.clear()
            monkeypatch.setenv(variable, choice.path)
        launching.faster_ptxas.cache_clear()
        assert launching.faster_ptxas() is None
        assert ["ptxas 12.9 was not found" in entry for entry in compatibility.fallbacks()] == [True] * entries


def test_cleared_caches_and_freed_kernels(log, kernel):
    """Since 3.8 Triton unloads a kernel without references."""
    x = torch.zeros(2, 8)
    launch = launching.of_call(GPU, (x,), "cleared caches")
    launch(kernel, 1, x, 7, WIDTH=16, MODE="a")
    launching.uncached(kernel, 1, x, 7, WIDTH=32, MODE="a")
    caches = kernel.device_caches[0][0]
    compiled = [weakref.ref(known) for known in caches.values()]
    assert len(compiled) == 2
    kernel.device_caches.clear()
    del caches
    gc.collect()
    assert all(known() is not None for known in compiled)
    launch(kernel, 1, x, 7, WIDTH=16, MODE="a")
    assert [entry[0] for entry in log] == ["asked", "launched", "asked", "launched", "launched"]


@pytest.mark.parametrize("run", [anew, eval("lambda self: None")], ids=["another source", "no source"])
def test_another_way_to_launch_is_left_to_triton(run, log, kernel, monkeypatch):
    assert compatibility.fallbacks() == []
    monkeypatch.setattr(compatibility, "unused", {})
    launching.check_launches(run)
    (fallback,) = compatibility.fallbacks()
    assert "CompiledKernel.run is called in another way" in fallback
    for _ in range(2):
        launching.of_call(GPU, (torch.zeros(8),), "another way")(kernel, 3, torch.zeros(8), 7, WIDTH=16, MODE="a")
    assert [entry[0] for entry in log] == ["asked", "launched"] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted on a GPU")
def test_interpreter_next_to_a_hopper_gpu(interpreter, monkeypatch):
    """The interpreter takes the GPU's target for its own, and cannot run inline assembly."""
    target = GPUTarget("cuda", 90, 32)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: target))
    q = torch.randn(1, 600, 1, 16)
    rates = torch.tensor([-0.1])
    expected = decay_attention(q, q, q, rates, backend="reference")
    torch.testing.assert_close(decay_attention(q, q, q, rates, backend="triton"), expected)


def test_misaligned_tensors_and_cpus_are_not_remembered():
    x, misaligned = torch.zeros(8), torch.zeros(17)[1:]
    assert launching.of_call(GPU, (x, misaligned)) is launching.uncached
    assert launching.of_call(torch.device("cpu"), (x,)) is launching.uncached
    assert launching.of_call(GPU, (x, misaligned[3:])) is not launching.uncached
    assert launching.of_call(GPU, (x,), saved=(misaligned,)) is launching.uncached
    assert launching.of_call(GPU, (x,), saved=(misaligned[3:],)) is not launching.uncached


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_launches_with_hooks_are_not_remembered(name):
    chain, hook = getattr(triton.knobs.runtime, name), print
    chain.add(hook)
    try:
        assert launching.of_call(GPU, (torch.zeros(8),)) is launching.uncached
    finally:
        chain.remove(hook)
    assert launching.of_call(GPU, (torch.zeros(8),)) is not launching.uncached


def test_every_device_has_launches_of_its_own():
    x = torch.zeros(8)
    first, second = (launching.of_call(torch.device("cuda", index), (x,)) for index in range(2))
    assert first is not second
    assert launching.of_call(torch.device("cuda", 0), (x,)) is first


CALLS = {
    "dense": {}, "one token more": dict(length=641), "one head": dict(heads=1, kv_heads=1), "groups": dict(kv_heads=1),
    "constant": dict(decay="constant"), "none": dict(decay=None), "not planned": dict(length=200),
    "window": dict(window_size=(130, 0)), "not causal": dict(causal=False, length=300),
    "packed": dict(packed=[0, 5, 5, 600, 640]),
    "packed, three tokens more": dict(packed=[0, 5, 5, 600, 643], length=643),
    "packed, five tokens more": dict(packed=[0, 5, 5, 600, 645], length=645),
    "float16 of 96": dict(dtype=torch.float16, dim=96), "strided": dict(strided=True),
    "row scale": dict(row_scale=True), "bias": dict(bias=True, length=130), "lse": dict(lse=True),
}
NOT_HOPPERS = ("not causal", "float16 of 96", "row scale", "bias")


def run(backend, dtype=torch.bfloat16, dim=64, length=640, heads=2, kv_heads=2, decay="scalar", packed=None,
        strided=False, row_scale=False, bias=False, lse=False, **options):
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
        )
    total = out.sum() + (row_lse.sum() if lse else 0)
    torch.autograd.grad(total, inputs)


@pytest.fixture(params=["triton", "hopper"])
def backend(request) -> str:
    if isinstance(load(request.param), str):
        pytest.skip(load(request.param))
    return request.param


@gpu
def test_remembered_kernels_are_those_that_triton_chooses(backend, monkeypatch):
    """All calls, twice, one after the other, in one memory of launches: none may find another's kernels."""
    launches = []
    remembering = launching._remembering

    def watched(kinds):
        launch = remembering(kinds)
        if launch is None:
            return None

        def check(kernel, programs, *args, **constants):
            chosen = kernel.warmup(*args, grid=(programs,), **constants, **launching._COMPILER_OPTIONS)
            launch(kernel, programs, *args, **constants)
            known = launch.known[(kernel.fn, programs, *constants.values())]
            assert (known.function, known.metadata) == (chosen.function, chosen.packed_metadata), kernel.fn.__name__
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
    assert compatibility.fallbacks() == []


@gpu
def test_packed_batches_of_other_totals_ask_nothing(backend, monkeypatch):
    run(backend, packed=[0, 5, 5, 600, 643], length=643)
    asked = []
    monkeypatch.setattr(launching, "uncached", lambda kernel, *_, **__: asked.append(kernel.fn.__name__))
    for total in (645, 647, 650):
        run(backend, packed=[0, 5, 5, 600, total], length=total)
    assert asked == []


def test_deterministic_algorithms_fill_no_buffer(device, torch_settings):
    x = torch.ones(5, 7, device=device)[:, 1:].mT
    torch.use_deterministic_algorithms(True)
    like, other = contiguous_like(x), uninitialised(x, 3, 5, dtype=torch.int32)
    assert (like.shape, like.dtype, like.device, like.stride()) == (x.shape, x.dtype, x.device, (5, 1))
    # the tests' poison; torch's is the largest integer
    assert torch.equal(other, torch.full((3, 5), -1, dtype=torch.int32, device=device))
