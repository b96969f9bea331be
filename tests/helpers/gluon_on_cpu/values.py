"""Functions of triton.language and Gluon on arrays and device memory. Registers have no layouts here."""

from collections.abc import Callable

import numpy as np

from gluon_on_cpu import arrays, machine
from gluon_on_cpu.arrays import Array, Pointer, Type


def arange(start: int, end: int, layout: None = None) -> Array:
    return Array.as_is(np.arange(start, end, dtype=np.int32), arrays.int32)


def full(shape: list[int], value: Array | float, dtype: Type, layout: None = None) -> Array:
    return Array.as_is(np.broadcast_to(Array(Array.of(value).data, dtype).data, [int(n) for n in shape]), dtype)


def zeros(shape: list[int], dtype: Type, layout: None = None) -> Array:
    return full(shape, 0, dtype)


def where(condition: Array, x: Array | float, y: Array | float) -> Array:
    (x, y), dtype = arrays.together(x, y)
    return Array(np.where(Array.of(condition).data, x, y), dtype)


def expand_dims(x: Array, axis: int) -> Array:
    return Array.as_is(np.expand_dims(x.data, axis), x.dtype)


def broadcast(x: Array, y: Array) -> tuple[Array, Array]:
    a, b = np.broadcast_arrays(x.data, y.data)
    return Array.as_is(a, x.dtype), Array.as_is(b, y.dtype)


def reshape(x: Array, shape: list[int]) -> Array:
    return x.reshape(shape)


def permute(x: Array, order: list[int]) -> Array:
    return Array.as_is(x.data.transpose(order), x.dtype)


def split(x: Array) -> tuple[Array, Array]:
    return Array.as_is(x.data[..., 0], x.dtype), Array.as_is(x.data[..., 1], x.dtype)


def convert_layout(x: Array, layout: None, assert_trivial: bool = False) -> Array:
    return x


def cdiv(x: Array | int, divisor: Array | int) -> Array:
    return (x + divisor - 1) // divisor


def _reduction(function: Callable) -> Callable[[Array, int], Array]:
    return lambda x, axis: Array(function(x.data, axis), x.dtype)


max, min, sum = _reduction(np.max), _reduction(np.min), _reduction(np.sum)


# Device memory


def load(pointer: Pointer, mask: Array | None = None, other: float = 0) -> Array:
    at, mask = pointer.places(mask)
    return Array(np.where(mask, pointer.memory[np.where(mask, at, 0)], other), pointer.dtype)


def store(pointer: Pointer, value: Array, mask: Array | None = None) -> None:
    value = Array.of(value).to(pointer.dtype).data
    at, mask = pointer.places(mask, value.shape)
    pointer.memory[at[mask]] = np.broadcast_to(value, at.shape)[mask]


def atomic_add(pointer: Pointer, value: Array, mask: Array | None = None, sem: str | None = None) -> Array:
    machine.running.pause()
    value = Array.of(value).to(pointer.dtype).data
    at, mask = pointer.places(mask, value.shape)
    before = pointer.memory[np.where(mask, at, 0)]
    np.add.at(pointer.memory, at[mask], np.broadcast_to(value, at.shape)[mask])
    return Array(before, pointer.dtype)


# Assembly, by its main instruction


def _wait_until_stores_are_written(x: Array) -> Array:
    machine.warps().wait_for_stores(0, written=True)
    return x * 0


ASSEMBLY = {
    "bmsk.clamp.b32 $0, 0, $1;": lambda count: (1 << np.minimum(count.data, 32).astype(np.int64)) - 1,
    "selp.f32 $0, $1, 0fFF800000, set;": lambda x, own, bit: where((own & bit) != 0, x, -np.inf).data,
    "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;": lambda x: x.data,
    "add.s32 $0, $1, 1;": lambda n: n.data + 1,
    "min.s32 $0, $1, $2;": lambda x, y: np.minimum(x.data, y.data),
    # to within 2^-22, absolutely, of numbers in [1, 2)
    "lg2.approx.ftz.f32 $0, $1;": lambda x: np.round(np.log2(x.data) * 2.0**22) / 2.0**22,
    "rcp.approx.ftz.f32 $0, $1;": lambda x: np.reciprocal(x.data),
    "mul.rn.bf16x2 $0, $1, $2;": lambda x, factor: (x * factor).data,
    "vote.sync.any.pred any, changed, 0xffffffff;": lambda acc, correction: (acc * correction).data,
    "cvt.rni.s32.f32 $0, $1;": lambda x: np.nan_to_num(np.rint(x.data)),
    "cp.async.bulk.wait_group 0;": lambda x: _wait_until_stores_are_written(x).data,
    "fence.proxy.async; mov.b32 $0, 0;": lambda x: (x * 0).data,
}


def inline_asm_elementwise(
    asm: str, constraints: str, args: list[Array], dtype: Type, is_pure: bool, pack: int
) -> Array:
    known = next((run for instruction, run in ASSEMBLY.items() if instruction in asm), None)
    if known is None:
        raise NotImplementedError(f"assembly without an emulation: {asm}")
    result = known(*args)
    return Array(result.astype(np.int32) if dtype is arrays.int32 else result, dtype)
