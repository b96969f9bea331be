"""Kernel launches that skip Triton's look-up of the compiled kernel after the first one.

`kernel[grid](...)` derives the compiled kernel from the kind of every argument, in every launch. For an attention
kernel that takes five times as long as the launch itself. The kinds follow from properties that all launches of one
call of ours share. So they are looked up once per call, and later launches call the compiled kernel's private `run` as
Triton does (DirectLaunch).

A call with other lengths, as packed batches have in every step, is another call, but mostly has the same kinds. Then
each kernel's arguments are examined once more (kinds_of), and Triton is asked for new kinds only. Triton reports each
launch to a profiler's hooks, and prepares the report even without a hook. Direct launches skip both, so if a hook is
set, every launch goes through Triton.
"""

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import JITFunction, driver

from decayattn import compatibility

# launch(kernel, programs, *args, **constants) is kernel[(programs,)](*args, **constants, **_COMPILER_OPTIONS)
Launch = Callable[..., None]

# compile every kernel with this, whatever the default: Triton 3.10 is to stop fusing a·b + c into one rounding
_COMPILER_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}
_HOPPER = 90
# The ptxas that Triton 3.9 takes for Hopper, and another that it has. By the latter a forward is up to 6 % faster: it
# hardly spills. _PTX: the version of its input, which is in the keys of Triton's cache, too
_SLOW_PTXAS, _FASTER_PTXAS, _PTX = "13.4", "12.9", {"ptx_version": 88}
_of_thread = threading.local()  # .ptxas: what assembles the kernel that the thread compiles; None: Triton's choice
# kernels are specialised for pointers, and for integers, that are multiples of this
_ALIGNMENT = 16
# The launch in JITFunction.run that DirectLaunch repeats. If it reads differently, Triton makes all launches
_RUN = "triton.compiler.CompiledKernel.run"
_STATEMENTS = (
    "stream = driver.active.get_current_stream(device)",
    "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata, "
    "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())",
)
# Compiled kernels that were launched. Since Triton 3.8 a freed kernel is unloaded from the GPU, where a CUDA graph may
# still launch it. Triton itself drops kernels: if two threads compile one at once it keeps one of the two, and none
# after its caches are cleared
_held: dict[int, Any] = {}
# multiprocessors that the interpreter pretends to have: few, so that programs have several parts of the work even in
# short problems
_OF_A_CPU = 8
# kinds of calls to keep: training has one or two; packed sequences have one for every total length
REMEMBERED = 256


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a device; 8 for a CPU, where the interpreter runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _OF_A_CPU


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Make the inputs' GPU the current one, to which launches go, unless it already is."""
    elsewhere = device.index is not None and device.index != torch.cuda.current_device()  # a CPU has no index
    return torch.cuda.device(device) if elsewhere else contextlib.nullcontext()


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

    @classmethod
    def of(cls, kernel: JITFunction, compiled: Any, args: tuple, constants: dict[str, Any]) -> "DirectLaunch":
        # a compiled kernel is launched with all parameters in order, including those for which it was compiled
        given = {parameter.name: parameter.default for parameter in kernel.params if parameter.has_default} | constants
        rest = tuple(given[name] for name in kernel.arg_names[len(args) :])
        return cls(compiled.run, compiled.function, compiled.packed_metadata, rest)


def check_launches(run: Callable) -> None:
    """Leave all launches to Triton unless the source of `run`, JITFunction's, makes them as DirectLaunch does."""
    try:
        source = inspect.getsource(run)
    except OSError:
        source = ""
    if not all(statement in " ".join(source.split()) for statement in _STATEMENTS):
        reason = f"is called in another way by Triton {triton.__version__}: Triton makes all launches, which takes more"
        compatibility.unused[_RUN] = f"{reason} host time"


check_launches(triton.runtime.JITFunction.run)


@functools.cache
def faster_ptxas() -> Any:
    """A ptxas (.path, .version) that makes faster kernels for Hopper than Triton's choice; None: Triton chooses.

    If there is one, Triton's get_ptxas returns it from now on to threads in `uncached`, and its own choice to others.
    """
    compiler = triton.backends.nvidia.compiler
    choose = getattr(compiler, "get_ptxas", None)
    if "TRITON_PTXAS_BLACKWELL_PATH" in os.environ or not choose or choose(_HOPPER).version != _SLOW_PTXAS:
        return None
    with contextlib.suppress(RuntimeError):  # there is no other
        if (other := triton.knobs.nvidia.ptxas).version == _FASTER_PTXAS:
            # Triton asks for the version once, for the keys of all kernels: let it find its choice
            compiler.get_ptxas_version(_HOPPER)
            compiler.get_ptxas = lambda arch: getattr(_of_thread, "ptxas", None) or choose(arch)
            return other
    compatibility.unused[f"ptxas {_FASTER_PTXAS}"] = f"was not found: {_SLOW_PTXAS} makes a forward up to 6 % slower"
    return None


def uncached(kernel: JITFunction, programs: int, *args: Any, **constants: Any) -> Any:
    """Launch through Triton. Return the compiled kernel, or None from the interpreter, which compiles nothing."""
    of_hopper = isinstance(kernel, JITFunction) and driver.active.get_current_target().arch == _HOPPER
    _of_thread.ptxas = faster_ptxas() if of_hopper else None
    options = _COMPILER_OPTIONS | _PTX if _of_thread.ptxas else _COMPILER_OPTIONS
    try:
        compiled = kernel[(programs,)](*args, **constants, **options)
    finally:
        _of_thread.ptxas = None
    if compiled is not None:
        _held[id(compiled)] = compiled
    return compiled


def of_call(
    device: torch.device, tensors: Sequence[Tensor | None], *modes: Hashable, saved: Sequence[Tensor] = ()
) -> Launch:
    """Return the launch for a call on these tensors.

    It caches by the dtypes and strides of the tensors and by the modes. These must determine the kinds of all
    arguments: dtypes, strides, integers that are 1 or multiples of 16, and which arguments are None. `saved` holds
    tensors from a forward of ours: their kinds follow from its own, but their addresses may have changed. The caller's
    own buffers are aligned.
    """
    hooks = triton.knobs.runtime
    if _RUN in compatibility.unused or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        return uncached
    misaligned = any([x.data_ptr() % _ALIGNMENT for x in saved])
    kinds = [None if x is None else (x.dtype, x.stride(), x.data_ptr() % _ALIGNMENT) for x in tensors]
    return _remembering((device, modes, misaligned, *kinds)) or uncached


class _Remembering:
    """A launch on one GPU that caches its compiled kernels by kernel and constants."""

    def __init__(self, device: torch.device) -> None:
        self.device = device.index
        self.known: dict[tuple, DirectLaunch] = {}

    def __call__(self, kernel: JITFunction, programs: int, *args: Any, **constants: Any) -> None:
        key = (kernel.fn, programs, *constants.values())
        direct = self.known.get(key)
        if direct is None:
            kinds = kinds_of(args)
            # None, for unknown kinds, is never stored
            by_kinds = None if kinds is None else (self.device, kernel.fn, *constants.items(), kinds)
            direct = _by_kinds.get(by_kinds)
            if direct is None:
                compiled = uncached(kernel, programs, *args, **constants)
                if compiled is not None:
                    self.known[key] = direct = DirectLaunch.of(kernel, compiled, args, constants)
                    if by_kinds is not None:
                        _by_kinds[by_kinds] = direct
                return
            self.known[key] = direct
        direct(programs, self.device, args)


@functools.lru_cache(REMEMBERED)
def _remembering(call: tuple) -> _Remembering | None:
    device, _, misaligned, *kinds = call
    misaligned = misaligned or any(kind[-1] for kind in kinds if kind is not None)
    return None if misaligned or device.type != "cuda" else _Remembering(device)


# ----------------------------------------------------------------------------------------------------------------------
# Kinds of arguments, which calls with other lengths share

# by device, kernel, constants and kinds of arguments; one entry per compiled kernel, which Triton keeps too
_by_kinds: dict[tuple | None, DirectLaunch] = {}


def kinds_of(args: tuple) -> tuple | None:
    """Return the kinds of a launch's arguments, for which Triton compiles a kernel; None if one is unknown.

    The kinds are as fine as Triton's or finer: integers that are 1, that are multiples of 16, their width; dtypes; all
    of a descriptor but its address and shape. Tensors are aligned (of_call).
    """
    if torch.version.hip is not None:  # ROCm specialises for tensors of 2 GB
        return None
    found: list[Hashable] = []
    return tuple(found) if _add_kinds(args, found) else None


def _add_kinds(args: tuple, found: list[Hashable]) -> bool:
    """Append the kinds of args to found; True if all are known. A tuple's type and length enclose its entries."""
    add = found.append
    for x in args:
        kind: Any = type(x)
        if kind is int:
            aligned = 1 if x == 1 else 2 if x % _ALIGNMENT == 0 else 0
            add(aligned if -(2**31) <= x < 2**31 else aligned + (4 if x < 2**63 else 8))
        elif kind is Tensor:
            add(x.dtype)
        elif x is None or kind is float:
            add(kind)
        elif isinstance(x, tuple):
            add(kind)
            if not _add_kinds(x, found):
                return False
            add(len(x))
        elif kind is bool:
            add((bool, x))
        elif isinstance(x, Tensor):
            add(x.dtype)
        elif hasattr(x, "block_shape"):
            add(kind)
            add(x.base.dtype)
            for name in _traits(kind, *vars(x)):
                value = getattr(x, name)
                add(tuple(value) if type(value) is list else value)
        else:
            return False
    return True


@functools.cache
def _traits(kind: Hashable, *names: str) -> tuple[str, ...]:
    """Properties of a descriptor other than address and shape."""
    return tuple(name for name in names if name not in ("base", "shape", "strides"))
