"""Launches of compiled kernels without Triton's look-up: its private CompiledKernel.run, called as Triton calls it.

Where Triton calls it differently, Triton makes all launches (compatibility.fallbacks). Nothing here imports Triton.
"""

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from decayattn import compatibility

_RUN = "triton.compiler.CompiledKernel.run"
# Compiled kernels that were launched. Since Triton 3.8 a freed kernel is unloaded from the GPU, where a CUDA graph may
# still launch it. Triton itself drops kernels: if two threads compile one at once it keeps one of the two, and none
# after its caches are cleared
_held: dict[int, Any] = {}
# kernels that Triton launched with the same arguments as DirectLaunch
_compared: set[Callable] = set()
# one thread at a time launches a kernel for the first time
_locks: dict[Callable, threading.RLock] = {}


class DirectLaunch(NamedTuple):
    """Compiled kernel, and the arguments of its launcher besides the kernel's."""

    run: Callable
    function: Any
    metadata: Any
    rest: tuple  # the last parameters, for which the kernel was compiled

    def __call__(self, programs: int, device: int, args: tuple) -> None:
        # three times None: the launch metadata for hooks, and the two hooks
        stream = compatibility.current_stream(device)
        self.run(programs, 1, 1, stream, self.function, self.metadata, None, None, None, *args, *self.rest)


def has_direct_launches() -> bool:
    """True unless Triton is known to launch kernels differently from DirectLaunch."""
    return compatibility.is_used(_RUN)


def launch(kernel: Any, programs: int, args: tuple, constants: dict[str, Any]) -> Any:
    """Launch with Triton. Return the compiled kernel, or None from the interpreter, which compiles nothing."""
    compiled = kernel[(programs,)](*args, **constants)
    if compiled is not None:
        _held[id(compiled)] = compiled
    return compiled


def first_launch(
    kernel: Any, programs: int, device: int, args: tuple, constants: dict[str, Any]
) -> DirectLaunch | None:
    """Launch with Triton. Return a direct launch for the next time, or None if that must also be Triton's.

    At a kernel's very first launch, the direct launch is compared with the arguments that Triton passes. If they
    differ, Triton makes all launches from then on.
    """
    with _locks.setdefault(kernel.fn, threading.RLock()):
        if kernel.fn in _compared:
            compiled = launch(kernel, programs, args, constants)
            return None if compiled is None else _direct(kernel, compiled, args, constants)
        chosen = kernel.warmup(*args, grid=(programs,), **constants)
        if chosen is None or hasattr(chosen, "result"):  # a hook prevents compilation, or it is unfinished
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
        if launched is not chosen:  # another thread compiled it in the meantime
            return None
        try:
            direct = _direct(kernel, chosen, args, constants)
        except AttributeError as error:
            _leave_to_triton(str(error))
            return None
        if not any(_agrees(direct, programs, device, args, given) for given in passed):
            _leave_to_triton("receives other arguments")
            return None
        _compared.add(kernel.fn)
        return direct


def _observing(run: Callable, passed: list[tuple]) -> Callable:
    def observe(*given: Any) -> Any:
        passed.append(given)
        return run(*given)

    return observe


def _direct(kernel: Any, compiled: Any, args: tuple, constants: dict[str, Any]) -> DirectLaunch:
    # a compiled kernel is launched with all parameters in order, including those for which it was compiled
    given = {parameter.name: parameter.default for parameter in kernel.params if parameter.has_default} | constants
    rest = tuple(given[name] for name in kernel.arg_names[len(args) :])
    return DirectLaunch(compiled.run, compiled.function, compiled.packed_metadata, rest)


def _agrees(direct: DirectLaunch, programs: int, device: int, args: tuple, given: tuple) -> bool:
    """True if Triton passed to the launcher what a direct launch passes, apart from the hooks."""
    hooks = sys.modules["triton"].knobs.runtime
    expected = (
        programs, 1, 1, compatibility.current_stream(device), direct.function, direct.metadata,
        None, hooks.launch_enter_hook, hooks.launch_exit_hook, *args, *direct.rest,
    )
    launch_metadata = 6  # passed to hooks
    return len(given) == len(expected) and all(
        i == launch_metadata or x is y or (type(x) is type(y) is int and x == y)
        for i, (x, y) in enumerate(zip(given, expected, strict=True))
    )


def _leave_to_triton(difference: str) -> None:
    if has_direct_launches():
        reason = (
            f"of Triton {sys.modules['triton'].__version__} is not that of 3.6 to 3.9 ({difference}): Triton makes all "
            "launches, which takes more host time"
        )
        compatibility.leave(_RUN, reason)
        warnings.warn(f"decayattn: {_RUN} {reason}", RuntimeWarning, stacklevel=4)
