"""Private names of PyTorch and Triton that this library uses, each with a public alternative.

They save host time in every call. A name that is missing or has changed is not used: its public alternative gives the
same results. `fallbacks()` lists these names. Nothing here imports Triton.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# name: reason why it is not used, and the alternative
_fallbacks: dict[str, str] = {}


def fallbacks() -> list[str]:
    """Private names that this PyTorch or Triton (once loaded) lacks or has changed, with the alternatives used."""
    return [f"{name} {reason}" for name, reason in _fallbacks.items()]


def is_used(name: str) -> bool:
    """True unless fallbacks() lists the name."""
    return name not in _fallbacks


def leave(name: str, reason: str) -> None:
    """List a name in fallbacks(), with the reason why it is not used."""
    _fallbacks[name] = reason


def _probed(name: str, instead: str) -> Callable[[Callable[[], Any]], Any]:
    """Decorator that replaces a probe by its result; if it fails, by None, with an entry in fallbacks()."""

    def result(probe: Callable[[], Any]) -> Any:
        try:
            return probe()
        except Exception as error:
            leave(name, f"cannot be used in PyTorch {torch.__version__} ({type(error).__name__}: {error}): {instead}")
            return None

    return result


def _expect(value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")


@_probed(
    "torch._C._len_torch_dispatch_stack, ._are_functorch_transforms_active",
    "every call passes through the operators, which takes more host time",
)
def _observers() -> tuple[Callable[[], int], Callable[[], bool]]:
    modes, transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
    _expect(modes(), int)
    _expect(transforms(), bool)
    return modes, transforms


def has_observers() -> bool:
    """True if a tracer, a dispatch mode or a transform of torch.func sees operators, or if that is unknown."""
    if torch.compiler.is_compiling() or _observers is None or torch.jit.is_tracing():
        return True
    modes, transforms = _observers
    return modes() > 0 or transforms()


def is_transformed() -> bool:
    """True if a transform of torch.func is known to be active."""
    return _observers is not None and _observers[1]()


def is_fake(x: Tensor) -> bool:
    """True for a tensor without values, as torch.compile uses while tracing."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(x, fake.FakeTensor)


@_probed(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "a FlopCounterMode that was made before the first call of a kernel counts 0",
)
def _modes() -> Callable[[], list]:
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack
    _expect(modes(), list)
    return modes


def count_flops(formulas: dict[Any, Callable[..., int]]) -> None:
    """Register FLOP formulas of operators with PyTorch's counter, if it is imported, and with its active counters."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    for operator, formula in formulas.items():
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator, get_raw=True)(formula)
    for mode in _modes() if _modes is not None else ():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", {})
        for operator in formulas:
            registry.setdefault(operator, counter.flop_registry[operator])


@_probed(
    "torch._C._AutoDispatchBelowAutograd",
    "torch.library.register_autograd differentiates the operators, which takes more host time",
)
def below_autograd() -> Callable:
    """Context for calls to operators below autograd; None: torch.library.register_autograd makes these calls."""
    with torch._C._AutoDispatchBelowAutograd():
        return torch._C._AutoDispatchBelowAutograd


@_probed("torch.autograd.forward_ad._current_level", "every tensor of a call is checked for a tangent")
def _has_level() -> bool:
    _expect(forward_ad._current_level, int)
    return True


def has_tangent(tensors: Iterable[Tensor]) -> bool:
    """True if one of them has a tangent for forward-mode derivatives; none has outside of a dual level."""
    if _has_level and forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


@_probed("torch._assert_async", "the check of a padding_mask on a GPU synchronises")
def _assertion() -> Callable[[Tensor, str], None]:
    torch._assert_async(torch.ones((), dtype=torch.bool, device="cpu"), "")
    return torch._assert_async


@_probed(
    "torch._C._functorch.is_functorch_wrapped_tensor, .get_unwrapped",
    "values of tensors are not checked under a transform of torch.func",
)
def _wrappers() -> tuple[Callable[[Tensor], bool], Callable[[Tensor], Tensor]]:
    functorch = torch._C._functorch
    _expect(functorch.is_functorch_wrapped_tensor(torch.ones((), device="cpu")), bool)
    return functorch.is_functorch_wrapped_tensor, functorch.get_unwrapped


def assert_on_device(condition: Tensor, message: str) -> None:
    """Assert in the kernels' stream, also compiled or in a CUDA graph, without synchronising. A CPU raises at once."""
    if _assertion is not None:
        _assertion(condition, message)
    elif not condition:
        raise RuntimeError(message)


def refuse_unless(condition: Tensor, message: str) -> None:
    """Refuse values of a tensor: a CPU raises at once; other devices and compiled code use assert_on_device."""
    if torch.compiler.is_compiling():
        assert_on_device(condition, message)
        return
    if is_transformed():
        if _wrappers is None:
            return
        is_wrapped, unwrapped = _wrappers
        while is_wrapped(condition):  # vmap has no rule for assertions; check all samples at once
            condition = unwrapped(condition)
        condition = condition.all()
    if condition.device.type != "cpu":
        assert_on_device(condition, message)
        return
    try:
        assert_on_device(condition, message)
    except RuntimeError:
        raise ValueError(message) from None


def all_gather(gathered: Tensor, own: Tensor, group: "torch.distributed.ProcessGroup") -> None:
    """Fill gathered (ranks, ·) with every rank's own (1, ·). PyTorch 2.13 renames the function; the old name warns."""
    dist = torch.distributed
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, own, group=group)


@_probed(
    "_dynamo_marked_constant",
    "torch.compiler.assume_constant_result sets the mark, which imports torch._dynamo and Triton with the library",
)
def _has_mark() -> bool:
    """Look for the mark in PyTorch's source: importing torch._dynamo would import Triton."""
    source = Path(torch.__file__).parent / "_dynamo" / "decorators.py"
    if "fn._dynamo_marked_constant = True" not in source.read_text(encoding="utf-8"):
        raise AttributeError("torch.compiler.assume_constant_result sets another mark")
    return True


def assume_constant_result(function: Callable) -> Callable:
    """torch.compiler.assume_constant_result without importing torch._dynamo and Triton: compiled code keeps results."""
    if not _has_mark:
        return torch.compiler.assume_constant_result(function)
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_probed("torch._C._cuda_getCurrentRawStream", "torch.cuda.current_stream gives the stream")
def _raw_stream() -> Callable[[int], int] | None:
    # asking for a stream here would initialise CUDA; runtime/launching.py checks that Triton asks so
    on_gpus = torch.version.cuda is not None or torch.version.hip is not None
    return torch._C._cuda_getCurrentRawStream if on_gpus else None


# current_stream(device index): address of the current stream
current_stream = _raw_stream or (lambda device: torch.cuda.current_stream(device).cuda_stream)
