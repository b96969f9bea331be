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
    # every sum and product of integers is computed in int64, too, and compared, for an assertion that is off
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._get_np_dtype = by_names(interpreter._get_np_dtype)
    interpreter._convert_float = convert_bits(interpreter._convert_float)
    interpreter.TensorHandle.__init__ = make_handle
    make_types_once()
    make_shapes_once()
    interpreter.ScanOps.generic_scan = scan_in_few_steps


def patch_the_language_once() -> None:
    """Triton patches its language where a kernel is launched, and once more at every call of a function in it. Each
    time it looks for functions to patch in all of the language."""
    patch, call = interpreter._patch_lang, interpreter.InterpretedFunction.__call__
    known: dict[tuple[int, ...], dict[tuple[int, str], tuple[Any, str, Any]]] = {}

    @functools.cache
    def languages(fn: Any) -> list:
        return [x for x in fn.__globals__.values() if x is tl or x is tl.core]

    def is_patched(fn: Any) -> bool:
        return not any(tl.core.is_builtin(x.load) for x in languages(fn))

    def patch_once(fn: Any) -> Any:
        scope, modules = interpreter._LangPatchScope(), tuple(map(id, languages(fn)))
        if is_patched(fn):
            return scope
        if modules in known:
            for change in known[modules].values():
                scope.set_attr(*change)
            return scope
        scope = patch(fn)
        for name in OPERATORS:
            owner = tl.tensor if name.startswith("__") else tl
            scope.set_attr(owner, name, at_once(getattr(owner, name), functools.partial(operation, name)))
        for owner, name, kind in (
            (tl.tensor, "to", cast), (tl.tensor, "__getitem__", expansion), (tl, "where", selection),
        ):
            scope.set_attr(owner, name, at_once(getattr(owner, name), kind))
        scope.set_attr(tl, "load", load_at_once(tl.load))
        scope.set_attr(tl, "arange", functools.cache(tl.arange))
        known[modules] = {(id(owner), name): (owner, name, vars(owner)[name]) for owner, name, _ in scope._changes}
        return scope

    def call_once(self: Any, *args: Any, **options: Any) -> Any:
        if self.fn not in self.rewritten_fn or not is_patched(self.fn):
            return call(self, *args, **options)
        try:
            return self.rewritten_fn[self.fn](*args, **options)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = patch_once
    interpreter.InterpretedFunction.__call__ = call_once


def make_handle(self: interpreter.TensorHandle, data: np.ndarray, dtype: tl.dtype, attr: dict | None = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integers, rounded towards 0."""
    return (a - np.fmod(a, b)) // b


# NumPy's operation on integers, and that on floats
OPERATORS: dict[str, tuple[Callable | None, Callable | None]] = {
    **{f"__{reverse}{name}__": ops for reverse in ("", "r") for name, ops in {
        "add": (np.add, np.add), "sub": (np.subtract, np.subtract), "mul": (np.multiply, np.multiply),
        "truediv": (None, np.true_divide), "floordiv": (divided, None), "mod": (np.fmod, None),
        "and": (np.bitwise_and, None), "or": (np.bitwise_or, None),
    }.items()},
    "__lt__": (np.less, np.less), "__le__": (np.less_equal, np.less_equal), "__gt__": (np.greater, np.greater),
    "__ge__": (np.greater_equal, np.greater_equal), "__eq__": (np.equal, np.equal),
    "__ne__": (np.not_equal, np.not_equal), "maximum": (np.maximum, np.fmax), "minimum": (np.minimum, np.fmin),
}
FLOATS, INTEGERS = ("fp16", "fp32", "fp64"), ("int32", "int64")
OF_NUMPY = FLOATS + INTEGERS


def operation(name: str, found: tl.tensor, a: Any, b: Any) -> Callable | None:
    """NumPy's operation that gives what Triton's gave for operands of these types, if there is one."""
    (of_integers, of_floats), left = OPERATORS[name], getattr(a, "dtype", None)
    if left is None:
        return None
    is_number = type(b) in (int, float)
    op, right = None, type(b) if is_number else b.dtype.name
    if left.is_ptr():
        size = max(1, left.element_ty.primitive_bitwidth // 8)
        if name == "__add__" and right in (int, *INTEGERS):
            op = lambda at, offset: at + size * np.asarray(offset, np.int64).view(np.uint64)  # noqa: E731
    elif left.name in INTEGERS:
        op = of_integers if right in (int, *INTEGERS) else None
    elif left.name in FLOATS and of_floats in (np.fmax, np.fmin):  # a number becomes a float32 first
        op = of_floats if right in (left.name, *[float] * (left.name == "fp32")) else None
    elif left.name in FLOATS:  # float16 is divided in float32
        is_half = of_floats is np.true_divide and left.name == "fp16" and right not in ("fp32", "fp64")
        op = of_floats if right in (int, float, *FLOATS) and not is_half else None
    elif left.name == right == "int1" and of_integers in (np.bitwise_and, np.bitwise_or):
        op = of_integers
    return (lambda x, y: op(y, x)) if op and name.startswith("__r") else op


def selection(found: tl.tensor, condition: Any, *sides: Any) -> Callable | None:
    """np.where for tensors of one type, or for one and a number."""
    types = {side.dtype.name for side in sides if type(side) is tl.tensor}
    is_exact = type(condition) is tl.tensor and condition.dtype.name == "int1" and found.dtype.name in OF_NUMPY
    return np.where if is_exact and types == {found.dtype.name} else None


def cast(found: tl.tensor, x: tl.tensor, new: tl.dtype) -> Callable | None:
    if not (x.dtype.name in OF_NUMPY and new.name in OF_NUMPY):
        return None
    return lambda data, _: data.astype(interpreter._get_np_dtype(new))


def expansion(found: tl.tensor, x: tl.tensor, slices: Any) -> Callable | None:
    """tensor[:, None] and the like."""
    return (lambda data, slices: data[tuple(slices)]) if x.type.is_block() else None


def kind_of(x: Any) -> Any:
    """Name of a type and of a tensor's, or type of a number, or new axes among slices; None of others. Integers of 64
    bits make the result wider."""
    if type(x) is tl.tensor:
        return x.type.name
    if isinstance(x, tl.dtype):
        return x.name
    if isinstance(x, (tuple, tl.tuple)):
        return None if any(n is not None and n != slice(None) for n in x) else tuple([n is None for n in x])
    return type(x) if type(x) is float or (type(x) is int and abs(x) < 2**31) else None


def at_once(function: Callable, operation: Callable[..., Callable | None]) -> Callable:
    """A function of tensors and numbers as one operation of NumPy, after Triton's code has found the type of the result
    for these types. An operation without such a function is None."""
    known: dict[tuple, tuple[Callable, tl.dtype, tl.dtype] | None] = {}

    def called(*args: Any, **options: Any) -> tl.tensor:
        values = [x.value if isinstance(x, tl.constexpr) else x for x in args]
        kinds = tuple(map(kind_of, values))
        if options or known.get(kinds) is None:
            found = function(*args, **options)
            if not options and None not in kinds and kinds not in known:
                op = operation(found, *values)
                known[kinds] = op and (op, found.handle.dtype, found.type)
            return found
        op, dtype, type_ = known[kinds]
        data = [x.handle.data if type(x) is tl.tensor else x for x in values]
        return tl.tensor(interpreter.TensorHandle(op(*data), dtype), type_)

    return called


def convert_bits(convert: Callable) -> Callable:
    """float32 to bfloat16 as Triton's interpreter does it, and back; it takes other ways for subnormal numbers."""

    @functools.wraps(convert)
    def converted(data: np.ndarray, old: tl.dtype, new: tl.dtype, rounding: Any) -> np.ndarray:
        if {old.name, new.name} != {"bf16", "fp32"}:
            return convert(data, old, new, rounding)
        wide = data.view(np.uint32) if old.name == "fp32" else data.view(np.uint16).astype(np.uint32) << 16
        if ((wide & 0x7F800000 == 0) & (wide & 0x007FFFFF != 0)).any():
            return convert(data, old, new, rounding)
        if old.name == "bf16":
            return wide
        carry = wide >> 15 & 1 if rounding == interpreter._ir.ROUNDING_MODE.RTNE else 0
        return (wide >> 16 & 0xFF80 | (wide >> 16 & 0x7F) + carry).astype(np.uint16)

    return converted


def load_at_once(load: Callable) -> Callable:
    """tl.load: one call of the interpreter's, if NumPy has the type and masked lanes get a number."""
    builder = interpreter.interpreter_builder
    # between the pointers and is_volatile are one or two hints for caches, by version
    hints_of_none = (None,) * (len(inspect.signature(builder.create_load).parameters) - 2)

    def at_once(pointer: Any, mask: Any = None, other: Any = None, **hints: Any) -> tl.tensor:
        is_plain = isinstance(pointer, tl.tensor) and pointer.dtype.is_ptr() and (
            pointer.dtype.element_ty.name in OF_NUMPY or (pointer.dtype.element_ty.name == "bf16" and not other)
        )
        shape = pointer.handle.data.shape if is_plain else ()
        has_mask = isinstance(mask, tl.tensor)
        if not is_plain or not (mask is None or has_mask) or isinstance(other, tl.tensor) or (
            has_mask and np.broadcast_shapes(shape, mask.handle.data.shape) != shape
        ):
            return load(pointer, mask, other, **hints)
        type_ = pointer.dtype.element_ty
        seen = interpreter.TensorHandle(np.broadcast_to(mask.handle.data if has_mask else True, shape), tl.int1)
        value = other.value if isinstance(other, tl.constexpr) else other
        if value is not None:
            value = interpreter.TensorHandle(np.full(shape, value, interpreter._get_np_dtype(type_)), type_)
        found = builder.create_masked_load(pointer.handle, seen, value, *hints_of_none, False)
        return tl.tensor(found, pointer.type.with_element_ty(type_) if pointer.type.is_block() else type_)

    return at_once


def by_names(function: Callable) -> Callable:
    """A function of types, called once for each."""
    known: dict[tuple[str, ...], Any] = {}

    def called_once(*types: tl.dtype) -> Any:
        names = tuple([x.name for x in types])
        if names not in known:
            known[names] = function(*types)
        return known[names]

    return called_once


def make_types_once() -> None:
    make, known = tl.block_type.__init__, {}

    def make_once(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        key = element_ty.name, tuple(x.value if isinstance(x, tl.constexpr) else x for x in shape)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key], element_ty=element_ty)

    tl.block_type.__init__, tl.block_type.with_element_ty = make_once, by_names(tl.block_type.with_element_ty)


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
