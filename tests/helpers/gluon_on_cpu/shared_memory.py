"""Shared memory: views of buffers with their places, writers and readers."""

import math
from collections.abc import Callable

import numpy as np
from triton.experimental.gluon import language as gl

from gluon_on_cpu import machine
from gluon_on_cpu.arrays import Array, Type, poisoned
from gluon_on_cpu.machine import Program, Race, Warps

# grain of accesses to large buffers, in elements; of small ones, it is one element
_GRAIN = 8
_LARGE = 4096
# those of a view: a part in one piece, mostly
Grains = slice | np.ndarray


class Buffer:
    """Memory, and of every grain the last writer, and the time of each reader's last read."""

    def __init__(self, program: Program, shape: list[int], dtype: Type) -> None:
        size = int(np.prod(shape))
        self.program = program
        self.data = poisoned(size, dtype)
        self.grain = _GRAIN if size >= _LARGE else 1
        grains = -(-size // self.grain)
        self.writer = np.zeros(grains, np.int64)
        self.written = np.zeros(grains, np.int64)
        self.by_warps = np.zeros(grains, np.bool_)
        # by agent, of which there are few
        self.read: dict[int, np.ndarray] = {}

    def _check_writes(self, grains: Grains, warps: Warps, agent: int, does: str, copies: str) -> None:
        """Raise where the warps do not know of a grain's last write, or an agent of theirs needs a fence after it."""
        unknown = self.written[grains] > warps.clock[self.writer[grains]]
        if unknown.any():
            raise self._race(warps, does, self.writer[grains][unknown][0], "written")
        if agent != warps.agent and self._unfenced(grains, warps).any():
            raise Race(f"{warps.name}: {copies} what was written, without a fence between")

    def _unfenced(self, grains: Grains, warps: Warps) -> np.ndarray:
        """Mask of grains that warps wrote, with no fence since then that these warps know of."""
        by_warps = self.by_warps[grains]
        unfenced = np.zeros(by_warps.size, np.bool_)
        if not by_warps.any():
            return unfenced
        for writer in np.unique(self.writer[grains][by_warps]):
            by = next(w for w in self.program.warps if w.agent == writer)
            known = max(time for time in by.fences if time <= warps.clock[writer])
            unfenced |= (self.writer[grains] == writer) & (self.written[grains] > known)
        return unfenced

    def reads(self, grains: Grains, warps: Warps, agent: int, time: int) -> None:
        self._check_writes(grains, warps, agent, "reads", "copies or multiplies")
        if (self.written[grains][self.writer[grains] == warps.agent] > warps.together[warps.agent]).any():
            # their own: the compiler has inserted a barrier
            warps.wait_for_each_other()
        if agent not in self.read:
            self.read[agent] = np.zeros(self.writer.size, np.int64)
        self.read[agent][grains] = time

    def writes(self, grains: Grains, warps: Warps, agent: int, time: int) -> None:
        self._check_writes(grains, warps, agent, "overwrites", "copies over")
        for reader, times in self.read.items():
            # one warp has waited for the stores
            clock = warps.known() if reader == warps.stores else warps.clock
            if (times[grains] > clock[reader]).any():
                raise self._race(warps, "overwrites", reader, "read")
        self.writer[grains] = agent
        self.written[grains] = time
        self.by_warps[grains] = agent == warps.agent

    def _race(self, warps: Warps, does: str, agent: int, what: str) -> Race:
        names = {known: w.name for w in self.program.warps for known in (w.agent, w.products, w.stores)}
        other = names.get(agent, "copies to shared memory")
        return Race(f"{warps.name} {does} what, as far as it knows, has not been {what} by {other}")


class Shared:
    """A view of a buffer: the place of each of its elements."""

    def __init__(self, buffer: Buffer, dtype: Type, at: np.ndarray) -> None:
        self.buffer, self.dtype, self.at = buffer, dtype, at
        self._grains: Grains | None = None
        self._parts: dict = {}

    @property
    def shape(self) -> list[int]:
        return list(self.at.shape)

    @property
    def type(self) -> "Shared":
        return self

    @property
    def grains(self) -> Grains:
        if self._grains is None:
            first, last, grain = int(self.at.min()), int(self.at.max()), self.buffer.grain
            whole = last - first + 1 == self.at.size  # no element is twice in a view
            self._grains = slice(first // grain, last // grain + 1) if whole else np.unique(self.at // grain)
        return self._grains

    def _part(self, key: tuple, at: Callable[[], np.ndarray]) -> "Shared":
        if key not in self._parts:
            self._parts[key] = Shared(self.buffer, self.dtype, at())
        return self._parts[key]

    def index(self, n: Array | int) -> "Shared":
        n = int(n)
        if not 0 <= n < self.at.shape[0]:
            raise IndexError(f"buffer {n} of {self.at.shape[0]}")
        return self._part(("index", n), lambda: self.at[n])

    def slice(self, start: Array | int, length: int, dim: int = 0) -> "Shared":
        start = int(start)
        assert 0 <= start <= self.at.shape[dim] - length
        return self._part(("slice", start, length, dim), lambda: self.at.take(np.arange(start, start + length), dim))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return self._part(("permute", *order), lambda: self.at.transpose(order))

    def reshape(self, shape: list[int]) -> "Shared":
        return self._part(("reshape", *shape), lambda: self.at.reshape(shape))

    def reinterpret(self, dtype: Type, shape: list[int], layout: gl.NVMMASharedLayout) -> "Shared":
        """View of the buffer with a type of the same width and, as Triton 3.8 demands, the whole of it."""
        assert dtype.primitive_bitwidth == self.dtype.primitive_bitwidth
        if math.prod(shape) != self.at.size:
            raise ValueError(f"reinterpreted as {math.prod(shape)} elements, a buffer of {self.at.size}")
        return self._part(("reinterpret", dtype, *shape), lambda: self.at.min() + places(shape, dtype, layout))

    def load(self, layout: None = None) -> Array:
        warps = machine.warps()
        return self.read_by(warps, warps.agent, warps.now())

    def read_by(self, warps: Warps, agent: int, time: int) -> Array:
        self.buffer.reads(self.grains, warps, agent, time)
        return Array.as_is(self.buffer.data[self.at], self.dtype)

    def store(self, value: Array) -> None:
        warps = machine.warps()
        self.buffer.writes(self.grains, warps, warps.agent, warps.now())
        self.fill(value.to(self.dtype).data)

    def fill(self, data: np.ndarray) -> None:
        self.buffer.data[self.at] = data


def places(shape: list[int], dtype: Type, layout: object) -> np.ndarray:
    """Places of a buffer's elements; operands of matrix products have panels of columns, of 32, 64 or 128 bytes. How
    bytes are swizzled inside eight rows of a panel follows from their addresses, and is the same for all."""
    size = int(np.prod(shape))
    panel = getattr(layout, "swizzle_byte_width", 0) * 8 // dtype.primitive_bitwidth
    columns = shape[-1]
    if not panel or columns <= panel:
        return np.arange(size).reshape(shape)
    rows = int(np.prod(shape[-layout.rank : -1]))
    at = np.arange(size).reshape(-1, columns // panel, rows, panel)
    return at.swapaxes(1, 2).reshape(shape)


def allocate(program: Program, dtype: Type, shape: list[int], layout: object) -> Shared:
    shape = [int(n) for n in shape]
    return Shared(Buffer(program, shape, dtype), dtype, places(shape, dtype, layout))
