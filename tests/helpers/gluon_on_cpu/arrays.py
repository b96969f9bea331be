"""The values of a kernel: tensors and scalars with Triton's types and its arithmetic, and pointers."""

import operator
from collections.abc import Callable

import numpy as np
import torch


class Type:
    """Type of an element. 16-bit floats are stored as float32 of equal value."""

    def __init__(self, rank: int, name: str, primitive_bitwidth: int, numpy: type, poison: float) -> None:
        self.rank = rank  # the higher one is the common type of two
        self.name = name
        self.primitive_bitwidth = primitive_bitwidth
        self.numpy = numpy
        # shows where unwritten memory is read
        self.poison = poison

    def __repr__(self) -> str:
        return self.name


int1 = Type(0, "int1", 1, np.bool_, True)
int32 = Type(1, "int32", 32, np.int32, 2**30 - 1)
int64 = Type(2, "int64", 64, np.int64, 2**62 - 1)
float16 = Type(3, "float16", 16, np.float32, np.nan)
bfloat16 = Type(4, "bfloat16", 16, np.float32, np.nan)
float32 = Type(5, "float32", 32, np.float32, np.nan)
float64 = Type(6, "float64", 64, np.float64, np.nan)
TYPES = {type.name: type for type in (int1, int32, int64, float16, bfloat16, float32, float64)}


def type_of(dtype: torch.dtype) -> Type:
    return TYPES[str(dtype).removeprefix("torch.")]


def poisoned(shape: int | tuple[int, ...], dtype: Type) -> np.ndarray:
    return np.full(shape, dtype.poison, dtype.numpy)


def rounded(data: np.ndarray, dtype: Type) -> np.ndarray:
    """Values of a type, rounded to the nearest even."""
    if dtype is float16:
        return data.astype(np.float16).astype(np.float32)
    if data.dtype != dtype.numpy:
        data = data.astype(dtype.numpy)
    if dtype is bfloat16:
        bits = np.ascontiguousarray(data).view(np.uint32)
        bits = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        data = np.where(np.isnan(data), data, bits.view(np.float32))
    return data


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Quotient rounded towards 0, as in C."""
    quotient = np.floor_divide(a, b)
    return quotient + ((quotient < 0) & (quotient * b != a))


_rank = operator.attrgetter("rank")


class Array:
    """A tensor, or a scalar: one with no dimensions."""

    __slots__ = ("data", "dtype")
    __array_ufunc__ = None  # NumPy's operators defer to ours
    __hash__ = None
    layout = None

    def __init__(self, data: np.ndarray | float, dtype: Type) -> None:
        self.data, self.dtype = rounded(np.asarray(data), dtype), dtype

    @classmethod
    def as_is(cls, data: np.ndarray, dtype: Type) -> "Array":
        """Values that the type has already."""
        array = cls.__new__(cls)
        array.data, array.dtype = data, dtype
        return array

    @classmethod
    def of(cls, value: "Array | float", beside: Type | None = None) -> "Array":
        """A number with values of a type takes that type, unless it does not fit."""
        if isinstance(value, Array):
            return value
        if isinstance(value, (bool, np.bool_)):
            return cls(value, int1)
        if isinstance(value, int):
            wide = int32 if -(2**31) <= value < 2**31 else int64
            return cls(value, wide if beside is None else max(beside, wide, key=_rank))
        return cls(value, beside if beside is not None and beside.rank > int64.rank else float32)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> "Array":
        return self

    def to(self, dtype: Type, bitcast: bool = False) -> "Array":
        if bitcast:
            return Array(self.data.astype(self.dtype.numpy).view(dtype.numpy), dtype)
        data = self.data
        if dtype.rank <= int64.rank and data.dtype.kind == "f":
            data = np.trunc(data)
        return Array(data, dtype)

    def reshape(self, shape: list[int]) -> "Array":
        return Array.as_is(self.data.reshape(shape), self.dtype)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return operator.index(self.data[()])

    def __float__(self) -> float:
        return float(self.data)

    def __neg__(self) -> "Array":
        return Array(-self.data, self.dtype)

    def __invert__(self) -> "Array":
        return Array(~self.data, self.dtype)


def together(*values: Array | float) -> tuple[list[np.ndarray], Type]:
    """Operands in their common type."""
    known = [value.dtype for value in values if isinstance(value, Array)]
    beside = max(known, key=_rank) if known else None
    arrays = [Array.of(value, beside) for value in values]
    dtype = max((array.dtype for array in arrays), key=_rank)
    return [array.data.astype(dtype.numpy, copy=False) for array in arrays], dtype


def elementwise(function: Callable, result: Type | None = None) -> Callable[..., Array]:
    def apply(*values: Array | float) -> Array:
        arrays, dtype = together(*values)
        return Array(function(*arrays), result or dtype)

    return apply


def _arithmetic(function: Callable) -> Callable[..., Array]:
    """Operator on arrays; truth values count as 0 and 1."""

    def apply(a: Array | float, b: Array | float) -> Array:
        arrays, dtype = together(a, b)
        if dtype is int1:
            arrays, dtype = [x.astype(np.int32) for x in arrays], int32
        return Array(function(*arrays), dtype)

    return apply


def _operators() -> None:
    binary = {
        "add": _arithmetic(np.add), "sub": _arithmetic(np.subtract), "mul": _arithmetic(np.multiply),
        "floordiv": _arithmetic(_divided), "mod": _arithmetic(lambda a, b: a - _divided(a, b) * b),
        "truediv": elementwise(np.divide), "and": elementwise(np.bitwise_and), "or": elementwise(np.bitwise_or),
        "xor": elementwise(np.bitwise_xor), "lshift": _arithmetic(np.left_shift), "rshift": _arithmetic(np.right_shift),
    }

    def of(function: Callable) -> Callable:
        # a pointer adds itself
        return lambda a, b: NotImplemented if isinstance(b, Pointer) else function(a, b)

    for name, function in binary.items():
        setattr(Array, f"__{name}__", of(function))
        setattr(Array, f"__r{name}__", lambda a, b, function=function: function(b, a))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Array, f"__{name}__", elementwise(getattr(operator, name), int1))


class Pointer:
    """Elements of a tensor's storage. One outside of it may be formed, but not read or written."""

    __slots__ = ("at", "dtype", "memory")

    def __init__(self, memory: np.ndarray, dtype: Type, at: np.ndarray) -> None:
        self.memory = memory
        self.dtype = dtype
        self.at = at

    @classmethod
    def to(cls, x: torch.Tensor) -> "Pointer":
        whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        if x.dtype == torch.bfloat16:
            # numpy has none: a copy, which can be read only
            memory = whole.float().numpy()
            memory.setflags(write=False)
        else:
            memory = whole.numpy()
        return cls(memory, type_of(x.dtype), np.asarray(x.storage_offset(), np.int64))

    def __add__(self, offset: Array | int) -> "Pointer":
        return Pointer(self.memory, self.dtype, self.at + Array.of(offset).data.astype(np.int64))

    __radd__ = __add__

    def places(self, mask: Array | bool | None, shape: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
        """(elements, which of them are meant)."""
        mask = np.asarray(True) if mask is None else Array.of(mask).data
        at, mask, _ = np.broadcast_arrays(self.at, mask, np.empty(shape, np.bool_))
        meant = at[mask]
        if meant.size and (meant.min() < 0 or meant.max() >= self.memory.size):
            raise IndexError(f"elements {meant.min()} to {meant.max()} of a storage of {self.memory.size}")
        return at, mask


_operators()
