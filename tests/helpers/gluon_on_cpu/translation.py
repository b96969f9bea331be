"""From Triton's and Gluon's functions to Python ones that mean the same with the arrays and the language here."""

import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper as gluon_hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from decayattn.backends.hopper.common import fragments, gluon_compat
from gluon_on_cpu import arrays, hopper, language, machine
from gluon_on_cpu.arrays import Array, Pointer

# by identity, for constants and types are compared in other ways
_MEANINGS = {
    id(original): meaning
    for original, meaning in [
        (gl, language.language),
        (triton.language, language.language),
        (gluon_compat, language.gluon_compat),
        # words of two columns stay pairs: no arithmetic is done on them
        (fragments.to_words, lambda x: x),
        (fragments.from_words, lambda words, like: words),
        (gluon_hopper.mbarrier, language.mbarrier),
        (gluon_hopper.tma, language.tma),
        (gluon_hopper.fence_async_shared, hopper.fence_async_shared),
        (gluon_hopper.warpgroup_mma, hopper.warpgroup_mma),
        (gluon_hopper.warpgroup_mma_wait, hopper.warpgroup_mma_wait),
        *((getattr(gl, name), type) for name, type in arrays.TYPES.items()),
    ]
}


def _is_function(value: Any) -> bool:
    """@triton.jit, @gluon.jit, @gluon.constexpr_function, and @triton.jit in the interpreter."""
    return type(value).__module__.startswith("triton.runtime") or hasattr(value, "is_gluon")


def _is_aggregate(value: Any) -> bool:
    return getattr(value, "__triton_aggregate__", False) and inspect.isclass(value)


def _meaning(value: Any) -> Any:
    if id(value) in _MEANINGS:
        return _MEANINGS[id(value)]
    if isinstance(value, gl.constexpr):
        return value.value
    if _is_aggregate(value):
        return _aggregate(value)
    if _is_function(value):
        return _function(value.fn)
    if isinstance(value, ModuleType) and value.__name__.startswith("triton"):
        raise NotImplementedError(f"{value.__name__} in a kernel")
    return value


def _names(code: CodeType) -> set[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, nested))


# functions and classes name themselves and each other: each is known before what it names is looked up
_known: dict[FunctionType | type, Any] = {}


def _function(fn: FunctionType) -> Callable:
    if fn not in _known:
        world: dict[str, Any] = {"range": language.loop}
        defaults = tuple(_meaning(value) for value in fn.__defaults__ or ())
        _known[fn] = FunctionType(fn.__code__, world, fn.__name__, defaults, fn.__closure__)
        for name in _names(fn.__code__) & fn.__globals__.keys():
            world[name] = _meaning(fn.__globals__[name])
    return _known[fn]


def python_of(function: Any) -> Callable:
    """Python function that replaces a kernel's function; it looks names up in the kernel's __globals__."""
    return _function(function.fn)


def _aggregate(cls: type) -> type:
    if cls not in _known:
        _known[cls] = type(cls.__name__, (), {})
        methods = {name: member for name, member in vars(cls).items() if _is_function(member)}
        # the constructor is kept in what the class's hash is made of
        for name, member in (methods | {"__init__": cls.hash_attrs[0]}).items():
            setattr(_known[cls], name, _function(getattr(member, "fn", member)))
    return _known[cls]


class Kernel:
    """A Gluon kernel that is launched like one, and run here, in an order that follows from the seed."""

    def __init__(self, kernel: Any, seed: int = 0) -> None:
        self.fn = kernel.fn
        self.seed = seed
        self.parameters = inspect.signature(self.fn).parameters

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return functools.partial(self._run, grid[0])

    def _run(self, programs: int, *args: Any, **constants: Any) -> None:
        run = _function(self.fn)
        given = dict(zip(self.parameters, args, strict=False))
        given |= {name: value for name, value in constants.items() if name in self.parameters}
        given = {
            name: value if self.parameters[name].annotation is gl.constexpr else _argument(value)
            for name, value in given.items()
        }
        machine.running = machine.Machine(self.seed)
        for number in range(programs):
            program = machine.Program(machine.running, number, programs)
            machine.running.start(machine.Warps(program, self.fn.__name__, 4, lambda: run(**given)))
        machine.running.run()


def _argument(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return Pointer.to(value)
    if isinstance(value, TensorDescriptor):
        return hopper.Descriptor(value)
    if isinstance(value, tuple):
        elements = map(_argument, value)
        return type(value)._make(elements) if hasattr(value, "_make") else tuple(elements)
    return Array.of(value)
