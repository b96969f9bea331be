"""Private names of PyTorch and Triton that this library uses, each with a public alternative.

They save host time in every call. A name that is missing or has changed is not used: its public alternative gives the
same results. `fallbacks()` lists these names. Nothing here imports Triton.
"""

import contextlib
import operator
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# private name: reason why it is not used, and the alternative
unused: dict[str, str] = {}


def fallbacks() -> list[str]:
    """Private names that this PyTorch or Triton (once loaded) lacks or has changed, with the alternatives used."""
    return [f"{name} {reason}" for name, reason in unused.items()]


def _probe(name: str, instead: str, find: Callable[[], Any]) -> Any:
    """Return find(); if it fails, None, with an entry in fallbacks()."""
    try:
        return find()
    except Exception as error:
        unused[name] = f"cannot be used in PyTorch {torch.__version__} ({type(error).__name__}: {error}): {instead}"
        return None


def _giving(kind: type, function: Callable, *arguments: object) -> Callable:
    """Return the function, after a check of the type of its result."""
    result = function(*arguments)
    if not isinstance(result, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(result).__name__}")
    return function


_observers = _probe(
    "torch._C._len_torch_dispatch_stack, ._are_functorch_transforms_active",
    "every call passes through the operators, which takes more host time",
    lambda: (
        _giving(int, torch._C._len_torch_dispatch_stack), _giving(bool, torch._C._are_functorch_transforms_active)
    ),
)


def has_observers() -> bool:
    """True if a tracer, a dispatch mode or a transform of torch.func sees operators, or if that is unknown."""
    if torch.compiler.is_compiling() or _observers is None or torch.jit.is_tracing():
        return True
    modes, transforms = _observers
    return modes() > 0 or transforms()


def is_transformed() -> bool:
    return _observers is not None and _observers[1]()


_modes = _probe(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "a FlopCounterMode that was made before the first call of a kernel counts 0",
    lambda: _giving(list, torch.utils._python_dispatch._get_current_dispatch_mode_stack),
)


def count_flops(formulas: dict[Any, Callable[..., int]]) -> None:
    """Register FLOP formulas of operators with PyTorch's counter, if it is imported, and with its active counters."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    modes = _modes() if _modes is not None else ()
    for registered in (counter, *(getattr(mode, "counter", None) for mode in modes)):
        for call, formula in formulas.items():
            getattr(registered, "flop_registry", {}).setdefault(call, formula)


# context for calls to operators below autograd; None: torch.library.register_autograd makes these calls
below_autograd = _probe(
    "torch._C._AutoDispatchBelowAutograd",
    "torch.library.register_autograd differentiates the operators, which takes more host time",
    lambda: _giving(contextlib.AbstractContextManager, torch._C._AutoDispatchBelowAutograd),
)
_has_level = _probe(
    "torch.autograd.forward_ad._current_level", "every tensor of a call is checked for a tangent",
    lambda: isinstance(operator.index(forward_ad._current_level), int),
)


def has_tangent(tensors: Iterable[Tensor]) -> bool:
    """True if one of them has a tangent for forward-mode derivatives; none has outside of a dual level."""
    if _has_level and forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


_TRUE = torch.ones((), dtype=torch.bool, device="cpu")
_assertion = _probe(
    "torch._assert_async", "the check of a padding_mask on a GPU synchronises",
    lambda: _giving(type(None), torch._assert_async, _TRUE, ""),
)
_wrappers = _probe(
    "torch._C._functorch.is_functorch_wrapped_tensor, .get_unwrapped",
    "values of tensors are not checked under a transform of torch.func",
    lambda: (_giving(bool, torch._C._functorch.is_functorch_wrapped_tensor, _TRUE), torch._C._functorch.get_unwrapped),
)


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


def within(longest: int, axis: int) -> int:
    """longest, at most the axis. A symbolic size is not compared: that would fix it in an exported graph."""
    return longest if isinstance(axis, torch.SymInt) or isinstance(longest, torch.SymInt) else min(longest, axis)


# in PyTorch's source, because importing torch._dynamo would import Triton
_DECORATORS = Path(torch.__file__).parent / "_dynamo" / "decorators.py"
_has_mark = _probe(
    "_dynamo_marked_constant",
    "torch.compiler.assume_constant_result sets the mark, which imports torch._dynamo and Triton with the library",
    lambda: _DECORATORS.read_text(encoding="utf-8").index("fn._dynamo_marked_constant = True") > 0,
)


def assume_constant_result(function: Callable) -> Callable:
    """torch.compiler.assume_constant_result without importing torch._dynamo and Triton: compiled code keeps results."""
    if not _has_mark:
        return torch.compiler.assume_constant_result(function)
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# asking for a stream here would initialise CUDA; runtime/launching.py checks that Triton asks so
_raw_stream = _probe(
    "torch._C._cuda_getCurrentRawStream", "torch.cuda.current_stream gives the stream",
    lambda: torch._C._cuda_getCurrentRawStream if torch.version.cuda or torch.version.hip else None,
)
# current_stream(device index): address of the current stream
current_stream = _raw_stream or (lambda device: torch.cuda.current_stream(device).cuda_stream)
