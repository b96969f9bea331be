"""Choice of a call's backend: the named one, or an error with the reason. No other one replaces it."""

import inspect
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from processes import run_python

from decayattn import decay_attention, reference
from decayattn.backends import registry
from decayattn.backends.hopper import backend as hopper
from decayattn.backends.portable import config, decode
from decayattn.backends.runtime import interpreter, launching
from decayattn.problem import AttentionProblem, Inputs

ON_GPU = torch.cuda.is_available()


def problem(dtype=torch.float32, device="cpu") -> AttentionProblem:
    q = torch.zeros(1, 3, 2, 4, dtype=dtype, device=device)
    return AttentionProblem.of(Inputs(q, q, q), True)


@pytest.mark.parametrize("name", ["hopper9000", "Triton", "", None])
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match=f"backend: expected one of 'auto', 'reference', .*'triton'.*got {name!r}"):
        registry.select(problem(), name)


def test_auto_is_a_kernel_on_a_gpu_and_the_reference_elsewhere(device):
    assert registry.select(problem(device=device), "auto") == ("auto" if device.type == "cuda" else "reference")
    assert registry.select(problem(), "auto") == "reference"
    assert registry.select(problem(torch.bfloat16), "auto") == "reference"


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_named_backend_runs_alone(name, device, monkeypatch):
    ran = []
    for kernel in registry.KERNELS:
        module = registry.load(kernel)
        if not isinstance(module, str):
            forward = module.forward
            monkeypatch.setattr(module, "forward", lambda *a, k=kernel, f=forward: (ran.append(k), f(*a))[1])
    q = torch.randn(1, 3, 2, 4, device=device)
    decay_attention(q, q, q, backend=name)
    assert ran == [name] * (name != "reference")


@pytest.mark.parametrize("decay", [(), (0,), (1, 3, 0)])
@pytest.mark.parametrize("name", ["auto", "reference", "triton"])
def test_no_query_heads(name, decay, device):
    q = torch.zeros(1, 3, 0, 4, device=device, requires_grad=True)
    k = torch.randn(1, 3, 2, 4, device=device, requires_grad=True)
    log_decay = torch.zeros(decay, device=device, requires_grad=True)
    out, lse = decay_attention(q, k, k, log_decay, return_lse=True, backend=name)
    assert (out.shape, lse.shape) == ((1, 3, 0, 4), (1, 0, 3))
    gradients = torch.autograd.grad(out.sum() + lse.sum(), [q, k, log_decay], materialize_grads=True)
    assert [x.shape for x in gradients] == [q.shape, k.shape, log_decay.shape]
    assert all((x == 0).all() for x in gradients)


def test_backends_with_decode_kernels_decode(monkeypatch):
    """On a GPU where every backend takes the dtype."""
    monkeypatch.setattr(registry, "unavailable", lambda *arguments: None)
    kind = torch.float16, torch.device("cuda", 0)
    if isinstance(registry.load("triton"), str):
        pytest.skip(registry.load("triton"))
    assert registry.decoder("auto", *kind) is registry.decoder("triton", *kind) is registry.load("triton")
    assert registry.decoder("reference", *kind) is reference
    assert registry.decoder("auto", torch.float16, torch.device("cpu")) is reference
    with pytest.raises(ValueError, match="'hopper' cannot take this problem: it has no kernels for new tokens"):
        registry.decoder("hopper", *kind)
    assert registry.select(problem(torch.float16)._replace(device=kind[1]), "hopper") == "hopper"


@pytest.mark.skipif(ON_GPU, reason="nothing is interpreted")
@pytest.mark.parametrize(("triton", "numpy", "works"), [
    ("3.6.0", "2.4.6", False), ("3.6.1+git", "3.0.0", False), ("3.6.0", "2.3.5", True), ("3.7.0", "2.4.6", True)
])
def test_interpreter_is_refused_with_a_failing_numpy(triton, numpy, works, monkeypatch):
    installed = {"triton": triton, "numpy": numpy}
    monkeypatch.setattr(interpreter, "_installed", installed.get)
    monkeypatch.setattr(interpreter, "fails", interpreter.fails.__wrapped__)
    if works:
        assert registry.select(problem(), "triton") == "triton"
    else:
        with pytest.raises(ValueError, match=f"backend: 'triton'.*needs numpy below 2.4, not {numpy}: pip install"):
            registry.select(problem(), "triton")


@pytest.mark.parametrize(("change", "reason"), [
    pytest.param(dict(dtype=torch.bfloat16), "bfloat16 products wrong", marks=pytest.mark.skipif(ON_GPU, reason="CPU")),
    (dict(device=torch.device("mps")), "not on mps"),
])
def test_reasons_against_the_kernels(change, reason):
    with pytest.raises(ValueError, match=f"backend: 'triton' cannot take this problem: .*{reason}"):
        registry.select(problem()._replace(**change), "triton")


WITHOUT_KERNELS = """
import os, sys
import torch
before = {name for name in sys.modules if name.split(".")[0] == "triton"}
import decayattn
from decayattn.backends import registry

q = torch.randn(1, 3, 2, 4, requires_grad=True)
for backend in ("auto", "reference"):
    decayattn.decay_attention(q, q, q, torch.tensor([-1.0, -0.5]), backend=backend).sum().backward()
decayattn.DecayFlashAttention(8, 2)(torch.randn(1, 3, 8))
print({name for name in sys.modules if name.split(".")[0] == "triton"} - before)
print(torch.cuda.is_initialized())
print([name for name in os.environ if name.startswith("TRITON")])
sys.modules["triton"] = None  # import finds this where it is not installed
for _ in range(2):
    registry.load.cache_clear()
    try:
        decayattn.decay_attention(q, q, q, backend="triton")
    except ValueError as error:
        print(error)
    sys.modules.pop("triton")
"""


def test_cpu_without_triton_runs_the_reference_alone():
    """An import touches neither Triton nor a GPU. Without Triton, and without its interpreter, errors name a remedy: to
    set the variable, or, before that, another NumPy, which an older interpreter needs."""
    *lines, missing, unset = run_python("-c", WITHOUT_KERNELS, without="TRITON").splitlines()
    assert lines == ["set()", "False", "[]"]
    for error, remedy in ((missing, "pip install triton"), (unset, interpreter.fails() or "TRITON_INTERPRET=1")):
        assert "backend: 'triton' cannot take this problem" in error
        assert remedy in error


def test_own_import_errors_are_no_missing_triton(monkeypatch):
    error = ImportError("a typo of ours", name="decayattn.backends.portable.typo")
    monkeypatch.setattr(registry.importlib, "import_module", mock.Mock(side_effect=error))
    registry.load.cache_clear()
    try:
        with pytest.raises(ImportError, match="a typo of ours"):
            registry.load("triton")
    finally:
        registry.load.cache_clear()


@pytest.mark.parametrize(("length", "heads", "dim", "chosen"), [
    (1024, 8, 64, "triton"), (1024, 8, 128, "triton"), (2048, 8, 64, "hopper"), (256, 64, 64, "hopper"),
    (64, 8, 136, "hopper"),
])
def test_auto_takes_the_faster_backend(length, heads, dim, chosen, monkeypatch):
    """On a GPU where every backend takes the problem."""
    hopper = registry.load("hopper")
    if isinstance(hopper, str):
        pytest.skip(hopper)
    monkeypatch.setattr(launching, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(registry, "unavailable", lambda *arguments: None)
    monkeypatch.setattr(hopper, "unsupported", lambda *arguments: None)
    registry._automatic.cache_clear()
    q, v = torch.zeros(1, length, heads, 64), torch.zeros(1, length, heads, dim)
    inputs = Inputs(q, q, v, torch.zeros(heads), scale=0.125)
    asked_for = AttentionProblem.of(inputs, True)
    assert registry.resolve(asked_for, "auto", inputs) is registry.load(chosen)
    assert registry.resolve(asked_for, "hopper", inputs) is hopper
    packed = asked_for._replace(layout="packed", sequences=3)  # not measured
    assert registry.resolve(packed, "auto", inputs) is hopper
    registry._automatic.cache_clear()


def test_every_backend_fulfils_its_protocols():
    """Their names, and the parameters of each in the order of the protocol."""
    for kernel in registry.KERNELS:
        module = registry.load(kernel)
        if isinstance(module, str):
            pytest.skip(module)
        members = {name: x for name, x in vars(registry.Backend).items() if not name.startswith("_")}
        assert members.keys() >= {"unavailable", "unsupported", "is_profitable", "forward", "backward"}
        if kernel in registry.DECODERS:
            members |= {"append": reference.append, "decode": reference.decode}
        assert {name for name in module.__all__ if getattr(module, name) is not None} == members.keys()
        for name, wanted in members.items():
            expected = [parameter for parameter in inspect.signature(wanted).parameters if parameter != "self"]
            assert list(inspect.signature(getattr(module, name)).parameters) == expected, (kernel, name)


# Backends and tiles of each GPU


GPU = torch.device("cuda", 0)
# capability, ROCm, kilobytes of shared memory that a block can have
GPUS = {
    "A100": ((8, 0), False, 163, "other"),
    "RTX 4090": ((8, 9), False, 99, "other"),
    "H100": ((9, 0), False, 227, "sm90"),
    "B200": ((10, 0), False, 227, "other"),
    "RTX 5090": ((12, 0), False, 99, "other"),
    "T4": ((7, 5), False, 64, "small"),
    "MI250 (gfx90a)": ((9, 0), True, 64, "small"),
    "MI300 (gfx942)": ((9, 4), True, 64, "small"),
}


@pytest.fixture
def gpu(monkeypatch):
    """Function that replaces GPU 0."""

    def install(capability, hip, kilobytes):
        properties = SimpleNamespace(major=capability[0], minor=capability[1], shared_memory_per_block=48 << 10)
        if hip:
            properties.shared_memory_per_block = kilobytes << 10
        else:
            properties.shared_memory_per_block_optin = kilobytes << 10
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", "6.4" if hip else None)
        clear()

    def clear():
        config.arch.cache_clear()
        hopper.unavailable.cache_clear()

    yield install
    clear()


@pytest.mark.parametrize("name", GPUS)
def test_tiles_follow_from_the_gpu(name, gpu):
    *known, expected = GPUS[name]
    gpu(*known)
    assert config.arch(GPU) == expected
    reason = hopper.unavailable(torch.bfloat16, GPU)
    assert (reason is None) == (name == "H100")
    if known[1]:
        assert "not with ROCm" in reason


def test_float32_products_without_tf32(gpu, torch_settings):
    for precision, name, expected in (
        ("high", "A100", "tf32"), ("high", "MI250 (gfx90a)", "ieee"), ("highest", "A100", "ieee"),
    ):
        torch.set_float32_matmul_precision(precision)
        gpu(*GPUS[name][:3])
        assert config.dot_precision() == expected


def test_every_gpu_has_tiles_of_every_kernel():
    for arch in ("sm90", "other", "small", "interpreter"):
        for dim in (16, 64, 128, 256):
            for dtype in (torch.bfloat16, torch.float32, torch.float64):
                for kernel in (config.FORWARD, config.KEY_GRADIENTS, config.QUERY_GRADIENTS):
                    tile = config.choose(kernel, arch, dim, dtype, aligned=False)
                    assert tile.block_m * tile.block_n > 0
                assert decode.choose(arch, dim, dtype).block_n > 0
