"""Gluon API differences between Triton 3.6 and later versions, and the constructors of aggregates.

`load`, `store` and `reduce_add` start asynchronous copies of a tile between device and shared memory (by TMA, the copy
engine).
"""

import triton
import triton.language.core
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_load"):
    from triton import aggregate as _aggregate

    load = tma.async_load
    store = tma.async_store
    reduce_add = tma.async_atomic_add
else:
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    _aggregate = triton.language.core._aggregate
    load = tma.async_copy_global_to_shared
    store = tma.async_copy_shared_to_global

    @builtin
    def reduce_add(tensor_desc, coord, src, _semantic=None):
        """Emit the instruction, which this version's builder has, but not its Python layer."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


# renamed earlier than the others, in 3.7
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# since 3.8, mbarrier.expect synchronises the warps first, as mbarrier.arrive does in every version
EXPECT_SYNCHRONISES: gl.constexpr = gl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8))
# shared memory with another type, shape and layout
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


def aggregate(cls):
    """Make a class an aggregate, with a constructor that takes its fields in order: only later versions make one.

    A call with other fields is other source text, so kernels are compiled again although Triton does not hash this
    constructor.
    """
    fields = cls.__annotations__

    def init(self, *values):
        for (name, kind), value in zip(fields.items(), values, strict=True):
            setattr(self, name, gl.constexpr(value) if kind is gl.constexpr else value)

    init.__triton_builtin__ = True
    cls.__init__ = init
    return _aggregate(cls)
