"""Triton's interpreter with less repeated work: most of a kernel's time goes to Triton's own Python."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

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


OPERATORS = {
    **{f"__{reverse}{name}__": op for reverse in ("", "r") for name, op in {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide, "and": np.bitwise_and,
        "or": np.bitwise_or,
    }.items()},
    "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal, "__eq__": np.equal,
    "__ne__": np.not_equal,
}
# kinds of numbers that a type can be computed with, by NumPy as by Triton
NUMBERS = {"fp16": (int, float), "fp32": (int, float), "fp64": (int, float), "int32": (int,), "int64": (int,)}
BITS = (np.bitwise_and, np.bitwise_or)
# types of results, by operator and types of the operands
_results: dict[tuple[str, str, str], tuple[tl.dtype, tl.dtype]] = {}


def operate_at_once(name: str, operator: Callable) -> Callable:
    """Operator of a tensor with one of its type, or with a number: one operation of NumPy, after Triton's own code has
    found the type of the result."""
    op, is_reverse = OPERATORS[name], name.startswith("__r")

    def at_once(self: tl.tensor, other: Any) -> tl.tensor:
        type_ = self.dtype.name
        is_exact = type_ in ("fp32", "fp64") or (type_ in NUMBERS and op is not np.true_divide)
        value = other.value if isinstance(other, tl.constexpr) else other
        if isinstance(value, tl.tensor):
            kind, is_exact = value.type.name, type_ == value.dtype.name and (is_exact or op in BITS)
            value = value.handle.data
        else:
            kind, is_exact = type(value).__name__, is_exact and type(value) in NUMBERS[type_] and abs(value) < 2**31
        key = name, self.type.name, kind
        if not is_exact or key not in _results:
            found = operator(self, other)
            _results[key] = found.handle.dtype, found.type
            return found
        data = self.handle.data
        value = value if isinstance(value, np.ndarray) else data.dtype.type(value)
        dtype, type_of_result = _results[key]
        operands = (value, data) if is_reverse else (data, value)
        return tl.tensor(interpreter.TensorHandle(op(*operands), dtype), type_of_result)

    return at_once


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
