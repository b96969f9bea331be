"""Triton's interpreter with less of what it does over and over: most of a kernel's time goes to Triton's own Python."""

import dataclasses
import functools
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def hurry() -> None:
    """From now on, in this process. What is computed stays the same, but for the order in which a scan adds up."""
    patch_the_language_once()
    leave_out_assertions_that_are_off()
    interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
    make_types_once()
    make_shapes_once()
    find_ways_to_common_types_once()
    interpreter.ScanOps.generic_scan = scan_in_few_steps


def patch_the_language_once() -> None:
    """Triton patches its language where a kernel is launched, and once more at every call of a function in it."""
    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()

    @functools.cache
    def languages(fn: Any) -> list:
        return [x for x in fn.__globals__.values() if x is tl or x is tl.core]

    def patch_once(fn: Any) -> Any:
        return patch(fn) if any(tl.core.is_builtin(x.load) for x in languages(fn)) else nothing

    interpreter._patch_lang = patch_once


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
        if type.name not in known:
            make(self, handle, type)
            known[type.name] = dict(vars(self))
        vars(self).update(known[type.name], handle=handle, type=type, dtype=type.scalar)

    tl.tensor.__init__ = make_once


def find_ways_to_common_types_once() -> None:
    """What becomes of the operands of a sum, a product or a comparison follows from the types of tensors, and from
    numbers, which become the same tensors again."""
    to_common_type, known = TritonSemantic.binary_op_type_checking_impl, {}
    is_cast = object()

    def kind(x: Any) -> Any:
        return x.type.name if isinstance(x, tl.tensor) else (type(x), repr(x))

    def way(x: Any, new: tl.tensor) -> Any:
        if new is x or not isinstance(x, tl.tensor):
            return None if new is x else new
        return (new.type, new.handle.data.shape) if new.dtype.name == x.dtype.name else is_cast

    def go(x: Any, way: Any) -> tl.tensor:
        if way is None:
            return x
        if isinstance(way, tl.tensor):
            return way
        type, shape = way
        return tl.tensor(interpreter.TensorHandle(np.broadcast_to(x.handle.data, shape), x.handle.dtype), type)

    def to_common_type_once(self: TritonSemantic, lhs: Any, rhs: Any, *allowed: bool, **options: bool) -> Any:
        key = kind(lhs), kind(rhs), allowed, *options.items()
        if key not in known:
            found = to_common_type(self, lhs, rhs, *allowed, **options)
            ways = tuple(map(way, (lhs, rhs), found))
            known[key] = None if any(way is is_cast for way in ways) else ways
            return found
        if known[key] is None:
            return to_common_type(self, lhs, rhs, *allowed, **options)
        return tuple(map(go, (lhs, rhs), known[key]))

    TritonSemantic.binary_op_type_checking_impl = to_common_type_once


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
