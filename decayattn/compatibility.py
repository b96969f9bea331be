"""The private names of PyTorch and Triton that this library uses, each with a public way behind it.

They save the host's time in every call. One that is gone, or is not what it was, is not used: the public way gives the
same results. `fallbacks()` lists those. Nothing here imports Triton.
"""

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

# name: why it is not used, and what happens instead
_fallbacks: dict[str, str] = {}


def fallbacks() -> list[str]:
    """Which private names this PyTorch or Triton has no more, or has changed, and what is done instead; empty where all
    are as they were. Of Triton's, that is known once a kernel has been launched on a GPU."""
    return [f"{name} {reason}" for name, reason in _fallbacks.items()]


def _usable(name: str, probe: Callable[[], Any], instead: str) -> Any:
    """What probe finds; None, and an entry in fallbacks(), where it fails."""
    try:
        return probe()
    except Exception as error:
        _fallbacks[name] = f"cannot be used in PyTorch {torch.__version__} ({type(error).__name__}: {error}): {instead}"
        return None


def _expect(value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")


# ----------------------------------------------------------------------------------------------------------------------
# Operators


def _probe_observers() -> tuple[Callable[[], int], Callable[[], bool]]:
    modes, transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
    _expect(modes(), int)
    _expect(transforms(), bool)
    return modes, transforms


_observers = _usable(
    "torch._C._len_torch_dispatch_stack, ._are_functorch_transforms_active", _probe_observers,
    "every call passes through the operators, which takes the host longer",
)


def has_observers() -> bool:
    """Whether a dispatch mode or a transform of torch.func wants to see operators; True where that is unknown,
    for an operator is right everywhere."""
    if _observers is None:
        return True
    modes, transforms = _observers
    return modes() > 0 or transforms()


def is_transformed() -> bool:
    """Whether a transform of torch.func is known to be active."""
    return _observers is not None and _observers[1]()


def is_fake(x: Tensor) -> bool:
    """True for a tensor without values, as torch.compile traces with."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(x, fake.FakeTensor)


def _probe_modes() -> Callable[[], list]:
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack
    _expect(modes(), list)
    return modes


_modes = _usable(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack", _probe_modes,
    "a FlopCounterMode that was made before the first call of a kernel counts 0",
)


def count_flops(formulas: dict[Any, Callable[..., int]]) -> None:
    """Register FLOP formulas of operators with PyTorch's counter, if it is imported: its import would import Triton.

    A counter copies the formulas when it is made, so the active ones receive them too.
    """
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


def _probe_guard() -> Callable:
    with torch._C._AutoDispatchBelowAutograd():
        return torch._C._AutoDispatchBelowAutograd


# context of calls to operators that autograd shall not see; None: torch.library.register_autograd makes such calls
below_autograd = _usable(
    "torch._C._AutoDispatchBelowAutograd", _probe_guard,
    "torch.library.register_autograd differentiates the operators, which takes the host longer",
)


def _probe_level() -> bool:
    _expect(forward_ad._current_level, int)
    return True


_has_level = _usable(
    "torch.autograd.forward_ad._current_level", _probe_level, "every tensor of a call is asked for its tangent"
)


def has_tangent(tensors: Iterable[Tensor]) -> bool:
    """Whether one of them has a tangent, for forward-mode derivatives; without a level, none has."""
    if _has_level and forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


# ----------------------------------------------------------------------------------------------------------------------
# Values of tensors


def _probe_assertion() -> Callable[[Tensor, str], None]:
    torch._assert_async(torch.ones((), dtype=torch.bool, device="cpu"), "")
    return torch._assert_async


_assertion = _usable("torch._assert_async", _probe_assertion, "a padding_mask on a GPU is waited for")


def _probe_wrappers() -> tuple[Callable[[Tensor], bool], Callable[[Tensor], Tensor]]:
    functorch = torch._C._functorch
    _expect(functorch.is_functorch_wrapped_tensor(torch.ones((), device="cpu")), bool)
    return functorch.is_functorch_wrapped_tensor, functorch.get_unwrapped


_wrappers = _usable(
    "torch._C._functorch.is_functorch_wrapped_tensor, .get_unwrapped", _probe_wrappers,
    "values of tensors are not checked under a transform of torch.func",
)


def assert_on_device(condition: Tensor, message: str) -> None:
    """Assert in the stream of the kernels, without a synchronisation. torch.compile and CUDA graphs keep it.

    On a CPU it raises a RuntimeError at once, on a GPU the device fails, as from an index out of range.
    """
    if _assertion is not None:
        _assertion(condition, message)
    elif not condition:
        raise RuntimeError(message)


def refuse_unless(condition: Tensor, message: str) -> None:
    """Refuse values of a tensor: at once on a CPU; elsewhere, and in compiled code, by assert_on_device."""
    if torch.compiler.is_compiling():
        assert_on_device(condition, message)
        return
    if is_transformed():
        if _wrappers is None:
            return
        is_wrapped, unwrapped = _wrappers
        while is_wrapped(condition):  # vmap has no rule for an assertion; inside are the values of all samples
            condition = unwrapped(condition)
        condition = condition.all()
    if condition.device.type != "cpu":
        assert_on_device(condition, message)
        return
    try:
        assert_on_device(condition, message)
    except RuntimeError:
        raise ValueError(message) from None


# ----------------------------------------------------------------------------------------------------------------------
# torch.distributed


def all_gather(gathered: Tensor, own: Tensor, group: "torch.distributed.ProcessGroup") -> None:
    """gathered (ranks, ·) is filled with every rank's own (1, ·). PyTorch 2.13 has given it another name, and warns of
    the one that it had."""
    dist = torch.distributed
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, own, group=group)


# ----------------------------------------------------------------------------------------------------------------------
# torch.compile


def _probe_mark() -> bool:
    """The mark is read in PyTorch's source: to import torch._dynamo would import Triton."""
    source = Path(torch.__file__).parent / "_dynamo" / "decorators.py"
    if "fn._dynamo_marked_constant = True" not in source.read_text(encoding="utf-8"):
        raise AttributeError("torch.compiler.assume_constant_result sets another mark")
    return True


_has_mark = _usable(
    "_dynamo_marked_constant", _probe_mark,
    "torch.compiler.assume_constant_result sets the mark, which imports torch._dynamo and Triton with the library",
)


def assume_constant_result(function: Callable) -> Callable:
    """torch.compile calls the function while it traces, and keeps its answer.

    torch.compiler.assume_constant_result, which sets the same mark and imports torch._dynamo, and with it Triton.
    """
    if not _has_mark:
        return torch.compiler.assume_constant_result(function)
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def left_to_eager_code(reason: str) -> Callable[[Callable], Callable]:
    """A function that torch.compile does not trace, nor what it calls; with fullgraph=True that is an error with the
    reason.

    torch.compiler.disable, which imports torch._dynamo, and with it Triton, only where somebody else has done so.
    """

    def decorate(function: Callable) -> Callable:
        disabled = functools.lru_cache(lambda: torch.compiler.disable(function, reason=reason))

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                raise RuntimeError(reason)
            if "torch._dynamo" in sys.modules:
                return disabled()(*args, **kwargs)
            return function(*args, **kwargs)

        return wrapper

    return decorate


# ----------------------------------------------------------------------------------------------------------------------
# Launches


def _probe_stream() -> Callable[[int], int] | None:
    # to ask for a stream here would initialise CUDA; first_launch compares it with what Triton passes
    on_gpus = torch.version.cuda is not None or torch.version.hip is not None
    return torch._C._cuda_getCurrentRawStream if on_gpus else None


def _public_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# current_stream(device index): the address of the stream that work is put on
current_stream = (
    _usable("torch._C._cuda_getCurrentRawStream", _probe_stream, "torch.cuda.current_stream is asked for the stream")
    or _public_stream
)

_RUN = "triton.compiler.CompiledKernel.run"
# compiled kernels that were launched. Since Triton 3.8 a kernel that is freed is unloaded from the GPU, where a CUDA
# graph may still launch it; and of those that two threads compile at once Triton holds one only, and none when its
# caches are cleared
_held: dict[int, Any] = {}
# kernels that Triton was seen to launch as DirectLaunch does
_compared: set[Callable] = set()
# only one thread at a time launches a kernel for the first time
_locks: dict[Callable, threading.RLock] = {}


class DirectLaunch(NamedTuple):
    """A compiled kernel, and what its launcher is given besides the arguments."""

    run: Callable
    function: Any
    metadata: Any
    rest: tuple  # the last parameters, which the kernel was compiled for

    def __call__(self, programs: int, device: int, args: tuple) -> None:
        # three times None: the metadata of the launch for hooks, and the hooks
        stream = current_stream(device)
        self.run(programs, 1, 1, stream, self.function, self.metadata, None, None, None, *args, *self.rest)


def has_direct_launches() -> bool:
    """Whether Triton launches kernels as DirectLaunch does, as far as is known."""
    return _RUN not in _fallbacks


def launch(kernel: Any, programs: int, args: tuple, constants: dict[str, Any]) -> Any:
    """Launched by Triton: the compiled kernel; None from the interpreter, which compiles nothing."""
    compiled = kernel[(programs,)](*args, **constants)
    if compiled is not None:
        _held[id(compiled)] = compiled
    return compiled


def first_launch(
    kernel: Any, programs: int, device: int, args: tuple, constants: dict[str, Any]
) -> DirectLaunch | None:
    """Launched by Triton, and how to launch it again without; None where the next launch has to be Triton's, too.

    A kernel's very first launch is compared with what Triton passes in it. Where that differs, all launches are left to
    Triton from then on.
    """
    with _locks.setdefault(kernel.fn, threading.RLock()):
        if kernel.fn in _compared:
            compiled = launch(kernel, programs, args, constants)
            return None if compiled is None else _direct(kernel, compiled, args, constants)
        chosen = kernel.warmup(*args, grid=(programs,), **constants)
        if chosen is None or hasattr(chosen, "result"):  # a hook keeps Triton from compiling; it is still compiling
            launch(kernel, programs, args, constants)
            return None
        passed: list[tuple] = []
        try:
            run = chosen.run
            chosen._run = _observing(run, passed)
        except AttributeError as error:
            launch(kernel, programs, args, constants)
            _leave_to_triton(str(error))
            return None
        try:
            launched = launch(kernel, programs, args, constants)
        finally:
            chosen._run = run
        if launched is not chosen:  # another thread has compiled it meanwhile
            return None
        try:
            direct = _direct(kernel, chosen, args, constants)
        except AttributeError as error:
            _leave_to_triton(str(error))
            return None
        if not any(_agrees(direct, programs, device, args, given) for given in passed):
            _leave_to_triton("is given other arguments")
            return None
        _compared.add(kernel.fn)
        return direct


def _observing(run: Callable, passed: list[tuple]) -> Callable:
    def observe(*given: Any) -> Any:
        passed.append(given)
        return run(*given)

    return observe


def _direct(kernel: Any, compiled: Any, args: tuple, constants: dict[str, Any]) -> DirectLaunch:
    # a compiled kernel is launched with all parameters in their order, those that it was compiled for too
    given = {parameter.name: parameter.default for parameter in kernel.params if parameter.has_default} | constants
    rest = tuple(given[name] for name in kernel.arg_names[len(args) :])
    return DirectLaunch(compiled.run, compiled.function, compiled.packed_metadata, rest)


def _agrees(direct: DirectLaunch, programs: int, device: int, args: tuple, given: tuple) -> bool:
    """Whether Triton gave the launcher what a direct launch gives it, but for the hooks."""
    hooks = sys.modules["triton"].knobs.runtime
    expected = (
        programs, 1, 1, current_stream(device), direct.function, direct.metadata,
        None, hooks.launch_enter_hook, hooks.launch_exit_hook, *args, *direct.rest,
    )
    launch_metadata = 6  # which hooks get
    return len(given) == len(expected) and all(
        i == launch_metadata or x is y or (type(x) is type(y) is int and x == y)
        for i, (x, y) in enumerate(zip(given, expected, strict=True))
    )


def _leave_to_triton(difference: str) -> None:
    if has_direct_launches():
        _fallbacks[_RUN] = (
            f"of Triton {sys.modules['triton'].__version__} is not that of 3.6 to 3.9 ({difference}): Triton makes all "
            "launches, which takes the host longer"
        )
        warnings.warn(f"decayattn: {_RUN} {_fallbacks[_RUN]}", RuntimeWarning, stacklevel=4)
