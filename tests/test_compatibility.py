"""Without the private names of PyTorch and Triton that calls are faster with; those of launches are in
backends/runtime/test_launching.py."""

import contextlib
import importlib
from types import SimpleNamespace

import pytest
import torch
from processes import run_python
from repository_files import ROOT
from torch.autograd import forward_ad

from decayattn import compatibility, decay_attention


@pytest.fixture
def reload(monkeypatch):
    """Reload the module without the removed names, until the test ends, and find the one reason that it gives."""

    def reloaded(*said):
        importlib.reload(compatibility)
        (fallback,) = compatibility.fallbacks()
        assert all(text in fallback for text in said)

    yield reloaded
    monkeypatch.undo()
    importlib.reload(compatibility)


def make(device):
    shape = (1, 10, 1, 16)
    inputs = [torch.randn(shape, device=device) for _ in range(3)] + [-torch.rand(shape[:3], device=device)]
    return [x.requires_grad_() for x in inputs]


def gradients(inputs):
    return torch.autograd.grad(decay_attention(*inputs, backend="triton").square().sum(), inputs)


def test_private_names_are_all_here():
    assert compatibility.fallbacks() == []


@pytest.mark.parametrize("change", ["gone", "changed"])
@pytest.mark.parametrize("name", ["_len_torch_dispatch_stack", "_are_functorch_transforms_active"])
def test_calls_without_names_of_observers_use_operators(name, change, reload, monkeypatch, device):
    inputs = make(device)
    expected = gradients(inputs)
    assert not compatibility.has_observers()
    with monkeypatch.context() as patch:  # PyTorch itself has what it needs
        if change == "gone":
            patch.delattr(torch._C, name)
        else:
            patch.setattr(torch._C, name, lambda: None)
        reload(name, "every call passes through the operators")
    assert compatibility.has_observers()
    for x, y in zip(gradients(inputs), expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("gone", [False, True])
def test_assert_on_device_raises_without_private_names(gone, reload, monkeypatch):
    if gone:
        monkeypatch.delattr(torch, "_assert_async")
        reload("the check of a padding_mask on a GPU synchronises")
    compatibility.assert_on_device(torch.tensor(True), "all is well")
    with pytest.raises(RuntimeError, match="a row with a gap"):
        compatibility.assert_on_device(torch.tensor(False), "a row with a gap")


@pytest.mark.parametrize("gone", [False, True])
def test_values_under_vmap_need_the_unwrapped_tensor(gone, reload, monkeypatch):
    if gone:
        with monkeypatch.context() as patch:
            patch.delattr(torch._C._functorch, "get_unwrapped")
            reload("values of tensors are not checked under a transform")
    refuse = torch.vmap(lambda x: (compatibility.refuse_unless(x, "a bad sample"), x)[1])
    refuse(torch.tensor([True, True]))
    with contextlib.nullcontext() if gone else pytest.raises(ValueError, match="a bad sample"):
        refuse(torch.tensor([True, False]))


@pytest.mark.parametrize("change", ["gone", "changed"])
def test_calls_without_dual_levels_check_every_tangent(change, reload, monkeypatch, device):
    inputs = make(device)
    if change == "gone":
        monkeypatch.setattr(forward_ad, "unpack_dual", lambda x: SimpleNamespace(tangent=None))
        monkeypatch.delattr(forward_ad, "_current_level")
    else:
        monkeypatch.setattr(forward_ad, "_current_level", None)
        monkeypatch.setattr(forward_ad, "unpack_dual", lambda x: SimpleNamespace(tangent=x if x is inputs[1] else None))
    reload("every tensor of a call is checked for a tangent")
    if change == "gone":
        gradients(inputs)
    else:
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            gradients(inputs)


def test_constant_results_without_the_private_mark(reload, monkeypatch, tmp_path):
    marked = []
    monkeypatch.setattr(torch.compiler, "assume_constant_result", lambda function: marked.append(function) or function)
    assert compatibility.assume_constant_result(make) is make
    assert make._dynamo_marked_constant
    monkeypatch.delattr(make, "_dynamo_marked_constant")
    assert marked == []
    (tmp_path / "_dynamo").mkdir()
    (tmp_path / "_dynamo" / "decorators.py").write_text("fn.another_mark = True\n")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    reload("_dynamo_marked_constant")
    assert compatibility.assume_constant_result(make) is make
    assert marked == [make]
    assert not hasattr(make, "_dynamo_marked_constant")


def test_current_stream_without_the_raw_stream(reload, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=100 + device))
    reload("torch.cuda.current_stream")
    assert compatibility.current_stream(1) == 101


WITHOUT_ALL = """
import sys
import torch
from torch.autograd import forward_ad

names = ("_len_torch_dispatch_stack", "_are_functorch_transforms_active", "_AutoDispatchBelowAutograd")
private = {name: getattr(torch._C, name) for name in names}
for name in names:
    delattr(torch._C, name)
from decayattn import compatibility, decay_attention, integrations, nn
assert "transformers" not in sys.modules
for name in names:  # PyTorch itself has what it needs
    setattr(torch._C, name, private[name])

assert len(compatibility.fallbacks()) == 2, compatibility.fallbacks()
device = "cuda" if torch.cuda.is_available() else "cpu"
inputs = [x.to(device).requires_grad_() for x in (*torch.randn(3, 1, 10, 1, 16), -torch.rand(1, 10, 1))]

def gradients(backend, **options):
    out, lse = decay_attention(*inputs, backend=backend, return_lse=True)
    return torch.autograd.grad(out.square().sum() + lse.sum(), inputs, **options)

for x, y in zip(gradients("triton"), gradients("reference"), strict=True):
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
with torch.no_grad():
    assert not decay_attention(*inputs, backend="triton").requires_grad
*_, last = gradients("triton", create_graph=True)
with forward_ad.dual_level():
    tangent = lambda: decay_attention(forward_ad.make_dual(inputs[0], inputs[1]), *inputs[1:], backend="triton")
    for refused in (lambda: torch.autograd.grad(last.sum(), inputs), tangent):
        try:
            refused()
        except RuntimeError as error:
            assert "derivative" in str(error), error
        else:
            raise SystemExit("a derivative came out")
"""


@pytest.mark.slow
def test_autograd_works_without_any_private_name():
    """A process of its own: the way operators are differentiated is chosen when the library is imported."""
    run_python("-c", WITHOUT_ALL, cwd=ROOT)
