"""Gluon's operations for Hopper: barriers, the copy engine, matrix products, and warp specialisation."""

import ctypes

import numpy as np
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gluon_on_cpu import arrays, machine, shared_memory
from gluon_on_cpu.arrays import Array, Type
from gluon_on_cpu.shared_memory import Shared

# Shared memory, barriers


class Barriers:
    """Memory for mbarriers."""

    def __init__(self, barriers: list[machine.Barrier | None], first: int = 0) -> None:
        self.barriers = barriers
        self.first = first

    def index(self, n: Array | int) -> "Barriers":
        assert 0 <= int(n) < len(self.barriers)
        return Barriers(self.barriers, int(n))

    @property
    def one(self) -> machine.Barrier:
        return self.barriers[self.first]


# the layout of barriers
BARRIER = object()


def allocate_shared_memory(dtype: Type, shape: list[int], layout: object) -> Shared | Barriers:
    if layout is BARRIER:
        return Barriers([None] * shape[0])
    return shared_memory.allocate(machine.program(), dtype, shape, layout)


def init(barrier: Barriers, count: int) -> None:
    barrier.barriers[barrier.first] = machine.Barrier(machine.program(), int(count))


def invalidate(barrier: Barriers) -> None:
    barrier.barriers[barrier.first] = None


def expect(barrier: Barriers, size: int, pred: Array | bool = True) -> None:
    if pred:
        barrier.one.bytes += int(size)
        barrier.one.arrive(1, machine.warps().known())


def arrive(barrier: Barriers, count: int = 1, pred: Array | bool = True) -> None:
    machine.warps().wait_for_each_other()
    if pred:
        barrier.one.arrive(int(count), machine.warps().known())


def wait(barrier: Barriers, phase: Array | int, pred: Array | bool = True) -> None:
    if pred:
        phase = int(phase)
        machine.running.wait(lambda: barrier.one.passed(phase), f"phase {barrier.one.phase} of barrier {barrier.first}")
        machine.warps().learn(barrier.one.known)


def thread_barrier() -> None:
    machine.warps().wait_for_each_other()


def fence_async_shared() -> None:
    machine.warps().fence()


# The copy engine


class Descriptor:
    """A tensor map, as a kernel sees it."""

    def __init__(self, description: TensorDescriptor) -> None:
        self.address = description.base.data_ptr()
        self.dtype = arrays.type_of(description.base.dtype)
        self.lengths = description.shape
        self.strides = description.strides
        self.block_shape = [int(n) for n in description.block_shape]
        self.layout = description.layout
        self.nbytes = int(np.prod(self.block_shape)) * self.dtype.primitive_bitwidth // 8

    @property
    def block_type(self) -> "Descriptor":
        return self

    def tile(self, at: list[Array | int]) -> tuple[np.ndarray, np.ndarray | None]:
        """(which elements of a tile exist, memory as an array, those elements' places in it)."""
        at = [int(n) for n in at]
        size = self.dtype.primitive_bitwidth // 8
        # addresses are added up modulo 2^64
        origin = sum(n * stride for n, stride in zip(at, self.strides, strict=True)) * size % 2**64
        origin = origin - 2**64 if origin >= 2**63 else origin
        there = np.ones(self.block_shape, np.bool_)
        offset = np.full(self.block_shape, origin // size, np.int64)
        for n, (first, length, stride, block) in enumerate(
            zip(at, self.lengths, self.strides, self.block_shape, strict=True)
        ):
            axis = np.arange(block).reshape([-1 if m == n else 1 for m in range(len(at))])
            there &= (first + axis >= 0) & (first + axis < length)
            if block > 1:
                offset += axis * stride
        if not there.any():
            return there, np.empty(0), np.empty(0, np.int64)
        begin, end = offset[there].min(), offset[there].max() + 1
        memory = (ctypes.c_uint8 * int((end - begin) * size)).from_address(self.address + int(begin) * size)
        kinds = {arrays.float16: np.float16, arrays.bfloat16: np.uint16}
        return there, np.frombuffer(memory, kinds.get(self.dtype, self.dtype.numpy)), offset[there] - begin

    def read(self, at: list[Array | int]) -> np.ndarray:
        """A tile, 0 where the tensor does not reach."""
        there, memory, elements = self.tile(at)
        data = np.zeros(self.block_shape, self.dtype.numpy)
        values = memory[elements]
        if self.dtype is arrays.bfloat16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        data[there] = values
        return data

    def write(self, at: list[Array | int], data: np.ndarray, add: bool = False) -> None:
        there, memory, elements = self.tile(at)
        values = data[there]
        if self.dtype is arrays.bfloat16:
            values = values.view(np.uint32) >> 16
        memory[elements] = memory[elements] + values if add else values


def copy_to_shared(descriptor: Descriptor, at: list[Array | int], barrier: Barriers, tile: Shared) -> None:
    assert tile.shape == descriptor.block_shape
    barrier, at, warps = barrier.one, [int(n) for n in at], machine.warps()
    phase, known = barrier.phase, warps.known()
    tile.buffer.writes(tile.grains, warps, barrier.agent, phase + 1)

    def arrive() -> None:
        assert barrier.phase == phase, "unexpected bytes"
        tile.fill(descriptor.read(at))
        barrier.receive(descriptor.nbytes, known)

    tile.fill(arrays.poisoned(tile.at.shape, tile.dtype))
    machine.running.loads.append(arrive)


def copy_from_shared(descriptor: Descriptor, at: list[Array | int], tile: Shared, add: bool = False) -> None:
    assert tile.shape == descriptor.block_shape
    warps, at = machine.warps(), [int(n) for n in at]
    data = tile.read_by(warps, warps.stores, warps.started_stores + 1).data
    warps.start_store(lambda: descriptor.write(at, data, add))


def store_wait(pending: int) -> None:
    machine.warps().wait_for_stores(int(pending))


# Matrix products


class Product(Array):
    """A result that is there when it has been waited for, and NaN before. Products may be added to it before that."""

    __slots__ = ("number", "result", "warps")

    def __init__(self, warps: machine.Warps, result: np.ndarray) -> None:
        self.warps = warps
        self.number = warps.started_products
        self.result = result
        self.dtype = arrays.float32

    @property
    def data(self) -> np.ndarray:
        there = self.warps.clock[self.warps.products] >= self.number
        return self.result if there else arrays.poisoned(self.result.shape, self.dtype)


def warpgroup_mma(
    a: Array | Shared, b: Shared, acc: Array, use_acc: Array | bool = True, is_async: bool = False
) -> Array:
    warps = machine.warps()
    warps.started_products += 1
    a, b = (x.read_by(warps, warps.products, warps.started_products) if isinstance(x, Shared) else x for x in (a, b))
    assert (a.dtype, acc.dtype) == (b.dtype, arrays.float32)
    product = a.data @ b.data
    if use_acc:
        product += acc.result if isinstance(acc, Product) else acc.data
    if not is_async:
        warps.wait_for_products(0)
    return Product(warps, product)


def warpgroup_mma_wait(pending: int, deps: tuple[Array, ...]) -> Array | tuple[Array, ...]:
    machine.warps().wait_for_products(int(pending))
    return deps[0] if len(deps) == 1 else tuple(deps)


# Programs


def warp_specialize(partitions: list[tuple], warps: list[int], registers: list[int]) -> None:
    program, default = machine.program(), machine.warps()
    default.wait_for_each_other()
    groups = []
    for number, ((function, args), count) in enumerate(zip(partitions[1:], warps, strict=True), 1):
        name = f"{function.__name__.strip('_')} {number}"
        group = machine.Warps(program, name, count, lambda function=function, args=args: function(*args))
        group.learn(default.together)
        group.wait_for_each_other()
        groups.append(group)
        machine.running.start(group)
    partitions[0][0](*partitions[0][1])
    machine.running.wait(lambda: all(group.ended for group in groups), "the other warps")
