"""Launching kernels, the second time without asking Triton which compiled kernel is meant.

`kernel[grid](...)` works that out from the kind of every argument in every launch, which takes an attention kernel five
times as long as the launch. What the kinds depend on is the same for all launches of one call of ours, so it is looked
up once per call, and what was compiled for it is launched from then on (compatibility.DirectLaunch). Triton tells a
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
# pointers that are multiples of this are compiled for
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


def anew(kernel: triton.runtime.JITFunction, programs: int, *args: Any, **constants: Any) -> None:
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
        return anew
    if not compatibility.has_direct_launches():
        return anew
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
    return anew if misaligned % _ALIGNMENT else _remembering(tuple(kinds))


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
        elif (direct := compatibility.first_launch(kernel, programs, self.device, args, constants)) is not None:
            self.known[key] = direct


@functools.lru_cache(REMEMBERED)
def _remembering(kinds: tuple) -> _Remembering:
    return _Remembering(kinds[0])
