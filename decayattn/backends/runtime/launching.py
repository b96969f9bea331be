"""Launching kernels, the second time without asking Triton which compiled kernel is meant.

`kernel[grid](...)` works that out from the kind of every argument in every launch, which takes an attention kernel five
times as long as the launch. What the kinds depend on is the same for all launches of one call of ours, so it is looked
up once per call, and what was compiled for it is launched from then on (compatibility.DirectLaunch). A call on other
lengths, as packed batches have in every step, is another call, but mostly of the same kinds: there each kernel's
arguments are looked at once more (kinds_of), and Triton is asked where they are of new kinds only. Triton tells a
launch to a profiler's hooks, and gets it ready for them even where there is none: where there is one, every launch goes
through Triton.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from decayattn import compatibility

# launch(kernel, programs, *args, **constants) is kernel[(programs,)](*args, **constants)
Launch = Callable[..., None]

# how every kernel is compiled, whatever the default: Triton 3.10 is to stop fusing a·b + c into one rounding
COMPILER_OPTIONS = {"enable_fp_fusion": True}
# kernels are compiled for pointers, and for integers, that are multiples of this
_ALIGNMENT = 16
# what is divided among multiprocessors is divided in the interpreter too: so few that short problems already have
# programs with several parts of the work
_OF_A_CPU = 8
# kinds of calls that are remembered: training has one or two, of packed sequences one for every total length
REMEMBERED = 256


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a device has; a CPU, which interprets, has one program at a time and gets a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _OF_A_CPU


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Launches go to the current GPU: make it the inputs' one, unless it is."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else contextlib.nullcontext()


def uncached(kernel: triton.runtime.JITFunction, programs: int, *args: Any, **constants: Any) -> None:
    """A launch that remembers nothing."""
    compatibility.launch(kernel, programs, args, constants)


def of_call(
    device: torch.device, tensors: Sequence[Tensor | None], *modes: Hashable, saved: Sequence[Tensor] = ()
) -> Launch:
    """The launch for a call on these tensors.

    For launches whose arguments are of kinds (dtypes, strides, integers that are 1 or multiples of 16, what is None)
    that follow from the dtypes and strides of the tensors and from the modes. Those that a forward of ours saved have
    no other kinds than it gave them, but may have been moved. The caller's own buffers are aligned.
    """
    hooks = triton.knobs.runtime
    if device.type != "cuda" or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        return uncached
    if not compatibility.has_direct_launches():
        return uncached
    misaligned, kinds = 0, [device, modes]
    for x in tensors:
        if x is None:
            kinds.append(None)
        else:
            misaligned |= x.data_ptr()
            kinds.append(x.dtype)
            kinds.append(x.stride())
    for x in saved:
        misaligned |= x.data_ptr()
    return uncached if misaligned % _ALIGNMENT else _remembering(tuple(kinds))


class _Remembering:
    """A launch on one GPU that remembers, by kernel and constants, what it has launched."""

    def __init__(self, device: torch.device) -> None:
        self.device = device.index
        self.known: dict[tuple, compatibility.DirectLaunch] = {}

    def __call__(self, kernel: triton.runtime.JITFunction, programs: int, *args: Any, **constants: Any) -> None:
        key = (kernel.fn, programs, *constants.values())
        direct = self.known.get(key)
        if direct is not None:
            direct(programs, self.device, args)
        elif (direct := _launch_by_kinds(kernel, programs, self.device, args, constants)) is not None:
            self.known[key] = direct


@functools.lru_cache(REMEMBERED)
def _remembering(kinds: tuple) -> _Remembering:
    return _Remembering(kinds[0])


# ----------------------------------------------------------------------------------------------------------------------
# Kinds of arguments, which calls on other lengths share

# by device, kernel, constants and kinds of arguments; as many as there are compiled kernels, which Triton keeps, too
_by_kinds: dict[tuple, compatibility.DirectLaunch] = {}


def _launch_by_kinds(
    kernel: triton.runtime.JITFunction, programs: int, device: int, args: tuple, constants: dict[str, Any]
) -> compatibility.DirectLaunch | None:
    """Launched, and how to launch it again; None where Triton has to be asked again."""
    kinds = kinds_of(args)
    if kinds is None:
        return compatibility.first_launch(kernel, programs, device, args, constants)
    key = (device, kernel.fn, *constants.items(), kinds)
    direct = _by_kinds.get(key)
    if direct is not None:
        direct(programs, device, args)
    elif (direct := compatibility.first_launch(kernel, programs, device, args, constants)) is not None:
        _by_kinds[key] = direct
    return direct


def kinds_of(args: tuple) -> tuple | None:
    """What of a launch's arguments Triton compiles a kernel for; None where that is not known.

    It distinguishes what Triton does, or more: integers that are 1, that are multiples of 16, their width; dtypes, and
    what else there is to a descriptor but place and size. Tensors are aligned (of_call).
    """
    if torch.version.hip is not None:  # where tensors of 2 GB are another kind
        return None
    found: list[Hashable] = []
    return tuple(found) if _add_kinds(args, found) else None


def _add_kinds(args: tuple, found: list[Hashable]) -> bool:
    """Whether all of them are known. What is in a tuple stands between its type and its length."""
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
    """What a descriptor has besides place and size."""
    return tuple(name for name in names if name not in ("base", "shape", "strides"))
