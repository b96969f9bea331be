"""Triton's interpreter with less repeated work: most of a kernel's time goes to Triton's own Python."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def hurry() -> None:
    """From now on, in this process. Results stay the same, except for the order in which a scan adds up."""
    patch_the_language_once()
    leave_out_assertions_that_are_off()
    interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
    make_types_once()
    make_shapes_once()
    interpreter.ScanOps.generic_scan = scan_in_few_steps


def patch_the_language_once() -> None:
    """Triton patches its language where a kernel is launched, and once more at every call of a function in it."""
    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()

    @functools.cache
    def languages(fn: Any) -> list:
        return [x for x in fn.__globals__.values() if x is tl or x is tl.core]

    def patch_once(fn: Any) -> Any:
        if not any(tl.core.is_builtin(x.load) for x in languages(fn)):
            return nothing
        scope = patch(fn)
        for name in OPERATORS:
            scope.set_attr(tl.tensor, name, operate_at_once(name, getattr(tl.tensor, name)))
        scope.set_attr(tl.tensor, "to", cast_at_once(tl.tensor.to))
        scope.set_attr(tl.tensor, "__getitem__", expand_at_once(tl.tensor.__getitem__))
        scope.set_attr(tl, "load", load_at_once(tl.load))
        return scope

    interpreter._patch_lang = patch_once


OPERATORS = [
    f"__{reverse}{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or") for reverse in ("", "r")
] + ["__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"]


class Operation(NamedTuple):
    """Operator for operands of certain types: op of both arrays, each of which is cast before, or given."""

    op: Callable
    ways: list[np.dtype | np.ndarray | None]
    dtype: tl.dtype
    type: tl.dtype

    def of(self, *operands: Any) -> np.ndarray:
        return self.op(*(
            way if isinstance(way, np.ndarray) else x.handle.data if way is None else x.handle.data.astype(way)
            for x, way in zip(operands, self.ways, strict=True)
        ))


_operations: dict[tuple, Operation | None] = {}


def operate_at_once(name: str, operator: Callable) -> Callable:
    """An operator of tensors. What it does follows from the types of tensors, and from numbers: after a first time,
    which Triton's own code computes, it is one operation of NumPy."""
    is_reverse = name.startswith("__r")

    def at_once(self: tl.tensor, other: Any) -> tl.tensor:
        if isinstance(other, tl.tensor):
            key = name, self.type.name, other.type.name
        else:
            key = name, self.type.name, type(other), repr(other)
        operands = (other, self) if is_reverse else (self, other)
        if key not in _operations:
            found, _operations[key] = observed(lambda: operator(self, other), operands)
            return found
        operation = _operations[key]
        if operation is None:
            return operator(self, other)
        return tl.tensor(interpreter.TensorHandle(operation.of(*operands), operation.dtype), operation.type)

    return at_once


def observed(operate: Callable[[], tl.tensor], operands: tuple[Any, Any]) -> tuple[tl.tensor, Operation | None]:
    """The result, and NumPy's operation for it, if one operation of the operands, or of their casts, gives the same."""
    builder, seen = interpreter.InterpreterBuilder, []
    binary_op, create_addptr = builder.binary_op, builder.create_addptr

    def watched(builder: Any, lhs: Any, rhs: Any, op: Callable) -> Any:
        seen.append((op, lhs, rhs))
        return binary_op(builder, lhs, rhs, op)

    def watched_addptr(builder: Any, pointer: Any, offset: Any) -> Any:
        size = np.uint64(max(1, pointer.get_element_ty().primitive_bitwidth // 8))
        seen.append((lambda where, by: where + size * by.astype(np.uint64), pointer, offset))
        return create_addptr(builder, pointer, offset)

    builder.binary_op, builder.create_addptr = watched, watched_addptr
    try:
        found = operate()
    finally:
        builder.binary_op, builder.create_addptr = binary_op, create_addptr
    if len(seen) != 1:
        return found, None
    [(op, *handles)] = seen
    ways = list(map(way_to, operands, handles))
    of_bits = all(x.data.dtype == bool for x in handles)  # their sums are of one bit
    if any(way is NO_WAY for way in ways) or (of_bits and op not in (np.bitwise_and, np.bitwise_or)):
        return found, None
    operation, expected = Operation(op, ways, found.handle.dtype, found.type), found.handle.data
    again = operation.of(*operands)
    is_same = (again.dtype, again.shape, again.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    return found, operation if is_same else None


NO_WAY = object()


def way_to(x: Any, handle: Any) -> Any:
    """Conversion of an operand before the operation: None, a dtype that it is cast to, or an array; else NO_WAY."""
    if not isinstance(x, tl.tensor):
        return handle.data
    if handle.data.dtype == x.handle.data.dtype and handle.dtype == x.handle.dtype:
        return None
    has_own_cast = any(t.is_bf16() or t.is_fp8() or t.is_ptr() or t.is_bool() for t in (x.dtype, handle.dtype.scalar))
    return NO_WAY if has_own_cast else handle.data.dtype


def cast_at_once(cast: Callable) -> Callable:
    """tensor.to: one cast of NumPy, if neither side is a type that NumPy lacks."""

    def at_once(self: tl.tensor, dtype: Any, *options: Any, **more: Any) -> tl.tensor:
        new = dtype.value if isinstance(dtype, tl.constexpr) else dtype
        if options or more or not (is_of_numpy(self.dtype) and is_of_numpy(new)):
            return cast(self, dtype, *options, **more)
        if new.name == self.dtype.name:
            return self
        type_ = self.type.with_element_ty(new) if self.type.is_block() else new
        return tl.tensor(interpreter.TensorHandle(self.handle.data.astype(interpreter._get_np_dtype(new)), new), type_)

    return at_once


def expand_at_once(get: Callable) -> Callable:
    """tensor[:, None] and the like: a view by NumPy."""
    known: dict[tuple, tl.dtype] = {}

    def at_once(self: tl.tensor, slices: Any) -> tl.tensor:
        index = tuple(slices) if isinstance(slices, (tuple, tl.tuple)) else (slices,)
        if not self.type.is_block() or any(x is not None and x != slice(None) for x in index):
            return get(self, slices)
        key = self.type.name, tuple(x is None for x in index)
        if key not in known:
            known[key] = get(self, slices).type
        return tl.tensor(interpreter.TensorHandle(self.handle.data[index], self.handle.dtype), known[key])

    return at_once


def load_at_once(load: Callable) -> Callable:
    """tl.load: one call of the interpreter's, if NumPy has the type and masked lanes get a number."""
    builder = interpreter.interpreter_builder
    # between the pointers and is_volatile are one or two hints for caches, by version
    hints_of_none = (None,) * (len(inspect.signature(builder.create_load).parameters) - 2)

    def at_once(pointer: Any, mask: Any = None, other: Any = None, **hints: Any) -> tl.tensor:
        is_plain = isinstance(pointer, tl.tensor) and pointer.dtype.is_ptr() and is_of_numpy(pointer.dtype.element_ty)
        shape = pointer.handle.data.shape if is_plain else ()
        has_mask = isinstance(mask, tl.tensor)
        if not is_plain or not (mask is None or has_mask) or isinstance(other, tl.tensor) or (
            has_mask and np.broadcast_shapes(shape, mask.handle.data.shape) != shape
        ):
            return load(pointer, mask, other, **hints)
        type_ = pointer.dtype.element_ty
        if mask is None:
            found = builder.create_load(pointer.handle, *hints_of_none, False)
        else:
            seen = interpreter.TensorHandle(np.broadcast_to(mask.handle.data, shape), tl.int1)
            value = other.value if isinstance(other, tl.constexpr) else other
            if value is not None:
                value = interpreter.TensorHandle(np.full(shape, value, interpreter._get_np_dtype(type_)), type_)
            found = builder.create_masked_load(pointer.handle, seen, value, *hints_of_none, False)
        return tl.tensor(found, pointer.type.with_element_ty(type_) if pointer.type.is_block() else type_)

    return at_once


def is_of_numpy(dtype: tl.dtype) -> bool:
    return dtype.name in ("fp16", "fp32", "fp64", "int32", "int64")


def leave_out_assertions_that_are_off() -> None:
    """Every sum and product of integers is computed in int64, too, and compared, for an assertion that only runs with
    the option debug."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def by_name(function: Any) -> Any:
    """A function of a type, called once for each type."""
    known: dict[str, Any] = {}

    def called_once(type: tl.dtype) -> Any:
        if type.name not in known:
            known[type.name] = function(type)
        return known[type.name]

    return called_once


def make_types_once() -> None:
    make, known = tl.block_type.__init__, {}

    def make_once(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        key = element_ty.name, tuple(x.value if isinstance(x, tl.constexpr) else x for x in shape)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key], element_ty=element_ty)

    tl.block_type.__init__ = make_once


def make_shapes_once() -> None:
    """A tensor's shape and number of elements, which follow from its type."""
    make, known = tl.tensor.__init__, {}

    def make_once(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        name = type.name
        if name not in known:
            make(self, handle, type)
            known[name] = {**vars(self), "dtype": type.scalar}
        self.__dict__ = {**known[name], "handle": handle, "type": type}

    tl.tensor.__init__ = make_once


def scan_in_few_steps(self: interpreter.ScanOps, input: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """All numbers at once in log2 steps, as GPUs do it, and not one after the other."""
    found, axis = list(input), self.axis
    shape = found[0].handle.data.shape
    place = np.arange(shape[axis]).reshape([-1 if n == axis else 1 for n in range(len(shape))])
    step = 1
    while step < shape[axis]:
        before = [self.to_tensor(np.roll(x.handle.data, step, axis), x.dtype) for x in found]
        both = self.combine_fn.fn(*before, *found)
        both = both if isinstance(both, tuple) else (both,)
        found = [
            self.to_tensor(np.where(place < step, x.handle.data, new.handle.data), x.dtype)
            for x, new in zip(found, both, strict=True)
        ]
        step *= 2
    return found
