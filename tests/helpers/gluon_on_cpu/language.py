"""Names by which kernels find values.py and hopper.py: triton.language, Gluon and its Hopper modules, gluon_compat."""

import functools
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
from triton.experimental.gluon import language as gl

from gluon_on_cpu import arrays, hopper, machine, values
from gluon_on_cpu.arrays import Array, elementwise
from gluon_on_cpu.shared_memory import Shared


def _no_layout(*args, **kwargs) -> None:
    return None


def loop(*bounds: Array | int) -> Iterator[Array]:
    """range of a kernel's integers."""
    return (Array(n, arrays.int32) for n in range(*map(int, bounds)))


def _exp2(x: np.ndarray) -> np.ndarray:
    """exp2 of a GPU's instruction: subnormal results are 0."""
    result = np.exp2(x)
    return np.where(result < np.finfo(np.float32).tiny, result.dtype.type(0), result)


_LAYOUTS = (
    "BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout", "SliceLayout",
    "SwizzledSharedLayout",
)
_VALUES = (
    "arange", "atomic_add", "broadcast", "cdiv", "convert_layout", "expand_dims", "full", "inline_asm_elementwise",
    "load", "max", "min", "permute", "reshape", "split", "store", "sum", "where", "zeros",
)
language = SimpleNamespace(
    **arrays.TYPES,
    **dict.fromkeys(_LAYOUTS, _no_layout),
    **{name: getattr(values, name) for name in _VALUES},
    **{name: elementwise(getattr(np, name)) for name in ("abs", "floor", "maximum", "minimum")},
    exp2=elementwise(_exp2),
    NVMMASharedLayout=gl.NVMMASharedLayout,
    allocate_shared_memory=hopper.allocate_shared_memory,
    constexpr=lambda value: value,
    num_programs=lambda axis: Array(machine.program().programs, arrays.int32),
    program_id=lambda axis: Array(machine.program().number, arrays.int32),
    static_range=range,
    target_info=SimpleNamespace(cuda_capability_geq=lambda *version: False),
    warp_specialize=hopper.warp_specialize,
)
mbarrier = SimpleNamespace(
    MBarrierLayout=lambda: hopper.BARRIER, arrive=hopper.arrive, expect=hopper.expect, init=hopper.init,
    invalidate=hopper.invalidate, wait=hopper.wait,
)
tma = SimpleNamespace(store_wait=hopper.store_wait)
gluon_compat = SimpleNamespace(
    EXPECT_SYNCHRONISES=False, load=hopper.copy_to_shared,
    reduce_add=functools.partial(hopper.copy_from_shared, add=True), reinterpret=Shared.reinterpret,
    store=hopper.copy_from_shared, thread_barrier=hopper.thread_barrier,
)
